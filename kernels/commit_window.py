"""commit_window: the accepted rows of a window, and only those, into every kind of cache."""

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt

from .cache_rows import (
    add_lengths,
    cache_columns,
    cache_row_indices,
    cache_rows,
    flag_path,
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
from .window_runs import kept_runs, runs_pay, slots_of

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
    chain,
    ring,
):
    """Writes window rows path[b, 0..num_accepted[b]] to positions seq_lens[b].. of the caches, in place.

    Rows move HBM -> SBUF -> HBM by an indirect gather and an indirect scatter for every 128 of them, with indices from
    the chip and out of range where a row is not kept: one program for all lengths, outcomes and trees, and only kept
    rows cost bytes. Where there are many, the rows of a chain move in runs (window_runs).

    UNVERIFIED: that the compiler takes nt.mutable_tensor for a parameter that is a tuple of tensors; a single layer
    therefore comes as the tensor itself.

    Args:
        key_caches, value_caches: HBM tensors in `cache_layout`, one or a tuple with one a layer; written in place.
        keys, values: [B, Hkv, T, D], the windows, likewise.
        seq_lens, num_accepted: [B] int32.
        path: [B, T] int32, the window rows kept; None for a chain, whose path is 0, 1, 2, ...
        block_table: [B, M] int32 for "NHPD" and "NPHD", else None.
        key_scales, value_scales: [layers, Hkv] fp32 for fp8 caches, else None.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".
        chain: there is no path.
        ring: position p goes to slot p mod S.

    Returns:
        key_caches then value_caches, as one flat tuple.
    """
    key_moves = my_moves(keys, key_caches, key_scales, 0)
    value_moves = my_moves(values, value_caches, value_scales, 1)
    lengths = (seq_lens, num_accepted, path, block_table)
    if cache_layout == "BHDS":
        commit(key_moves, lengths, "BHDS", chain, ring)
        commit(value_moves, lengths, "BHSD", chain, ring)
    else:
        key_moves.extend(value_moves)
        commit(key_moves, lengths, cache_layout, chain, ring)
    return in_order(key_caches, value_caches)


def commit(moves, lengths, cache_layout, chain, ring):
    """Moves the kept rows of each (window, cache, scales, layer) in `moves`, all of one shape."""
    if len(moves) == 0:
        return
    window, cache, _, _ = moves[0]
    seq_lens, num_accepted, path, block_table = lengths
    batch, heads, rows, head_dim = window.shape
    groups = row_groups(heads, cache_layout)
    slots = num_slots(cache, cache_layout, block_table)

    seq_len = load_lengths(seq_lens)
    accepted = load_lengths(num_accepted)
    row = row_numbers(batch, rows)
    slot, outside = locate(add_lengths(seq_len, row), cache, cache_layout, block_table, ring)
    if not chain:
        row = load_path(path)
        flag_path(outside, row)
    move = kept_rows(accepted, outside)
    if ring:
        move = last_rows(move, accepted, slots)
    # One row a descriptor, or runs of rows: a column of the index tiles for each size.
    sizes = [1]
    if chain and runs_pay(batch, heads, head_dim, rows, slots, cache_layout, ring):
        unit = cache.shape[2] if cache_layout == "NHPD" else slots if ring else 0
        row, move, sizes = kept_runs(move, seq_len, min(rows, slots), unit)
        slot = slots_of(row, slot)
    sources = window_row_indices(row, move, heads, groups, rows)
    targets = cache_row_indices(slot, move, cache, cache_layout, heads)

    columns = len(sizes)
    spread = row.shape[1] // columns
    turn = 0
    buffers = staging(columns * len(moves), (nl.tile_size.pmax, heads // groups, sizes[0] * head_dim), window.dtype)
    for tile in row_tiles(batch, groups, spread):
        source = on_partitions(sources, tile, columns)
        target = on_partitions(targets, tile, columns)
        for column in range(columns):
            elements = sizes[column] * head_dim
            for window, cache, scales, layer in moves:
                buffer = buffers[turn % len(buffers)][0 : source.shape[0], :, 0:elements]
                turn += 1
                gather(buffer, window_rows(window), source[:, column : column + 1])
                if cache.dtype != window.dtype:
                    buffer = to_float8(buffer, scales, layer, tile, groups, spread)
                if cache_layout == "BHDS":
                    scatter(cache_columns(cache), target[:, column : column + 1], to_columns(buffer, sizes[column]))
                else:
                    scatter(cache_rows(cache, cache_layout, head_dim), target[:, column : column + 1], buffer)


def to_columns(buffer, size):
    """Runs [count, 1, size * D] of rows as [count, D, size]: element by element along the slots."""
    count, _, elements = buffer.shape
    head_dim = elements // size
    if size == 1:
        return buffer.reshape((count, head_dim, 1))
    columns = nl.ndarray((count, head_dim, size), dtype=buffer.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=columns, src=buffer.reshape((count, size, head_dim)).permute((0, 2, 1)))
    return columns


def to_float8(buffer, scales, layer, tile, groups, rows):
    """Rows [count, heads, elements] over their head's scale, saturated at 240, as fp8."""
    count, row_heads, elements = buffer.shape
    _, sequences, group, tile_groups = tile
    heads = scales.shape[1]
    inverse = nl.ndarray((count, row_heads), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[0, count], [1, heads]] if groups == 1 else [[0, sequences], [1, tile_groups], [0, rows]]
    nisa.dma_copy(dst=inverse, src=scales.ap(pattern=pattern, offset=layer * heads + group))
    nisa.reciprocal(dst=inverse, data=inverse)

    # Scalar and Vector engine take one pass each.
    scaled = nl.ndarray((count, row_heads, elements), dtype=nl.float32, buffer=nl.sbuf)
    for head in range(row_heads):
        nisa.activation(dst=scaled[:, head, :], op=nl.copy, data=buffer[:, head, :], scale=inverse[:, head : head + 1])
    saturated = nl.ndarray((count, row_heads, elements), dtype=nl.float8_e4m3, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=saturated, data=scaled, op0=nl.minimum, operand0=FLOAT8_MAX, op1=nl.maximum, operand1=-FLOAT8_MAX
    )
    return saturated
