"""The softmax of a row tile, pass by pass: masks, running maximum and sum, weighted values.

What a row carries from pass to pass (Milakov and Gimelshein, 1805.02867): its weighted values, the sum of its weights,
and minus the maximum of its scores, negated because that is the bias of the exponential.
"""

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from .attention_loads import transpose_all
from .attention_plan import PSUM_BANK, PSUM_BANK_BYTES, RowTile, psum, tile
from .attention_tree import load_ancestors

NOTHING_SEEN = 1e20  # minus the maximum of a row that saw no key yet: exp(masked score + this) is 0
MASKED = -3.4028234663852886e38  # what range_select writes where a slot is not seen
SMALLEST_SUM = 1e-18  # a row that saw a key has a sum of at least 1; the logarithm's domain starts at 2^-64
MOST_TRANSPOSES = 8  # of a batch
SPAN_BANKS = 2  # of scores under one mask; two spans are in use at a time


class Rows(NamedTuple):
    """What does not change for a row tile; [count, 1] unless said otherwise."""

    row: object  # the window row
    depth: object  # its position, counted from row 0's
    sees: object  # [rows, T] the window keys that it sees
    first_slot: object  # of the row's stream in a pass; None where it is 0
    key_scale: object  # of scores of the cache; None if that is shape.scale
    value_scale: object  # of weighted values; None if there is none
    fresh: object  # State of rows that have seen nothing but their sink


class State(NamedTuple):
    values: object  # [count, groups * D] fp32, weighted; those of groups other than the row's own are by-products
    total: object  # [count, 1]
    negative_max: object  # [count, 1], of scaled scores
    all: object  # the tile that holds the three


def groups_of(rows):
    return rows.heads * rows.streams


def new_state(shape, rows):
    return state_of(tile((rows.count, groups_of(rows) * shape.head_dim + 2)))


def state_of(stored):
    width = stored.shape[1] - 2
    return State(stored[:, 0:width], stored[:, width : width + 1], stored[:, width + 1 : width + 2], stored)


def one_stream(shape, rows, constants, state):
    """A row tile, its constants and its state, without the streams but the first."""
    if rows.streams == 1:
        return rows, constants, state
    count = rows.rows
    plain = RowTile(rows.first_row, count, rows.first_head, rows.heads, 1, count)
    return (
        plain,
        Rows(
            constants.row[0:count],
            constants.depth[0:count],
            constants.sees,
            None,
            None if constants.key_scale == None else constants.key_scale[0:count],  # noqa: E711
            None if constants.value_scale == None else constants.value_scale[0:count],  # noqa: E711
            part_of(shape, constants.fresh, plain),
        ),
        part_of(shape, state, plain),
    )


def part_of(shape, state, rows):
    """The state of the rows of the first stream."""
    count = rows.count
    return State(
        state.values[0:count, 0 : rows.heads * shape.head_dim],
        state.total[0:count],
        state.negative_max[0:count],
        None,
    )


