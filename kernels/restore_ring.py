"""restore_ring: what rejected rows overwrote in a ring, brought back."""

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt

from .cache_rows import (
    add_lengths,
    constant,
    in_order,
    load_lengths,
    locate,
    my_moves,
    not_negative,
    row_numbers,
)
from .window_moves import move_window


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
    for share in my_moves((saved_keys, key_caches, None), (saved_values, value_caches, None), cache_layout):
        moves, layout = share
        restore(moves, seq_lens, num_accepted, block_table, layout)
    return in_order(key_caches, value_caches)


def restore(moves, seq_lens, num_accepted, block_table, cache_layout):
    """Restores each cache of the (saved, cache, _, _) in `moves`, all of one shape."""
    saved, cache, _, _ = moves[0]
    batch, _, window, _ = saved.shape
    zero = constant((nl.tile_size.pmax, 1), 0)  # first: buffers are zeroed while lengths are on their way
    row = row_numbers(batch, window)
    seq_len = load_lengths(seq_lens)
    accepted = load_lengths(num_accepted)
    slot, outside, offset = locate(add_lengths(seq_len, row), cache, cache_layout, block_table, True)
    rejected = rejected_rows(row, seq_len, accepted, outside)
    most = max(window - 1, 1)
    move_window(moves, cache_layout, block_table, True, row, slot, offset, rejected, most, True, zero)


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
