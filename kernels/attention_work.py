"""Which cache slots are read when: each sequence's live slots cut into passes, by lengths that only the run knows.

A few sequences are unrolled, with runtime loops over the passes of each. Of many, a table in HBM, computed on the chip,
lists all passes, and one runtime loop walks it: the program does not grow with the batch.

A pass that ends with the last live slot may begin among those of the pass before; only a sequence shorter than one pass
reads slots that are not live. Element offsets are int32, by tensor_tensor: fp32 would not be exact.
"""

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from .attention_lengths import EVERYWHERE, QUADRANT, Lengths, spread, whole_steps
from .attention_plan import PARTITIONS, tile

# Columns of the table. Slots count from the first one that the pass loads.
SEQUENCE = 0
FIRST = 1
END = 2
LIVE_ROWS = 3
STARTS = 4
POSITION = 5
VALUE_OFFSET = 6
KEY_OFFSET = 7
BLOCK = 8  # entry of the block table for the first slot, among those of all sequences
COLUMNS = 9


class Pass(NamedTuple):
    """One pass over slots of one sequence. Tiles are fp32 [128, 1], the same value on every partition.

    Slots count from the first one that the pass loads on core 0; its own are first <= slot < end.
    """

    sequence: int  # what is known of it while tracing; else 0 and an index
    sequence_index: object  # [1, 1] int32 or None
    key_index: object  # where it loads: [1, 1] int32 or None for 0; in rows of D, or elements of transposed keys
    value_index: object
    first: object
    end: object
    live_rows: object  # window rows that are no padding; 0 in an empty slot
    starts: object  # 1 for a sequence's first pass, else 0; None if that is known
    position: object  # of window row 0
    block: object  # entry of the block table for the first slot loaded, among those of all sequences; None unless paged


class Work(NamedTuple):
    """A table [passes, COLUMNS] int32 in HBM, and the register that holds how many of its rows are used."""

    table: object
    count: object


class DensePasses(NamedTuple):
    """How sequences with at least one pass of live slots take them: one pass that ends with the last live slot, and,
    from the first slot on, those that start before it."""

    any: object  # a register each: 1 if there is a pass, else 0
    latest: object  # where the pass that ends with the last live slot starts: [128, B] fp32
    index: object  # the same, [1, B] int32
    end: object  # the same, a register each
    second: object  # where the second pass from the first slot on starts, a register each; None if at a known slot
    left: object  # slots from the first to that of the last pass, [128, B] fp32
    none: object  # 0 and the slots of a pass, [128, 1] fp32 each
    step: object


def latest_passes(shape, chunk, cached):
    """Where passes that end with the last live slot start, [128, B] fp32, and for the first partition in int32.

    From seq_lens as they are given, before any check: wherever that is, it can be loaded.
    """
    latest = tile(cached.shape)
    index = tile((1, cached.shape[1]), nl.int32)
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
    return latest, index


def dense_passes(shape, chunk, lengths, latest, index):
    """DensePasses of all sequences, and 1 [128, B] for each that has no pass of live slots, else 0."""
    size = lengths.cached.shape
    some = tile(size)
    short = tile(size)
    step = float(chunk.step)
    nisa.scalar_tensor_tensor(
        dst=some, data=lengths.cached, op0=nl.subtract, operand0=step, op1=nl.greater_equal, operand1=lengths.base
    )
    any_pass = counters(some)
    nisa.tensor_scalar(dst=short, data=some, op0=nl.equal, operand0=0.0)
    second = None
    if shape.sliding_window > 0:
        after = tile(size)
        nisa.tensor_scalar(dst=after, data=lengths.base, op0=nl.add, operand0=step)
        second = counters(after)
    left = tile(size)
    nisa.tensor_tensor(dst=left, data1=latest, data2=lengths.base, op=nl.subtract, engine=nisa.engine.gpsimd)
    none = tile((PARTITIONS, 1))
    all_own = tile((PARTITIONS, 1))
    nisa.memset(dst=none, value=0.0)
    nisa.memset(dst=all_own, value=step)
    return DensePasses(any_pass, latest, index, counters(latest), second, left, none, all_own), short


