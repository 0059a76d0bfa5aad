"""commit_window: the accepted rows of a window, and only those, into every kind of cache."""

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt

from .cache_rows import (
    add_lengths,
    cache_row_indices,
    cache_rows,
    gather,
    in_order,
    kept_rows,
    last_rows,
    load_lengths,
    load_path,
    locate,
    my_moves,
    num_slots,
    on_partitions,
    row_groups,
    row_numbers,
    row_tiles,
    scatter,
    staging,
    window_row_indices,
    window_rows,
)

FLOAT8_MAX = 240.0


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
    key_moves = my_moves(keys, key_caches, key_scales, 0)
    value_moves = my_moves(values, value_caches, value_scales, 1)
    if cache_layout == "BHDS":
        commit(key_moves, seq_lens, num_accepted, path, block_table, "BHDS", ring)
        commit(value_moves, seq_lens, num_accepted, path, block_table, "BHSD", ring)
    else:
        key_moves.extend(value_moves)
        commit(key_moves, seq_lens, num_accepted, path, block_table, cache_layout, ring)
    return in_order(key_caches, value_caches)


def commit(moves, seq_lens, num_accepted, path, block_table, cache_layout, ring):
    """Moves the kept rows of each (window, cache, scales, layer) in `moves`, all of one shape."""
    if len(moves) == 0:
        return
    window, cache, _, _ = moves[0]
    batch, heads, rows, head_dim = window.shape
    groups = row_groups(heads, cache_layout)

    paths = load_path(path)
    position = add_lengths(load_lengths(seq_lens), row_numbers(batch, rows))
    slot, outside = locate(position, cache, cache_layout, block_table, ring)
    accepted = load_lengths(num_accepted)
    kept = kept_rows(accepted, paths, outside)
    if ring:
        kept = last_rows(kept, accepted, num_slots(cache, cache_layout, block_table))
    sources = window_row_indices(paths, kept, heads, groups)
    targets = cache_row_indices(slot, kept, cache, cache_layout, heads)

    for tile in row_tiles(batch, groups, rows):
        source = on_partitions(sources, tile)
        target = on_partitions(targets, tile)
        buffers = staging(len(moves), source.shape[0], heads // groups, head_dim, window.dtype)
        for turn in range(len(moves)):
            window, cache, scales, layer = moves[turn]
            buffer = buffers[turn % len(buffers)]
            gather(buffer, window_rows(window), source)
            if cache.dtype != window.dtype:
                buffer = to_float8(buffer, scales, layer, tile, groups, rows)
            scatter(cache_rows(cache, cache_layout, head_dim), target, buffer)


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
