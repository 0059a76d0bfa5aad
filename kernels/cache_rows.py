"""Which rows of a window move, and where they stand in HBM: the index arithmetic of the rollback kernels.

Sequences are on partitions: one pass over [B, T] tiles serves every head and layer. Indices are int32 and computed by
`tensor_tensor` on GpSimd, exact to 2^31; only values below 2^24 (lengths, rows, blocks) pass through fp32.

A row is one head's key or value of one token. An indirect DMA takes an index a partition, and moves from there some
rows of some heads: `groups` is how many partitions share the heads of a token.
"""

import nki.isa as nisa
import nki.language as nl

MAX_POSITION = 1 << 24  # fp32 holds every smaller integer
ABSENT = (1 << 31) - 1  # an index out of range: an indirect DMA with oob_mode.skip leaves that row alone


def load_lengths(lengths):
    """[B] int32 in HBM -> [B, 1] tile, a sequence a partition."""
    batch = lengths.shape[0]
    tile = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=lengths.reshape((batch, 1)))
    return tile


def load_path(path):
    """[B, T] int32 in HBM -> tile, a sequence a partition."""
    tile = nl.ndarray(path.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=path)
    return tile


def layers_of(tensors):
    """One tensor, or a tuple with one a layer, as a tuple."""
    return tensors if isinstance(tensors, tuple) else (tensors,)


def my_moves(keys, values, cache_layout):
    """This core's share of one move of keys and one of values a layer, by layout: a list of (moves, layout).

    A core moves whole tensors. A layer's two go to different cores, alternating, so that neither gets all the keys,
    which are slow to write where they are stored transposed; values never are.

    Args:
        keys, values: (sources, targets, scales), tensors or tuples with one a layer; of scales, see to_float8.

    Returns:
        moves: a list of (source, target, scales, layer), never empty, all of one shape.
    """
    shares = []
    for parity in range(2):
        sources, targets, scales = keys if parity == 0 else values
        sources = layers_of(sources)
        targets = layers_of(targets)
        moves = []
        for layer in range(len(targets)):
            if (layer + parity) % nl.num_programs(0) == nl.program_id(0):
                moves.append((sources[layer], targets[layer], scales, layer))
        shares.append(moves)
    key_moves, value_moves = shares
    if cache_layout != "BHDS":
        key_moves.extend(value_moves)
        value_moves = []
    result = []
    if len(key_moves) > 0:
        result.append((key_moves, cache_layout))
    if len(value_moves) > 0:
        result.append((value_moves, "BHSD"))
    return result


def in_order(keys, values):
    """The tensors of all layers as the flat tuple that a kernel returns, keys first."""
    tensors = []
    tensors.extend(layers_of(keys))
    tensors.extend(layers_of(values))
    return tuple(tensors)


def element_bytes(dtype):
    """Bytes of an element of a dtype that caches have."""
    if dtype == nl.float32:
        return 4
    return 1 if dtype == nl.float8_e4m3 else 2


def constant(shape, value):
    """An int32 tile of one value, for exact tensor_tensor arithmetic (tensor_scalar computes in fp32)."""
    tile = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def add_lengths(lengths, rows):
    """[B, 1] lengths + [B, T] rows, int32."""
    position = nl.ndarray(rows.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=position, data1=rows, data2=lengths.broadcast(1, rows.shape[1]), op=nl.add)
    return position


def not_negative(lengths):
    """Flags [B, 1] fp32 of the sequences that are no empty slot."""
    flags = nl.ndarray(lengths.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=flags, data=lengths, op0=nl.greater_equal, operand0=0.0)
    return flags


def row_numbers(batch, window):
    """0, 1, ..., T - 1 on each of B partitions, int32."""
    rows = nl.ndarray((batch, window), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=rows, pattern=[[1, window]], offset=0, channel_multiplier=0)
    return rows


