"""Work lists: the passes of many sequences in a table in HBM, computed on the chip, which runtime loops walk.

Items of long sequences come first, then those of short ones, a part of the table each. Element offsets are int32, by
tensor_tensor: fp32 would not be exact.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_lengths import QUADRANT, Lengths, repeat_quadrant, spread, whole_steps
from .attention_plan import PARTITIONS, tile
from .attention_work import Pass, counters, latest_start

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

# What is known of a sequence, or of a lap of it, fp32: the fields of Lengths, and then
NUMBER = 5
IS_FIRST = 6  # 1 for its first lap, else 0
LAST_ITEM = 7  # counted from 1; 0 if another lap has it
FIELDS = 8


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

    `laps_`: Lengths [128, B] of all sequences, on every partition, one or, for a ring, two. A lap of a sequence is an
    entry of its own, next to the sequence's other one.
    """
    kinds = len(plans)
    entries = shape.batch * len(laps_)
    fields = tile((PARTITIONS, FIELDS, shape.batch, len(laps_)))
    items = tile((PARTITIONS, kinds, shape.batch, len(laps_)))
    describe_entries(plans, laps_, numbers, fields, items)

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

    table = write_table(shape, plans, pick_entries(fields, ends, numbers.item))
    rows, width = table.shape[1:]
    stored = nl.ndarray((rows * PARTITIONS, width), dtype=nl.float32, buffer=nl.private_hbm)
    nisa.dma_copy(dst=stored.ap(pattern=[[width, PARTITIONS], [PARTITIONS * width, rows], [1, width]]), src=table)
    work = []
    for kind in range(kinds):
        first = kind * rows // kinds
        work.append(Work(stored, first * PARTITIONS, table[:, first, :], registers[2 * kind], registers[2 * kind + 1]))
    return work


def describe_entries(plans, laps_, numbers, fields, items):
    """What is known of each entry, `fields` [128, FIELDS, B, laps], and how many items it has, `items` [128, plans, B,
    laps]: 0 by plans that its sequence does not choose."""
    chosen = choose_plans(plans, laps_[0])
    for lap in range(len(laps_)):
        own = laps_[lap]
        lengths = (own.cached, own.live_rows, own.position, own.oldest, own.base)
        for which in range(len(lengths)):
            nisa.tensor_copy(dst=fields[:, which, :, lap], src=lengths[which], engine=nisa.engine.scalar)
        nisa.memset(dst=fields[:, IS_FIRST, :, lap], value=1.0 if lap == 0 else 0.0, engine=nisa.engine.vector)
        for kind in range(len(plans)):
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
    nisa.tensor_copy(dst=fields[:, NUMBER], src=numbers.sequence, engine=nisa.engine.scalar)
    # A sequence ends with the last item of its last lap that has one.
    last = fields[:, LAST_ITEM]
    nisa.tensor_copy(dst=last, src=items[:, 0])
    for kind in range(1, len(plans)):
        nisa.tensor_tensor(dst=last, data1=last, data2=items[:, kind], op=nl.add)
    if len(laps_) > 1:
        alone = tile(laps_[0].cached.shape)
        nisa.tensor_scalar(dst=alone, data=last[:, :, 1], op0=nl.equal, operand0=0.0)
        nisa.tensor_tensor(dst=last[:, :, 0], data1=last[:, :, 0], data2=alone, op=nl.multiply)


@dataclass
class Picked(nl.NKIObject):
    """Items [P, n], as many of each plan, and the entries that they are of; past the list, all of an entry is 0."""

    index: object  # of the item in its entry
    fields: object  # [P, n, FIELDS]


def pick_entries(fields, ends, item):
    """The items numbered by `item` [P, plans, n] in the list of each plan.

    `fields` as describe_entries leaves them; `ends` [P, plans, entries] are the running sum of the entries' items.
    """
    partitions, kinds, columns = item.shape
    entries = ends.shape[2]
    # An item's entry is the first whose items do not end at or before it.
    grid = (partitions, kinds, columns, entries)
    before = tile((partitions, kinds, columns, entries + 1))
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
    products = tile((partitions, rows, FIELDS, entries))
    picked = tile((partitions, rows, FIELDS))
    nisa.tensor_tensor(
        dst=products,
        data1=fields.reshape((partitions, FIELDS, entries)).expand_dim(1).broadcast(1, rows),
        data2=one_hot.reshape((partitions, rows, entries)).expand_dim(2).broadcast(2, FIELDS),
        op=nl.multiply,
    )
    nisa.tensor_reduce(dst=picked, op=nl.add, data=products, axis=3)
    return Picked(index.reshape((partitions, rows)), picked)


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


def write_table(shape, plans, picked):
    """The table [P, n, columns] of items."""
    partitions, rows = picked.index.shape
    size = (partitions, rows)
    index = picked.index
    fields = picked.fields
    lengths = Lengths(fields[:, :, 0], fields[:, :, 1], fields[:, :, 2], fields[:, :, 3], fields[:, :, 4])
    sequence = fields[:, :, NUMBER]
    last = tile(size)
    # An item past the list is the last of no sequence: its index is not below 0.
    nisa.scalar_tensor_tensor(
        dst=last, data=index, op0=nl.add, operand0=1.0, op1=nl.equal, operand1=fields[:, :, LAST_ITEM]
    )
    together = plans[0].together
    table = tile((partitions, rows, OWN + together * COLUMNS))
    as_int = table.view(nl.int32)
    starts = tile(size)
    nisa.tensor_copy(dst=as_int[:, :, SEQUENCE], src=sequence, engine=nisa.engine.scalar)
    nisa.tensor_copy(dst=table[:, :, LIVE_ROWS], src=lengths.live_rows, engine=nisa.engine.scalar)
    nisa.tensor_scalar(dst=starts, data=index, op0=nl.equal, operand0=0.0)
    nisa.tensor_tensor(dst=table[:, :, STARTS], data1=starts, data2=fields[:, :, IS_FIRST], op=nl.multiply)
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
