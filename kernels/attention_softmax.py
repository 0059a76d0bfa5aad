"""The softmax of a row tile, pass by pass: masks, running maximum and sum, weighted values.

What a row carries from pass to pass (Milakov and Gimelshein, 1805.02867): its weighted values, the sum of its weights,
and minus the maximum of its scores, negated because that is the bias of the exponential.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_loads import repeat
from .attention_plan import PSUM_BANK, PSUM_BANK_BYTES, RowTile, psum, psum_width, tile
from .attention_tree import load_ancestors

NOTHING_SEEN = 1e20  # minus the maximum of a row that saw no key yet: exp(masked score + this) is 0
MASKED = -3.4028234663852886e38  # what range_select writes where a slot is not seen
SMALLEST_SUM = 1e-18  # a row that saw a key has a sum of at least 1; the logarithm's domain starts at 2^-64
FEW_COLUMNS = 512  # of transposed weights: half a bank of bf16 is soon emptied, a whole one in fewer instructions
COLUMNS_A_BATCH_AHEAD = 256  # the larger the batches, the more are transposed before the first is weighed
SPAN_BANKS = 2  # of scores under one mask; two spans are in use at a time


@dataclass
class Rows(nl.NKIObject):
    """What does not change for a row tile; [count, 1] unless said otherwise."""

    row: object  # the window row
    depth: object  # its position, counted from row 0's
    sees: object  # [count, T] the window keys that it sees
    stream: object  # that the row belongs to; None if there is but one
    key_scale: object  # of scores of the cache; None if that is shape.scale
    value_scale: object  # of weighted values; None if there is none
    fresh: object  # State of rows that have seen nothing but their sink


@dataclass
class State(nl.NKIObject):
    """The streams of a row have one maximum, so that what they weigh adds up in PSUM."""

    values: object  # [rows, heads * D] fp32, weighted; those of heads other than the row's own are by-products
    total: object  # [count, 1], of the row's stream
    negative_max: object  # [count, 1], of scaled scores
    all: object  # the tile that holds the three


def groups_of(rows):
    return rows.heads * rows.streams


def new_state(shape, rows):
    width = rows.heads * shape.head_dim
    stored = tile(((rows.count + 15) // 16 * 16, width + 2))  # a multiple of 16, as sendrecv needs
    return State(
        stored[0 : rows.rows, 0:width],
        stored[0 : rows.count, width : width + 1],
        stored[0 : rows.count, width + 1 : width + 2],
        stored,
    )


def one_stream(rows, constants, state):
    """A row tile, its constants and its state, without the streams but the first.

    What is then taken in leaves the others behind, which must not have seen anything.
    """
    if rows.streams == 1:
        return rows, constants, state
    count = rows.rows
    return (
        RowTile(rows.first_row, count, rows.first_head, rows.heads, 1, count),
        Rows(
            constants.row[0:count],
            constants.depth[0:count],
            None,
            None,
            None if constants.key_scale == None else constants.key_scale[0:count],  # noqa: E711
            None if constants.value_scale == None else constants.value_scale[0:count],  # noqa: E711
            None,
        ),
        State(state.values, state.total[0:count], state.negative_max[0:count], None),
    )


def row_constants(shape, rows, with_window, sinks, key_scale, value_scale):
    """Rows of a row tile. `with_window`: whether the window's keys are this core's to take."""
    stride = rows.count // rows.streams
    across = tile((1, rows.streams, stride))
    nisa.memset(dst=across, value=0.0)
    nisa.iota(
        dst=across[:, :, 0 : rows.rows],
        pattern=[[0, rows.streams], [0, rows.rows // shape.window], [1, shape.window]],
        offset=0,
        channel_multiplier=0,
    )
    staged = psum((rows.count, 1))
    row = tile((rows.count, 1))
    nisa.nc_transpose(dst=staged, data=across, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=row, src=staged, engine=nisa.engine.scalar)
    stream = None
    if rows.streams > 1:
        stream = tile((rows.count, 1))
        for i in range(rows.streams):
            nisa.memset(dst=stream[i * stride : (i + 1) * stride], value=float(i))

    fresh = new_state(shape, rows)
    nisa.memset(dst=fresh.all, value=0.0)
    nisa.memset(dst=fresh.negative_max, value=NOTHING_SEEN)
    if sinks != None:  # noqa: E711
        # A sink is a key with a score of its own and no value.
        heads = rows.rows // shape.window
        sink = fresh.negative_max
        nisa.dma_copy(
            dst=sink[0 : rows.rows],
            src=sinks.ap(pattern=[[1, heads], [0, shape.window]], offset=rows.first_row // shape.window),
        )
        repeat(rows, sink)
        nisa.tensor_scalar(dst=sink, data=sink, op0=nl.multiply, operand0=-1.0)
        nisa.memset(dst=fresh.total[0 : rows.rows], value=1.0)
    return Rows(
        row=row,
        depth=row,
        sees=chain_sees(shape, rows, row) if with_window else None,
        stream=stream,
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
        constants.stream,
        constants.key_scale,
        constants.value_scale,
        constants.fresh,
    )


def row_scale(rows, scales, factor):
    """factor * scales [Hkv] of each row's head, as [count, 1]; None without scales."""
    if scales == None:  # noqa: E711
        return None
    scale = tile((rows.count, 1))
    nisa.memset(dst=scale, value=0.0)
    own = rows.rows // rows.heads
    nisa.dma_copy(dst=scale[0 : rows.rows], src=scales.ap(pattern=[[1, rows.heads], [0, own]], offset=rows.first_head))
    repeat(rows, scale)
    nisa.tensor_scalar(dst=scale, data=scale, op0=nl.multiply, operand0=factor)
    return scale


