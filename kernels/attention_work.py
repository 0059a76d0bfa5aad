"""Which cache slots are read when: each sequence's live slots cut into passes, by lengths that only the run knows.

A few sequences are unrolled, with runtime loops over the passes of each. Of many, a table in HBM, computed on the chip,
lists all passes, those of long sequences and then those of short ones, and a runtime loop walks either part: the
program does not grow with the batch.

A pass that ends with the last live slot may begin among those of the pass before; only a sequence shorter than one pass
reads slots that are not live. Element offsets are int32, by tensor_tensor: fp32 would not be exact.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_lengths import QUADRANT, Lengths, repeat_quadrant, spread, whole_steps
from .attention_plan import PARTITIONS, tile

# An item of the table: four columns of its own, then five of each of its passes; fp32, or int32 bit by bit.
SEQUENCE = 0  # int32
LIVE_ROWS = 1
STARTS = 2
STORED = 3  # int32
OWN = 4
FIRST = 0  # slots count from the first one that the pass loads
END = 1
POSITION = 2
VALUE_INDEX = 3  # int32
KEY_INDEX = 4  # int32
COLUMNS = 5


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
class Work(nl.NKIObject):
    """Items, some passes over one sequence each, from row `start` of a table [items, columns] in HBM on; the first of
    them [128, columns] on the chip; and registers: 1 if there are any, else 0, and how many come before the last."""

    table: object
    start: int
    first: object
    any: object
    before_last: object


@dataclass
class DensePasses(nl.NKIObject):
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


def count_steps(lengths, step):
    """How many steps each sequence's live slots take, in fp32."""
    size = lengths.cached.shape
    extent = tile(size)
    steps = tile(size)
    nisa.tensor_tensor(dst=extent, data1=lengths.cached, data2=lengths.base, op=nl.subtract)
    quotient, covered = whole_steps(extent, step)
    nisa.tensor_tensor(dst=steps, data1=extent, data2=covered, op=nl.greater)
    nisa.tensor_tensor(dst=steps, data1=steps, data2=quotient, op=nl.add)
    return steps


# A few sequences, unrolled.


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


# Many sequences, listed.


@dataclass
class Numbers(nl.NKIObject):
    """Counted before lists are made: GpSimd has no time for it once gathers are under way."""

    sequence: object  # [128, B, laps] fp32, the number of each sequence
    item: object  # [128, plans, n] fp32: item i of a plan is entry i // 128 of partition i % 128
    goes_on: object  # [128, plans, B * laps] fp32, 0 where a plan's list begins, else 1


def number_all(shape, plans):
    """Numbers for a list of each plan."""
    laps_ = 2 if shape.ring else 1
    most = 0
    for plan in plans:
        most = max(most, plan.most)
    # One more than can be taken, since the next but one is read.
    columns = (shape.batch * laps_ * most + PARTITIONS) // PARTITIONS
    sequence = tile((PARTITIONS, shape.batch, laps_))
    item = tile((PARTITIONS, len(plans), columns))
    nisa.iota(dst=sequence, pattern=[[1, shape.batch], [0, laps_]], offset=0, channel_multiplier=0)
    nisa.iota(dst=item, pattern=[[0, len(plans)], [PARTITIONS, columns]], offset=0, channel_multiplier=1)
    goes_on = tile((PARTITIONS, len(plans), shape.batch * laps_))
    nisa.memset(dst=goes_on, value=1.0)
    nisa.memset(dst=goes_on[:, :, 0:1], value=0.0)
    return Numbers(sequence, item, goes_on)