def divide(numerator, divisor):
    """Quotient and remainder of an int32 tile in [0, 2^24) by a positive constant; NKI has neither division nor mod.

    The fp32 quotient is off by less than one and may be rounded either way on its way to int32; two comparisons of
    the exact remainder then correct it. The fraction multiplies an fp32 copy: between int32 tiles, tensor_scalar may
    compute in integers (UNVERIFIED), which would do for the whole numbers that all other calls have.
    """
    shape = numerator.shape
    value = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    quotient = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    remainder = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    step = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    whole = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    divisors = constant(shape, divisor)

    nisa.tensor_copy(dst=value, src=numerator, engine=nisa.engine.scalar)
    nisa.tensor_scalar(dst=quotient, data=value, op0=nl.multiply, operand0=1.0 / divisor)
    nisa.tensor_tensor(dst=whole, data1=quotient, data2=divisors, op=nl.multiply)
    nisa.tensor_tensor(dst=remainder, data1=numerator, data2=whole, op=nl.subtract)

    nisa.tensor_scalar(dst=step, data=remainder, op0=nl.less, operand0=0.0)
    nisa.tensor_tensor(dst=quotient, data1=quotient, data2=step, op=nl.subtract)
    nisa.tensor_tensor(dst=whole, data1=step, data2=divisors, op=nl.multiply)
    nisa.tensor_tensor(dst=remainder, data1=remainder, data2=whole, op=nl.add)

    nisa.tensor_scalar(dst=step, data=remainder, op0=nl.greater_equal, operand0=float(divisor))
    nisa.tensor_tensor(dst=quotient, data1=quotient, data2=step, op=nl.add)
    nisa.tensor_tensor(dst=whole, data1=step, data2=divisors, op=nl.multiply)
    nisa.tensor_tensor(dst=remainder, data1=remainder, data2=whole, op=nl.subtract)
    return quotient, remainder


def kept_rows(num_accepted, outside, entry):
    """Flags [B, T] fp32: 1 where entry t of the path is a row to keep, 0 everywhere else; `entry` is row_numbers'.

    A sequence keeps nothing if num_accepted [B, 1] is T or more, or if `outside` [B, T] flags one of its kept rows.
    """
    batch, window = outside.shape
    accepted = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    kept = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=accepted, src=num_accepted, engine=nisa.engine.scalar)
    nisa.tensor_scalar(dst=kept, data=entry, op0=nl.less_equal, operand0=accepted)

    wrong = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    good = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=wrong, data1=outside, data2=kept, op=nl.multiply)
    nisa.tensor_reduce(dst=good, op=nl.add, data=wrong, axis=1)
    nisa.tensor_scalar(dst=good, data=good, op0=nl.equal, operand0=0.0)
    nisa.tensor_scalar(dst=accepted, data=accepted, op0=nl.less, operand0=float(window))
    nisa.tensor_scalar(dst=kept, data=kept, op0=nl.multiply, operand0=good, op1=nl.multiply, operand1=accepted)
    return kept


def as_flags(kept):
    """[B, T] fp32 flags as uint8, which predicates take."""
    flags = nl.ndarray(kept.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=flags, src=kept)
    return flags


def flag_path(flags, path, window):
    """Adds to `flags` [B, P] where `path` [B, P] does not start at 0, does not rise, or leaves the window's rows."""
    batch, entries = path.shape
    flag(flags, path, nl.greater_equal, float(window))
    flag(flags[:, 0:1], path[:, 0:1], nl.not_equal, 0.0)
    if entries > 1:
        falls = nl.ndarray((batch, entries - 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=falls, data1=path[:, 1:entries], data2=path[:, 0 : entries - 1], op=nl.less_equal)
        nisa.tensor_tensor(dst=flags[:, 1:entries], data1=flags[:, 1:entries], data2=falls, op=nl.add)


def last_rows(kept, num_accepted, slots, entry):
    """Of more kept rows [B, T] than a ring has slots, only the last: two rows must never go to one slot."""
    batch, window = kept.shape
    if window <= slots:
        return kept
    oldest = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    recent = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=oldest, data=num_accepted, op0=nl.subtract, operand0=float(slots))
    nisa.tensor_scalar(dst=recent, data=entry, op0=nl.greater, operand0=oldest)
    nisa.tensor_tensor(dst=recent, data1=recent, data2=kept, op=nl.multiply)
    return recent


