"""Rows on their way from HBM to HBM, through buffers on the chip."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import (
    cache_columns,
    cache_row_indices,
    cache_rows,
    on_partitions,
    row_groups,
    row_tiles,
    window_row_indices,
    window_rows,
)

NUM_BUFFERS = 8  # rows in flight: enough to hide a DMA's ~2 us, a few KiB a partition
FLOAT8_MAX = 240.0


def move_window_rows(moves, row, slot, move, sizes, cache_layout):
    """Moves rows of each (window, cache, scales, layer) in `moves`, all of one shape, from the window to the cache.

    Args:
        row: [B, Q] int32 tile, the first window row of each run.
        slot: [B, Q] int32 tile, what `locate` says of that row's place in the cache.
        move: [B, Q] fp32 tile, 1 where the run moves.
        sizes: [1] where every column is a single row; else the rows of each of the Q runs.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".
    """
    window, cache, _, _ = moves[0]
    batch, heads, rows, head_dim = window.shape
    groups = row_groups(heads, cache_layout)
    sources = window_row_indices(row, move, heads, groups, rows)
    targets = cache_row_indices(slot, move, cache, cache_layout, heads)

    # Single rows lie on partitions, all columns at once; a run's size is static, so each column of runs has its DMAs.
    columns = len(sizes)
    spread = row.shape[1] // columns
    buffers = staging(columns * len(moves), (nl.tile_size.pmax, heads // groups, max(sizes) * head_dim), window.dtype)
    turn = 0
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


def staging(num_moves, shape, dtype):
    """Buffers of zeros for rows on their way: what is not gathered stays zero."""
    buffers = []
    for _ in range(min(NUM_BUFFERS, num_moves)):
        buffer = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        nisa.memset(dst=buffer, value=0.0, engine=nisa.engine.vector)
        buffers.append(buffer)
    return buffers


def gather(buffer, rows, index):
    """buffer [count, row_heads, D] = the rows at `index` [count, 1]; unchanged where that is out of range."""
    nisa.dma_copy(dst=buffer, src=at_rows(rows, index, buffer.shape), oob_mode=nisa.oob_mode.skip)


def scatter(rows, index, buffer):
    """The rows at `index` [count, 1] = buffer [count, row_heads, D]; an index out of range writes nothing."""
    nisa.dma_copy(dst=at_rows(rows, index, buffer.shape), src=buffer, oob_mode=nisa.oob_mode.skip)


def at_rows(rows, index, shape):
    """`rows`, as cache_rows and window_rows describe them, seen through an index a partition."""
    tensor, head_stride, element_stride = rows
    count, row_heads, head_dim = shape
    return tensor.ap(
        pattern=[[tensor.shape[1], count], [head_stride, row_heads], [element_stride, head_dim]],
        vector_offset=index,
        indirect_dim=0,
    )