def list_passes(shape, plans, laps_, numbers, core, cores):
    """A Work for each plan: those of sequences that choose it, or, of two `cores` that share these, of this core's.

    `laps_`: Lengths [128, B] of all sequences, on every partition, one or, for a ring, two.
    """
    # A lap of a sequence is an entry of its own, next to the sequence's other one. What is known of them comes first.
    batch = shape.batch
    kinds = len(plans)
    entries = batch * len(laps_)
    known = 5  # fields of Lengths
    fields = tile((PARTITIONS, known + 3, batch, len(laps_)))
    items = tile((PARTITIONS, kinds, batch, len(laps_)))
    chosen = choose_plans(plans, laps_[0])
    for lap in range(len(laps_)):
        own = laps_[lap]
        lengths = (own.cached, own.live_rows, own.position, own.oldest, own.base)
        for which in range(known):
            nisa.tensor_copy(dst=fields[:, which, :, lap], src=lengths[which], engine=nisa.engine.scalar)
        nisa.memset(dst=fields[:, known + 1, :, lap], value=1.0 if lap == 0 else 0.0, engine=nisa.engine.vector)
        for kind in range(kinds):
            # A sequence has at least one item, which takes the window.
            counted = count_steps(own, plans[kind].together * plans[kind].chunk.step)
            nisa.scalar_tensor_tensor(
                dst=items[:, kind, :, lap],
                data=counted,
                op0=nl.maximum,
                operand0=1.0 if lap == 0 else 0.0,
                op1=nl.multiply,
                operand1=chosen[:, kind],
            )
    nisa.tensor_copy(dst=fields[:, known, :, :], src=numbers.sequence, engine=nisa.engine.scalar)
    # A sequence ends with the last item of its last lap that has one.
    count = fields[:, known + 2, :, :]
    nisa.tensor_copy(dst=count, src=items[:, 0])
    for kind in range(1, kinds):
        nisa.tensor_tensor(dst=count, data1=count, data2=items[:, kind], op=nl.add)
    if len(laps_) > 1:
        more = tile((PARTITIONS, batch))
        nisa.tensor_scalar(dst=more, data=count[:, :, 1], op0=nl.equal, operand0=0.0)
        nisa.tensor_tensor(dst=count[:, :, 0], data1=count[:, :, 0], data2=more, op=nl.multiply)

    ends = tile((PARTITIONS, kinds, entries))
    flat = (PARTITIONS, kinds * entries)
    nisa.tensor_tensor_scan(
        dst=ends.reshape(flat),
        data0=numbers.goes_on.reshape(flat),
        data1=items.reshape(flat),
        initial=0.0,
        op0=nl.multiply,
        op1=nl.add,
    )
    totals = ends[:, :, entries - 1]
    if cores > 1:
        # Both take as many.
        ends, totals = own_share(items, ends, core)
    counts = tile((PARTITIONS, kinds, 2))
    nisa.tensor_scalar(dst=counts[:, :, 0], data=totals, op0=nl.minimum, operand0=1.0)
    nisa.tensor_tensor(dst=counts[:, :, 1], data1=totals, data2=counts[:, :, 0], op=nl.subtract)
    # GpSimd may have gathers to describe.
    registers = counters(counts.reshape((PARTITIONS, 2 * kinds)), nisa.engine.vector)

    # An item's entry is the first whose items do not end at or before it.
    item = numbers.item
    columns = item.shape[2]
    grid = (PARTITIONS, kinds, columns, entries)
    before = tile((PARTITIONS, kinds, columns, entries + 1))
    scratch = tile(grid)
    one_hot = tile(grid)
    index = tile(item.shape)
    ends = ends.expand_dim(2).broadcast(2, columns)
    nisa.memset(dst=before[:, :, :, 0:1], value=1.0, engine=nisa.engine.vector)
    nisa.tensor_tensor(
        dst=before[:, :, :, 1:], data1=ends, data2=item.expand_dim(3).broadcast(3, entries), op=nl.less_equal
    )
    nisa.tensor_tensor(dst=one_hot, data1=before[:, :, :, 0:entries], data2=before[:, :, :, 1:], op=nl.subtract)
    nisa.tensor_tensor(dst=scratch, data1=before[:, :, :, 1:], data2=ends, op=nl.multiply)
    nisa.tensor_reduce(dst=index, op=nl.maximum, data=scratch, axis=3)
    nisa.tensor_tensor(dst=index, data1=item, data2=index, op=nl.subtract)

    rows = kinds * columns
    index = index.reshape((PARTITIONS, rows))
    picked = tile((PARTITIONS, rows, known + 3, entries))
    own = tile((PARTITIONS, rows, known + 3))
    nisa.tensor_tensor(
        dst=picked,
        data1=fields.reshape((PARTITIONS, known + 3, entries)).expand_dim(1).broadcast(1, rows),
        data2=one_hot.reshape((PARTITIONS, rows, entries)).expand_dim(2).broadcast(2, known + 3),
        op=nl.multiply,
    )
    nisa.tensor_reduce(dst=own, op=nl.add, data=picked, axis=3)
    lengths = Lengths(own[:, :, 0], own[:, :, 1], own[:, :, 2], own[:, :, 3], own[:, :, 4])
    last = tile((PARTITIONS, rows))
    # An item past the list is of no sequence, and the last of none.
    nisa.scalar_tensor_tensor(
        dst=last, data=index, op0=nl.add, operand0=1.0, op1=nl.equal, operand1=own[:, :, known + 2]
    )
    table = write_table(shape, plans, own[:, :, known], index, own[:, :, known + 1], last, lengths)
    width = table.shape[2]
    stored = nl.ndarray((rows * PARTITIONS, width), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=stored.ap(pattern=[[width, PARTITIONS], [PARTITIONS * width, rows], [1, width]]), src=table)
    work = []
    for kind in range(kinds):
        first = kind * columns
        work.append(Work(stored, first * PARTITIONS, table[:, first, :], registers[2 * kind], registers[2 * kind + 1]))
    return work


