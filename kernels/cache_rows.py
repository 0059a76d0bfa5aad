"""Which rows of a window are kept and where they stand in HBM: the index arithmetic of the rollback kernels.

Sequences are on partitions: one pass over [B, T] tiles serves every head and layer. Indices are int32 and computed by
`tensor_tensor` on GpSimd, exact to 2^31; only values below 2^24 (lengths, rows, blocks) pass through fp32.

A row is what one descriptor of an indirect DMA moves: one head's key or value of one token, or a token's whole line
where all heads are contiguous ("NPHD"). `groups` is how many rows a token has: Hkv, or 1 for "NPHD".
"""

import nki.isa as nisa
import nki.language as nl

MAX_POSITION = 1 << 24  # fp32 holds every smaller integer


def load_lengths(lengths):
    """[B] int32 in HBM -> [B, 1] tile, a sequence a partition."""
    batch = lengths.shape[0]
    tile = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=lengths.reshape((batch, 1)))
    return tile


def constant(shape, value):
    """An int32 tile of one value, for exact tensor_tensor arithmetic (tensor_scalar computes in fp32)."""
    tile = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=value)
    return tile


def divide(numerator, divisor):
    """Quotient and remainder of an int32 tile in [0, 2^24) by a positive constant; NKI has neither division nor mod.

    The fp32 quotient is off by less than one and may be rounded either way on its way to int32; two comparisons of
    the exact remainder then correct it.
    """
    shape = numerator.shape
    quotient = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    remainder = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    step = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    whole = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    divisors = constant(shape, divisor)

    nisa.tensor_scalar(dst=quotient, data=numerator, op0=nl.multiply, operand0=1.0 / divisor)
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


def kept_rows(seq_lens, num_accepted, path, max_length, ring_slots):
    """Flags [B, T] fp32: 1 where entry t of the path is a row to keep, 0 everywhere else.

    A sequence with bad values (a length out of range, a path that does not start at 0 and rise) keeps nothing.

    Args:
        seq_lens, num_accepted: [B, 1] int32 tiles.
        path: [B, T] int32 tile.
        max_length: the positions that a sequence has room for.
        ring_slots: slots of a ring, whose later rows push out the earlier ones; 0 where there is no ring.
    """
    batch, window = path.shape
    row = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    kept = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    accepted = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[1, window]], offset=0, channel_multiplier=0)
    nisa.tensor_copy(dst=accepted, src=num_accepted)
    nisa.tensor_scalar(dst=kept, data=row, op0=nl.less_equal, operand0=accepted)

    # Good lengths: accepted < T, seq_lens >= 0, seq_lens + accepted + 1 <= max_length.
    good = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    flag = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=good, data=accepted, op0=nl.less, operand0=float(window))
    nisa.tensor_scalar(dst=flag, data=seq_lens, op0=nl.greater_equal, operand0=0.0)
    nisa.tensor_tensor(dst=good, data1=good, data2=flag, op=nl.multiply)
    nisa.tensor_scalar(dst=flag, data=seq_lens, op0=nl.add, operand0=accepted, op1=nl.less, operand1=float(max_length))
    nisa.tensor_tensor(dst=good, data1=good, data2=flag, op=nl.multiply)

    # A good path: starts at 0, rises by at least 1 to each kept entry, stays below T.
    wrong = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=wrong, data=path, op0=nl.greater_equal, operand0=float(window))
    nisa.tensor_scalar(dst=flag, data=path[:, 0:1], op0=nl.equal, operand0=0.0)
    nisa.tensor_tensor(dst=good, data1=good, data2=flag, op=nl.multiply)
    if window > 1:
        falls = nl.ndarray((batch, window - 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=falls, data1=path[:, 1:window], data2=path[:, 0 : window - 1], op=nl.less_equal)
        nisa.tensor_tensor(dst=wrong[:, 1:window], data1=wrong[:, 1:window], data2=falls, op=nl.add)
    drop_wrong(good, kept, wrong)

    if ring_slots > 0 and ring_slots < window:
        # Row t gives way to row t + ring_slots if that is kept too: two rows must never go to one slot.
        last = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=accepted, data=accepted, op0=nl.subtract, operand0=float(ring_slots))
        nisa.tensor_scalar(dst=last, data=row, op0=nl.greater, operand0=accepted)
        nisa.tensor_tensor(dst=kept, data1=kept, data2=last, op=nl.multiply)
    return kept


