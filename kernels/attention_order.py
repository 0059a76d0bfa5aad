"""In which order the engines are given the steps that a sequence takes.

An engine keeps its order: an instruction that waits holds up all that stand behind it. So what comes next is always
what could start first, by rough figures of how long everything takes: list scheduling, while the program is traced.
The figures decide when something is computed, never what. What runs ahead is bounded by the room that it takes.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PIECE
from .attention_softmax import groups_of
from .attention_steps import (
    copy_next,
    end_scores,
    end_values,
    engine_of,
    exponentiate_next,
    mask_span,
    multiply_next,
    transpose_next,
    weigh_values,
)

# Nanoseconds. Of a column of 128 lanes: trn2's clocks; Vector copies two-byte elements twice as fast.
TENSOR_COLUMN = 1 / 2.4
VECTOR_COLUMN = 1 / 0.96
VECTOR_COPY_COLUMN = 0.5 / 0.96
SCALAR_COLUMN = 1 / 1.2
INSTRUCTION = 50.0  # what one takes besides
LATENCY = 100.0  # until another engine sees a result
PIECE_FETCH = 1450.0  # PIECE slots of keys or of values, from HBM
DMA_TRANSPOSE = 5000.0

# PSUM has eight banks.
MOST_PRODUCTS = 2  # spans that are not masked yet
MOST_TRANSPOSED = 2  # batches that are not in SBUF yet
MOST_WEIGHED = 2  # steps that are not in the state yet
MOST_SCORED = 2  # steps whose scores, in SBUF, are not all exponentiated yet

# What is done of a step. Of two that could start at the same time the first is taken.
KINDS = range(7)
MULTIPLY, MASK, EXPONENTIATE, TRANSPOSE, COPY, WEIGH, END = KINDS


@dataclass
class Clock(nl.NKIObject):
    """When each engine is free."""

    tensor: float
    vector: float
    scalar: float


@dataclass
class Progress(nl.NKIObject):
    """A step, how far it is, and when each of its results can be used."""

    scoring: object
    weighing: object  # None until it is known where its values will be
    first: int  # slots of the steps before, which are fetched before its own
    slots: int
    every: int  # slots whose keys are fetched before any values
    products: object  # of each span, then of the window
    masked: int  # spans
    known: object  # its maximum; None until then
    weights: object  # of each batch
    transposed: object
    ready: object
    last_product: float
    ended: bool


@dataclass
class Line(nl.NKIObject):
    """Steps that follow each other."""

    steps: object  # a Progress each
    clock: object
    most_weights: int  # batches that are not transposed yet
    fetch: float  # of PIECE slots; 0 where they are fetched long before


@dataclass
class Task(nl.NKIObject):
    """What an engine may do next."""

    kind: int
    step: object
    start: float
    engine: object = None  # of COPY
    place: object = None  # of WEIGH: (batch, stream)


def new_line(most_weights, fetch):
    return Line([], Clock(0.0, 0.0, 0.0), most_weights, fetch)


def join_line(line, scoring, first, slots, every):
    """One more step; slots as Progress has them."""
    line.steps.append(Progress(scoring, None, first, slots, every, [], 0, None, [], [], [], 0.0, False))


def score_first(line, count):
    """Scores of the first `count` steps, alone."""
    steps = line.steps[0:count]
    tasks = 0
    for step in steps:
        tasks += scores_left(step)
    for _ in range(tasks):
        run_soonest(line, steps, (MULTIPLY, MASK))


def ready_line(line, count):
    """Scores of all steps, weights of the first `count`."""
    ready = line.steps[0:count]
    tasks = 0
    for step in line.steps:
        tasks += scores_left(step)
    for step in ready:
        tasks += weights_left(step)
    for _ in range(tasks):
        run_soonest(line, line.steps, (MULTIPLY, MASK), ready, (EXPONENTIATE, TRANSPOSE, COPY))


def finish_line(line):
    """What is left of all steps."""
    finish_steps(line, len(line.steps))


def finish_steps(line, count):
    """What is left of the first `count` steps, and what of others could start before that. They end in order."""
    while not line.steps[count - 1].ended:
        run_soonest(line, line.steps, KINDS)


def scores_left(step):
    """MULTIPLY and MASK tasks of a step that are not done."""
    return count_products(step.scoring) - len(step.products) + len(step.scoring.spans) - step.masked


def weights_left(step):
    """EXPONENTIATE, TRANSPOSE and COPY tasks of a step that are not done."""
    return 3 * len(step.weighing.batches) - len(step.weights) - len(step.transposed) - len(step.ready)


def count_products(scoring):
    return len(scoring.spans) + (1 if len(scoring.window) > 0 else 0)


def count_places(weighing):
    count = 0
    for batch in weighing.batches:
        count += len(batch.values)
    return count


def run_soonest(line, steps, kinds, more_steps=(), more_kinds=()):
    """Does what can start first, of some kinds of some steps, and of more kinds of others."""
    best = None
    for pair in ((steps, kinds), (more_steps, more_kinds)):
        own_steps, own_kinds = pair
        for kind in own_kinds:
            task = next_task(line, own_steps, kind)
            if task != None and (best == None or task.start < best.start):  # noqa: E711
                best = task
    if best.kind == MULTIPLY:
        run_products(line.clock, best)
    elif best.kind == MASK:
        run_mask(line.clock, best)
    elif best.kind == EXPONENTIATE:
        run_exponentials(line.clock, best)
    elif best.kind == TRANSPOSE:
        run_transposes(line.clock, best)
    elif best.kind == COPY:
        run_copies(line.clock, best)
    elif best.kind == WEIGH:
        run_values(line.clock, best)
    else:
        line.clock.vector = best.start + 4 * INSTRUCTION
        best.step.ended = True
        end_values(best.step.weighing)


def next_task(line, steps, kind):
    """The Task of a kind that comes next; None if it has to wait for one of another kind."""
    if kind == MULTIPLY:
        return next_products(line, steps)
    if kind == MASK:
        return next_mask(line, steps)
    if kind == EXPONENTIATE:
        return next_exponentials(line, steps)
    if kind == TRANSPOSE:
        return next_transposes(line, steps)
    if kind == COPY:
        return next_copies(line, steps)
    if kind == WEIGH:
        return next_values(line, steps)
    return next_end(line, steps)


def arrival(line, slots):
    """When so many slots are there: of keys, or of values, then with those whose keys come before."""
    return line.fetch * ((slots + PIECE - 1) // PIECE)


def apart(scoring):
    """Whether scores and exponentials need different activation tables: then they do not take turns."""
    return scoring.shape.softcap > 0.0


def next_products(line, steps):
    waiting = 0
    for step in steps:
        if step.known != None:  # noqa: E711
            continue
        done = len(step.products)
        waiting += done - step.masked
        if done < count_products(step.scoring):
            if waiting >= MOST_PRODUCTS:
                return None
            spans = len(step.scoring.spans)
            slots = step.first + step.slots * min(done + 1, spans) // spans
            return Task(MULTIPLY, step, max(line.clock.tensor, arrival(line, slots)))
    return None


def run_products(clock, task):
    step = task.step
    scoring = step.scoring
    i = len(step.products)
    columns = scoring.spans[i].size if i < len(scoring.spans) else scoring.shape.window
    clock.tensor = task.start + columns * groups_of(scoring.rows) * TENSOR_COLUMN
    step.products.append(clock.tensor + LATENCY)
    multiply_next(scoring)


def next_mask(line, steps):
    for k in range(len(steps)):
        step = steps[k]
        if step.known != None:  # noqa: E711
            continue
        # The last span needs the window's products as well.
        last = step.masked == len(step.scoring.spans) - 1
        needed = count_products(step.scoring) if last else step.masked + 1
        if len(step.products) < needed:
            return None
        if k >= MOST_SCORED and len(steps[k - MOST_SCORED].weights) < len(steps[k - MOST_SCORED].weighing.batches):
            return None
        return Task(MASK, step, max(line.clock.vector, step.products[needed - 1]))
    return None


def run_mask(clock, task):
    step = task.step
    scoring = step.scoring
    clock.vector = task.start + scoring.spans[step.masked].size * VECTOR_COLUMN
    mask_span(scoring, step.masked)
    step.masked += 1
    if step.masked == len(scoring.spans):
        end_scores(scoring)
        clock.vector += (5 if scoring.rows.streams == 1 else 11) * INSTRUCTION
        step.known = clock.vector + LATENCY


def next_exponentials(line, steps):
    waiting = 0
    for k in range(len(steps)):
        step = steps[k]
        if step.known == None:  # noqa: E711
            return None
        waiting += len(step.weights) - len(step.transposed)
        if len(step.weights) == len(step.weighing.batches):
            continue
        if waiting >= line.most_weights:
            return None
        if apart(step.scoring) and k + 1 < len(steps) and steps[k + 1].known == None:  # noqa: E711
            return None
        return Task(EXPONENTIATE, step, max(line.clock.scalar, step.known))
    return None


def run_exponentials(clock, task):
    step = task.step
    _, partitions, size = step.weighing.batches[len(step.weights)].scores.shape
    clock.scalar = task.start + partitions * size * SCALAR_COLUMN + INSTRUCTION
    step.weights.append(clock.scalar + LATENCY)
    exponentiate_next(step.weighing)


def transposed_columns(weighing, i):
    return weighing.batches[i].scores.shape[2] * weighing.rows.count


def next_transposes(line, steps):
    waiting = 0
    for step in steps:
        done = len(step.transposed)
        waiting += done - len(step.ready)
        if done < len(step.weights):
            if engine_of(step.weighing, done) == nisa.engine.dma:
                return Task(TRANSPOSE, step, step.weights[done])
            if waiting >= MOST_TRANSPOSED:
                return None
            return Task(TRANSPOSE, step, max(line.clock.tensor, step.weights[done]))
    return None


def run_transposes(clock, task):
    step = task.step
    i = len(step.transposed)
    if engine_of(step.weighing, i) == nisa.engine.dma:
        step.transposed.append(task.start + DMA_TRANSPOSE)
    else:
        clock.tensor = task.start + transposed_columns(step.weighing, i) * TENSOR_COLUMN
        step.transposed.append(clock.tensor + LATENCY)
    transpose_next(step.weighing)


def next_copies(line, steps):
    for step in steps:
        done = len(step.ready)
        if done < len(step.transposed):
            engine = engine_of(step.weighing, done)
            if engine == nisa.engine.dma:
                return Task(COPY, step, 0.0, engine)
            vector = max(line.clock.vector, step.transposed[done])
            scalar = max(line.clock.scalar, step.transposed[done])
            if engine == None:  # noqa: E711
                columns = transposed_columns(step.weighing, done)
                sooner = vector + columns * VECTOR_COPY_COLUMN <= scalar + columns * SCALAR_COLUMN
                engine = nisa.engine.vector if sooner else nisa.engine.scalar
            return Task(COPY, step, vector if engine == nisa.engine.vector else scalar, engine)
        if done < len(step.weighing.batches):
            return None
    return None


def run_copies(clock, task):
    step = task.step
    i = len(step.ready)
    columns = transposed_columns(step.weighing, i)
    end = step.transposed[i]
    if task.engine == nisa.engine.vector:
        clock.vector = task.start + columns * VECTOR_COPY_COLUMN
        end = clock.vector + LATENCY
    elif task.engine == nisa.engine.scalar:
        clock.scalar = task.start + columns * SCALAR_COLUMN
        end = clock.scalar + LATENCY
    step.ready.append(end)
    copy_next(step.weighing, task.engine)


def next_values(line, steps):
    begun = 0
    for step in steps:
        weighing = step.weighing
        if len(weighing.weighed) == 0 and begun == MOST_WEIGHED:
            return None
        begun += 0 if step.ended else 1
        best = None
        for i in range(len(step.ready)):
            for stream in range(len(weighing.batches[i].values)):
                there = max(step.ready[i], values_arrival(line, step, i, stream))
                if not was_weighed(weighing, i, stream) and (best == None or there < best.start):  # noqa: E711
                    best = Task(WEIGH, step, there, None, (i, stream))
        if best != None:  # noqa: E711
            best.start = max(best.start, line.clock.tensor)
            return best
        if len(step.ready) < len(weighing.batches):
            return None
    return None


def was_weighed(weighing, i, stream):
    for place in weighing.weighed:  # noqa: SIM110
        if place == (i, stream):
            return True
    return False


def values_arrival(line, step, i, stream):
    """When the values of a batch are there; those of a stream come after another's."""
    begin = 1 if step.weighing.step.window != None else 0  # noqa: E711
    if i < begin:
        return 0.0
    own = step.slots // step.weighing.rows.streams
    last = own * stream + own * (i - begin + 1) // (len(step.weighing.batches) - begin)
    return arrival(line, step.every + step.first + last)


def run_values(clock, task):
    weighing = task.step.weighing
    i, stream = task.place
    columns = len(weighing.batches[i].values[stream]) * weighing.rows.heads * weighing.shape.head_dim
    clock.tensor = task.start + columns * TENSOR_COLUMN
    task.step.last_product = clock.tensor + LATENCY
    weigh_values(weighing, i, stream)


def next_end(line, steps):
    for step in steps:
        if not step.ended:
            if len(step.weighing.weighed) < count_places(step.weighing):
                return None
            return Task(END, step, max(line.clock.vector, step.last_product))
    return None
