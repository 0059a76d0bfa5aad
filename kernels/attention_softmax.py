"""The softmax of a row tile, pass by pass: masks, running maximum and sum, weighted values.

What a row carries from pass to pass (Milakov and Gimelshein, 1805.02867): its weighted values, the sum of its weights,
and minus the maximum of its scores, negated because that is the bias of the exponential.
"""

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from .attention_loads import transpose_all
from .attention_plan import PSUM_BANK, RowTile, psum, tile
from .attention_tree import load_ancestors

NOTHING_SEEN = 1e20  # minus the maximum of a row that saw no key yet: exp(masked score + this) is 0
MASKED = -3.4028234663852886e38  # what range_select writes where a slot is not seen
SMALLEST_SUM = 1e-18  # a row that saw a key has a sum of at least 1; the logarithm's domain starts at 2^-64
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


class Masks(NamedTuple):
    """What each row of a row tile sees in a pass."""

    first: object  # [count, 1] fp32: slots first <= slot < end of the row's stream
    end: object
    window: object  # [count, T] uint8, or None


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
    size = (rows.count, 1)
    copies = rows.count // shape.window
    row = tile(size)
    window_rows = tile((1, copies, shape.window))
    nisa.iota(dst=window_rows, pattern=[[0, copies], [1, shape.window]], offset=0, channel_multiplier=0)
    nisa.dma_copy(dst=row, src=window_rows)

    first_slot = None
    if rows.streams > 1:
        first_slots = tile((1, rows.streams, rows.rows))
        share = chunk.slots // rows.streams
        nisa.iota(dst=first_slots, pattern=[[share, rows.streams], [0, rows.rows]], offset=0, channel_multiplier=0)
        first_slot = tile(size)
        nisa.dma_copy(dst=first_slot, src=first_slots)

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
        first_slot=first_slot,
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


def mask_rows(shape, constants, current, with_cache, with_window):
    """Masks of a pass; rows of padding see nothing."""
    first = None
    end = None
    window = None
    if with_cache:
        first, end = slot_bounds(shape, constants, current)
    if with_window:
        count = constants.row.shape[0]
        live_row = tile((count, 1))
        nisa.tensor_scalar(dst=live_row, data=constants.row, op0=nl.less, operand0=current.live_rows[0:count])
        if current.starts != None:  # noqa: E711
            nisa.tensor_tensor(dst=live_row, data1=live_row, data2=current.starts[0:count], op=nl.multiply)
        window = tile((count, shape.window), nl.uint8)
        nisa.tensor_scalar(dst=window, data=constants.sees, op0=nl.multiply, operand0=live_row)
    return Masks(first, end, window)


def slot_bounds(shape, constants, current):
    """First slot that each row sees, and one past the last, in its stream: [count, 1] each."""
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
    nisa.tensor_tensor(dst=stream_first, data1=first, data2=constants.first_slot, op=nl.subtract)
    nisa.tensor_tensor(dst=end, data1=end, data2=constants.first_slot, op=nl.subtract)
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


