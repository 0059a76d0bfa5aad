"""Which cache slots are read when: each sequence's live slots cut into passes, by lengths that only the run knows.

A few sequences are unrolled, with runtime loops over the passes of each; many are listed (attention_list.py), so that
the program does not grow with the batch.

A pass that ends with the last live slot may begin among those of the pass before; only a sequence shorter than one pass
reads slots that are not live.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PARTITIONS, tile


@dataclass
class Pass(nl.NKIObject):
    """One pass over slots of one sequence. Tiles are fp32 [128, 1], the same value on every partition.

    Slots count from the first one that the pass loads on core 0; its own are first <= slot < end.
    """

    sequence: int  # what is known of it while tracing; else 0 and an index
    sequence_index: object  # [1, 1] int32 or None
    key_index: object  # where it loads: [1, 1] int32 or None for 0; in rows of D, elements of transposed keys, or runs
    value_index: object
    first: object
    end: object
    live_rows: object  # window rows that are no padding; 0 in an empty slot
    starts: object  # 1 for a sequence's first pass, else 0; None if that is known
    position: object  # of window row 0
    stored_index: object = None  # where its results go: sequence_index, or out of range if a later item has them


def anywhere(sequence):
    """A Pass of which nothing is known yet but its sequence."""
    return Pass(sequence, None, None, None, None, None, None, None, None)


@dataclass
class DensePasses(nl.NKIObject):
    """How sequences with at least one pass of live slots take them: one pass that ends with the last live slot, and,
    from the first slot on, those that start before it."""

    any: object  # a register each: 1 if there is a pass, else 0; known after dense_passes, as what follows it here
    together: object  # a register: 1 if all have one; None if nothing asks for it
    apart: object  # a register each: 1 if there is a pass, but not all have one; `any` if nothing asks for it
    second: object  # where the second pass from the first slot on starts, a register each; None if at a known slot
    left: object  # slots from the first to that of the last pass, [128, B] fp32
    latest: object  # where the pass that ends with the last live slot starts: [128, B] fp32
    index: object  # the same, [1, B] int32
    none: object  # 0 and the slots of a pass, [128, 1] fp32 each
    step: object


def latest_passes(shape, chunk, cached):
    """DensePasses of all sequences, of which it is known where passes that end with the last live slot start.

    From seq_lens as they are given, before any check: wherever that is, it can be loaded.
    """
    latest = tile(cached.shape)
    index = tile((1, cached.shape[1]), nl.int32)
    none = tile((PARTITIONS, 1))
    step = tile((PARTITIONS, 1))
    nisa.memset(dst=none, value=0.0)
    nisa.memset(dst=step, value=float(chunk.step))
    nisa.tensor_scalar(
        dst=latest,
        data=cached,
        op0=nl.minimum,
        operand0=float(shape.slots),
        op1=nl.subtract,
        operand1=float(chunk.step),
    )
    nisa.tensor_scalar(dst=latest, data=latest, op0=nl.maximum, operand0=0.0)
    nisa.tensor_copy(dst=index, src=latest[0:1], engine=nisa.engine.gpsimd)
    return DensePasses(None, None, None, None, None, latest, index, none, step)


def dense_passes(shape, chunk, lengths, dense, with_together):
    """What else DensePasses hold, `together` if that is asked for, and 1 [128, B] for each sequence that has no pass of
    live slots, else 0."""
    size = lengths.cached.shape
    dense.left = tile(size)
    nisa.tensor_tensor(
        dst=dense.left, data1=dense.latest, data2=lengths.base, op=nl.subtract, engine=nisa.engine.gpsimd
    )
    some = tile(size)
    short = tile(size)
    step = float(chunk.step)
    nisa.scalar_tensor_tensor(
        dst=some, data=lengths.cached, op0=nl.subtract, operand0=step, op1=nl.greater_equal, operand1=lengths.base
    )
    dense.any = counters(some)
    dense.apart = dense.any
    if with_together:
        every = tile((PARTITIONS, 1))
        apart = tile(size)
        nisa.tensor_reduce(dst=every, op=nl.minimum, data=some, axis=1)
        nisa.tensor_scalar(dst=apart, data=some, op0=nl.subtract, operand0=every)
        dense.together = counters(every)[0]
        dense.apart = counters(apart)
    nisa.tensor_scalar(dst=short, data=some, op0=nl.equal, operand0=0.0)
    if shape.sliding_window > 0:
        after = tile(size)
        nisa.tensor_scalar(dst=after, data=lengths.base, op0=nl.add, operand0=step)
        dense.second = counters(after)
    return short


def ragged_ends(lengths, chosen):
    """A register each: one past the last live slot of the chosen sequences, 0 for others; None chooses all."""
    if chosen == None:  # noqa: E711
        return counters(lengths.cached)
    ends = tile(lengths.cached.shape)
    nisa.tensor_tensor(dst=ends, data1=lengths.cached, data2=chosen, op=nl.multiply, engine=nisa.engine.gpsimd)
    return counters(ends)


def counters(values, engine=nisa.engine.gpsimd):
    """A register for each column of a tile [128, B]."""
    count = values.shape[1]
    whole = tile((1, count), nl.int32)
    nisa.tensor_copy(dst=whole, src=values[0:1, :], engine=engine)
    registers = []
    for sequence in range(count):
        register = nisa.register_alloc()
        nisa.register_load(register, whole[:, sequence : sequence + 1])
        registers.append(register)
    return registers


def first_pass(lengths, sequence):
    """A sequence's first pass where it is known to load from slot 0 on."""
    one = slice(sequence, sequence + 1)
    return Pass(
        sequence,
        None,
        None,
        None,
        lengths.oldest[:, one],
        lengths.cached[:, one],
        lengths.live_rows[:, one],
        None,
        lengths.position[:, one],
    )


def pass_from(shape, lengths, sequence, begin, latest):
    """The pass whose own slots begin with `begin` [128, 1], loaded from min(begin, latest) on; `latest` is a number or
    [128, 1]."""
    one = slice(sequence, sequence + 1)
    size = (PARTITIONS, 1)
    start = tile(size)
    first = tile(size)
    end = tile(size)
    nisa.tensor_scalar(dst=start, data=begin, op0=nl.minimum, operand0=latest, op1=nl.maximum, operand1=0.0)
    # Of the first block, slots may be too old to be seen.
    nisa.scalar_tensor_tensor(
        dst=first, data=begin, op0=nl.maximum, operand0=lengths.oldest[:, one], op1=nl.subtract, operand1=start
    )
    nisa.tensor_tensor(dst=end, data1=lengths.cached[:, one], data2=start, op=nl.subtract, engine=nisa.engine.gpsimd)
    position = None
    if shape.sliding_window > 0 or shape.positioned:
        position = tile(size)
        nisa.tensor_tensor(dst=position, data1=lengths.position[:, one], data2=start, op=nl.subtract)
    index = tile((1, 1), nl.int32)
    nisa.tensor_copy(dst=index, src=start[0:1], engine=nisa.engine.gpsimd)
    return Pass(sequence, None, index, index, first, end, lengths.live_rows[:, one], None, position)


def latest_start(shape, chunk):
    """Where the last pass over a cache must start so as not to read past it; paged loads skip what is not there."""
    return float(shape.slots if shape.block_size > 0 else shape.slots - chunk.step)
