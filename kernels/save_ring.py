"""save_ring: what a window is about to overwrite in a ring."""

import nki
import nki.isa as nisa
import nki.language as nl

from .cache_rows import (
    add_lengths,
    cache_row_indices,
    cache_rows,
    in_order,
    layers_of,
    load_lengths,
    locate,
    my_moves,
    not_negative,
    on_partitions,
    row_groups,
    row_numbers,
    row_tiles,
)
from .row_moves import gather, staging


@nki.jit
def save_ring(key_caches, value_caches, seq_lens, block_table, num_rows, cache_layout):
    """Copies what the slots of positions seq_lens[b] .. seq_lens[b] + num_rows - 1 hold.

    Args:
        key_caches, value_caches: HBM tensors in `cache_layout`, one or a tuple with one a layer; any dtype, moved as
            bits.
        seq_lens: [B] int32; below 0 for an empty slot, whose saved rows are zero.
        block_table: [B, M] int32 for "NHPD" and "NPHD", else None.
        num_rows: rows of the window, at most the ring's slots.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".

    Returns:
        Saved keys, then saved values, [B, Hkv, num_rows, D] a layer, as one flat tuple.
    """
    batch = seq_lens.shape[0]
    cache = layers_of(value_caches)[0]
    heads = cache.shape[2] if cache_layout == "NPHD" else cache.shape[1]
    shape = (batch, heads, num_rows, cache.shape[3])
    saved_keys = []
    saved_values = []
    for _ in layers_of(key_caches):
        saved_keys.append(nl.ndarray(shape, dtype=cache.dtype, buffer=nl.shared_hbm))
        saved_values.append(nl.ndarray(shape, dtype=cache.dtype, buffer=nl.shared_hbm))
    saved_keys = tuple(saved_keys)
    saved_values = tuple(saved_values)

    key_moves = my_moves(key_caches, saved_keys, None, 0)
    value_moves = my_moves(value_caches, saved_values, None, 1)
    if cache_layout == "BHDS":
        save(key_moves, seq_lens, block_table, "BHDS")
        save(value_moves, seq_lens, block_table, "BHSD")
    else:
        key_moves.extend(value_moves)
        save(key_moves, seq_lens, block_table, cache_layout)
    return in_order(saved_keys, saved_values)


def save(moves, seq_lens, block_table, cache_layout):
    """Copies the window's rows of each (cache, saved, _, _) in `moves`, all of one shape."""
    if len(moves) == 0:
        return
    cache, saved, _, _ = moves[0]
    batch, heads, window, head_dim = saved.shape
    groups = row_groups(heads, cache_layout)

    seq_len = load_lengths(seq_lens)
    slot, outside = locate(add_lengths(seq_len, row_numbers(batch, window)), cache, cache_layout, block_table, True)
    inside = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=inside, data=outside, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=not_negative(seq_len)
    )
    sources = cache_row_indices(slot, inside, cache, cache_layout, heads)

    for tile in row_tiles(batch, groups, window):
        sequence, sequences, group, tile_groups = tile
        source = on_partitions(sources, tile)
        buffers = staging(len(moves), (source.shape[0], heads // groups, head_dim), cache.dtype)
        for turn in range(len(moves)):
            cache, saved, _, _ = moves[turn]
            buffer = buffers[turn % len(buffers)]
            gather(buffer, cache_rows(cache, cache_layout, head_dim), source)
            target = saved[sequence : sequence + sequences]
            # In the buffer's order: by token where a row holds all its heads, by head where it holds one.
            target = target.permute((0, 2, 1, 3)) if groups == 1 else target[:, group : group + tile_groups]
            nisa.dma_copy(dst=target, src=buffer)
