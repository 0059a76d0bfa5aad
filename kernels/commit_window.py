"""commit_window: the accepted rows of a window, and only those, into every kind of cache."""

import nki
import nki.language as nl
import nki.typing as nt

from .cache_rows import (
    add_lengths,
    constant,
    flag_path,
    in_order,
    kept_rows,
    last_rows,
    load_lengths,
    load_path,
    locate,
    my_moves,
    num_slots,
    row_numbers,
)
from .window_moves import move_window


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
    chain,
    ring,
):
    """Writes window rows path[b, 0..num_accepted[b]] to positions seq_lens[b].. of the caches, in place.

    Rows move HBM -> SBUF -> HBM by indirect gathers and scatters, with indices from the chip and out of range where a
    row is not kept: one program for all lengths, outcomes and trees, and only kept rows cost bytes. Where there are
    many, the rows of a chain move in runs (window_runs), and those for transposed keys as columns (column_moves).

    UNVERIFIED: that the compiler takes nt.mutable_tensor for a parameter that is a tuple of tensors; a single layer
    therefore comes as the tensor itself.

    Args:
        key_caches, value_caches: HBM tensors in `cache_layout`, one or a tuple with one a layer; written in place.
        keys, values: [B, Hkv, T, D], the windows, likewise.
        seq_lens, num_accepted: [B] int32.
        path: [B, P] int32, the window rows kept, P at most T; None for a chain, whose path is 0, 1, 2, ...
        block_table: [B, M] int32 for "NHPD" and "NPHD", else None.
        key_scales, value_scales: [layers, Hkv] fp32 for fp8 caches, else None.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".
        chain: there is no path.
        ring: position p goes to slot p mod S.

    Returns:
        key_caches then value_caches, as one flat tuple.
    """
    lengths = (seq_lens, num_accepted, path, block_table)
    for share in my_moves((keys, key_caches, key_scales), (values, value_caches, value_scales), cache_layout):
        moves, layout = share
        commit(moves, lengths, layout, chain, ring)
    return in_order(key_caches, value_caches)


def commit(moves, lengths, cache_layout, chain, ring):
    """Moves the kept rows of each (window, cache, scales, layer) in `moves`, all of one shape."""
    window, cache, _, _ = moves[0]
    seq_lens, num_accepted, path, block_table = lengths
    batch, _, rows, _ = window.shape
    slots = num_slots(cache, cache_layout, block_table)

    zero = constant((nl.tile_size.pmax, 1), 0)  # first: buffers are zeroed while lengths are on their way
    seq_len = load_lengths(seq_lens)
    accepted = load_lengths(num_accepted)
    entries = rows if chain else path.shape[1]
    entry = row_numbers(batch, entries)
    row = entry
    slot, outside, offset = locate(add_lengths(seq_len, row), cache, cache_layout, block_table, ring)
    if not chain:
        row = load_path(path)
        flag_path(outside, row, rows)
    kept = kept_rows(accepted, outside, entry)
    if ring:
        kept = last_rows(kept, accepted, slots, entry)
    most = min(entries, slots)
    move_window(moves, cache_layout, block_table, ring, row, slot, offset, kept, most, chain, zero)