def chain_sees(shape, rows, row):
    """[count, T] fp32 flags: each row sees itself and the window rows before it; of streams, the first does."""
    every = tile((rows.count, shape.window))
    if rows.streams > 1:
        nisa.memset(dst=every, value=0.0)
    size = (rows.rows, shape.window)
    row = row[0 : rows.rows]
    sees = every[0 : rows.rows]
    column = tile(size)
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
    return every


def window_mask(shape, constants, current):
    """[count, T] uint8: which window keys each row sees, if this pass takes the window; rows of padding see none."""
    count = constants.row.shape[0]
    live_row = tile((count, 1))
    nisa.tensor_scalar(dst=live_row, data=constants.row, op0=nl.less, operand0=current.live_rows[0:count])
    if current.starts != None:  # noqa: E711
        nisa.tensor_tensor(dst=live_row, data1=live_row, data2=current.starts[0:count], op=nl.multiply)
    mask = tile((count, shape.window), nl.uint8)
    nisa.tensor_scalar(dst=mask, data=constants.sees, op0=nl.multiply, operand0=live_row)
    return mask


def slot_bounds(shape, chunk, constants, current):
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
    if constants.stream == None:  # noqa: E711
        return first, end
    stream_first = tile(size)
    for pair in ((first, stream_first), (end, end)):
        bound, shifted = pair
        nisa.scalar_tensor_tensor(
            dst=shifted,
            data=constants.stream,
            op0=nl.multiply,
            operand0=-float(chunk.slots // chunk.streams),
            op1=nl.add,
            operand1=bound,
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


@dataclass
class Step(nl.NKIObject):
    """A step of the softmax whose scores are known and whose values are not weighed yet: a pass, the window or both."""

    cached: object  # masked scores of the pass, and their scale; None if the step has none
    window: object  # the same of the window
    earlier: object  # [count, 1], minus the maximum before the step
    negative_max: object  # and after it


def score_step(shape, chunk, rows, constants, stationary, keys, bounds, window, earlier):
    """Scores of a pass, the window, or both, and how they raise the maximum of a row tile.

    Args:
        stationary: queries, as load_queries leaves them.
        keys: an entry a segment as load_keys leaves them; None without a pass.
        bounds: (first, end), as slot_bounds leaves them.
        window: () or (keys, mask), as load_window and window_mask leave them.
        earlier: [count, 1], minus the maximum so far.
    """
    scale = shape.scale if shape.softcap == 0.0 else shape.softcap
    window_part = None
    raised = earlier
    if len(window) > 0:
        scores, largest = window_scores(shape, rows, stationary, window[0], window[1])
        raised = raised_maximum(largest, -scale, earlier)
        window_part = (scores, scale)
    pass_part = None
    if keys != None:  # noqa: E711
        spans = spans_of(chunk, rows)
        scores = tile((rows.count, chunk.slots // rows.streams))
        maxima = tile((rows.count, len(spans)))
        for i in range(len(spans)):
            products = span_products(rows, stationary, keys, chunk, spans[i])
            nisa.range_select(
                dst=scores[:, spans[i].first : spans[i].first + spans[i].size],
                on_true_tile=capped(shape, products, constants.key_scale),
                comp_op0=nl.greater_equal,
                comp_op1=nl.less,
                bound0=bounds[0],
                bound1=bounds[1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
                reduce_res=maxima[:, i : i + 1],
                range_start=chunk.first + spans[i].first,
            )
        cache_scale = scale
        minus_cache_scale = -scale
        if constants.key_scale != None and shape.softcap == 0.0:  # noqa: E711
            cache_scale = constants.key_scale
            minus_cache_scale = tile((rows.count, 1))
            nisa.tensor_scalar(dst=minus_cache_scale, data=cache_scale, op0=nl.multiply, operand0=-1.0)
        raised = raised_maximum(maxima, minus_cache_scale, raised)
        pass_part = (scores, cache_scale)
    return Step(pass_part, window_part, earlier, over_streams(rows, raised, nl.minimum, nisa.engine.vector))


def weigh_step(shape, chunk, rows, step, values, window_values, state, begins, engines, columns=FEW_COLUMNS):
    """Takes the values of a step into the state.

    Args:
        values: of the pass, if the step has one, as load_slots leaves them.
        window_values: [T, heads, D] if the step has the window, else None.
        begins: whether this is a sequence's first step: `state` then has no values yet.
        engines: which take turns at the transposed weights: they empty PSUM, DMA does it all.
        columns: of weights that they take at once.
    """
    decay = tile((rows.count, 1))
    nisa.activation(dst=decay, op=nl.exp, data=step.earlier, scale=-1.0, bias=step.negative_max)
    batches = []
    if step.window != None:  # noqa: E711
        batches.append(Batch(step.window[0].expand_dim(2), step.window[1], [[window_values]]))
    if step.cached != None:  # noqa: E711
        batches.extend(batches_of(shape, chunk, rows, columns, step.cached[0], step.cached[1], values))
    weighted = psum((rows.rows, rows.heads * shape.head_dim))
    total = weigh(shape, rows, batches, step.negative_max, weighted, engines, columns // COLUMNS_A_BATCH_AHEAD)

    # The total first: it waits for no product.
    nisa.scalar_tensor_tensor(
        dst=state.total, data=state.total, op0=nl.multiply, operand0=decay, op1=nl.add, operand1=total
    )
    nisa.tensor_copy(dst=state.negative_max, src=step.negative_max, engine=nisa.engine.scalar)
    if begins:
        nisa.tensor_copy(dst=state.values, src=weighted, engine=nisa.engine.vector)
        return
    nisa.tensor_scalar(
        dst=state.values,
        data=state.values,
        op0=nl.multiply,
        operand0=decay[0 : rows.rows],
        engine=nisa.engine.scalar,
    )
    nisa.tensor_tensor(dst=state.values, data1=state.values, data2=weighted, op=nl.add)


@dataclass
class Span(nl.NKIObject):
    """Slots of a pass under one mask: partitions begin..until - 1 of a segment of each stream."""

    first: int  # slot of its stream
    size: int
    segment: int
    begin: int
    until: int


def spans_of(chunk, rows):
    """Spans that cover a pass."""
    span = min(chunk.partitions, SPAN_BANKS * max(1, PSUM_BANK // chunk.run))
    spans = []
    for segment in range(chunk.segments // rows.streams):
        for begin in range(0, chunk.partitions, span):
            until = min(begin + span, chunk.partitions)
            first = (segment * chunk.partitions + begin) * chunk.run
            spans.append(Span(first, (until - begin) * chunk.run, segment, begin, until))
    return spans


def span_products(rows, stationary, keys, chunk, span):
    """q . k [count, size] of a span, in PSUM."""
    run = chunk.run
    share = chunk.segments // rows.streams  # segments of a stream
    bank = max(1, PSUM_BANK // run)  # partitions whose slots fill a bank
    products = psum((rows.count, span.size))
    for low in range(span.begin, span.until, bank):
        high = min(low + bank, span.until)
        for group in range(groups_of(rows)):
            slots = []
            for part in keys[group // rows.heads * share + span.segment]:
                slots.append(part[:, group % rows.heads, low:high, :])
            score(products[:, (low - span.begin) * run : (high - span.begin) * run], stationary, slots, group)
    return products


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


def raised_maximum(maxima, minus_scale, negative_max):
    """Minus the larger of what `negative_max` [count, 1] stands for and of scale * `maxima` [count, n]."""
    size = negative_max.shape
    largest = maxima
    if maxima.shape[1] > 1:
        largest = tile(size)
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=maxima, axis=1)
    raised = tile(size)
    nisa.tensor_scalar(
        dst=raised, data=largest, op0=nl.multiply, operand0=minus_scale, op1=nl.minimum, operand1=negative_max
    )
    return raised


def over_streams(rows, values, op, engine):
    """`values` [count, 1] combined by `op` over the streams of each row, the same on all of them."""
    half = rows.count // 2
    while half >= rows.count // rows.streams:
        others = tile(values.shape)
        combined = tile(values.shape)
        for first in range(0, rows.count, 2 * half):
            low = slice(first, first + half)
            high = slice(first + half, first + 2 * half)
            nisa.tensor_copy(dst=others[low], src=values[high], engine=engine)
            nisa.tensor_copy(dst=others[high], src=values[low], engine=engine)
        nisa.tensor_tensor(dst=combined, data1=values, data2=others, op=op, engine=engine)
        values = combined
        half //= 2
    return values


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


@dataclass
class Batch(nl.NKIObject):
    """Slots that are transposed together, some of each run."""

    scores: object  # [count, partitions, size]
    scale: object  # of the scores
    values: object  # of each stream that sees them, of each slot of a run: [partitions, heads, D]


def batches_of(shape, chunk, rows, columns, scores, scale, values):
    """Batches of a pass: its scores [count, slots of a stream], its values as load_slots leaves them."""
    share = chunk.segments // rows.streams
    size = 4 if shape.dtype == nl.float32 else 2
    batch = max(1, min(chunk.run, min(columns // rows.count, PSUM_BANK_BYTES // (psum_width(rows.count) * size))))
    while chunk.run % batch > 0:
        batch -= 1
    scores = scores.reshape_dim(1, (share, chunk.partitions, chunk.run))
    batches = []
    for segment in range(share):
        for first in range(0, chunk.run, batch):
            own = []
            for stream in range(rows.streams):
                slots = []
                for i in range(first, first + batch):
                    slots.append(values[stream * share + segment][:, :, i, :])
                own.append(slots)
            batches.append(Batch(scores[:, segment, :, first : first + batch], scale, own))
    return batches


def weigh(shape, rows, batches, negative_max, weighted, engines, ahead):
    """weighted [rows, heads * D] = exp(scores) x values of all batches; returns the weights' sums [count, 1].

    Slots go to partitions by transposes: a batch is transposed while the exponentials of the next are computed.
    `engines` as weigh_step has them; `ahead` batches are transposed before the first one's values are weighed.
    """
    stride = rows.count // rows.streams
    sums = tile((rows.count, len(batches)))
    staged = []
    for i in range(len(batches) + ahead):
        if i < len(batches):
            batch = batches[i]
            _, partitions, size = batch.scores.shape
            weights = tile((rows.count, 1, size, partitions), shape.dtype)
            exponentials(
                weights[:, 0, :, :].permute((0, 2, 1)), batch.scores, batch.scale, negative_max, sums[:, i : i + 1]
            )
            if engines[i % len(engines)] == nisa.engine.dma:
                staged.append(tile((partitions, 1, size, rows.count), shape.dtype))
                nisa.dma_transpose(dst=staged[i], src=weights)
            else:
                staged.append(psum((partitions, 1, size, psum_width(rows.count)), shape.dtype))
                for j in range(size):
                    nisa.nc_transpose(
                        dst=staged[i][:, 0, j, 0 : rows.count], data=weights[:, 0, j, :], engine=nisa.engine.tensor
                    )
        done = i - ahead
        if done < 0:
            continue
        transposed = staged[done]
        if engines[done % len(engines)] != nisa.engine.dma:
            transposed = tile((transposed.shape[0], 1, transposed.shape[2], rows.count), shape.dtype)
            nisa.tensor_copy(
                dst=transposed, src=staged[done][:, :, :, 0 : rows.count], engine=engines[done % len(engines)]
            )
        for stream in range(len(batches[done].values)):
            values = batches[done].values[stream]
            for j in range(len(values)):
                nisa.nc_matmul(
                    dst=weighted,
                    stationary=transposed[:, 0, j, stream * stride : stream * stride + rows.rows],
                    moving=values[j],
                    accumulate=done + stream + j > 0,
                )
    if len(batches) == 1:
        return sums
    total = tile((rows.count, 1))
    nisa.tensor_reduce(dst=total, op=nl.add, data=sums, axis=1)
    return total


def restart(state, fresh, starts):
    """Starts over where `starts` [128, 1] fp32 is 1, not 0; bit by bit, since another sequence's state may hold NaN."""
    count = state.total.shape[0]
    width = state.values.shape[1]
    keep = tile((count, 1), nl.int32)
    begins = tile((count, 1), nl.uint8)
    nisa.tensor_scalar(dst=keep, data=starts[0:count], op0=nl.add, operand0=-1.0, engine=nisa.engine.scalar)
    nisa.tensor_copy(dst=begins, src=starts[0:count], engine=nisa.engine.scalar)
    values = state.values.view(nl.int32)
    nisa.tensor_scalar(dst=values, data=values, op0=nl.bitwise_and, operand0=keep[0 : values.shape[0]])
    nisa.tensor_copy_predicated(
        dst=state.all[0:count, width : width + 2],
        src=fresh.all[0:count, width : width + 2],
        predicate=begins.broadcast(1, 2),
    )
