"""Rows of a vocabulary on the chip: how they lie there, their statistics, and the draw of one token from them.

A row of V entries is a tile [128, size]: partition p holds the `size` = ceil(V/128) consecutive ids from p * size, so
one DMA moves a row in long runs, every engine works on all its lanes, and the partitions are the 128 groups of the
two-step draw. Ids are handled in fp32, exact below 2^24.

Three layouts of small arrays occur: [128, n] (a value a partition and row), [n, 128] (its transpose, where partitions
are reduced) and [1, n] (one value a row or sequence, where decisions are made). They change into each other through
the Tensor engine's transpose, which is bit exact on trn2, NaN included: a row never touches its neighbour's values.
"""

import nki.isa as nisa
import nki.language as nl

NUM_GROUPS = 128
SEGMENTS = 8  # of a lane, each of which gives its 8 largest entries
MIN_COLUMNS = 8  # the least that max8 and nc_find_index8 take
BLOCK = 32  # ids of a lane that share a maximum: about as many as there are blocks in a lane of 152k ids
FILL = -(2.0**127)  # what lanes without an id hold: below every logit, exact and finite in bf16 too
LOWEST_PEAK = -1.0e30  # stands in for -inf where a maximum is subtracted; its scaled value stays finite
BIG_ID = 16777216.0  # above every id; integers below it are exact in fp32
MASS_BYTES = 98304  # of a partition, for the masses of the rows that a chunk of sequences draws from
ROW_TILE_BYTES = 49152  # of a partition: a window of 8 fp32 rows of 152k ids, with room for a second one in flight


def group_size(vocab_size):
    return (vocab_size + NUM_GROUPS - 1) // NUM_GROUPS


def searched_width(vocab_size):
    """Columns of a row's tile that is searched for its best id: in whole blocks where that is done by blocks."""
    size = group_size(vocab_size)
    if size < MIN_COLUMNS * BLOCK:
        return max(size, SEGMENTS * MIN_COLUMNS)
    return (size + BLOCK - 1) // BLOCK * BLOCK


def held(vocab_size, shard):
    """(first lane, columns) that an array holds: those of a `shard` (first lane, columns, first id), or all."""
    return (shard[0], shard[1]) if len(shard) > 0 else (0, vocab_size)


def allocate_rows(num_rows, width, dtype, vocab_size, fill, shard=()):
    """Tile [128, num_rows, width]; lanes that no id fills hold `fill`."""
    size = group_size(vocab_size)
    _, columns = held(vocab_size, shard)
    tile = nl.ndarray((NUM_GROUPS, num_rows, width), dtype=dtype, buffer=nl.sbuf)
    if columns < NUM_GROUPS * size:
        nisa.memset(dst=tile, value=fill)
    elif width > size:
        nisa.memset(dst=tile[:, :, size:width], value=fill)
    return tile


def load_rows(rows, first, num_rows, vocab_size, fill, shard=()):
    """A tile of rows first.. of the last-but-one dimensions of `rows` [..., V], columns below vocab_size only.

    Where `rows` hold a shard of the vocabulary, they fill its lanes.
    """
    tile = allocate_rows(num_rows, searched_width(vocab_size), rows.dtype, vocab_size, fill, shard)
    fill_rows(tile, rows, first, vocab_size, shard)
    return tile


def fill_rows(tile, rows, first, vocab_size, shard=()):
    """Writes rows first.. of `rows` [..., V] to `tile` [128, num_rows, width] of `allocate_rows`."""
    num_rows = tile.shape[1]
    size = group_size(vocab_size)
    lane, columns = held(vocab_size, shard)
    full = columns // size
    rest = columns - full * size
    row_stride = rows.shape[len(rows.shape) - 1]
    if full > 0:
        nisa.dma_copy(
            dst=tile[lane : lane + full, :, 0:size],
            src=rows.ap(pattern=[[size, full], [row_stride, num_rows], [1, size]], offset=first * row_stride),
        )
    if rest > 0:
        nisa.dma_copy(
            dst=tile[lane + full : lane + full + 1, :, 0:rest],
            src=rows.ap(
                pattern=[[size, 1], [row_stride, num_rows], [1, rest]], offset=first * row_stride + full * size
            ),
        )


def load_row_at(tile, rows, index, vocab_size, shard=()):
    """Fills `tile` [128, width] with the row of `rows` [..., V] that `index` [1, 1] int32 names at run time.

    An index out of range leaves the tile as it is.
    """
    size = group_size(vocab_size)
    lane, columns = held(vocab_size, shard)
    full = columns // size
    rest = columns - full * size
    row_stride = rows.shape[len(rows.shape) - 1]
    flat = rows.reshape((rows.size // row_stride, row_stride))
    if full > 0:
        nisa.dma_copy(
            dst=tile[lane : lane + full, 0:size],
            src=flat.ap(pattern=[[size, full], [1, size]], offset=0, scalar_offset=index, indirect_dim=0),
            oob_mode=nisa.oob_mode.skip,
        )
    if rest > 0:
        nisa.dma_copy(
            dst=tile[lane + full : lane + full + 1, 0:rest],
            src=flat.ap(pattern=[[size, 1], [1, rest]], offset=full * size, scalar_offset=index, indirect_dim=0),
            oob_mode=nisa.oob_mode.skip,
        )


def store_row(rows, row, tile, vocab_size):
    """Writes `tile` [128, size] to the first vocab_size columns of a row of `rows` [n, V]."""
    size = group_size(vocab_size)
    full = vocab_size // size
    rest = vocab_size - full * size
    row_stride = rows.shape[1]
    nisa.dma_copy(dst=rows.ap(pattern=[[size, full], [1, size]], offset=row * row_stride), src=tile[0:full])
    if rest > 0:
        nisa.dma_copy(
            dst=rows.ap(pattern=[[size, 1], [1, rest]], offset=row * row_stride + full * size),
            src=tile[full : full + 1, 0:rest],
        )


def transpose(data):
    """[p, f] fp32 -> [f, p] in SBUF, bit for bit."""
    partitions, columns = data.shape
    turned = nl.ndarray((columns, partitions), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=data, engine=nisa.engine.tensor)
    result = floats((columns, partitions))
    nisa.tensor_copy(dst=result, src=turned)
    return result


def spread(column):
    """[n, 1] fp32 -> [128, n], the same on every partition."""
    count = column.shape[0]
    wide = floats((count, NUM_GROUPS))
    nisa.tensor_copy(dst=wide, src=column.broadcast(1, NUM_GROUPS))
    return transpose(wide)


def first_ids(vocab_size):
    """[128, 1] fp32: the first id of each partition."""
    ids = floats((NUM_GROUPS, 1))
    nisa.iota(dst=ids, pattern=[[0, 1]], offset=0, channel_multiplier=group_size(vocab_size))
    return ids


def floats(shape):
    """An fp32 tile in SBUF."""
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)


def tensor_tensor(data1, data2, op):
    """A fresh tile of data1's shape."""
    result = floats(data1.shape)
    nisa.tensor_tensor(dst=result, data1=data1, data2=data2, op=op)
    return result


def tensor_scalar(data, op0, operand0, op1=None, operand1=None):
    """A fresh tile of data's shape."""
    result = floats(data.shape)
    nisa.tensor_scalar(dst=result, data=data, op0=op0, operand0=operand0, op1=op1, operand1=operand1)
    return result
