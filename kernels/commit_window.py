"""commit_window: the accepted rows of a window, and only those, into every kind of cache."""

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt

from .cache_rows import (
    MAX_POSITION,
    block_of,
    constant,
    divide,
    kept_rows,
    load_lengths,
    on_partitions,
    row_indices,
    row_tiles,
)

FLOAT8_MAX = 240.0
NUM_BUFFERS = 8  # rows in flight between HBM and HBM: enough to hide a DMA's ~2 us, a few KiB a partition


@nki.jit
def commit_window(
    key_caches: nt.mutable_tensor,
    value_caches: nt.mutable_tensor,
    keys,
    values,
    seq_lens,
    num_accepted,
    path,
    block_table,
    key_scales,
    value_scales,
    cache_layout,
    ring,
):
    """Writes window rows path[b, 0..num_accepted[b]] to positions seq_lens[b].. of the caches, in place.

    Rows move HBM -> SBUF -> HBM by one indirect gather and one indirect scatter for every 128 of them, with indices
    from the chip and out of range where a row is not kept: one program for all lengths, outcomes and trees, and only
    kept rows cost bytes.

    UNVERIFIED: that the compiler takes nt.mutable_tensor for a parameter that is a tuple of tensors.

    Args:
        key_caches, value_caches: a tuple with one HBM tensor a layer, in `cache_layout`; written in place.
        keys, values: tuples of [B, Hkv, T, D], the windows.
        seq_lens, num_accepted: [B] int32.
        path: [B, T] int32, the window rows kept; 0, 1, 2, ... for a chain.
        block_table: [B, M] int32 for "NHPD" and "NPHD", else None.
        key_scales, value_scales: [layers, Hkv] fp32 for fp8 caches, else None.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".
        ring: position p goes to slot p mod S.

    Returns:
        key_caches then value_caches, as one flat tuple.
    """
    # Each core moves whole tensors: K and V of a layer on different cores, alternating, so that neither gets all keys
    # (slow to write where they are stored transposed).
    key_moves = []
    value_moves = []
    for layer in range(len(keys)):
        if layer % nl.num_programs(0) == nl.program_id(0):
            key_moves.append((keys[layer], key_caches[layer], key_scales, layer))
        if (layer + 1) % nl.num_programs(0) == nl.program_id(0):
            value_moves.append((values[layer], value_caches[layer], value_scales, layer))

    if cache_layout == "BHDS":
        scatter_rows(key_moves, seq_lens, num_accepted, path, block_table, "BHDS", ring)
        scatter_rows(value_moves, seq_lens, num_accepted, path, block_table, "BHSD", ring)
    else:
        scatter_rows(key_moves + value_moves, seq_lens, num_accepted, path, block_table, cache_layout, ring)

    outputs = []
    for cache in key_caches:
        outputs.append(cache)
    for cache in value_caches:
        outputs.append(cache)
    return tuple(outputs)