def attend(shape, chunk, rows, constants, stationary, cached, window, masks, state, begins):
    """Takes a pass into the state of a row tile: cached keys, the window's, or both.

    Args:
        stationary: queries, as load_queries leaves them.
        cached: (keys, values), an entry a segment as load_keys and load_slots leave them, or ().
        window: (keys, values), as load_window leaves them, or ().
        masks: Masks of the pass.
        begins: whether it is a sequence's first: `state` then holds nothing yet.
    """
    before = constants.fresh if begins else state
    scale = shape.scale if shape.softcap == 0.0 else shape.softcap
    cache_scale = scale
    if constants.key_scale != None and shape.softcap == 0.0:  # noqa: E711
        cache_scale = constants.key_scale

    parts = []
    if len(cached) > 0:
        scores, maxima = cache_scores(shape, chunk, rows, constants, stationary, cached[0], masks)
        parts.append((scores, maxima, cache_scale))
    if len(window) > 0:
        scores, maxima = window_scores(shape, rows, stationary, window[0], masks)
        parts.append((scores, maxima, scale))
    decay = raise_maximum(parts, before, state)

    weighted = psum((rows.count, groups_of(rows) * shape.head_dim))
    sums = []
    for scores, _, part_scale in parts:
        total = tile((rows.count, 1))
        weights = exponentials(shape, scores, part_scale, state, total)
        if len(sums) < len(cached) // 2:
            weigh_values(chunk, rows, weights, cached[1], weighted)
        else:
            weigh_window(rows, weights, window[1], weighted[:, 0 : rows.heads * shape.head_dim], len(cached) > 0)
        sums.append(total)

    if begins:
        nisa.tensor_copy(dst=state.values, src=weighted, engine=nisa.engine.scalar)
    else:
        nisa.scalar_tensor_tensor(
            dst=state.values, data=state.values, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=weighted
        )
    nisa.scalar_tensor_tensor(
        dst=state.total, data=before.total, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=sums[0]
    )
    for total in sums[1:]:
        nisa.tensor_tensor(dst=state.total, data1=state.total, data2=total, op=nl.add)


def cache_scores(shape, chunk, rows, constants, stationary, keys, masks):
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
            bound0=masks.first,
            bound1=masks.end,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reduce_res=maxima[:, i : i + 1],
            range_start=chunk.first + first_slot,
        )
    return scores, maxima


def window_scores(shape, rows, stationary, keys, masks):
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
        predicate=masks.window,
        on_true=capped(shape, products, None),
        on_false=MASKED,
        reduce_res=maximum,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_op=nl.maximum,
    )
    return scores, maximum


def raise_maximum(parts, before, state):
    """Raises the maximum from `before` to those of (scores, maxima, scale) parts; returns what scales earlier sums."""
    count = before.total.shape[0]
    decay = tile((count, 1))
    negative_max = before.negative_max
    for _, maxima, scale in parts:
        largest = tile((count, 1))
        raised = tile((count, 1))
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=maxima, axis=1, negate=True)
        nisa.tensor_scalar(
            dst=raised, data=largest, op0=nl.multiply, operand0=scale, op1=nl.minimum, operand1=negative_max
        )
        negative_max = raised
    nisa.activation(dst=decay, op=nl.exp, data=before.negative_max, scale=-1.0, bias=negative_max)
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


def weigh_values(chunk, rows, weights, values, weighted):
    """weighted [count, groups * D] = weights [count, slots of a stream] x values, slots on partitions."""
    run = chunk.run
    share = chunk.segments // rows.streams
    size = chunk.partitions * run
    width = weighted.shape[1] // rows.streams
    for segment in range(share):
        transposed = tile((chunk.partitions, run, rows.count), weights.dtype)
        own_weights = weights[:, segment * size : (segment + 1) * size]
        transpose_all(transposed, own_weights.reshape_dim(1, (chunk.partitions, run)).permute((0, 2, 1)))
        for stream in range(rows.streams):
            for i in range(run):
                nisa.nc_matmul(
                    dst=weighted[:, stream * width : (stream + 1) * width],
                    stationary=transposed[:, i, :],
                    moving=values[stream * share + segment][:, :, i, :],
                    accumulate=segment + i > 0,
                )


def weigh_window(rows, weights, values, weighted, accumulate):
    """weighted [count, heads * D] (+)= weights [count, T] x values [T, heads, D]."""
    transposed = tile((weights.shape[1], 1, rows.count), weights.dtype)
    transpose_all(transposed, weights.expand_dim(1))
    nisa.nc_matmul(dst=weighted, stationary=transposed[:, 0, :], moving=values, accumulate=accumulate)


def restart(state, fresh, starts):
    """Starts over where `starts` [128, 1] uint32 is set: by a select, as another sequence's state may hold NaN."""
    count, width = state.all.shape
    nisa.tensor_copy_predicated(dst=state.all, src=fresh.all, predicate=starts[0:count].broadcast(1, width))