def num_slots(cache, cache_layout, block_table):
    """Positions that a sequence has room for: S, or M * P."""
    if cache_layout == "BHDS":
        return cache.shape[3]
    if cache_layout == "NHPD":
        return block_table.shape[1] * cache.shape[2]
    if cache_layout == "NPHD":
        return block_table.shape[1] * cache.shape[1]
    return cache.shape[2]


def locate(position, cache, cache_layout, block_table, ring):
    """Where a window's positions [B, T] are stored, the first of each sequence the lowest.

    Returns:
        index: [B, T] int32, the row of the cache that holds the token's first head, without the share of the sequence
            (unless paged) and of the head.
        outside: [B, T] fp32, above 0 where there is no such row: the position is not in the cache or not in a block.
        offset: [B, T] int32, the token's place in its block, or in the cache.
    """
    slots = num_slots(cache, cache_layout, block_table)
    outside = nl.ndarray(position.shape, dtype=nl.float32, buffer=nl.sbuf)
    limit = MAX_POSITION if ring else slots
    nisa.tensor_scalar(dst=outside, data=position, op0=nl.greater_equal, operand0=float(limit))
    flag(outside, position, nl.less, 0.0)
    if ring:
        _, position = divide(position, slots)
    if cache_layout == "BHSD" or cache_layout == "BHDS":
        return position, outside, position

    # A ring's window may wrap to the first blocks, so all of its few table entries are read.
    window = position.shape[1]
    entries = block_table.shape[1]
    block_size = slots // entries
    touched = entries if ring else min(entries, (window + block_size - 2) // block_size + 1)
    block, offset = block_of(position, block_table, block_size, touched)
    flag(outside, block, nl.less, 0.0)
    flag(outside, block, nl.greater_equal, float(cache.shape[0]))

    # Blocks of P tokens, each token a row ("NHPD", whose heads lie P rows apart) or all its heads' rows ("NPHD").
    token_rows = cache.shape[2] if cache_layout == "NPHD" else 1
    index = nl.ndarray(position.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=index, data1=block, data2=constant(position.shape, cache.shape[1] * cache.shape[2]), op=nl.multiply
    )
    row = offset
    if token_rows > 1:
        row = nl.ndarray(position.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=row, data1=offset, data2=constant(position.shape, token_rows), op=nl.multiply)
    nisa.tensor_tensor(dst=index, data1=index, data2=row, op=nl.add)
    return index, outside, offset


def flag(flags, data, op, operand):
    """flags += data op operand, both [B, T]."""
    nisa.scalar_tensor_tensor(dst=flags, data=data, op0=op, operand0=operand, op1=nl.add, operand1=flags)


def block_of(position, block_table, block_size, touched):
    """Block id and offset inside it, [B, T] int32, of positions of which the first of each sequence is the lowest.

    Only `touched` entries of each sequence's table are read, in one descriptor. A position outside them looks up some
    entry of its own sequence.
    """
    batch, window = position.shape
    entries = block_table.shape[1]
    entry, offset = divide(position, block_size)

    # From the first position's entry on, but never past the end of the sequence's table.
    first = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=first,
        data=entry[:, 0:1],
        op0=nl.minimum,
        operand0=float(entries - touched),
        op1=nl.maximum,
        operand1=0.0,
    )
    start = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=start, pattern=[[0, 1]], offset=0, channel_multiplier=entries)
    nisa.tensor_tensor(dst=start, data1=start, data2=first, op=nl.add)
    table = nl.ndarray((batch, touched), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=table,
        src=block_table.reshape((batch * entries, 1)).ap(
            pattern=[[1, batch], [1, touched]], vector_offset=start, indirect_dim=0
        ),
    )

    lookup = nl.ndarray((batch, window), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=lookup, data1=entry, data2=first.broadcast(1, window), op=nl.subtract)
    chosen = nl.ndarray((batch, window), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=chosen, data=lookup, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(touched - 1)
    )
    block = nl.ndarray((batch, window), dtype=nl.int32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=block, data=table, indices=chosen)
    return block, offset