def drop_wrong(good, kept, wrong):
    """Clears `kept` [B, T] of each sequence with `good` [B, 1] unset, or with a kept row flagged in `wrong` [B, T]."""
    batch = good.shape[0]
    count = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=wrong, data1=wrong, data2=kept, op=nl.multiply)
    nisa.tensor_reduce(dst=count, op=nl.add, data=wrong, axis=1)
    nisa.tensor_scalar(dst=count, data=count, op0=nl.equal, operand0=0.0)
    nisa.tensor_tensor(dst=good, data1=good, data2=count, op=nl.multiply)
    nisa.tensor_scalar(dst=kept, data=kept, op0=nl.multiply, operand0=good)


def block_of(position, block_table, num_blocks, block_size, kept):
    """Block id and offset inside it of positions [B, T]; clears `kept` where a needed table entry is no block.

    Only the entries that a window can touch are read, one descriptor a sequence.
    """
    batch, window = position.shape
    entries = block_table.shape[1]
    touched = min(entries, (window + block_size - 2) // block_size + 1)
    index, offset = divide(position, block_size)

    # Reading `touched` entries from the first position's, but never past the end of the sequence's table.
    first = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=first,
        data=index[:, 0:1],
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

    # Rows that are not kept may lie past the table: they look up some entry of their own, whose block is not used.
    lookup = nl.ndarray((batch, window), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=lookup, data1=index, data2=first.broadcast(1, window), op=nl.subtract)
    chosen = nl.ndarray((batch, window), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=chosen, data=lookup, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(touched - 1)
    )
    block = nl.ndarray((batch, window), dtype=nl.int32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=block, data=table, indices=chosen)

    wrong = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    past = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    good = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=good, value=1.0)
    nisa.tensor_scalar(dst=wrong, data=block, op0=nl.less, operand0=0.0)
    nisa.tensor_scalar(dst=past, data=block, op0=nl.greater_equal, operand0=float(num_blocks))
    nisa.tensor_tensor(dst=wrong, data1=wrong, data2=past, op=nl.add)
    drop_wrong(good, kept, wrong)
    return block, offset


def row_indices(token_index, kept, groups, group_stride, sequence_stride, num_rows):
    """Index [B, groups, T] int32 of each row to move; `num_rows`, one past the last row, where it is not kept.

    An index out of range makes an indirect DMA with oob_mode.skip leave that row alone.

    Args:
        token_index: [B, T] int32 tile, index of a token's first row, less its sequence's share.
        kept: [B, T] fp32 flags.
        group_stride, sequence_stride: rows from one head to the next, from one sequence to the next.
        num_rows: rows of the HBM tensor being indexed.
    """
    batch, window = token_index.shape
    row = nl.ndarray((batch, groups, window), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[group_stride, groups], [0, window]], offset=0, channel_multiplier=sequence_stride)
    nisa.tensor_tensor(dst=row, data1=row, data2=token_index.expand_dim(1).broadcast(1, groups), op=nl.add)

    move = nl.ndarray((batch, groups, window), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=move, src=kept.expand_dim(1).broadcast(1, groups))
    index = constant((batch, groups, window), num_rows)
    nisa.tensor_copy_predicated(dst=index, src=row, predicate=move)
    return index


def row_tiles(batch, groups, window):
    """Cuts the rows [B, groups, T] into tiles of at most 128: a list of (sequence, count, group, count)."""
    tiles = []
    if groups * window <= nl.tile_size.pmax:
        step = nl.tile_size.pmax // (groups * window)
        for sequence in range(0, batch, step):
            tiles.append((sequence, min(step, batch - sequence), 0, groups))
    else:
        step = max(1, nl.tile_size.pmax // window)
        for sequence in range(batch):
            for group in range(0, groups, step):
                tiles.append((sequence, 1, group, min(step, groups - group)))
    return tiles


def on_partitions(index, tile):
    """The rows of one tile of `index` [B, groups, T] as [rows, 1], a row a partition, as indirect DMAs want them."""
    sequence, sequences, group, groups = tile
    rows = sequences * groups * index.shape[2]
    column = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=column, src=index[sequence : sequence + sequences, group : group + groups, :])
    return column