def row_constants(shape, chunk, rows, with_window, sinks, key_scale, value_scale):
    """Rows of a row tile. `with_window`: whether the window's keys are this core's to take."""
    copies = rows.count // shape.window
    numbers = tile((1, copies, shape.window, 2))
    nisa.iota(dst=numbers[:, :, :, 0], pattern=[[0, copies], [1, shape.window]], offset=0, channel_multiplier=0)
    nisa.iota(
        dst=numbers[:, :, :, 1],
        pattern=[[chunk.slots // rows.streams, rows.streams], [0, rows.rows]],
        offset=0,
        channel_multiplier=0,
    )
    columns = tile((rows.count, 2))
    nisa.dma_copy(dst=columns, src=numbers)
    row = columns[:, 0:1]

    fresh = new_state(shape, rows)
    nisa.memset(dst=fresh.all, value=0.0)
    nisa.memset(dst=fresh.negative_max, value=NOTHING_SEEN)
    if sinks != None:  # noqa: E711
        # A sink is a key with a score of its own and no value.
        heads = rows.rows // shape.window
        sink = fresh.negative_max[0 : rows.rows]
        nisa.dma_copy(
            dst=sink, src=sinks.ap(pattern=[[1, heads], [0, shape.window]], offset=rows.first_row // shape.window)
        )
        nisa.tensor_scalar(dst=sink, data=sink, op0=nl.multiply, operand0=-1.0)
        nisa.memset(dst=fresh.total[0 : rows.rows], value=1.0)
    return Rows(
        row=row,
        depth=row,
        sees=chain_sees(shape, row[0 : rows.rows]) if with_window else None,
        first_slot=columns[:, 1:2] if rows.streams > 1 else None,
        key_scale=row_scale(rows, key_scale, shape.scale if shape.softcap == 0.0 else shape.scale / shape.softcap),
        value_scale=row_scale(rows, value_scale, 1.0),
        fresh=fresh,
    )


def with_tree(shape, rows, constants, table, current):
    """Constants of a row tile in a sequence that has a tree."""
    sees, depth = load_ancestors(shape, rows, table, current)
    return Rows(
        constants.row,
        depth,
        sees,
        constants.first_slot,
        constants.key_scale,
        constants.value_scale,
        constants.fresh,
    )


def row_scale(rows, scales, factor):
    """factor * scales [Hkv] of each row's head, as [count, 1]; None without scales."""
    if scales == None:  # noqa: E711
        return None
    scale = tile((rows.count, 1))
    own = rows.count // groups_of(rows)
    nisa.dma_copy(
        dst=scale, src=scales.ap(pattern=[[0, rows.streams], [1, rows.heads], [0, own]], offset=rows.first_head)
    )
    nisa.tensor_scalar(dst=scale, data=scale, op0=nl.multiply, operand0=factor)
    return scale


def chain_sees(shape, row):
    """[rows, T] fp32 flags: each row sees itself and the window rows before it."""
    size = (row.shape[0], shape.window)
    column = tile(size)
    sees = tile(size)
    nisa.iota(dst=column, pattern=[[1, shape.window]], offset=0, channel_multiplier=0)
    nisa.tensor_scalar(dst=sees, data=column, op0=nl.less_equal, operand0=row)
    if shape.sliding_window > 0 and shape.sliding_window < shape.window:
        near = tile(size)
        nisa.tensor_scalar(
            dst=near,
            data=column,
            op0=nl.subtract,
            operand0=row,
            op1=nl.greater,
            operand1=-float(shape.sliding_window),
        )
        nisa.tensor_tensor(dst=sees, data1=sees, data2=near, op=nl.multiply)
    return sees


def window_mask(shape, constants, current):
    """[rows, T] uint8: which window keys each row sees, if this pass takes the window; rows of padding see none."""
    count = constants.row.shape[0]
    live_row = tile((count, 1))
    nisa.tensor_scalar(dst=live_row, data=constants.row, op0=nl.less, operand0=current.live_rows[0:count])
    if current.starts != None:  # noqa: E711
        nisa.tensor_tensor(dst=live_row, data1=live_row, data2=current.starts[0:count], op=nl.multiply)
    mask = tile((count, shape.window), nl.uint8)
    nisa.tensor_scalar(dst=mask, data=constants.sees, op0=nl.multiply, operand0=live_row)
    return mask


def slot_bounds(shape, constants, current):
    """First slot that each row sees in its stream, and one past the last, [count, 1] each; rows of padding see none."""
    count = constants.row.shape[0]
    size = (count, 1)
    first = current.first[0:count]
    end = tile(size)
    nisa.tensor_scalar(
        dst=end,
        data=constants.row,
        op0=nl.less,
        operand0=current.live_rows[0:count],
        op1=nl.multiply,
        operand1=current.end[0:count],
    )
    if shape.sliding_window > 0 or shape.positioned:
        position = tile(size)
        nisa.tensor_scalar(dst=position, data=constants.depth, op0=nl.add, operand0=current.position[0:count])
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
    if constants.first_slot == None:  # noqa: E711
        return first, end
    stream_first = tile(size)
    for bound, shifted in ((first, stream_first), (end, end)):
        nisa.tensor_tensor(
            dst=shifted, data1=bound, data2=constants.first_slot, op=nl.subtract, engine=nisa.engine.gpsimd
        )
    return stream_first, end


def score(dst, stationary, keys, group):
    """Adds one group's q . k to dst [count, ...], for `keys` a tile [part, ...] for each part of D."""
    for part in range(len(keys)):
        size = keys[part].shape[0]
        nisa.nc_matmul(
            dst=dst,
            stationary=stationary[0:size, part, group, :],
            moving=keys[part],
            accumulate=group + part > 0,
        )


def capped(shape, scores, scale):
    """tanh(scale * score / softcap) where there is a softcap; `scale` is that of these scores, None if shape.scale."""
    if shape.softcap == 0.0:
        return scores
    result = tile(scores.shape)
    nisa.activation(
        dst=result,
        op=nl.tanh,
        data=scores,
        scale=shape.scale / shape.softcap if scale == None else scale,  # noqa: E711
    )
    return result


class Step(NamedTuple):
    """A step of the softmax whose scores are known and whose values are not weighed yet."""

    parts: object  # (masked scores, scale) of each pass, then of the window if it is there
    earlier: object  # [count, 1], minus the maximum before the step
    negative_max: object  # and after it


def score_step(shape, chunk, rows, constants, stationary, cached, window, earlier):
    """Scores of passes, the window, or both, and how they raise the maximum of a row tile.

    Args:
        stationary: queries, as load_queries leaves them.
        cached: a list of (keys, (first, end)) for each pass: an entry a segment as load_keys leaves them, bounds as
            slot_bounds does.
        window: () or (keys, mask), as load_window and window_mask leave them.
        earlier: [count, 1], minus the maximum so far.
    """
    scale = shape.scale if shape.softcap == 0.0 else shape.softcap
    cache_scale = scale
    if constants.key_scale != None and shape.softcap == 0.0:  # noqa: E711
        cache_scale = constants.key_scale
    parts = []
    maxima = []
    for keys, bounds in cached:
        scores, largest = cache_scores(shape, chunk, rows, constants, stationary, keys, bounds)
        parts.append((scores, cache_scale))
        maxima.append((largest, cache_scale))
    if len(window) > 0:
        scores, largest = window_scores(shape, rows, stationary, window[0], window[1])
        parts.append((scores, scale))
        maxima.append((largest, scale))

    return Step(parts, earlier, raised_maximum(maxima, earlier))


def weigh_step(shape, chunk, rows, constants, step, values, window_values, state, begins, engines):
    """Takes the values of a step into the state.

    Args:
        values: an entry a pass, as load_slots leaves them.
        window_values: [T, heads, D] if the step has the window, else None.
        begins: whether this is a sequence's first step: `state` then holds nothing yet.
        engines: which take turns at emptying PSUM.
    """
    decay = tile((rows.count, 1))
    nisa.activation(dst=decay, op=nl.exp, data=step.earlier, scale=-1.0, bias=step.negative_max)
    weighted = psum((rows.count, groups_of(rows) * shape.head_dim))
    sums = []
    for i in range(len(values)):
        scores, scale = step.parts[i]
        sums.append(
            weigh_values(shape, chunk, rows, scores, scale, step.negative_max, values[i], weighted, i > 0, engines)
        )
    if len(step.parts) > len(values):
        scores, scale = step.parts[len(values)]
        total = tile((rows.count, 1))
        weights = tile(scores.shape, shape.dtype)
        exponentials(weights, scores, scale, step.negative_max, total)
        weigh_window(rows, weights, window_values, weighted[:, 0 : rows.heads * shape.head_dim], len(values) > 0)
        sums.append(total)

    if begins:
        nisa.tensor_copy(dst=state.values, src=weighted, engine=nisa.engine.scalar)
    else:
        nisa.tensor_scalar(
            dst=state.values, data=state.values, op0=nl.multiply, operand0=decay, engine=nisa.engine.scalar
        )
        nisa.tensor_tensor(dst=state.values, data1=state.values, data2=weighted, op=nl.add)
    nisa.tensor_copy(dst=state.negative_max, src=step.negative_max, engine=nisa.engine.gpsimd)
    earlier_total = constants.fresh.total if begins else state.total
    nisa.scalar_tensor_tensor(
        dst=state.total, data=earlier_total, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=sums[0]
    )
    for total in sums[1:]:
        nisa.tensor_tensor(dst=state.total, data1=state.total, data2=total, op=nl.add)


def cache_scores(shape, chunk, rows, constants, stationary, keys, bounds):
    """Masked scores [count, slots of a stream] of a pass, and their maxima [count, n]."""
    run = chunk.run
    share = chunk.segments // rows.streams  # segments of a stream
    bank = max(1, PSUM_BANK // run)  # partitions whose slots fill a bank
    span = min(chunk.partitions, SPAN_BANKS * bank)
    spans = (chunk.partitions + span - 1) // span  # of a segment
    scores = tile((rows.count, share * chunk.partitions * run))
    maxima = tile((rows.count, share * spans))
    for i in range(share * spans):
        segment = i // spans
        begin = i % spans * span
        until = min(begin + span, chunk.partitions)
        products = psum((rows.count, (until - begin) * run))
        for low in range(begin, until, bank):
            high = min(low + bank, until)
            for group in range(groups_of(rows)):
                slots = []
                for part in keys[group // rows.heads * share + segment]:
                    slots.append(part[:, group % rows.heads, low:high, :])
                score(products[:, (low - begin) * run : (high - begin) * run], stationary, slots, group)
        first_slot = (segment * chunk.partitions + begin) * run
        nisa.range_select(
            dst=scores[:, first_slot : first_slot + (until - begin) * run],
            on_true_tile=capped(shape, products, constants.key_scale),
            comp_op0=nl.greater_equal,
            comp_op1=nl.less,
            bound0=bounds[0],
            bound1=bounds[1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reduce_res=maxima[:, i : i + 1],
            range_start=chunk.first + first_slot,
        )
    return scores, maxima


def window_scores(shape, rows, stationary, keys, mask):
    """Masked scores [count, T] with the window's keys, and their maxima [count, 1]."""
    products = psum((rows.count, shape.window))
    scores = tile((rows.count, shape.window))
    maximum = tile((rows.count, 1))
    for head in range(rows.heads):
        own_keys = []
        for part in keys:
            own_keys.append(part[:, head, :])
        score(products, stationary, own_keys, head)
    nisa.select_reduce(
        dst=scores,
        predicate=mask,
        on_true=capped(shape, products, None),
        on_false=MASKED,
        reduce_res=maximum,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_op=nl.maximum,
    )
    return scores, maximum


def raised_maximum(maxima, negative_max):
    """Minus the largest of what `negative_max` [count, 1] stands for and of (maxima [count, n], scale) pairs."""
    for largest, scale in maxima:
        size = negative_max.shape
        own = tile(size)
        raised = tile(size)
        nisa.tensor_reduce(dst=own, op=nl.maximum, data=largest, axis=1, negate=True)
        nisa.tensor_scalar(dst=raised, data=own, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=negative_max)
        negative_max = raised
    return negative_max


def exponentials(weights, scores, scale, negative_max, total):
    """weights = exp(scale * score - maximum) in the Tensor engine's dtype, and their row sums in `total`."""
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=scores,
        scale=scale,
        bias=negative_max,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def weigh_values(shape, chunk, rows, scores, scale, negative_max, values, weighted, accumulate, engines):
    """weighted [count, groups * D] (+)= exp(scores) [count, slots of a stream] x values; returns the weights' sums.

    Slots go to partitions by transposes, a few of each run at a time: one batch is transposed while the exponentials
    of the next are computed. `engines` take turns at emptying PSUM.
    """
    run = chunk.run
    share = chunk.segments // rows.streams
    width = weighted.shape[1] // rows.streams
    size = 4 if shape.dtype == nl.float32 else 2
    batch = max(1, min(run, MOST_TRANSPOSES, PSUM_BANK_BYTES // (rows.count * size)))
    while run % batch > 0:
        batch -= 1
    batches = []
    for segment in range(share):
        for first in range(0, run, batch):
            batches.append((segment, first))
    sums = tile((rows.count, len(batches)))
    weights = tile((rows.count, share, chunk.partitions, run), shape.dtype)
    scores = scores.reshape_dim(1, (share, chunk.partitions, run))

    staged = []
    for i in range(len(batches) + 1):
        if i < len(batches):
            segment, first = batches[i]
            exponentials(
                weights[:, segment, :, first : first + batch],
                scores[:, segment, :, first : first + batch],
                scale,
                negative_max,
                sums[:, i : i + 1],
            )
            staged.append(psum((chunk.partitions, batch, rows.count), shape.dtype))
            for j in range(batch):
                nisa.nc_transpose(
                    dst=staged[i][:, j, :], data=weights[:, segment, :, first + j], engine=nisa.engine.tensor
                )
        if i > 0:
            segment, first = batches[i - 1]
            transposed = tile((chunk.partitions, batch, rows.count), shape.dtype)
            nisa.tensor_copy(dst=transposed, src=staged[i - 1], engine=engines[(i - 1) % len(engines)])
            for stream in range(rows.streams):
                for j in range(batch):
                    nisa.nc_matmul(
                        dst=weighted[:, stream * width : (stream + 1) * width],
                        stationary=transposed[:, j, :],
                        moving=values[stream * share + segment][:, :, first + j, :],
                        accumulate=accumulate or i > 1 or j > 0,
                    )
    if len(batches) == 1:
        return sums
    total = tile((rows.count, 1))
    nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
    return total


def weigh_window(rows, weights, values, weighted, accumulate):
    """weighted [count, heads * D] (+)= weights [count, T] x values [T, heads, D]."""
    transposed = tile((weights.shape[1], 1, rows.count), weights.dtype)
    transpose_all(transposed, weights.expand_dim(1))
    nisa.nc_matmul(dst=weighted, stationary=transposed[:, 0, :], moving=values, accumulate=accumulate)


def restart(state, fresh, starts):
    """Starts over where `starts` [128, 1] fp32 is 1, not 0; bit by bit, since another sequence's state may hold NaN."""
    count = state.total.shape[0]
    width = state.values.shape[1]
    keep = tile((count, 1), nl.int32)
    begins = tile((count, 1), nl.uint8)
    nisa.tensor_scalar(dst=keep, data=starts[0:count], op0=nl.add, operand0=-1.0, engine=nisa.engine.scalar)
    nisa.tensor_copy(dst=begins, src=starts[0:count], engine=nisa.engine.gpsimd)
    values = state.values.view(nl.int32)
    nisa.tensor_scalar(dst=values, data=values, op0=nl.bitwise_and, operand0=keep)
    nisa.tensor_copy_predicated(
        dst=state.all[:, width : width + 2], src=fresh.all[:, width : width + 2], predicate=begins.broadcast(1, 2)
    )
