"""A step of the softmax: scores of a pass, of the window, or of both, and the values that they weigh.

Scores are known to the maximum before any is exponentiated. Engines keep their order: a step's scores come with the
values of the step before, some of each in turn.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PSUM_BANK, PSUM_BANK_BYTES, psum, psum_width, tile
from .attention_softmax import MASKED, groups_of, idle_engine, over_streams

FEW_COLUMNS = 512  # of transposed weights: half a bank of bf16 is soon emptied, a whole one in fewer instructions
BATCHES_AHEAD = 2  # that are transposed before the first one's values are weighed


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

    cached: object  # masked scores of the pass, [count, slots of a stream]; None if the step has none
    window: object  # the same of the window, [count, T]
    cache_scale: object  # of the pass's scores
    scale: float  # of the window's
    earlier: object  # [count, 1], minus the maximum before the step
    negative_max: object  # and after it


@dataclass
class Scoring(nl.NKIObject):
    """A step whose scores are on their way."""

    shape: object
    chunk: object
    rows: object
    constants: object
    stationary: object
    keys: object
    bounds: object
    window: object
    spans: object
    maxima: object  # [count, 1] of each span, then of the window
    step: object
    products: object  # q . k of the spans that come first, and then of the window, in PSUM


def new_step(shape, chunk, rows, constants, with_window, earlier):
    """Room for a Step; `chunk` is None without a pass."""
    scale = shape.scale if shape.softcap == 0.0 else shape.softcap
    return Step(
        None if chunk == None else tile((rows.count, chunk.slots // rows.streams)),  # noqa: E711
        tile((rows.count, shape.window)) if with_window else None,
        constants.key_scale if constants.key_scale != None and shape.softcap == 0.0 else scale,  # noqa: E711
        scale,
        earlier,
        tile((rows.count, 1)),
    )


def new_scoring(shape, chunk, rows, constants, stationary, keys, bounds, window, step):
    """Scoring of a pass, the window, or both, which raise the maximum of a row tile.

    Args:
        stationary: queries, as load_queries leaves them.
        keys: an entry a segment as load_keys leaves them; None without a pass.
        bounds: (first, end), as slot_bounds leaves them.
        window: () or (keys, mask), as load_window and window_mask leave them.
        step: as new_step leaves it.
    """
    spans = [] if keys == None else spans_of(chunk, rows)  # noqa: E711
    maxima = tile((rows.count, len(spans) + (1 if len(window) > 0 else 0)))
    return Scoring(shape, chunk, rows, constants, stationary, keys, bounds, window, spans, maxima, step, [])


def begin_scores(shape, chunk, rows, constants, stationary, keys, bounds, window, step):
    """A Scoring whose first products are on their way; arguments as for new_scoring."""
    scoring = new_scoring(shape, chunk, rows, constants, stationary, keys, bounds, window, step)
    multiply_next(scoring)
    return scoring


def multiply_next(scoring):
    """q . k of the span that comes next, or, after the last one, of the window."""
    done = len(scoring.products)
    if done < len(scoring.spans):
        span = scoring.spans[done]
        scoring.products.append(span_products(scoring.rows, scoring.stationary, scoring.keys, scoring.chunk, span))
    elif done == len(scoring.spans) and len(scoring.window) > 0:
        scoring.products.append(window_products(scoring.shape, scoring.rows, scoring.stationary, scoring.window[0]))


def mask_span(scoring, i):
    """Scores of span i, masked, and their maxima."""
    span = scoring.spans[i]
    nisa.range_select(
        dst=scoring.step.cached[:, span.first : span.first + span.size],
        on_true_tile=capped(scoring.shape, scoring.products[i], scoring.constants.key_scale),
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=scoring.bounds[0],
        bound1=scoring.bounds[1],
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_res=scoring.maxima[:, i : i + 1],
        range_start=scoring.chunk.first + span.slot,
    )


def end_scores(scoring):
    """The window's scores, and the maximum of all."""
    shape = scoring.shape
    rows = scoring.rows
    step = scoring.step
    spans = len(scoring.spans)
    raised = step.earlier
    maxima = scoring.maxima
    if len(scoring.window) > 0:
        nisa.select_reduce(
            dst=step.window,
            predicate=scoring.window[1],
            on_true=capped(shape, scoring.products[spans], None),
            on_false=MASKED,
            reduce_res=maxima[:, spans : spans + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
            reduce_op=nl.maximum,
        )
    if spans > 0 and scoring.constants.key_scale != None and shape.softcap == 0.0:  # noqa: E711
        minus_scale = tile((rows.count, 1))
        nisa.tensor_scalar(dst=minus_scale, data=step.cache_scale, op0=nl.multiply, operand0=-1.0)
        raise_maximum(step.negative_max, maxima[:, 0:spans], minus_scale, raised)
        raised = step.negative_max
        if len(scoring.window) > 0:
            raise_maximum(step.negative_max, maxima[:, spans:], -step.scale, raised)
    else:
        raise_maximum(step.negative_max, maxima, -step.scale, raised)
    over_streams(rows, step.negative_max, step.negative_max, nl.minimum, nisa.engine.vector)


@dataclass
class Weighing(nl.NKIObject):
    """A step whose values are on their way."""

    shape: object
    rows: object
    step: object
    state: object
    begins: bool
    decay: object  # [count, 1], of what the state holds
    batches: object
    engines: object
    sums: object  # [count, 1] of each batch's weights, then of those before
    weights: object  # of each batch, [count, 1, slots of a run, partitions]
    transposed: object  # these, [partitions, 1, slots of a run, count], in PSUM unless DMA did it
    ready: object  # these in SBUF
    room: object  # for these, of each batch, as new_room makes it; () if they are not to outlive a loop
    weighed: object  # (batch, stream) of what is in `weighted`
    weighted: object  # [rows, heads * D] in PSUM; None until then


def new_weighing(
    shape, chunk, rows, step, values, window_values, state, begins, engines, columns=FEW_COLUMNS, ends=False
):
    """Weighing of a step, which takes its values into the state.

    Args:
        values: of the pass, if the step has one, as load_slots leaves them.
        window_values: [T, heads, D] if the step has the window, else None.
        begins: whether this is a sequence's first step: `state` then has no values yet.
        engines: which take turns at the transposed weights: they empty PSUM, DMA does it all; None, any.
        columns: of weights that they take at once.
        ends: whether no other step is there to be taken meanwhile.
    """
    batches = []
    if step.window != None:  # noqa: E711
        batches.append(Batch(step.window.expand_dim(2), step.scale, [[window_values]]))
    if step.cached != None:  # noqa: E711
        batches.extend(batches_of(shape, chunk, rows, columns, step.cached, step.cache_scale, values, ends))
    return Weighing(
        shape,
        rows,
        step,
        state,
        begins,
        tile((rows.count, 1)),
        batches,
        engines,
        tile((rows.count, len(batches) + 1)),
        [],
        [],
        [],
        (),
        [],
        None,
    )


def new_room(weighing):
    """Room for the weights of each batch of a Weighing, transposed: [partitions, 1, slots of a run, count]."""
    room = []
    for batch in weighing.batches:
        _, partitions, size = batch.scores.shape
        room.append(tile((partitions, 1, size, weighing.rows.count), weighing.shape.dtype))
    return room


def exponentiate_next(weighing):
    """Weights of the batch that comes next."""
    step = weighing.step
    i = len(weighing.weights)
    if i == 0:
        nisa.activation(dst=weighing.decay, op=nl.exp, data=step.earlier, scale=-1.0, bias=step.negative_max)
    batch = weighing.batches[i]
    count, partitions, size = batch.scores.shape
    weights = tile((count, 1, size, partitions), weighing.shape.dtype)
    exponentials(
        weights[:, 0, :, :].permute((0, 2, 1)),
        batch.scores,
        batch.scale,
        step.negative_max,
        weighing.sums[:, i : i + 1],
    )
    weighing.weights.append(weights)


def engine_of(weighing, i):
    """Which of its engines takes batch i."""
    return weighing.engines[i % len(weighing.engines)]


def transpose_next(weighing):
    """Weights of the batch that comes next, transposed: slots go to partitions."""
    i = len(weighing.transposed)
    weights = weighing.weights[i]
    count, _, size, partitions = weights.shape
    if engine_of(weighing, i) == nisa.engine.dma:
        transposed = tile((partitions, 1, size, count), weights.dtype)
        nisa.dma_transpose(dst=transposed, src=weights)
    else:
        transposed = psum((partitions, 1, size, psum_width(count)), weights.dtype)
        for j in range(size):
            nisa.nc_transpose(dst=transposed[:, 0, j, 0:count], data=weights[:, 0, j, :], engine=nisa.engine.tensor)
    weighing.transposed.append(transposed)


def copy_next(weighing, engine):
    """Transposed weights of the batch that comes next, in SBUF, by `engine` unless DMA put them there."""
    i = len(weighing.ready)
    transposed = weighing.transposed[i]
    if engine_of(weighing, i) == nisa.engine.dma:
        weighing.ready.append(transposed)
        return
    partitions, _, size, _ = transposed.shape
    count = weighing.rows.count
    ready = weighing.room[i] if len(weighing.room) > 0 else tile((partitions, 1, size, count), transposed.dtype)
    nisa.tensor_copy(dst=ready, src=transposed[:, :, :, 0:count], engine=engine)
    weighing.ready.append(ready)


def weigh_values(weighing, i, stream):
    """What a stream's weights of batch i weigh, added to that of the others."""
    rows = weighing.rows
    batch = weighing.batches[i]
    first = rows.count // rows.streams * stream
    if weighing.weighted == None:  # noqa: E711
        weighing.weighted = psum((rows.rows, rows.heads * weighing.shape.head_dim))
    for j in range(len(batch.values[stream])):
        nisa.nc_matmul(
            dst=weighing.weighted,
            stationary=weighing.ready[i][:, 0, j, first : first + rows.rows],
            moving=batch.values[stream][j],
            accumulate=len(weighing.weighed) + j > 0,
        )
    weighing.weighed.append((i, stream))


def ready_weights(weighing):
    """Weights of all batches, transposed."""
    count = len(weighing.batches)
    for i in range(count + BATCHES_AHEAD):
        if i < count:
            exponentiate_next(weighing)
            transpose_next(weighing)
        if i >= BATCHES_AHEAD:
            copy_next(weighing, engine_of(weighing, i - BATCHES_AHEAD))


def weigh_ready(weighing, last_first=False):
    """All values, of weights that are known; `last_first`: those of the last stream come before the others'."""
    streams = weighing.rows.streams
    for k in range(streams):
        stream = (k + streams - 1) % streams if last_first else k
        for i in range(len(weighing.batches)):
            if stream < len(weighing.batches[i].values):
                weigh_values(weighing, i, stream)
    end_values(weighing)


def weigh_next(weighing):
    """Weights of the batch that comes next, and values of the one BATCHES_AHEAD before: a batch is transposed while the
    exponentials of the next are computed."""
    if len(weighing.weights) < len(weighing.batches):
        exponentiate_next(weighing)
        transpose_next(weighing)
        if len(weighing.transposed) <= len(weighing.ready) + BATCHES_AHEAD:
            return
    i = len(weighing.ready)
    copy_next(weighing, engine_of(weighing, i))
    for stream in range(len(weighing.batches[i].values)):
        weigh_values(weighing, i, stream)


def score_and_weigh(scoring, weighing):
    """Scores of a step and values of the one before but for its last batches, either of which may be None: engines keep
    their order, so that some of each come in turn, first of the values, then no engine waits for the other."""
    batches = 0 if weighing == None else len(weighing.batches) - len(weighing.weights)  # noqa: E711
    done = 0
    if scoring != None:  # noqa: E711
        spans = len(scoring.spans)
        for i in range(spans):
            multiply_next(scoring)
            # Not between spans that need another activation table.
            until = batches * (i + 1) // spans if scoring.shape.softcap == 0.0 else 0
            for _ in range(done, until):
                weigh_next(weighing)
            done = until
            mask_span(scoring, i)
        end_scores(scoring)
    for _ in range(done, batches):
        weigh_next(weighing)


def end_values(weighing):
    """The last batches, and what the step does to the state."""
    rows = weighing.rows
    state = weighing.state
    step = weighing.step
    count = len(weighing.batches)
    engine = idle_engine(weighing.shape)
    # The total first: it waits for no product.
    nisa.tensor_tensor(
        dst=weighing.sums[:, count : count + 1], data1=state.total, data2=weighing.decay, op=nl.multiply, engine=engine
    )
    for _ in range(count - len(weighing.ready)):
        weigh_next(weighing)
    nisa.tensor_reduce(dst=state.total, op=nl.add, data=weighing.sums, axis=1)
    nisa.tensor_copy(dst=state.negative_max, src=step.negative_max, engine=engine)
    if weighing.begins:
        nisa.tensor_copy(dst=state.values, src=weighing.weighted, engine=nisa.engine.vector)
        return
    decay = weighing.decay[0 : rows.rows].broadcast(1, state.values.shape[1])
    nisa.tensor_tensor(dst=state.values, data1=state.values, data2=decay, op=nl.multiply, engine=engine)
    nisa.tensor_tensor(dst=state.values, data1=state.values, data2=weighing.weighted, op=nl.add)


def score_step(shape, chunk, rows, constants, stationary, keys, bounds, window, earlier):
    """The Step of a pass, the window, or both, alone; `earlier` [count, 1] is minus the maximum so far, the others as
    for new_scoring."""
    step = new_step(shape, chunk if keys != None else None, rows, constants, len(window) > 0, earlier)  # noqa: E711
    score_and_weigh(begin_scores(shape, chunk, rows, constants, stationary, keys, bounds, window, step), None)
    return step


def weigh_step(shape, chunk, rows, step, values, window_values, state, begins, engines):
    """Takes a step's values into the state, alone; arguments as for new_weighing."""
    weighing = new_weighing(shape, chunk, rows, step, values, window_values, state, begins, engines)
    score_and_weigh(None, weighing)
    end_values(weighing)


@dataclass
class Span(nl.NKIObject):
    """Slots of a pass under one mask: partitions begin..until - 1 of a piece of a segment of each stream."""

    first: int  # column of its stream
    size: int
    slot: int  # of the first stream
    segment: int
    piece: int
    begin: int
    until: int


def spans_of(chunk, rows):
    """Spans that cover a pass."""
    per_piece = chunk.partitions // chunk.pieces
    span = min(per_piece, max(1, PSUM_BANK // chunk.run))
    spans = []
    for segment in range(chunk.segments // rows.streams):
        for piece in range(chunk.pieces):
            column = (segment * chunk.partitions + piece * per_piece) * chunk.run
            slot = column * (rows.streams if chunk.pieces > 1 else 1)
            for begin in range(0, per_piece, span):
                until = min(begin + span, per_piece)
                first = begin * chunk.run
                size = (until - begin) * chunk.run
                spans.append(Span(column + first, size, slot + first, segment, piece, begin, until))
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
                slots.append(part[:, group % rows.heads, span.piece, low:high, :])
            score(products[:, (low - span.begin) * run : (high - span.begin) * run], stationary, slots, group)
    return products


def window_products(shape, rows, stationary, keys):
    """q . k [count, T] of the window, in PSUM."""
    products = psum((rows.count, shape.window))
    for head in range(rows.heads):
        own_keys = []
        for part in keys:
            own_keys.append(part[:, head, :])
        score(products, stationary, own_keys, head)
    return products


def raise_maximum(raised, maxima, minus_scale, negative_max):
    """raised = minus the larger of what `negative_max` [count, 1] stands for and of scale * `maxima` [count, n]."""
    largest = maxima
    if maxima.shape[1] > 1:
        largest = tile(negative_max.shape)
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=maxima, axis=1)
    nisa.tensor_scalar(
        dst=raised, data=largest, op0=nl.multiply, operand0=minus_scale, op1=nl.minimum, operand1=negative_max
    )


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


def batches_of(shape, chunk, rows, columns, scores, scale, values, ends):
    """Batches of a pass: its scores [count, slots of a stream], its values as load_slots leaves them."""
    share = chunk.segments // rows.streams
    size = 4 if shape.dtype == nl.float32 else 2
    batch = max(1, min(chunk.run, min(columns // rows.count, PSUM_BANK_BYTES // (psum_width(rows.count) * size))))
    while chunk.run % batch > 0:
        batch -= 1
    scores = scores.reshape_dim(1, (share, chunk.partitions, chunk.run))
    batches = []
    for segment in range(share):
        firsts = []
        for first in range(0, chunk.run, batch):
            firsts.append(first)
        if ends and segment == share - 1 and batch % 2 == 0:
            # The smaller the last batch, the sooner all is done.
            firsts.append(chunk.run - batch // 2)
        firsts.append(chunk.run)
        for k in range(len(firsts) - 1):
            own = []
            for stream in range(rows.streams):
                slots = []
                for i in range(firsts[k], firsts[k + 1]):
                    slots.append(values[stream * share + segment][:, :, i, :])
                own.append(slots)
            batches.append(Batch(scores[:, segment, :, firsts[k] : firsts[k + 1]], scale, own))
    return batches
