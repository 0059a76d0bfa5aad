"""Rows of windows on their way into caches: by columns, in runs, or one by one."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import as_flags
from .column_moves import move_columns
from .row_moves import move_runs
from .window_runs import columns_pay, longest_run, run_unit, runs_of, runs_pay, segments_of, slots_of


def move_window(moves, cache_layout, block_table, ring, row, slot, offset, kept, most, chain, zero):
    """Moves the entries flagged in `kept` of each (window, cache, scales, layer) in `moves`, all of one shape.

    Args:
        row: [B, T] int32, the window row of each entry.
        slot, offset: [B, T] int32, what `locate` says of each entry.
        kept: [B, T] fp32 flags of entries that are neighbours.
        most: the most entries that can be kept.
        chain: entries are the window's rows.
        zero: [128, 1] int32.
    """
    window, cache, _, _ = moves[0]
    unit = run_unit(cache, cache_layout, block_table, ring)
    longest = longest_run(most, unit)
    if cache_layout == "BHDS" and columns_pay(moves, longest, chain):
        length, end = segments_of(kept, offset, most, unit)
        move_columns(moves, row, slot, length, end, longest, zero)
        return
    runs = []
    if runs_pay(moves, window, 0.5, cache_layout, most, unit, chain):
        for run in runs_of(kept, offset, most, unit, window, cache_layout):
            size, first, exists = run
            sources = [first] if chain else rows_from(first, size, row)
            runs.append((size, sources, exists, slots_of(first, slot), exists))
    else:
        exists = as_flags(kept)
        runs.append((1, [row], exists, slot, exists))
    move_runs(moves, "BHSD", cache_layout, runs, zero)


def rows_from(first, size, row):
    """What `row` [B, T] says of the `size` entries from `first` [B, C] on, each [B, C] int32."""
    rows = []
    for number in range(size):
        entry = nl.ndarray(first.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=entry, data=first, op0=nl.add, operand0=float(number))
        rows.append(slots_of(entry, row))
    return rows