def choose_plans(plans, lengths):
    """[128, plans, B] flags: sequences with at least a dense pass of live slots choose that plan, if there is one,
    others the last."""
    partitions, batch = lengths.cached.shape
    chosen = tile((partitions, len(plans), batch))
    if not plans[0].dense:
        nisa.memset(dst=chosen, value=1.0, engine=nisa.engine.vector)
        return chosen
    extent = tile((partitions, batch))
    nisa.tensor_tensor(dst=extent, data1=lengths.cached, data2=lengths.oldest, op=nl.subtract)
    for kind in range(len(plans)):
        op = nl.greater_equal if plans[kind].dense else nl.less
        nisa.tensor_scalar(dst=chosen[:, kind], data=extent, op0=op, operand0=float(plans[0].chunk.step))
    return chosen


def own_share(items, ends, core):
    """Of sequences with `items` [P, plans, B, laps] each, those before the middle of a plan's list are core 0's.

    `ends` [P, plans, B * laps] is the running sum of items; returns that of this core's, and [P, plans], how many the
    core with more of them has.
    """
    partitions, kinds, batch, laps_ = items.shape
    whole = items[:, :, :, 0]
    if laps_ > 1:
        whole = tile((partitions, kinds, batch))
        nisa.tensor_reduce(dst=whole, op=nl.add, data=items, axis=3)
    whole_ends = ends.reshape(items.shape)[:, :, :, laps_ - 1]
    total = whole_ends[:, :, batch - 1]
    twice_middle = tile((partitions, kinds, batch))
    first = tile((partitions, kinds, batch))
    nisa.scalar_tensor_tensor(
        dst=twice_middle, data=whole_ends, op0=nl.multiply, operand0=2.0, op1=nl.subtract, operand1=whole
    )
    every = total.expand_dim(2).broadcast(2, batch)
    nisa.tensor_tensor(dst=first, data1=twice_middle, data2=every, op=nl.less_equal)
    nisa.tensor_tensor(dst=first, data1=first, data2=whole_ends, op=nl.multiply)
    share = tile((partitions, kinds))  # of core 0
    most = tile((partitions, kinds))
    nisa.tensor_reduce(dst=share, op=nl.maximum, data=first, axis=2)
    nisa.tensor_tensor(dst=most, data1=total, data2=share, op=nl.subtract)
    nisa.tensor_tensor(dst=most, data1=most, data2=share, op=nl.maximum)
    own = tile(ends.shape)
    cut = share.expand_dim(2).broadcast(2, batch * laps_)
    if core == 0:
        nisa.tensor_tensor(dst=own, data1=ends, data2=cut, op=nl.minimum)
    else:
        nisa.tensor_tensor(dst=own, data1=ends, data2=cut, op=nl.subtract)
        nisa.tensor_scalar(dst=own, data=own, op0=nl.maximum, operand0=0.0)
    return own, most


