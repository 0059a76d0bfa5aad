"""The softmax of a row tile, chunk by chunk: masks, running maximum and sum, weighted values.

What a row carries from chunk to chunk (Milakov and Gimelshein, 1805.02867): its weighted values, the sum of its
weights, and minus the maximum of its scores, negated because that is the bias of the exponential.
"""

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from .attention_loads import transpose_all
from .attention_plan import NOTHING_SEEN, PARTITIONS, PSUM_BANK, psum, tile
from .attention_work import END, FIRST, LIVE_ROWS, POSITION, SEQUENCE, STARTS

MASKED = -3.4028234663852886e38  # what range_select writes where a slot is not seen
SMALLEST_SUM = 1e-18  # a row that saw a key has a sum of at least 1; the logarithm's domain starts at 2^-64
LSE_COLUMNS = 4096  # log-sum-exps of a partition at a time
BANKS = 2  # of scores that one mask covers; two such tiles are in use at a time


class Rows(NamedTuple):
    """What does not change for a row tile: its window row [rows, 1], and which window keys that sees, [rows, T]."""

    row: object
    sees: object


class Masks(NamedTuple):
    """What each row of a row tile sees of one chunk."""

    first: object  # [rows, 1] fp32: slots first <= slot < end
    end: object
    window: object  # [rows, T] uint8


class State(NamedTuple):
    values: object  # [rows, heads * D] fp32, weighted; heads other than the row's own are by-products
    total: object  # [rows, 1]
    negative_max: object  # [rows, 1], of scaled scores
    all: object  # the tile that holds the three


def row_constants(shape, rows, all_rows):
    """Rows of a row tile; `all_rows` [1, Hq * T] holds the window row of each row of a sequence."""
    row = tile((rows.rows, 1))
    nisa.dma_copy(dst=row, src=all_rows[0:1, rows.first_row : rows.first_row + rows.rows])
    column = tile((rows.rows, shape.window))
    sees = tile((rows.rows, shape.window))
    nisa.iota(dst=column, pattern=[[1, shape.window]], offset=0, channel_multiplier=0)
    nisa.tensor_scalar(dst=sees, data=column, op0=nl.less_equal, operand0=row)
    if 0 < shape.sliding_window < shape.window:
        near = tile((rows.rows, shape.window))
        nisa.tensor_scalar(
            dst=near,
            data=column,
            op0=nl.subtract,
            operand0=row,
            op1=nl.greater,
            operand1=-float(shape.sliding_window),
        )
        nisa.tensor_tensor(dst=sees, data1=sees, data2=near, op=nl.multiply)
    return Rows(row, sees)


def fresh_state(shape, rows):
    """The state of rows that have seen nothing, as one tile."""
    width = rows.heads * shape.head_dim
    fresh = tile((rows.rows, width + 2))
    nisa.memset(dst=fresh, value=0.0)
    nisa.memset(dst=fresh[:, width + 1 : width + 2], value=NOTHING_SEEN)
    return fresh


def new_state(shape, rows):
    width = rows.heads * shape.head_dim
    state = tile((rows.rows, width + 2))
    return State(state[:, 0:width], state[:, width : width + 1], state[:, width + 1 : width + 2], state)


def restart(state, fresh, entry, always):
    """Starts over with a sequence's first chunk: by a select, because another sequence's state may hold NaN."""
    if always:
        nisa.tensor_copy(dst=state.all, src=fresh)
    else:
        count, width = fresh.shape
        starts = entry[0:count, STARTS : STARTS + 1].view(nl.uint32)
        nisa.tensor_copy_predicated(dst=state.all, src=fresh, predicate=starts.broadcast(1, width))


