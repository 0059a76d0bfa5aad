"""restore_ring: what rejected rows overwrote in a ring, brought back."""

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
    load_lengths,
    locate,
    my_moves,
    not_negative,
    on_partitions,
    row_groups,
    row_numbers,
    row_tiles,
    scatter,
    staging,
    window_row_indices,
    window_rows,
)


@nki.jit
def restore_ring(
    key_caches: nt.mutable_tensor,
    value_caches: nt.mutable_tensor,
    saved_keys,
    saved_values,
    seq_lens,
    num_accepted,
    block_table,
    cache_layout,
):
    """Puts saved rows num_accepted[b] + 1 .. T - 1 back into the slots of positions seq_lens[b] + row, in place.

    Args:
        key_caches, value_caches: HBM tensors in `cache_layout`, one or a tuple with one a layer; any dtype, moved as
            bits.
        saved_keys, saved_values: [B, Hkv, T, D], what save_ring returned, likewise.
        seq_lens, num_accepted: [B] int32, as they were when the window was written; num_accepted -1 restores nothing.
        block_table: [B, M] int32 for "NHPD" and "NPHD", else None.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".

    Returns:
        key_caches then value_caches, as one flat tuple.
    """
    key_moves = my_moves(saved_keys, key_caches, None, 0)
    value_moves = my_moves(saved_values, value_caches, None, 1)
    if cache_layout == "BHDS":
        restore(key_moves, seq_lens, num_accepted, block_table, "BHDS")
        restore(value_moves, seq_lens, num_accepted, block_table, "BHSD")
    else:
        key_moves.extend(value_moves)
        restore(key_moves, seq_lens, num_accepted, block_table, cache_layout)
    return in_order(key_caches, value_caches)


def restore(moves, seq_lens, num_accepted, block_table, cache_layout):
    """Restores each cache of the (saved, cache, _, _) in `moves`, all of one shape."""
    if len(moves) == 0:
        return
    saved, cache, _, _ = moves[0]
    batch, heads, window, head_dim = saved.shape
    groups = row_groups(heads, cache_layout)

    rows = row_numbers(batch, window)
    seq_len = load_lengths(seq_lens)
    slot, outside = locate(add_lengths(seq_len, rows), cache, cache_layout, block_table, True)
    rejected = rejected_rows(rows, seq_len, load_lengths(num_accepted), outside)
    sources = window_row_indices(rows, rejected, heads, groups, window)
    targets = cache_row_indices(slot, rejected, cache, cache_layout, heads)

    for tile in row_tiles(batch, groups, window):
        source = on_partitions(sources, tile)
        target = on_partitions(targets, tile)
        buffers = staging(len(moves), (source.shape[0], heads // groups, head_dim), cache.dtype)
        for turn in range(len(moves)):
            saved, cache, _, _ = moves[turn]
            buffer = buffers[turn % len(buffers)]
            gather(buffer, window_rows(saved), source)
            scatter(cache_rows(cache, cache_layout, head_dim), target, buffer)


def rejected_rows(rows, seq_len, num_accepted, outside):
    """Flags [B, T] fp32 of the rows past num_accepted that have a slot, in sequences that are not empty."""
    batch, window = rows.shape
    rejected = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    inside = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    accepted = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=accepted, src=num_accepted)
    nisa.tensor_scalar(
        dst=rejected, data=rows, op0=nl.greater, operand0=accepted, op1=nl.multiply, operand1=not_negative(num_accepted)
    )
    nisa.tensor_scalar(
        dst=inside, data=outside, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=not_negative(seq_len)
    )
    nisa.tensor_tensor(dst=rejected, data1=rejected, data2=inside, op=nl.multiply)
    return rejected
