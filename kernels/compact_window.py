"""compact_window: a window that was written before it was verified, its accepted rows moved to be contiguous."""

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt

from .cache_rows import (
    add_lengths,
    as_flags,
    constant,
    flag,
    flag_path,
    in_order,
    kept_rows,
    load_lengths,
    load_path,
    locate,
    my_moves,
    row_numbers,
)
from .row_moves import move_runs


@nki.jit
def compact_window(
    key_caches: nt.mutable_tensor,
    value_caches: nt.mutable_tensor,
    seq_lens,
    path,
    num_accepted,
    draft_lens,
    block_table,
    cache_layout,
    scrub,
    ring,
):
    """Moves positions seq_lens[b] + path[b, j] of the caches to seq_lens[b] + j, j = 0..num_accepted[b], in place.

    Safe where source and destination overlap, in any order that a scheduler may choose: all rows of a sequence and
    head are in one tile, whose scatter needs the whole of what its gather brought to SBUF, and tiles share no row.
    Rows that stay where they are cost nothing.

    Args:
        key_caches, value_caches: HBM tensors in `cache_layout`, one or a tuple with one a layer; any dtype, moved as
            bits.
        seq_lens, num_accepted: [B] int32.
        path: [B, T] int32, the window rows kept.
        draft_lens: [B] int32, the last window row that was written.
        block_table: [B, M] int32 for "NHPD" and "NPHD", else None.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".
        scrub: also writes zeros to positions seq_lens + num_accepted + 1 .. seq_lens + draft_lens.
        ring: position p is in slot p mod S; T is at most S.

    Returns:
        key_caches then value_caches, as one flat tuple.
    """
    lengths = (seq_lens, path, num_accepted, draft_lens, block_table)
    for share in my_moves((key_caches, key_caches, None), (value_caches, value_caches, None), cache_layout):
        moves, layout = share
        compact(moves, lengths, layout, scrub, ring)
    return in_order(key_caches, value_caches)


def compact(moves, lengths, cache_layout, scrub, ring):
    """Compacts each cache in `moves`, all of one shape."""
    cache, _, _, _ = moves[0]
    seq_lens, path, num_accepted, draft_lens, block_table = lengths
    batch, window = path.shape

    zero = constant((nl.tile_size.pmax, 1), 0)  # first: buffers are zeroed while lengths are on their way
    seq_len = load_lengths(seq_lens)
    accepted = load_lengths(num_accepted)
    paths = load_path(path)
    rows = row_numbers(batch, window)
    source_slot, wrong, _ = locate(add_lengths(seq_len, paths), cache, cache_layout, block_table, ring)
    target_slot, outside, _ = locate(add_lengths(seq_len, rows), cache, cache_layout, block_table, ring)
    nisa.tensor_tensor(dst=wrong, data1=wrong, data2=outside, op=nl.add)
    flag_path(wrong, paths, window)
    last = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=last, src=load_lengths(draft_lens))
    flag(wrong, paths, nl.greater, last)
    kept = kept_rows(accepted, wrong, rows)

    moved = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=moved, data1=paths, data2=rows, op=nl.not_equal)
    nisa.tensor_tensor(dst=moved, data1=moved, data2=kept, op=nl.multiply)
    written = moved
    if scrub:
        written = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
        rejected = rejected_rows(rows, accepted, last, kept, outside)
        nisa.tensor_tensor(dst=written, data1=moved, data2=rejected, op=nl.add)
    # A rejected row has no source, so what scrubs its slot is zero.
    runs = [(1, [source_slot], as_flags(moved), target_slot, as_flags(written))]
    move_runs(moves, cache_layout, cache_layout, runs, zero)


def rejected_rows(rows, num_accepted, last, kept, outside):
    """Flags [B, T] fp32 of the rows num_accepted + 1 .. last [B, 1] that have a slot, in sequences that keep row 0."""
    shape = rows.shape
    rejected = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    inside = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    bound = nl.ndarray((shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=bound, src=num_accepted)
    nisa.tensor_scalar(dst=rejected, data=rows, op0=nl.greater, operand0=bound, op1=nl.multiply, operand1=kept[:, 0:1])
    nisa.tensor_scalar(dst=inside, data=rows, op0=nl.less_equal, operand0=last)
    nisa.tensor_tensor(dst=rejected, data1=rejected, data2=inside, op=nl.multiply)
    nisa.tensor_scalar(dst=inside, data=outside, op0=nl.equal, operand0=0.0)
    nisa.tensor_tensor(dst=rejected, data1=rejected, data2=inside, op=nl.multiply)
    return rejected