def scatter_rows(moves, seq_lens, num_accepted, path, block_table, cache_layout, ring):
    """Moves the kept rows of each (window, cache, scales, layer) in `moves`, whose tensors all have one shape."""
    if len(moves) == 0:
        return
    window, cache, _, _ = moves[0]
    batch, heads, rows, head_dim = window.shape

    seq_len = load_lengths(seq_lens)
    paths = nl.ndarray((batch, rows), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=paths, src=path)
    position = nl.ndarray((batch, rows), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=position, pattern=[[1, rows]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=position, data1=position, data2=seq_len.broadcast(1, rows), op=nl.add)

    paged = cache_layout == "NHPD" or cache_layout == "NPHD"
    slots = cache.shape[3] if cache_layout == "BHDS" else cache.shape[2]
    if cache_layout == "NHPD":
        block_size = cache.shape[2]
    elif cache_layout == "NPHD":
        block_size = cache.shape[1]
    if paged:
        slots = block_table.shape[1] * block_size
    max_length = MAX_POSITION if ring else slots
    kept = kept_rows(seq_len, load_lengths(num_accepted), paths, max_length, slots if ring else 0)

    # The row of the cache that each token's first head goes to, less the sequence's and the head's share.
    slot = position
    if ring:
        _, slot = divide(position, slots)
    groups = heads
    row_pattern = [1, head_dim]
    row_size = head_dim
    if cache_layout == "BHSD":
        group_stride = slots
        sequence_stride = heads * slots
    elif cache_layout == "BHDS":
        # A key is a column: its elements lie S apart, so rows are counted in elements and one descriptor is an
        # element. Moving whole [D, T] windows instead would have to read and rewrite T columns to keep the rejected
        # ones, cannot stay inside the cache near its end, and is no longer a write of accepted rows only.
        group_stride = head_dim * slots
        sequence_stride = heads * head_dim * slots
        row_pattern = [slots, head_dim]
        row_size = 1
    else:
        block, slot = block_of(slot, block_table, cache.shape[0], block_size, kept)
        rows_per_block = block_size
        group_stride = 0
        sequence_stride = 0
        if cache_layout == "NHPD":
            rows_per_block = heads * block_size
            group_stride = block_size
        else:
            groups = 1
            row_pattern = [1, heads * head_dim]
            row_size = heads * head_dim
        first_row = nl.ndarray((batch, rows), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=first_row, data1=block, data2=constant((batch, rows), rows_per_block), op=nl.multiply)
        nisa.tensor_tensor(dst=first_row, data1=first_row, data2=slot, op=nl.add)
        slot = first_row
    cache_rows = cache.size // row_size
    cache_index = row_indices(slot, kept, groups, group_stride, sequence_stride, cache_rows)

    window_rows = batch * heads * rows
    window_index = row_indices(paths, kept, groups, rows, heads * rows, window_rows)
    row_heads = heads // groups

    # Rows that are not kept are neither read nor written, but a DMA may only send what was written once.
    buffers = []
    for _ in range(min(NUM_BUFFERS, len(moves))):
        buffer = nl.ndarray((nl.tile_size.pmax, row_heads, head_dim), dtype=window.dtype, buffer=nl.sbuf)
        nisa.memset(dst=buffer, value=0.0)
        buffers.append(buffer)

    turn = 0
    for tile in row_tiles(batch, groups, rows):
        source = on_partitions(window_index, tile)
        target = on_partitions(cache_index, tile)
        count = source.shape[0]
        for window, cache, scales, layer in moves:
            buffer = buffers[turn % len(buffers)][0:count]
            turn += 1
            nisa.dma_copy(
                dst=buffer,
                src=window.reshape((window_rows, head_dim)).ap(
                    pattern=[[head_dim, count], [rows * head_dim, row_heads], [1, head_dim]],
                    vector_offset=source,
                    indirect_dim=0,
                ),
                oob_mode=nisa.oob_mode.skip,
            )
            if cache.dtype != window.dtype:
                buffer = to_float8(buffer, scales, layer, tile, groups, rows)
            nisa.dma_copy(
                dst=cache.reshape((cache_rows, row_size)).ap(
                    pattern=[[row_size, count], row_pattern], vector_offset=target, indirect_dim=0
                ),
                src=buffer,
                oob_mode=nisa.oob_mode.skip,
            )


def to_float8(buffer, scales, layer, tile, groups, rows):
    """Rows [count, heads, D] over their head's scale, saturated at 240, as fp8."""
    count, row_heads, head_dim = buffer.shape
    _, sequences, group, tile_groups = tile
    heads = scales.shape[1]
    inverse = nl.ndarray((count, row_heads), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[0, count], [1, heads]] if groups == 1 else [[0, sequences], [1, tile_groups], [0, rows]]
    nisa.dma_copy(dst=inverse, src=scales.ap(pattern=pattern, offset=layer * heads + group))
    nisa.reciprocal(dst=inverse, data=inverse)

    scaled = nl.ndarray((count, row_heads, head_dim), dtype=nl.float32, buffer=nl.sbuf)
    for head in range(row_heads):
        nisa.tensor_scalar(
            dst=scaled[:, head, :],
            data=buffer[:, head, :],
            op0=nl.multiply,
            operand0=inverse[:, head : head + 1],
            op1=nl.minimum,
            operand1=FLOAT8_MAX,
        )
    saturated = nl.ndarray((count, row_heads, head_dim), dtype=nl.float8_e4m3, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=saturated, data=scaled, op0=nl.maximum, operand0=-FLOAT8_MAX)
    return saturated