def write_table(shape, plans, sequence, index, begins, last, lengths):
    """The table [P, n, columns] of items given by fp32 tiles [P, n], as many of each plan: their sequence, their index
    in it or in its lap, whether that lap is the sequence's first, whether they are the sequence's last, its lengths."""
    partitions, rows = sequence.shape
    size = (partitions, rows)
    together = plans[0].together
    table = tile((partitions, rows, OWN + together * COLUMNS))
    as_int = table.view(nl.int32)
    starts = tile(size)
    nisa.tensor_copy(dst=as_int[:, :, SEQUENCE], src=sequence, engine=nisa.engine.scalar)
    nisa.tensor_copy(dst=table[:, :, LIVE_ROWS], src=lengths.live_rows, engine=nisa.engine.scalar)
    nisa.tensor_scalar(dst=starts, data=index, op0=nl.equal, operand0=0.0)
    nisa.tensor_tensor(dst=table[:, :, STARTS], data1=starts, data2=begins, op=nl.multiply)
    # Only the last item stores: nothing orders two stores to one place at run-time addresses. Others get an index out
    # of range, past what both cores keep of two facts a sequence.
    stored = tile(size)
    nisa.tensor_scalar(
        dst=stored, data=last, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=-4.0 * shape.batch
    )
    nisa.tensor_tensor(dst=as_int[:, :, STORED], data1=stored, data2=sequence, op=nl.add)
    begin = tile((partitions, rows, together))
    start = tile((partitions, rows, together))
    columns = rows // len(plans)
    for kind in range(len(plans)):
        own = slice(kind * columns, (kind + 1) * columns)
        cut_items(
            shape,
            plans[kind],
            index[:, own],
            lengths.base[:, own],
            lengths.cached[:, own],
            begin[:, own],
            start[:, own],
        )
    write_passes(shape, plans[0].chunk.run, table, sequence, begin, start, lengths)
    return table


def cut_items(shape, plan, index, base, cached, begin, start):
    """The first slot of its own of each pass, and the first that it loads: `begin` and `start` [P, n, passes], of items
    given by [P, n]."""
    chunk = plan.chunk
    together = plan.together
    nisa.scalar_tensor_tensor(
        dst=begin[:, :, 0],
        data=index,
        op0=nl.multiply,
        operand0=float(together * chunk.step),
        op1=nl.add,
        operand1=base,
    )
    ends = cached
    if plan.dense and shape.block_size > 0:
        ends = tile(index.shape)
        nisa.tensor_scalar(dst=ends, data=cached, op0=nl.add, operand0=float(chunk.run - 1))
        _, ends = whole_steps(ends, chunk.run)
    for turn in range(together):
        now = start[:, :, turn]
        if plan.dense:
            # A pass may begin among the slots of the one before, but must not end after the last live one.
            nisa.scalar_tensor_tensor(
                dst=now,
                data=ends,
                op0=nl.subtract,
                operand0=float((together - turn) * chunk.step),
                op1=nl.minimum,
                operand1=begin[:, :, turn],
            )
            nisa.tensor_tensor(dst=now, data1=now, data2=base, op=nl.maximum)
        else:
            nisa.tensor_scalar(dst=now, data=begin[:, :, turn], op0=nl.minimum, operand0=latest_start(shape, chunk))
        if turn < together - 1:
            nisa.scalar_tensor_tensor(
                dst=begin[:, :, turn + 1],
                data=now,
                op0=nl.add,
                operand0=float(chunk.step),
                op1=nl.maximum,
                operand1=begin[:, :, turn],
            )