def mask_rows(shape, rows, constants, item):
    """Masks of a chunk; rows of padding see nothing. `item` is the chunk's row of the work table as fp32."""
    size = (rows.rows, 1)
    here = item[0 : rows.rows]
    end = tile(size)
    nisa.tensor_scalar(
        dst=end,
        data=constants.row,
        op0=nl.less,
        operand0=here[:, LIVE_ROWS : LIVE_ROWS + 1],
        op1=nl.multiply,
        operand1=here[:, END : END + 1],
    )
    first = here[:, FIRST : FIRST + 1]
    if shape.sliding_window > 0 or shape.positioned:
        position = tile(size)
        nisa.tensor_scalar(
            dst=position,
            data=constants.row,
            op0=nl.add,
            operand0=here[:, POSITION : POSITION + 1],
        )
    if shape.sliding_window > 0:
        own_first = tile(size)
        nisa.tensor_scalar(
            dst=own_first,
            data=position,
            op0=nl.subtract,
            operand0=float(shape.sliding_window - 1),
            op1=nl.maximum,
            operand1=first,
        )
        first = own_first
    if shape.positioned:
        # No slot after the row's own position.
        nisa.tensor_scalar(dst=end, data=position, op0=nl.add, operand0=1.0, op1=nl.minimum, operand1=end)
    if shape.cache_only:
        return Masks(first, end, None)
    starts = tile(size)
    nisa.tensor_scalar(
        dst=starts,
        data=constants.row,
        op0=nl.less,
        operand0=here[:, LIVE_ROWS : LIVE_ROWS + 1],
        op1=nl.multiply,
        operand1=here[:, STARTS : STARTS + 1],
    )
    window = tile((rows.rows, shape.window), nl.uint8)
    nisa.tensor_scalar(dst=window, data=constants.sees, op0=nl.multiply, operand0=starts)
    return Masks(first, end, window)


def score(dst, stationary, keys):
    """dst [rows, ...] = q . k, summed over the parts of D and over the heads, whose rows are disjoint."""
    parts = len(keys)
    heads = keys[0].shape[1]
    for part in range(parts):
        size = keys[part].shape[0]
        for head in range(heads):
            nisa.nc_matmul(
                dst=dst,
                stationary=stationary[0:size, part, head, :],
                moving=keys[part][:, head],
                accumulate=part + head > 0,
            )


def capped(shape, scores):
    """Scores through softcap * tanh(scale * score / softcap), but for the leading factor."""
    if shape.softcap == 0.0:
        return scores
    result = tile(scores.shape)
    nisa.activation(dst=result, op=nl.tanh, data=scores, scale=shape.scale / shape.softcap)
    return result


