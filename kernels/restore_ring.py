"""restore_ring: what rejected rows overwrote in a ring, brought back."""

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt

from .cache_rows import (
    add_lengths,
    as_flags,
    constant,
    in_order,
    load_lengths,
    locate,
    my_moves,
    not_negative,
    row_numbers,
)
from .row_moves import move_runs
from .window_runs import run_unit, runs_of, runs_pay, slots_of


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
    batch, _, window, _ = saved.shape
    row = row_numbers(batch, window)
    seq_len = load_lengths(seq_lens)
    accepted = load_lengths(num_accepted)
    slot, outside = locate(add_lengths(seq_len, row), cache, cache_layout, block_table, True)
    rejected = rejected_rows(row, seq_len, accepted, outside)
    unit = run_unit(cache, cache_layout, block_table, True)
    runs = []
    if window > 1 and runs_pay(moves, saved, cache_layout, window - 1, unit):
        begin = add_lengths(accepted, constant((batch, 1), 1))
        for run in runs_of(rejected, begin, seq_len, window - 1, unit, saved, cache_layout):
            size, first, exists = run
            runs.append((size, first, exists, slots_of(first, slot), exists))
    else:
        exists = as_flags(rejected)
        runs.append((1, row, exists, slot, exists))
    move_runs(moves, "BHSD", cache_layout, runs)


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
