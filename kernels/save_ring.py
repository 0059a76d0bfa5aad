"""save_ring: what a window is about to overwrite in a ring."""

import nki
import nki.isa as nisa
import nki.language as nl

from .cache_rows import (
    add_lengths,
    as_flags,
    constant,
    head_size,
    in_order,
    layers_of,
    load_lengths,
    locate,
    my_moves,
    not_negative,
    num_heads,
    row_numbers,
)
from .row_moves import move_runs
from .window_runs import run_unit, runs_of, runs_pay, slots_of


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
    values_layout = "BHSD" if cache_layout == "BHDS" else cache_layout
    shape = (batch, num_heads(cache, values_layout), num_rows, head_size(cache, values_layout))
    saved_keys = []
    saved_values = []
    for _ in layers_of(key_caches):
        saved_keys.append(nl.ndarray(shape, dtype=cache.dtype, buffer=nl.shared_hbm))
        saved_values.append(nl.ndarray(shape, dtype=cache.dtype, buffer=nl.shared_hbm))
    saved_keys = tuple(saved_keys)
    saved_values = tuple(saved_values)

    for share in my_moves((key_caches, saved_keys, None), (value_caches, saved_values, None), cache_layout):
        moves, layout = share
        save(moves, seq_lens, block_table, layout)
    return in_order(saved_keys, saved_values)


def save(moves, seq_lens, block_table, cache_layout):
    """Copies the window's rows of each (cache, saved, _, _) in `moves`, all of one shape."""
    cache, saved, _, _ = moves[0]
    batch, _, window, _ = saved.shape
    zero = constant((nl.tile_size.pmax, 1), 0)  # first: buffers are zeroed while lengths are on their way
    seq_len = load_lengths(seq_lens)
    row = row_numbers(batch, window)
    slot, outside, offset = locate(add_lengths(seq_len, row), cache, cache_layout, block_table, True)
    live = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=live, op=nl.add, data=outside, axis=1)
    nisa.tensor_scalar(dst=live, data=live, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=not_negative(seq_len))

    every = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=every, value=1.0)
    unit = run_unit(cache, cache_layout, block_table, True)
    if runs_pay(moves, saved, 1.0, cache_layout, window, unit, True):
        pieces = runs_of(every, offset, window, unit, saved, cache_layout)
    else:
        pieces = [(1, row, as_flags(every))]
    runs = []
    for run in pieces:
        size, first, exists = run
        # Every row is written, zero where the sequence has no source for it.
        source = nl.ndarray(exists.shape, dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=source, data=exists, op0=nl.multiply, operand0=live)
        runs.append((size, [slots_of(first, slot)], source, first, exists))
    move_runs(moves, cache_layout, "BHSD", runs, zero)