def attend(shape, chunk, rows, stationary, keys, values, window, masks, state):
    """Takes a chunk, and the window where there is one, into the state of a row tile.

    Args:
        stationary: queries, as load_queries leaves them.
        keys, values: the chunk, as load_keys and load_values leave it.
        window: the same of the window, as load_window leaves it; () if there is none.
        masks: Masks of the chunk.
    """
    count = rows.rows
    scale = shape.scale if shape.softcap == 0.0 else shape.softcap
    bank = max(1, PSUM_BANK // chunk.per_partition)  # partitions of the chunk whose slots fill a bank
    span = BANKS * bank
    spans = (chunk.partitions + span - 1) // span
    scores = tile((count, chunk.slots))
    maxima = tile((count, spans + len(window) // 2))
    for i in range(spans):
        first = i * span
        last = min(first + span, chunk.partitions)
        products = psum((count, (last - first) * chunk.per_partition))
        for start in range(first, last, bank):
            end = min(start + bank, last)
            columns = slice((start - first) * chunk.per_partition, (end - first) * chunk.per_partition)
            slots = []
            for part in keys:
                slots.append(part[:, :, start:end, :])
            score(products[:, columns], stationary, slots)
        nisa.range_select(
            dst=scores[:, first * chunk.per_partition : last * chunk.per_partition],
            on_true_tile=capped(shape, products),
            comp_op0=nl.greater_equal,
            comp_op1=nl.less,
            bound0=masks.first,
            bound1=masks.end,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reduce_res=maxima[:, i : i + 1],
            range_start=first * chunk.per_partition,
        )
    if len(window) > 0:
        window_keys, window_values = window
        products = psum((count, shape.window))
        window_scores = tile((count, shape.window))
        score(products, stationary, window_keys)
        nisa.select_reduce(
            dst=window_scores,
            predicate=masks.window,
            on_true=capped(shape, products),
            on_false=MASKED,
            reduce_res=maxima[:, spans : spans + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reduce_op=nl.maximum,
        )

    decay = raise_maximum(scale, maxima, state)
    sums = tile((count, 1 + len(window) // 2))
    weights = exponentials(shape, scores, scale, state, sums[:, 0:1])
    transposed = tile((chunk.partitions, chunk.per_partition, count), shape.dtype)
    transpose_all(transposed, weights.reshape_dim(1, (chunk.partitions, chunk.per_partition)).permute((0, 2, 1)))
    weighted = psum((count, rows.heads * shape.head_dim))
    for j in range(chunk.per_partition):
        nisa.nc_matmul(dst=weighted, stationary=transposed[:, j, :], moving=values[:, :, j, :], accumulate=j > 0)
    if len(window) > 0:
        weights = exponentials(shape, window_scores, scale, state, sums[:, 1:2])
        transposed = tile((shape.window, 1, count), shape.dtype)
        transpose_all(transposed, weights.expand_dim(1))
        nisa.nc_matmul(dst=weighted, stationary=transposed[:, 0, :], moving=window_values, accumulate=True)

    for summed, added in ((state.total, sums[:, 0:1]), (state.values, weighted)):
        nisa.scalar_tensor_tensor(dst=summed, data=summed, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=added)
    if len(window) > 0:
        nisa.tensor_tensor(dst=state.total, data1=state.total, data2=sums[:, 1:2], op=nl.add)


def raise_maximum(scale, maxima, state):
    """Raises the state's maximum to those of a chunk; returns the factor [rows, 1] by which what it summed shrinks."""
    size = state.total.shape
    largest = tile(size)
    negative_max = tile(size)
    decay = tile(size)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=maxima, axis=1, negate=True)
    nisa.tensor_scalar(
        dst=negative_max, data=largest, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=state.negative_max
    )
    nisa.activation(dst=decay, op=nl.exp, data=state.negative_max, scale=-1.0, bias=negative_max)
    nisa.tensor_copy(dst=state.negative_max, src=negative_max)
    return decay


def exponentials(shape, scores, scale, state, total):
    """exp(scale * score - maximum) in the Tensor engine's dtype, and their row sums in `total`."""
    weights = tile(scores.shape, shape.dtype)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        scale=scale,
        bias=state.negative_max,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    return weights


def store_output(shape, rows, constants, state, output, sums, entry, item):
    """Writes a row tile's output as of now: a later chunk of the same sequence writes over it.

    `sums` [2, B, Hq * T] in HBM, or None, gets the total and minus the maximum of each row, a total of 0 for padding.
    """
    count = rows.rows
    inverse = tile((count, 1))
    nisa.tensor_scalar(dst=inverse, data=state.total, op0=nl.maximum, operand0=SMALLEST_SUM)
    nisa.reciprocal(dst=inverse, data=inverse)
    result = tile(state.values.shape, output.dtype)
    nisa.tensor_scalar(dst=result, data=state.values, op0=nl.multiply, operand0=inverse, engine=nisa.engine.scalar)
    own = count // rows.heads
    for head in range(rows.heads):
        nisa.dma_copy(
            dst=output.reshape((shape.batch, shape.query_heads * shape.window * shape.head_dim)).ap(
                pattern=[[shape.head_dim, own], [1, shape.head_dim]],
                offset=(rows.first_row + head * own) * shape.head_dim,
                scalar_offset=entry[0:1, SEQUENCE : SEQUENCE + 1],
                indirect_dim=0,
            ),
            src=result[head * own : (head + 1) * own, head * shape.head_dim : (head + 1) * shape.head_dim],
        )
    if sums != None:  # noqa: E711
        live_total = tile((count, 1))
        nisa.tensor_scalar(
            dst=live_total,
            data=constants.row,
            op0=nl.less,
            operand0=item[0:count, LIVE_ROWS : LIVE_ROWS + 1],
            op1=nl.multiply,
            operand1=state.total,
        )
        row_count = shape.batch * shape.query_heads * shape.window
        by_sequence = sums.reshape((2 * shape.batch, shape.query_heads * shape.window))
        for offset, source in ((0, live_total), (row_count, state.negative_max)):
            nisa.dma_copy(
                dst=by_sequence.ap(
                    pattern=[[1, count], [1, 1]],
                    offset=offset + rows.first_row,
                    scalar_offset=entry[0:1, SEQUENCE : SEQUENCE + 1],
                    indirect_dim=0,
                ),
                src=source,
            )


def log_sum_exp(lse, sums):
    """lse [B, Hq, T] = maximum + log(total), -inf where the total is 0; `sums` as store_output leaves them."""
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