def ragged_ends(lengths, chosen):
    """A register each: one past the last live slot of the chosen sequences, 0 for others; None chooses all."""
    if chosen == None:  # noqa: E711
        return counters(lengths.cached)
    ends = tile(lengths.cached.shape)
    nisa.tensor_tensor(dst=ends, data1=lengths.cached, data2=chosen, op=nl.multiply, engine=nisa.engine.gpsimd)
    return counters(ends)


def count_passes(chunk, lengths):
    """Passes over each sequence's live slots, in fp32."""
    size = lengths.cached.shape
    extent = tile(size)
    passes = tile(size)
    nisa.tensor_tensor(dst=extent, data1=lengths.cached, data2=lengths.base, op=nl.subtract)
    quotient, covered = whole_steps(extent, chunk.step)
    nisa.tensor_tensor(dst=passes, data1=extent, data2=covered, op=nl.greater)
    nisa.tensor_tensor(dst=passes, data1=passes, data2=quotient, op=nl.add)
    return passes


def long_sequences(chunk, lengths):
    """1 for each sequence that has at least one pass of live slots, else 0."""
    extent = tile(lengths.cached.shape)
    flags = tile(lengths.cached.shape)
    nisa.tensor_tensor(dst=extent, data1=lengths.cached, data2=lengths.oldest, op=nl.subtract)
    nisa.tensor_scalar(dst=flags, data=extent, op0=nl.greater_equal, operand0=float(chunk.step))
    return flags


# A few sequences, unrolled.


def counters(values):
    """A register for each sequence, from a tile [128, B]."""
    count = values.shape[1]
    whole = tile((1, count), nl.int32)
    nisa.tensor_copy(dst=whole, src=values[0:1, :], engine=nisa.engine.gpsimd)
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
        None,
    )


def pass_from(shape, lengths, sequence, begin, latest, block):
    """The pass whose own slots begin with `begin` [128, 1], loaded from min(begin, latest) on.

    `latest` is a number or [128, 1]; `block` [128, 1] counts blocks as `begin` does slots, None unless paged.
    """
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
    index = None
    entry = None
    if shape.block_size == 0:
        index = tile((1, 1), nl.int32)
        nisa.tensor_copy(dst=index, src=start[0:1], engine=nisa.engine.gpsimd)
    else:
        entry = tile(size)
        nisa.tensor_scalar(dst=entry, data=block, op0=nl.add, operand0=float(sequence * shape.table_size))
    return Pass(sequence, None, index, index, first, end, lengths.live_rows[:, one], None, position, entry)


# Many sequences, listed.