def write_passes(shape, run, table, sequence, begin, start, lengths):
    """The columns of the passes of items: the first slot of their own, and the first that they load, [P, n, passes]
    each; of the sequence, [P, n]."""
    size = begin.shape
    together = size[2]
    own = table[:, :, OWN:].reshape_dim(2, (together, COLUMNS))
    as_int = table.view(nl.int32)[:, :, OWN:].reshape_dim(2, (together, COLUMNS))
    first = tile(size)
    oldest = lengths.oldest.expand_dim(2).broadcast(2, together)
    nisa.tensor_tensor(dst=first, data1=begin, data2=oldest, op=nl.maximum)
    nisa.tensor_tensor(dst=own[:, :, :, FIRST], data1=first, data2=start, op=nl.subtract)
    for pair in ((END, lengths.cached), (POSITION, lengths.position)):
        column, slot = pair
        slot = slot.expand_dim(2).broadcast(2, together)
        nisa.tensor_tensor(dst=own[:, :, :, column], data1=slot, data2=start, op=nl.subtract)
    if shape.block_size > 0:
        # Runs are few enough for fp32.
        own_run = tile(size)
        nisa.tensor_scalar(dst=own_run, data=start, op0=nl.multiply, operand0=1.0 / run)
        for column in (VALUE_INDEX, KEY_INDEX):
            nisa.scalar_tensor_tensor(
                dst=as_int[:, :, :, column],
                data=sequence.expand_dim(2).broadcast(2, together),
                op0=nl.multiply,
                operand0=float(shape.slots // run),
                op1=nl.add,
                operand1=own_run,
            )
        return
    sequence = table.view(nl.int32)[:, :, SEQUENCE]
    slot = tile(size, nl.int32)
    nisa.tensor_copy(dst=slot, src=start)
    heads_slots = shape.heads * shape.slots
    key_size = heads_slots * (shape.head_dim if shape.cache_layout == "BHDS" else 1)
    for pair in ((VALUE_INDEX, heads_slots), (KEY_INDEX, key_size)):
        # int32 is exact where fp32 would not be.
        column, sequence_size = pair
        sizes = tile(size[0:2], nl.int32)
        offset = tile(size[0:2], nl.int32)
        nisa.memset(dst=sizes, value=sequence_size)
        nisa.tensor_tensor(dst=offset, data1=sequence, data2=sizes, op=nl.multiply)
        offset = offset.expand_dim(2).broadcast(2, together)
        nisa.tensor_tensor(dst=as_int[:, :, :, column], data1=offset, data2=slot, op=nl.add)


def latest_start(shape, chunk):
    """Where the last pass over a cache must start so as not to read past it; paged loads skip what is not there."""
    return float(shape.slots if shape.block_size > 0 else shape.slots - chunk.step)


def new_entry(together, partitions=PARTITIONS):
    """Room for an item of a table, the same on every partition."""
    return tile((partitions, OWN + together * COLUMNS))


def first_entries(work, coming, after):
    """Fills entries with the first item and, on 32 partitions, with the second."""
    first = work.first[0:QUADRANT]
    spread(coming, first, nisa.engine.vector)
    nisa.nc_stream_shuffle(dst=after, src=first, shuffle_mask=[1] * QUADRANT)


def fetch_entry(work, item, ahead, entry):
    """Fills `entry` [32, columns] with the item that comes `ahead` items after `item`, a register."""
    partitions, width = entry.shape
    # A descriptor a partition costs less than to shuffle one on the chip, but more than to copy 32.
    nisa.dma_copy(
        dst=entry,
        src=work.table.ap(
            pattern=[[0, partitions], [1, width]],
            offset=(work.start + ahead) * width,
            scalar_offset=item,
            indirect_dim=0,
        ),
    )


def take_entry(shape, coming, after):
    """The item on 32 partitions is the one that comes next."""
    engine = copying_engine(shape)
    nisa.tensor_copy(dst=coming[0:QUADRANT], src=after, engine=engine)
    repeat_quadrant(coming, engine)


def listed_passes(entry, shard, cores):
    """The passes of an entry that are this core's."""
    as_int = entry.view(nl.int32)
    passes = []
    for own in range(OWN + shard * COLUMNS, entry.shape[1], cores * COLUMNS):
        passes.append(
            Pass(
                sequence=0,
                sequence_index=as_int[0:1, SEQUENCE : SEQUENCE + 1],
                key_index=as_int[0:1, own + KEY_INDEX : own + KEY_INDEX + 1],
                value_index=as_int[0:1, own + VALUE_INDEX : own + VALUE_INDEX + 1],
                first=entry[:, own + FIRST : own + FIRST + 1],
                end=entry[:, own + END : own + END + 1],
                live_rows=entry[:, LIVE_ROWS : LIVE_ROWS + 1],
                starts=entry[:, STARTS : STARTS + 1],
                position=entry[:, own + POSITION : own + POSITION + 1],
                stored_index=as_int[0:1, STORED : STORED + 1],
            )
        )
    return passes


def late_copy(shape, entry):
    """For DMAs that come late: the entry itself may be overwritten before."""
    late = tile(entry.shape)
    nisa.tensor_copy(dst=late, src=entry, engine=copying_engine(shape))
    return late


def copying_engine(shape):
    """For copies of entries, which wait for what is read by the one before: Scalar has more to do than GpSimd, unless
    that describes gathers."""
    return nisa.engine.gpsimd if shape.block_size == 0 else nisa.engine.scalar
