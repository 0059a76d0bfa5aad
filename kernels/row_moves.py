"""Runs of rows on their way from HBM to HBM, through buffers on the chip."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import (
    ABSENT,
    cache_row_indices,
    cache_rows,
    constant,
    element_bytes,
    head_size,
    num_heads,
    on_partitions,
    row_tiles,
    run_pieces,
)

MAX_KINDS = 6  # of moves that take turns: so many have 18 buffers
MAX_BYTES = 8192  # a partition of a buffer
RUN_BYTES = 1024  # a descriptor with which a DMA stays within 1.5 of the bytes' time
MOST_INDICES = 64  # of a DMA where partitions can share a run's heads: GpSimd takes ~10 ns for each
PART_BYTES = 64  # what HBM reads and writes at least
FLOAT8_MAX = 240.0


def move_runs(moves, source_layout, target_layout, runs, zero):
    """Moves runs of rows of each (source, target, scales, layer) in `moves`, all of one shape.

    A run and the heads it is for are in one tile, all columns of which are read before any is written.

    Args:
        source_layout, target_layout: a cache's, or "BHSD" for a window, which is such a cache of T slots.
        runs: for each size (rows, sources, source_exists [B, C] uint8, target [B, C] int32, target_exists): what
            `locate` says of the first row of each run, and whether there is one. A run comes from as many equal
            `sources` [B, C] int32, the first row of each. Without one it is zero.
        zero: [128, 1] int32.
    """
    kinds = []
    for run in runs:
        kinds.extend(kinds_of(moves, source_layout, target_layout, run, len(runs) == 1))
    for first in range(0, len(kinds), MAX_KINDS):
        take_turns(moves, source_layout, target_layout, kinds[first : first + MAX_KINDS], zero)


def take_turns(moves, source_layout, target_layout, kinds, zero):
    """Gathers and scatters of every kind for one move after the other.

    Gathers run ahead by a turn of every kind and one more: GpSimd, which issues DMAs in program order, ~1 us each, then
    waits neither ~2 us for the gather that a scatter needs, nor for gathers that are behind another's long scatter.
    """
    ahead = len(kinds) + 1
    depth = -(-2 * ahead // len(kinds))
    steps = len(moves) * len(kinds)
    for step in range(steps + ahead):
        if step < steps:
            turn = step // len(kinds)
            size, heads, parts, _, indices, buffers = kinds[step % len(kinds)]
            source = moves[turn][0]
            sources = indices.shape[1] - 1
            if turn < depth:
                whole = at_rows(source, source_layout, indices[:, 0:1], heads, size, parts)
                buffers.append(zeros(whole.shape, whole.dtype, zero))
            for number in range(sources):
                rows = at_rows(source, source_layout, indices[:, number : number + 1], heads, size // sources, parts)
                elements = rows.shape[2]
                part = buffers[turn % depth][:, :, number * elements : (number + 1) * elements]
                nisa.dma_copy(dst=part, src=rows, oob_mode=nisa.oob_mode.skip)
        if step >= ahead:
            turn = (step - ahead) // len(kinds)
            size, heads, parts, tile, indices, buffers = kinds[(step - ahead) % len(kinds)]
            _, target, scales, layer = moves[turn]
            buffer = buffers[turn % depth]
            if target.dtype != buffer.dtype:
                buffer = to_float8(buffer, heads, scales, layer, tile)
            if source_layout != target_layout and size > 1:
                buffer = reordered(buffer, heads, size, source_layout, target_layout, step - ahead)
            index = indices[:, indices.shape[1] - 1 : indices.shape[1]]
            rows = at_rows(target, target_layout, index, heads, size, parts)
            nisa.dma_copy(dst=rows, src=buffer.reshape(rows.shape), oob_mode=nisa.oob_mode.skip)


def kinds_of(moves, source_layout, target_layout, run, alone):
    """What the DMAs of a run need, for each of its tiles: (size, heads, parts, tile, indices, []).

    A partition moves `heads` heads, or one of `parts` parts of one. It has an index for each source, and the target's.
    `alone`: all rows move one by one.
    """
    size, sources, source_exists, target_first, target_exists = run
    source, target, _, _ = moves[0]
    batch, columns = target_first.shape
    heads, head_dim = num_heads(source, source_layout), head_size(source, source_layout)
    head_bytes = head_dim * element_bytes(source.dtype)
    transposed = source_layout == "BHDS" or target_layout == "BHDS"
    # An index takes as long as a short descriptor, so each moves some bytes. In "NPHD" heads lie side by side: the
    # fewer partitions share them, the longer their descriptors.
    least = size * RUN_BYTES // 2 if source_layout == "NPHD" or target_layout == "NPHD" else RUN_BYTES
    most = MOST_INDICES // (batch * columns)
    groups = row_groups(heads, size * head_bytes, most, 0 if transposed else least)
    parts = 1
    if transposed and groups == heads:
        parts = head_parts(head_dim, head_bytes, batch * groups * columns)

    # A DMA engine serves 8 partitions: short descriptors are spread over all of them. The indices of a run stand side
    # by side: a descriptor of many bytes takes no longer than one of 4.
    columns = columns * parts
    spread = max(1, nl.tile_size.pmax // (batch * groups * columns)) if alone else 1
    rows = constant((batch, groups, columns, spread, len(sources) + 1), ABSENT)
    for number in range(len(sources)):
        first, exists = cut(sources[number], source_exists, source, source_layout, parts)
        cache_row_indices(rows[:, :, :, 0, number], first, exists, source, source_layout, parts)
    first, exists = cut(target_first, target_exists, target, target_layout, parts)
    cache_row_indices(rows[:, :, :, 0, len(sources)], first, exists, target, target_layout, parts)
    kinds = []
    for entry in index_tiles(rows.reshape((batch, groups, columns * spread, len(sources) + 1))):
        tile, indices = entry
        kinds.append((size, heads // groups, parts, tile, indices, []))
    return kinds


def fill_partitions(batch):
    """Whether sequences fill the partitions as they are: no index has to move to another then."""
    return 2 * batch > nl.tile_size.pmax


def index_tiles(rows):
    """Tiles (see row_tiles) of indices [B, groups, C, K], and [count, K] of each, an index a partition."""
    batch, groups, columns, _ = rows.shape
    tiles = []
    if fill_partitions(batch):
        for group in range(groups):
            for column in range(columns):
                tiles.append(((0, batch, group, 1), rows[:, group, column]))
        return tiles
    for tile in row_tiles(batch, groups, columns):
        tiles.append((tile, on_partitions(rows, tile)))
    return tiles


def row_groups(heads, head_bytes, most, least):
    """How many partitions share the heads of a run: up to `most`, each with `least` bytes or more."""
    best = 1
    for groups in range(2, heads + 1):
        fits = groups <= most and heads // groups * head_bytes >= least
        if heads % groups == 0 and (fits or heads // best * head_bytes > MAX_BYTES):
            best = groups
    return best


def head_parts(head_dim, head_bytes, partitions):
    """Parts of a transposed head, which is many descriptors: enough for all DMA engines, none below PART_BYTES."""
    parts = 1
    for candidate in (2, 4, 8, 16, 32):
        fits = candidate * partitions <= nl.tile_size.pmax and head_bytes // candidate >= PART_BYTES
        if head_dim % candidate == 0 and fits:
            parts = candidate
    return parts


def cut(first, exists, cache, cache_layout, parts):
    """Runs [B, C] as [B, C * parts], each of D / parts elements of every row."""
    if parts == 1:
        return first, exists
    batch, columns = first.shape
    shape = (batch, columns, parts)
    flags = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_copy(dst=flags, src=exists.expand_dim(2).broadcast(2, parts))
    stride = 1
    if cache_layout == "BHDS":
        stride = cache.shape[2] // parts * cache.shape[3]
    else:
        whole = nl.ndarray((batch, columns), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=whole, data1=first, data2=constant((batch, columns), parts), op=nl.multiply)
        first = whole
    part = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=part, pattern=[[0, columns], [stride, parts]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=part, data1=part, data2=first.expand_dim(2).broadcast(2, parts), op=nl.add)
    return part.reshape((batch, columns * parts)), flags.reshape((batch, columns * parts))


def zeros(shape, dtype, zero):
    """A buffer in which what is not gathered is zero; by Scalar, since Vector and GpSimd do the index arithmetic."""
    elements = shape[1] * shape[2]
    if elements * element_bytes(dtype) % 4 == 0:
        words = elements * element_bytes(dtype) // 4
        buffer = nl.ndarray((shape[0], words), dtype=zero.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=buffer, src=zero[0 : shape[0]].broadcast(1, words), engine=nisa.engine.scalar)
        return buffer.view(dtype).reshape(shape)
    buffer = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=buffer, value=0.0)
    return buffer


def reordered(buffer, heads, size, source_layout, target_layout, number):
    """Runs in the order of a window, heads by rows by elements, in that of a cache, or back; one in three by
    Scalar, which copies up to four times slower than Vector."""
    to_cache = source_layout == "BHSD"
    cache_layout = target_layout if to_cache else source_layout
    count = buffer.shape[0]
    total = buffer.shape[1] * buffer.shape[2]
    if cache_layout == "NHPD" or (cache_layout == "NPHD" and heads == 1):
        return buffer
    if cache_layout == "NPHD":
        outer, inner = (heads, size) if to_cache else (size, heads)
        view = buffer.reshape((count, outer, inner, total // heads // size)).permute((0, 2, 1, 3))
    else:
        elements = total // heads // size
        outer, inner = (size, elements) if to_cache else (elements, size)
        view = buffer.reshape((count, heads, outer, inner)).permute((0, 1, 3, 2))
    result = nl.ndarray(view.shape, dtype=buffer.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=view, engine=nisa.engine.scalar if number % 3 == 2 else nisa.engine.vector)
    return result


def to_float8(buffer, heads, scales, layer, tile):
    """Runs of a window over their head's scale, saturated at 240, as fp8."""
    count, pieces, elements = buffer.shape
    _, sequences, group, groups = tile
    inverse = nl.ndarray((count, heads), dtype=nl.float32, buffer=nl.sbuf)
    pattern = [[0, sequences], [heads, groups], [0, count // (sequences * groups)], [1, heads]]
    nisa.dma_copy(dst=inverse, src=scales.ap(pattern=pattern, offset=layer * scales.shape[1] + group * heads))
    nisa.reciprocal(dst=inverse, data=inverse)

    # Scalar and Vector engine take one pass each.
    shape = (count, heads, pieces * elements // heads)
    buffer = buffer.reshape(shape)
    scaled = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    for head in range(heads):
        nisa.activation(dst=scaled[:, head], op=nl.copy, data=buffer[:, head], scale=inverse[:, head : head + 1])
    saturated = nl.ndarray(shape, dtype=nl.float8_e4m3, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=saturated, data=scaled, op0=nl.minimum, operand0=FLOAT8_MAX, op1=nl.maximum, operand1=-FLOAT8_MAX
    )
    return saturated


def at_rows(cache, cache_layout, index, heads, size, parts):
    """Runs of `size` rows of `heads` heads, at an index [count, 1] a partition: [count, pieces, elements]."""
    rows = cache_rows(cache, cache_layout, parts)
    stride, pieces, elements = run_pieces(cache, cache_layout, heads, size, parts)
    pattern = [[rows.shape[1], index.shape[0]], [stride, pieces], [1, elements]]
    return rows.ap(pattern=pattern, vector_offset=index, indirect_dim=0)
