"""From the state of row tiles to outputs and log-sum-exps in HBM."""

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PARTITIONS, psum, tile
from .attention_softmax import MASKED, SMALLEST_SUM, State

LSE_COLUMNS = 4096  # log-sum-exps of a partition at a time


def fold_streams(shape, rows, constants, state):
    """The state of a row tile's own rows [rows, ...], its streams put together."""
    if rows.streams == 1:
        return state
    count, width = state.all.shape

    # The largest maximum of a row's streams: along the free axis, then back to each stream's partition.
    across = psum((1, rows.streams, rows.rows))
    smallest = tile((1, 1, rows.rows))
    nisa.nc_transpose(dst=across, data=state.negative_max, engine=nisa.engine.tensor)
    nisa.tensor_reduce(dst=smallest, op=nl.minimum, data=across.permute((0, 2, 1)), axis=2)
    one = tile((1, 1))
    nisa.memset(dst=one, value=1.0)
    common = psum((count, 1))
    bias = tile((count, 1))
    nisa.nc_matmul(dst=common, stationary=smallest.broadcast(1, rows.streams), moving=one, accumulate=False)
    nisa.tensor_copy(dst=bias, src=common, engine=nisa.engine.scalar)
    factor = tile((count, 1))
    nisa.activation(dst=factor, op=nl.exp, data=state.negative_max, scale=-1.0, bias=bias)
    scaled = tile((count, width - 1))
    nisa.tensor_scalar(
        dst=scaled, data=state.all[:, 0 : width - 1], op0=nl.multiply, operand0=factor, engine=nisa.engine.scalar
    )

    # Row r of the result is the sum over streams of row stream * rows + r: of its own values, and of the totals.
    same_row = tile((count, rows.streams, rows.rows))
    nisa.memset(dst=same_row, value=1.0)
    nisa.affine_select(
        dst=same_row,
        pattern=[[-rows.rows, rows.streams], [-1, rows.rows]],
        channel_multiplier=1,
        on_true_tile=same_row,
        on_false_value=0.0,
        cmp_op=nl.equal,
    )
    values = psum((rows.rows, shape.head_dim))
    total = psum((rows.rows, 1))
    for stream in range(rows.streams):
        own = slice(stream * shape.head_dim, (stream + 1) * shape.head_dim)
        nisa.nc_matmul(dst=values, stationary=same_row[:, stream, :], moving=scaled[:, own], accumulate=stream > 0)
        nisa.nc_matmul(
            dst=total, stationary=same_row[:, stream, :], moving=scaled[:, width - 2 : width - 1], accumulate=stream > 0
        )
    return State(values, total, bias[0 : rows.rows], None)


def store_output(shape, rows, constants, state, outputs, sums, shard, current):
    """Writes a row tile's output as of now: a later pass of the same sequence writes over it.

    Args:
        outputs: [shards, B, Hq, T, D] in HBM.
        sums: [shards, 2, B, Hq, T] in HBM for each row's total, 0 in padding, and minus its maximum; or None.
        shard: where in these.
    """
    state = fold_streams(shape, rows, constants, state)
    size = (rows.rows, 1)
    inverse = tile(size)
    nisa.tensor_scalar(dst=inverse, data=state.total, op0=nl.maximum, operand0=SMALLEST_SUM)
    nisa.reciprocal(dst=inverse, data=inverse)
    if constants.value_scale != None:  # noqa: E711
        nisa.tensor_tensor(dst=inverse, data1=inverse, data2=constants.value_scale[0 : rows.rows], op=nl.multiply)
    result = tile(state.values.shape, outputs.dtype)
    nisa.tensor_scalar(dst=result, data=state.values, op0=nl.multiply, operand0=inverse, engine=nisa.engine.scalar)

    head_dim = shape.head_dim
    sequence_rows = shape.query_heads * shape.window
    first_row = (shard * shape.batch + current.sequence) * sequence_rows + rows.first_row
    own = rows.rows // rows.heads
    for head in range(rows.heads):
        nisa.dma_copy(
            dst=outputs.reshape((outputs.shape[0] * shape.batch, sequence_rows * head_dim)).ap(
                pattern=[[head_dim, own], [1, head_dim]],
                offset=(first_row + head * own) * head_dim,
                scalar_offset=current.sequence_index,
                indirect_dim=0,
            ),
            src=result[head * own : (head + 1) * own, head * head_dim : (head + 1) * head_dim],
        )
    if sums == None:  # noqa: E711
        return
    facts = tile((rows.rows, 2))
    nisa.scalar_tensor_tensor(
        dst=facts[:, 0:1],
        data=constants.row[0 : rows.rows],
        op0=nl.less,
        operand0=current.live_rows[0 : rows.rows],
        op1=nl.multiply,
        operand1=state.total,
    )
    nisa.tensor_copy(dst=facts[:, 1:2], src=state.negative_max, engine=nisa.engine.gpsimd)
    # Two rows make two descriptors, two columns one for each row.
    staged = psum((2, rows.rows))
    across = tile((2, rows.rows))
    nisa.nc_transpose(dst=staged, data=facts, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=across, src=staged, engine=nisa.engine.scalar)
    all_rows = shape.batch * sequence_rows
    nisa.dma_copy(
        dst=sums.reshape((sums.shape[0] * 2 * shape.batch, sequence_rows)).ap(
            pattern=[[all_rows, 2], [1, rows.rows]],
            offset=shard * all_rows + first_row,
            scalar_offset=current.sequence_index,
            indirect_dim=0,
        ),
        src=across,
    )


def log_sum_exp(lse, sums):
    """lse [B, Hq, T] = maximum + log(total), from `sums` [1, 2, B, Hq, T] as store_output leaves them."""
    size = lse.size
    for first in range(0, size, PARTITIONS * LSE_COLUMNS):
        count = min(PARTITIONS * LSE_COLUMNS, size - first)
        partitions = min(PARTITIONS, count)
        while count % partitions > 0:
            partitions -= 1
        columns = count // partitions
        pattern = [[columns, partitions], [1, columns]]
        total = tile((partitions, columns))
        negative_max = tile((partitions, columns))
        nisa.dma_copy(dst=total, src=sums.ap(pattern=pattern, offset=first))
        nisa.dma_copy(dst=negative_max, src=sums.ap(pattern=pattern, offset=size + first))
        nisa.dma_copy(dst=lse.ap(pattern=pattern, offset=first), src=log_of_sum(total, negative_max))


def log_of_sum(total, negative_max):
    """A tile of maximum + log(total), -inf where the total is 0."""
    result = tile(total.shape)
    nothing = tile(total.shape)
    nisa.tensor_scalar(dst=result, data=total, op0=nl.maximum, operand0=SMALLEST_SUM)
    nisa.activation(dst=result, op=nl.log, data=result)
    nisa.tensor_tensor(dst=result, data1=result, data2=negative_max, op=nl.subtract)
    # MASKED twice is -inf in fp32.
    nisa.tensor_scalar(dst=nothing, data=total, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=MASKED)
    nisa.scalar_tensor_tensor(dst=result, data=nothing, op0=nl.multiply, operand0=2.0, op1=nl.add, operand1=result)
    return result