def list_passes(shape, chunk, laps_, chosen, dense):
    """The work of the chosen sequences.

    Args:
        laps_: Lengths [128, B] of all sequences, on every partition, one or, for a ring, two.
        chosen: [128, B] fp32 flags.
        dense: whether each chosen sequence has at least a pass of live slots: then none loads others.
    """
    # A lap of a sequence is an entry of its own, next to the sequence's other one.
    entries = shape.batch * len(laps_)
    fields = [tile((PARTITIONS, entries))]
    nisa.iota(dst=fields[0], pattern=[[1, shape.batch], [0, len(laps_)]], offset=0, channel_multiplier=0)
    passes = tile((PARTITIONS, entries))
    begins = tile((PARTITIONS, entries))
    for which in range(len(laps_[0])):
        if laps_[0][which] != None:  # noqa: E711
            fields.append(side_by_side(laps_, which))
    for lap in range(len(laps_)):
        own = passes.reshape_dim(1, (shape.batch, len(laps_)))[:, :, lap]
        counted = count_passes(chunk, laps_[lap])
        if lap == 0:
            # At least one, which takes the window.
            nisa.tensor_scalar(dst=counted, data=counted, op0=nl.maximum, operand0=1.0)
        nisa.tensor_tensor(dst=own, data1=counted, data2=chosen, op=nl.multiply)
        nisa.memset(dst=begins.reshape_dim(1, (shape.batch, len(laps_)))[:, :, lap], value=1.0 if lap == 0 else 0.0)
    fields.append(begins)

    ends = tile(passes.shape)
    ones = tile(passes.shape)
    nisa.memset(dst=ones, value=1.0)
    nisa.tensor_tensor_scan(dst=ends, data0=ones, data1=passes, initial=0.0, op0=nl.multiply, op1=nl.add)
    total = counters(ends[:, entries - 1 : entries])[0]

    # Item i is entry i // 128 of partition i % 128.
    columns = (entries * chunk.most + PARTITIONS - 1) // PARTITIONS
    item = tile((PARTITIONS, columns))
    nisa.iota(dst=item, pattern=[[PARTITIONS, columns]], offset=0, channel_multiplier=1)

    # An item's entry is the number of entries whose passes end at or before it.
    grid = (PARTITIONS, columns, entries)
    before = tile(grid)
    scratch = tile(grid)
    ends = ends.expand_dim(1).broadcast(1, columns)
    nisa.tensor_tensor(dst=before, data1=ends, data2=item.expand_dim(2).broadcast(2, entries), op=nl.less_equal)
    nisa.tensor_tensor(dst=scratch, data1=before, data2=ends, op=nl.multiply)
    entry = tile((PARTITIONS, columns))
    index = tile((PARTITIONS, columns))
    nisa.tensor_reduce(dst=entry, op=nl.add, data=before, axis=2)
    nisa.tensor_reduce(dst=index, op=nl.maximum, data=scratch, axis=2)
    nisa.tensor_tensor(dst=index, data1=item, data2=index, op=nl.subtract)

    one_hot = tile(grid)
    nisa.iota(dst=scratch, pattern=[[0, columns], [1, entries]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=one_hot, data1=scratch, data2=entry.expand_dim(2).broadcast(2, entries), op=nl.equal)
    own = []
    for values in fields:
        picked = tile((PARTITIONS, columns))
        nisa.tensor_tensor(dst=scratch, data1=one_hot, data2=values.expand_dim(1).broadcast(1, columns), op=nl.multiply)
        nisa.tensor_reduce(dst=picked, op=nl.add, data=scratch, axis=2)
        own.append(picked)
    lengths = Lengths(own[1], own[2], own[3], own[4], own[5], own[6] if shape.block_size > 0 else None)
    return Work(write_table(shape, chunk, own[0], index, own[len(own) - 1], lengths, dense), total)


def side_by_side(laps_, which):
    """One field of the laps, [128, B * laps], a sequence's laps next to each other."""
    batch = laps_[0].cached.shape[1]
    together = tile((PARTITIONS, batch, len(laps_)))
    for lap in range(len(laps_)):
        nisa.tensor_copy(dst=together[:, :, lap], src=laps_[lap][which])
    return together.reshape((PARTITIONS, batch * len(laps_)))


def write_table(shape, chunk, sequence, index, begins, lengths, dense):
    """The table of passes given by fp32 tiles [P, n]: their sequence, their index in it or in its lap, whether that lap
    is the sequence's first, its lengths."""
    partitions, columns = sequence.shape
    size = (partitions, columns)
    table = tile((partitions, columns, COLUMNS), nl.int32)
    begin = tile(size)
    start = tile(size)
    nisa.scalar_tensor_tensor(
        dst=begin, data=index, op0=nl.multiply, operand0=float(chunk.step), op1=nl.add, operand1=lengths.base
    )
    if dense:
        # Items past the last one have no sequence and no slots.
        latest = tile(size)
        nisa.tensor_scalar(
            dst=latest,
            data=lengths.cached,
            op0=nl.subtract,
            operand0=float(chunk.step),
            op1=nl.maximum,
            operand1=0.0,
        )
        nisa.tensor_tensor(dst=start, data1=begin, data2=latest, op=nl.minimum)
    else:
        nisa.tensor_scalar(dst=start, data=begin, op0=nl.minimum, operand0=latest_start(shape, chunk))

    first = tile(size)
    starts = tile(size)
    nisa.tensor_tensor(dst=first, data1=begin, data2=lengths.oldest, op=nl.maximum)
    nisa.tensor_copy(dst=table[:, :, SEQUENCE], src=sequence)
    nisa.tensor_tensor(dst=table[:, :, FIRST], data1=first, data2=start, op=nl.subtract)
    nisa.tensor_tensor(dst=table[:, :, END], data1=lengths.cached, data2=start, op=nl.subtract)
    nisa.tensor_copy(dst=table[:, :, LIVE_ROWS], src=lengths.live_rows)
    nisa.tensor_scalar(dst=starts, data=index, op0=nl.equal, operand0=0.0)
    nisa.tensor_tensor(dst=table[:, :, STARTS], data1=starts, data2=begins, op=nl.multiply)
    nisa.tensor_tensor(dst=table[:, :, POSITION], data1=lengths.position, data2=start, op=nl.subtract)

    if shape.block_size > 0:
        block = tile(size)
        per_pass = float(chunk.step // shape.block_size)
        nisa.scalar_tensor_tensor(
            dst=block, data=index, op0=nl.multiply, operand0=per_pass, op1=nl.add, operand1=lengths.block
        )
        nisa.scalar_tensor_tensor(
            dst=table[:, :, BLOCK],
            data=sequence,
            op0=nl.multiply,
            operand0=float(shape.table_size),
            op1=nl.add,
            operand1=block,
        )
        nisa.memset(dst=table[:, :, VALUE_OFFSET : KEY_OFFSET + 1], value=0)
    else:
        offset = tile(size, nl.int32)
        nisa.tensor_copy(dst=offset, src=start)
        heads_slots = shape.heads * shape.slots
        write_offset(table[:, :, VALUE_OFFSET], table[:, :, SEQUENCE], heads_slots, offset)
        key_stride = heads_slots * (shape.head_dim if shape.cache_layout == "BHDS" else 1)
        write_offset(table[:, :, KEY_OFFSET], table[:, :, SEQUENCE], key_stride, offset)
        nisa.memset(dst=table[:, :, BLOCK], value=0)

    stored = nl.ndarray((columns * partitions, COLUMNS), dtype=nl.int32, buffer=nl.private_hbm)
    nisa.dma_copy(
        dst=stored.ap(pattern=[[COLUMNS, partitions], [partitions * COLUMNS, columns], [1, COLUMNS]]), src=table
    )
    return stored


def latest_start(shape, chunk):
    """Where the last pass over a cache must start so as not to read past it; paged loads skip what is not there."""
    return EVERYWHERE if shape.block_size > 0 else float(shape.slots - chunk.step)


def write_offset(dst, sequence, stride, offset):
    """dst = sequence * stride + offset, all int32: exact where fp32 would not be."""
    strides = tile(dst.shape, nl.int32)
    nisa.memset(dst=strides, value=stride)
    nisa.tensor_tensor(dst=strides, data1=strides, data2=sequence, op=nl.multiply)
    nisa.tensor_tensor(dst=dst, data1=strides, data2=offset, op=nl.add)


def listed_pass(work, item):
    """The pass in row `item`, a register, of the table; and the same for its stores.

    Those come late and have an index of their own, so that the next row can be loaded before.
    """
    entry = tile((QUADRANT, COLUMNS), nl.int32)
    values = tile((PARTITIONS, COLUMNS))
    sequence = tile((1, 1), nl.int32)
    as_float = tile((QUADRANT, COLUMNS))
    nisa.memset(dst=entry, value=0)
    nisa.dma_copy(
        dst=entry[0:1], src=work.table.ap(pattern=[[COLUMNS, 1], [1, COLUMNS]], scalar_offset=item, indirect_dim=0)
    )
    nisa.tensor_copy(dst=as_float, src=entry)
    spread(values, as_float, nisa.engine.gpsimd)
    nisa.tensor_copy(dst=sequence, src=entry[0:1, SEQUENCE : SEQUENCE + 1], engine=nisa.engine.gpsimd)
    passes = []
    for index in (entry[0:1, SEQUENCE : SEQUENCE + 1], sequence):
        passes.append(
            Pass(
                sequence=0,
                sequence_index=index,
                key_index=entry[0:1, KEY_OFFSET : KEY_OFFSET + 1],
                value_index=entry[0:1, VALUE_OFFSET : VALUE_OFFSET + 1],
                first=values[:, FIRST : FIRST + 1],
                end=values[:, END : END + 1],
                live_rows=values[:, LIVE_ROWS : LIVE_ROWS + 1],
                starts=values[:, STARTS : STARTS + 1],
                position=values[:, POSITION : POSITION + 1],
                block=values[:, BLOCK : BLOCK + 1],
            )
        )
    return passes[0], passes[1]
