"""merge_attention: outputs over disjoint sets of keys become one, weighed by their log-sum-exps."""

import nki
import nki.isa as nisa
import nki.language as nl

from .attention_output import log_of_sum
from .attention_plan import PARTITIONS, psum, tile
from .attention_softmax import MASKED, NOTHING_SEEN, SMALLEST_SUM


@nki.jit
def merge_attention(outputs, lses):
    """Rows on partitions, 128 at a time in a runtime loop, shards one after the other.

    Args:
        outputs: [n, B, Hq, T, D].
        lses: [n, B, Hq, T] fp32.

    Returns:
        output [B, Hq, T, D] of outputs' dtype, lse [B, Hq, T] fp32.
    """
    output = nl.ndarray(outputs.shape[1:], dtype=outputs.dtype, buffer=nl.shared_hbm)
    lse = nl.ndarray(lses.shape[1:], dtype=nl.float32, buffer=nl.shared_hbm)
    merge_all(outputs, lses, None, output, lse)
    return output, lse


def merge_all(outputs, lses, sums, output, lse):
    """Merges all rows. Each core takes half of them, in a loop of equal length on both; what is left is unrolled.

    Args:
        outputs: [n, B, Hq, T, D].
        lses: [n, B, Hq, T] fp32, or None where the shards are this kernel's own, which hold no NaN where nothing was
            seen, and come with `sums`.
        sums: [n, 2, B, Hq, T] fp32, the total and minus the maximum of each row.
        output, lse: where to write; `lse` may be None.
    """
    rows = outputs.size // outputs.shape[0] // outputs.shape[4]
    half = rows // nl.num_programs(0)
    first = half * nl.program_id(0)
    last = rows if nl.program_id(0) == nl.num_programs(0) - 1 else first + half
    whole = half // PARTITIONS * PARTITIONS

    def merge_at(row):
        merge_rows(outputs, lses, sums, output, lse, PARTITIONS, first, row)

    if whole > 0:
        nl.fori_loop(nisa.register_alloc(0), whole, merge_at, step=PARTITIONS)
    for row in range(first + whole, last, PARTITIONS):
        merge_rows(outputs, lses, sums, output, lse, min(PARTITIONS, last - row), row, None)


def by_row(values, rows, count, first, row):
    """[count, n] of values [n, rows] fp32 in HBM, from row `first` + `row` on: long descriptors, then a transpose."""
    entries = values.size // rows
    loaded = tile((entries, count))
    nisa.dma_copy(
        dst=loaded,
        src=values.reshape((values.size, 1)).ap(
            pattern=[[rows, entries], [1, count]], offset=first, scalar_offset=row, indirect_dim=0
        ),
    )
    staged = psum((count, entries))
    result = tile((count, entries))
    nisa.nc_transpose(dst=staged, data=loaded, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=result, src=staged, engine=nisa.engine.scalar)
    return result


def merge_rows(outputs, lses, sums, output, lse, count, first, row):
    """Merges `count` rows from `first` on, counted from `row`, a register or None."""
    shards, batch, heads, window, head_dim = outputs.shape
    rows = batch * heads * window
    all_outputs = outputs.reshape((shards * rows, head_dim))
    negative_max = tile((count, 1))
    weights = tile((count, shards))
    total = tile((count, 1))
    if lses == None:  # noqa: E711
        # No logarithm: the exponential's table stays loaded.
        facts = by_row(sums, rows, count, first, row).reshape_dim(1, (shards, 2))
        nisa.tensor_reduce(dst=negative_max, op=nl.minimum, data=facts[:, :, 1], axis=1)
        nisa.activation(dst=weights, op=nl.exp, data=facts[:, :, 1], scale=-1.0, bias=negative_max)
        nisa.tensor_tensor(dst=weights, data1=weights, data2=facts[:, :, 0], op=nl.multiply)
        nisa.tensor_reduce(dst=total, op=nl.add, data=weights, axis=1)
    else:
        # A shard that saw nothing has a log-sum-exp of -inf and a weight of exp(-inf + finite) = 0.
        logs = by_row(lses, rows, count, first, row)
        nisa.tensor_reduce(dst=negative_max, op=nl.maximum, data=logs, axis=1, negate=True)
        nisa.tensor_scalar(dst=negative_max, data=negative_max, op0=nl.minimum, operand0=NOTHING_SEEN)
        nisa.activation(
            dst=weights,
            op=nl.exp,
            data=logs,
            bias=negative_max,
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
    empty = None
    if lses != None:  # noqa: E711
        empty = tile((count, shards), nl.uint8)
        nisa.tensor_scalar(dst=empty, data=logs, op0=nl.less, operand0=MASKED)

    summed = tile((count, head_dim))
    nisa.memset(dst=summed, value=0.0)
    for shard in range(shards):
        loaded = tile((count, head_dim), outputs.dtype)
        nisa.dma_copy(
            dst=loaded,
            src=all_outputs.ap(
                pattern=[[head_dim, count], [1, head_dim]],
                offset=(shard * rows + first) * head_dim,
                scalar_offset=row,
                indirect_dim=0,
            ),
        )
        if empty != None:  # noqa: E711
            # A weight of 0 would not silence a NaN.
            nothing = empty[:, shard : shard + 1].broadcast(1, head_dim)
            nisa.tensor_copy_predicated(dst=loaded, src=0.0, predicate=nothing)
        weighted = tile((count, head_dim))
        nisa.tensor_scalar(
            dst=weighted,
            data=loaded,
            op0=nl.multiply,
            operand0=weights[:, shard : shard + 1],
            engine=nisa.engine.scalar,
        )
        nisa.tensor_tensor(dst=summed, data1=summed, data2=weighted, op=nl.add, engine=nisa.engine.gpsimd)

    inverse = tile((count, 1))
    result = tile((count, head_dim), output.dtype)
    nisa.tensor_scalar(dst=inverse, data=total, op0=nl.maximum, operand0=SMALLEST_SUM)
    nisa.reciprocal(dst=inverse, data=inverse)
    nisa.tensor_scalar(dst=result, data=summed, op0=nl.multiply, operand0=inverse, engine=nisa.engine.scalar)
    nisa.dma_copy(
        dst=output.reshape((rows, head_dim)).ap(
            pattern=[[head_dim, count], [1, head_dim]], offset=first * head_dim, scalar_offset=row, indirect_dim=0
        ),
        src=result,
    )
    if lse != None:  # noqa: E711
        nisa.dma_copy(
            dst=lse.reshape((rows, 1)).ap(
                pattern=[[1, count], [1, 1]], offset=first, scalar_offset=row, indirect_dim=0
            ),
            src=log_of_sum(total, negative_max),
        )
