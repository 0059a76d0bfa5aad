"""Which cache slots are read when: each sequence's live slots cut into chunks, a row of a table in HBM for each chunk.

The table is computed on the chip from the lengths, so that one program serves all of them and the runtime loop runs
once for each live chunk. Values below 2^24 are exact in fp32; element offsets are int32, by tensor_tensor.
"""

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PARTITIONS, tile

# Columns of the table. Slots count from the first one that the chunk loads.
SEQUENCE = 0
FIRST = 1  # the chunk's own slots: FIRST <= slot < END; others that it loads belong to the chunk before, or to none
END = 2
LIVE_ROWS = 3  # window rows that are no padding; 0 in an empty slot
STARTS = 4  # 1 for a sequence's first chunk, which takes the window along, else 0
POSITION = 5  # of window row 0
VALUE_OFFSET = 6  # from head 0 of sequence 0 to the chunk's first slot, in units of D elements
KEY_OFFSET = 7  # the same for keys; in elements where they are stored transposed
COLUMNS = 8


class Work(NamedTuple):
    """A table [items, COLUMNS] int32 in HBM, and the register that holds how many of its rows are used."""

    table: object
    count: object


def plan_work(shape, chunk, lengths):
    """The work of a call whose `lengths` are [B] int32 in HBM: seq_lens, draft_lens, then, if the call is positioned,
    cache_start and query_positions."""
    if chunk.most == 1:
        # A chunk a sequence, a sequence a partition.
        loaded = load_lengths(shape, lengths, (shape.batch, 1), [[1, shape.batch], [1, 1]])
        sequence = tile((shape.batch, 1))
        index = tile((shape.batch, 1))
        nisa.iota(dst=sequence, pattern=[[0, 1]], offset=0, channel_multiplier=1)
        nisa.memset(dst=index, value=0.0)
        return Work(write_table(shape, chunk, sequence, index, loaded), nisa.register_alloc(shape.batch))

    # Every partition knows every sequence. Item i is entry i // 128 of partition i % 128.
    loaded = load_lengths(shape, lengths, (PARTITIONS, shape.batch), [[0, PARTITIONS], [1, shape.batch]])
    ends, count = count_chunks(shape, chunk, loaded)
    columns = (shape.batch * chunk.most + PARTITIONS - 1) // PARTITIONS
    item = tile((PARTITIONS, columns))
    nisa.iota(dst=item, pattern=[[PARTITIONS, columns]], offset=0, channel_multiplier=1)

    # An item's sequence is the number of sequences whose chunks end at or before it.
    grid = (PARTITIONS, columns, shape.batch)
    before = tile(grid)
    scratch = tile(grid)
    ends = ends.expand_dim(1).broadcast(1, columns)
    nisa.tensor_tensor(dst=before, data1=ends, data2=item.expand_dim(2).broadcast(2, shape.batch), op=nl.less_equal)
    nisa.tensor_tensor(dst=scratch, data1=before, data2=ends, op=nl.multiply)
    sequence = tile((PARTITIONS, columns))
    index = tile((PARTITIONS, columns))
    nisa.tensor_reduce(dst=sequence, op=nl.add, data=before, axis=2)
    nisa.tensor_reduce(dst=index, op=nl.maximum, data=scratch, axis=2)
    nisa.tensor_tensor(dst=index, data1=item, data2=index, op=nl.subtract)

    one_hot = tile(grid)
    nisa.iota(dst=scratch, pattern=[[0, columns], [1, shape.batch]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=one_hot, data1=scratch, data2=sequence.expand_dim(2).broadcast(2, shape.batch), op=nl.equal)
    own = []
    for values in loaded:
        chosen = tile((PARTITIONS, columns))
        nisa.tensor_tensor(dst=scratch, data1=one_hot, data2=values.expand_dim(1).broadcast(1, columns), op=nl.multiply)
        nisa.tensor_reduce(dst=chosen, op=nl.add, data=scratch, axis=2)
        own.append(chosen)
    return Work(write_table(shape, chunk, sequence, index, own), count)


def load_lengths(shape, lengths, size, pattern):
    """fp32 tiles of `size`: cached slots, live rows, then, if the call is positioned, the position of row 0.

    Zeros where a sequence is empty or its values do not fit: 0 < live rows <= T, 0 <= seq_lens, room for both.
    """
    tiles = []
    for values in lengths:
        loaded = tile(size)
        nisa.dma_copy(dst=loaded, src=values.ap(pattern=pattern))
        tiles.append(loaded)
    cached = tiles[0]
    rows = tiles[1]
    good = tile(size)
    total = tile(size)
    nisa.tensor_scalar(dst=rows, data=rows, op0=nl.add, operand0=1.0)
    if shape.cache_only:
        nisa.tensor_copy(dst=total, src=cached)
    else:
        nisa.tensor_tensor(dst=total, data1=cached, data2=rows, op=nl.add)
    nisa.tensor_scalar(dst=good, data=total, op0=nl.less_equal, operand0=float(shape.slots))
    for values, op, bound in (
        (cached, nl.greater_equal, 0.0),
        (rows, nl.greater, 0.0),
        (rows, nl.less_equal, float(shape.window)),
    ):
        nisa.scalar_tensor_tensor(dst=good, data=values, op0=op, operand0=bound, op1=nl.multiply, operand1=good)
    nisa.tensor_tensor(dst=cached, data1=cached, data2=good, op=nl.multiply)
    nisa.tensor_tensor(dst=rows, data1=rows, data2=good, op=nl.multiply)
    if not shape.positioned:
        return [cached, rows]
    position = tiles[3]
    nisa.tensor_tensor(dst=position, data1=position, data2=tiles[2], op=nl.subtract)
    return [cached, rows, position]


def oldest_slot(shape, loaded):
    """The first slot that a row may see, 0 or what the sliding window leaves; `loaded` as from load_lengths."""
    oldest = tile(loaded[0].shape)
    position = loaded[2] if shape.positioned else loaded[0]
    nisa.tensor_scalar(
        dst=oldest,
        data=position,
        op0=nl.subtract,
        operand0=float(shape.sliding_window - 1),
        op1=nl.maximum,
        operand1=0.0,
    )
    return oldest


def count_chunks(shape, chunk, loaded):
    """Running totals [128, B] of the sequences' chunks, at least one each, and the register with the last of them."""
    size = loaded[0].shape
    extent = loaded[0]
    if shape.sliding_window > 0:
        extent = tile(size)
        nisa.tensor_tensor(dst=extent, data1=loaded[0], data2=oldest_slot(shape, loaded), op=nl.subtract)

    # ceil(extent / slots): the int32 quotient may have been rounded up or down; the remainder tells.
    quotient = tile(size, nl.int32)
    rest = tile(size)
    chunks = tile(size)
    nisa.tensor_scalar(dst=quotient, data=extent, op0=nl.multiply, operand0=1.0 / chunk.slots)
    nisa.scalar_tensor_tensor(
        dst=rest, data=quotient, op0=nl.multiply, operand0=-float(chunk.slots), op1=nl.add, operand1=extent
    )
    nisa.scalar_tensor_tensor(dst=chunks, data=rest, op0=nl.greater, operand0=0.0, op1=nl.add, operand1=quotient)
    nisa.tensor_scalar(dst=chunks, data=chunks, op0=nl.maximum, operand0=1.0)

    ones = tile(size)
    ends = tile(size)
    nisa.memset(dst=ones, value=1.0)
    nisa.tensor_tensor_scan(dst=ends, data0=ones, data1=chunks, initial=0.0, op0=nl.multiply, op1=nl.add)
    total = tile((1, 1), nl.int32)
    count = nisa.register_alloc()
    nisa.tensor_copy(dst=total, src=ends[0:1, shape.batch - 1 : shape.batch])
    nisa.register_load(count, total)
    return ends, count


def write_table(shape, chunk, sequence, index, loaded):
    """The table in HBM of items given by fp32 tiles [P, n]: their sequence, their index in it, its lengths."""
    partitions, columns = sequence.shape
    size = (partitions, columns)
    cached = loaded[0]
    position = loaded[2] if shape.positioned else cached
    table = tile((partitions, columns, COLUMNS), nl.int32)

    # The last chunk may start earlier than where the one before ends, so as not to read past the cache.
    own = tile(size)
    start = tile(size)
    nisa.tensor_scalar(dst=own, data=index, op0=nl.multiply, operand0=float(chunk.slots))
    if shape.sliding_window > 0:
        nisa.tensor_tensor(dst=own, data1=own, data2=oldest_slot(shape, loaded), op=nl.add)
    nisa.tensor_scalar(dst=start, data=own, op0=nl.minimum, operand0=float(shape.slots - chunk.slots))
    end = tile(size)
    nisa.tensor_tensor(dst=end, data1=cached, data2=start, op=nl.subtract)

    nisa.tensor_copy(dst=table[:, :, SEQUENCE], src=sequence)
    nisa.tensor_tensor(dst=table[:, :, FIRST], data1=own, data2=start, op=nl.subtract)
    nisa.tensor_scalar(dst=table[:, :, END], data=end, op0=nl.minimum, operand0=float(chunk.slots))
    nisa.tensor_copy(dst=table[:, :, LIVE_ROWS], src=loaded[1])
    nisa.tensor_scalar(dst=table[:, :, STARTS], data=index, op0=nl.equal, operand0=0.0)
    nisa.tensor_tensor(dst=table[:, :, POSITION], data1=position, data2=start, op=nl.subtract)

    offset = tile(size, nl.int32)
    nisa.tensor_copy(dst=offset, src=start)
    heads_slots = shape.heads * shape.slots
    write_offset(table[:, :, VALUE_OFFSET], table[:, :, SEQUENCE], heads_slots, offset)
    if shape.cache_layout == "BHDS":
        write_offset(table[:, :, KEY_OFFSET], table[:, :, SEQUENCE], heads_slots * shape.head_dim, offset)
    else:
        nisa.tensor_copy(dst=table[:, :, KEY_OFFSET], src=table[:, :, VALUE_OFFSET])

    stored = nl.ndarray((columns * partitions, COLUMNS), dtype=nl.int32, buffer=nl.private_hbm)
    nisa.dma_copy(
        dst=stored.ap(pattern=[[COLUMNS, partitions], [partitions * COLUMNS, columns], [1, COLUMNS]]), src=table
    )
    return stored


def write_offset(dst, sequence, stride, offset):
    """dst = sequence * stride + offset, all int32: exact where fp32 would not be."""
    strides = tile(dst.shape, nl.int32)
    nisa.memset(dst=strides, value=stride)
    nisa.tensor_tensor(dst=strides, data1=strides, data2=sequence, op=nl.multiply)
    nisa.tensor_tensor(dst=dst, data1=strides, data2=offset, op=nl.add)


def load_item(work, item):
    """Row `item`, a register, of the table, the same on every partition: as int32 for addresses, as fp32 for maths."""
    entry = tile((PARTITIONS, COLUMNS), nl.int32)
    values = tile((PARTITIONS, COLUMNS))
    nisa.dma_copy(
        dst=entry, src=work.table.ap(pattern=[[0, PARTITIONS], [1, COLUMNS]], scalar_offset=item, indirect_dim=0)
    )
    nisa.tensor_copy(dst=values, src=entry)
    return entry, values