def num_heads(cache, cache_layout):
    """Hkv."""
    return cache.shape[2] if cache_layout == "NPHD" else cache.shape[1]


def head_size(cache, cache_layout):
    """D."""
    return cache.shape[2] if cache_layout == "BHDS" else cache.shape[3]


def cache_rows(cache, cache_layout, parts):
    """A cache as [rows, row size], each row cut into `parts`.

    A transposed key is a column, so there "rows" are one element apart, whatever the parts.
    """
    size = 1 if cache_layout == "BHDS" else cache.shape[3] // parts
    return cache.reshape((cache.size // size, size))


def run_pieces(cache, cache_layout, heads, rows, parts):
    """`rows` neighbouring rows as they are stored: (stride, count, elements) of contiguous pieces.

    Of `heads` heads, or of one of `parts` parts of one. The elements of a transposed key lie S apart, whatever moves
    them. Whole [D, T] windows would take as many descriptors, but twice, to read the columns of rejected rows and to
    write them back, and would not fit at the end of the cache.
    """
    head_dim = head_size(cache, cache_layout)
    if cache_layout == "BHDS":
        return cache.shape[3], heads * head_dim // parts, rows
    if cache_layout == "NPHD":
        return cache.shape[2] * head_dim, rows, heads * head_dim
    if parts > 1:
        return head_dim, rows, head_dim // parts
    return cache.shape[2] * head_dim, heads, rows * head_dim


def cache_row_indices(result, index, exists, cache, cache_layout, parts):
    """`row_indices` of the rows of a cache that `locate` found, for the first head of each group."""
    heads = num_heads(cache, cache_layout)
    head_rows = 1 if cache_layout == "NPHD" else cache.shape[2] * parts
    if cache_layout == "BHDS":
        head_rows = cache.shape[2] * cache.shape[3]
    group_stride = heads // result.shape[1] * head_rows
    paged = cache_layout == "NHPD" or cache_layout == "NPHD"
    row_indices(result, index, exists, group_stride, 0 if paged else heads * head_rows)


def row_indices(result, index, exists, group_stride, sequence_stride):
    """result [B, groups, C] int32 = each row to move, where there is one.

    Args:
        index: [B, C] int32, a token's first row, without the share of its sequence.
        exists: [B, C] uint8 flags.
        group_stride, sequence_stride: rows from one group to the next, from one sequence to the next.
    """
    shape = result.shape
    row = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[group_stride, shape[1]], [0, shape[2]]], offset=0, channel_multiplier=sequence_stride)
    nisa.tensor_tensor(dst=row, data1=row, data2=index.expand_dim(1).broadcast(1, shape[1]), op=nl.add)
    nisa.tensor_copy_predicated(dst=result, src=row, predicate=exists.expand_dim(1).broadcast(1, shape[1]))


def row_tiles(batch, groups, columns):
    """Cuts [B, groups, C] into tiles of at most 128 partitions: a list of (sequence, count, group, count)."""
    tiles = []
    if groups * columns <= nl.tile_size.pmax:
        step = nl.tile_size.pmax // (groups * columns)
        for sequence in range(0, batch, step):
            tiles.append((sequence, min(step, batch - sequence), 0, groups))
    else:
        step = nl.tile_size.pmax // columns
        for sequence in range(batch):
            for group in range(0, groups, step):
                tiles.append((sequence, 1, group, min(step, groups - group)))
    return tiles


def on_partitions(index, tile):
    """One tile of `index` [B, groups, C, K] as [rows, K], rows on partitions: what indirect DMAs take by column."""
    sequence, sequences, group, groups = tile
    _, _, columns, kinds = index.shape
    indices = nl.ndarray((sequences * groups * columns, kinds), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=indices, src=index[sequence : sequence + sequences, group : group + groups])
    return indices
