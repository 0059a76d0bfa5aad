"""From the state of row tiles to outputs and log-sum-exps in HBM."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PARTITIONS, psum, tile
from .attention_softmax import MASKED, SMALLEST_SUM, idle_engine, live_flags, new_state, over_streams

SENDRECV_COLUMNS = 256  # fp32 that GpSimd's own DMA moves at most
LSE_COLUMNS = 4096  # log-sum-exps of a partition at a time


def other_state(shape, rows, state, core, dma_engine):
    """The other core's state of a row tile, which saw other slots."""
    theirs = new_state(shape, rows)
    width = state.all.shape[1]
    for first in range(0, width, SENDRECV_COLUMNS):
        some = slice(first, min(first + SENDRECV_COLUMNS, width))
        nisa.sendrecv(
            src=state.all[:, some],
            dst=theirs.all[:, some],
            send_to_rank=1 - core,
            recv_from_rank=1 - core,
            pipe_id=0,
            dma_engine=dma_engine,
        )
    return theirs


def joined_state(shape, rows, state, theirs):
    """Two states of a row tile put together."""
    joined = level_states(shape, rows, state, theirs)
    add_states(shape, joined, state, theirs)
    return joined


def level_states(shape, rows, state, theirs):
    """Weighs two states of a row tile against the larger of their maxima; returns room for what they add up to, with
    that maximum."""
    joined = new_state(shape, rows)
    width = state.all.shape[1] - 1
    largest = joined.all[:, width:]
    nisa.tensor_tensor(
        dst=largest, data1=state.all[:, width:], data2=theirs.all[:, width:], op=nl.minimum, engine=idle_engine(shape)
    )
    for part in (state, theirs):
        factor = tile(largest.shape)
        nisa.activation(dst=factor, op=nl.exp, data=part.all[:, width:], scale=-1.0, bias=largest)
        weighted = part.all[:, 0:width]
        nisa.tensor_scalar(dst=weighted, data=weighted, op0=nl.multiply, operand0=factor, engine=nisa.engine.scalar)
    return joined


def add_states(shape, joined, state, theirs):
    """Adds up what level_states has weighed."""
    width = state.all.shape[1] - 1
    nisa.tensor_tensor(
        dst=joined.all[:, 0:width],
        data1=state.all[:, 0:width],
        data2=theirs.all[:, 0:width],
        op=nl.add,
        engine=idle_engine(shape),
    )


@dataclass
class Output(nl.NKIObject):
    """What a row tile's rows saw, ready to be stored."""

    values: object  # [rows, heads * D]; those of heads other than the row's own are by-products
    facts: object  # [rows, 2], each row's total, 0 in padding, and minus its maximum; or None


def store_output(shape, rows, constants, state, outputs, sums, shard, current, part=0, parts=1):
    """Writes a row tile's output as of now: a later pass of the same sequence writes over it.

    Args:
        outputs: [shards, B, Hq, T, D] in HBM.
        sums: [shards, 2, B, Hq, T] in HBM for the facts of an Output, or None.
        shard: where in these.
        part: of each head's rows, which of `parts` equal ones are written; sums with the first.
    """
    with_facts = sums != None and part == 0  # noqa: E711
    output = output_of(shape, rows, constants, state, outputs.dtype, with_facts, current)
    write_output(shape, rows, output, outputs, sums, shard, current, part, parts)


def output_of(shape, rows, constants, state, dtype, with_facts, current):
    """The Output of a row tile as of now."""
    # On GpSimd if possible, which need not wait for the last products.
    engine = idle_engine(shape)
    size = (rows.rows, 1)
    smallest = tile(size)
    inverse = tile(size)
    nisa.memset(dst=smallest, value=SMALLEST_SUM, engine=engine)
    total = state.total
    if rows.streams > 1:
        total = tile(state.total.shape)
        over_streams(rows, total, state.total, nl.add, engine)
    total = total[0 : rows.rows]
    nisa.tensor_tensor(dst=inverse, data1=total, data2=smallest, op=nl.maximum, engine=engine)
    nisa.reciprocal(dst=inverse, data=inverse)
    if constants.value_scale != None:  # noqa: E711
        nisa.tensor_tensor(dst=inverse, data1=inverse, data2=constants.value_scale[0 : rows.rows], op=nl.multiply)
    result = tile(state.values.shape, dtype)
    nisa.tensor_tensor(
        dst=result,
        data1=state.values,
        data2=inverse.broadcast(1, state.values.shape[1]),
        op=nl.multiply,
        engine=engine,
    )
    if not with_facts:
        return Output(result, None)
    facts = tile((rows.rows, 2))
    live = live_flags(constants, current, engine)[0 : rows.rows]
    nisa.tensor_tensor(dst=facts[:, 0:1], data1=live, data2=total, op=nl.multiply, engine=engine)
    nisa.tensor_copy(dst=facts[:, 1:2], src=state.negative_max[0 : rows.rows], engine=nisa.engine.scalar)
    return Output(result, facts)


def write_output(shape, rows, output, outputs, sums, shard, current, part=0, parts=1):
    """Stores an Output; arguments as for store_output."""
    oob_mode = nisa.oob_mode.error if current.stored_index == None else nisa.oob_mode.skip  # noqa: E711
    head_dim = shape.head_dim
    sequence_rows = shape.query_heads * shape.window
    first_row = (shard * shape.batch + current.sequence) * sequence_rows + rows.first_row
    own = rows.rows // rows.heads
    low = own * part // parts
    high = own * (part + 1) // parts
    for head in range(rows.heads if high > low else 0):
        nisa.dma_copy(
            dst=outputs.reshape((outputs.shape[0] * shape.batch, sequence_rows * head_dim)).ap(
                pattern=[[head_dim, high - low], [1, head_dim]],
                offset=(first_row + head * own + low) * head_dim,
                scalar_offset=current.stored_index,
                indirect_dim=0,
            ),
            src=output.values[head * own + low : head * own + high, head * head_dim : (head + 1) * head_dim],
            oob_mode=oob_mode,
        )
    if output.facts == None:  # noqa: E711
        return
    # Two rows make two descriptors, two columns one for each row.
    staged = psum((2, rows.rows))
    across = tile((2, rows.rows))
    nisa.nc_transpose(dst=staged, data=output.facts, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=across, src=staged, engine=nisa.engine.scalar)
    all_rows = shape.batch * sequence_rows
    nisa.dma_copy(
        dst=sums.reshape((sums.shape[0] * 2 * shape.batch, sequence_rows)).ap(
            pattern=[[all_rows, 2], [1, rows.rows]],
            offset=shard * all_rows + first_row,
            scalar_offset=current.stored_index,
            indirect_dim=0,
        ),
        src=across,
        oob_mode=oob_mode,
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
