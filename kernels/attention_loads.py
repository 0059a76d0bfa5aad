"""Queries, keys and values of one pass, from HBM to where the Tensor engine wants them."""

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import fetch_runs, fetch_transposed_runs
from .attention_plan import PARTITIONS, PIECE, PSUM_BANK_BYTES, head_parts, psum, psum_width, tile

# A DMA engine serves 8 partitions: what is small lies apart, so that none is late with its share of the keys.
LOWER = 32
UPPER = 64

# PSUM is emptied by two engines in turn.
EVICTION_ENGINES = (nisa.engine.scalar, nisa.engine.vector)


def load_queries(shape, rows, query, current, stationary):
    """Fills `stationary` as transpose_queries does, from HBM."""
    queries = new_queries(shape, rows)
    fetch_queries(shape, rows, query, current, queries)
    transpose_queries(shape, rows, queries, stationary)


def new_queries(shape, rows):
    upper = UPPER if rows.rows <= PARTITIONS - UPPER else 0
    return tile((upper + rows.rows, shape.head_dim), shape.dtype)[upper : upper + rows.rows]


def fetch_queries(shape, rows, query, current, queries):
    """A row tile's queries [rows, D] as they lie."""
    head_dim = shape.head_dim
    sequence_size = shape.query_heads * shape.window * head_dim
    nisa.dma_copy(
        dst=queries,
        src=query.reshape((shape.batch, sequence_size)).ap(
            pattern=[[head_dim, rows.rows], [1, head_dim]],
            offset=current.sequence * sequence_size + rows.first_row * head_dim,
            scalar_offset=current.sequence_index,
            indirect_dim=0,
        ),
    )


def transpose_queries(shape, rows, queries, stationary):
    """Fills `stationary` [128, parts of D, groups, count]: q transposed, each group's rows in that group's copy only.

    The groups of a tile, heads or streams, have keys of their own but share a score tile: group g adds
    [.. 0, q_g, 0 ..] x keys_g to it.
    """
    groups = stationary.shape[2]
    own = rows.rows // rows.heads
    stride = rows.count // groups
    parts = head_parts(shape.head_dim)
    for part in range(len(parts)):
        first, size = parts[part]
        transposed = psum((size, rows.rows), shape.dtype)
        nisa.nc_transpose(dst=transposed, data=queries[:, first : first + size], engine=nisa.engine.tensor)
        for group in range(groups):
            source = (group % rows.heads) * own
            nisa.tensor_copy(
                dst=stationary[0:size, part, group, group * stride : group * stride + own],
                src=transposed[:, source : source + own],
                engine=nisa.engine.scalar,
            )


def repeat(rows, values):
    """Copies what `values` [count, n] holds for the first stream of a row tile to the others."""
    stride = rows.count // rows.streams
    for stream in range(1, rows.streams):
        own = slice(stream * stride, (stream + 1) * stride)
        nisa.tensor_copy(dst=values[own], src=values[0:stride], engine=nisa.engine.gpsimd)


def new_window(shape, rows):
    """Room for the window's keys and values."""
    first = LOWER if shape.window <= UPPER - LOWER else UPPER
    keys = tile((first + shape.window, rows.heads, shape.head_dim), shape.dtype)[first : first + shape.window]
    return keys, tile((shape.window, rows.heads, shape.head_dim), shape.dtype)


def fetch_window(shape, rows, key, value, current, window):
    """The window's keys and values [T, heads, D]."""
    head_dim = shape.head_dim
    sequence_size = shape.heads * shape.window * head_dim
    for pair in ((window[0], key), (window[1], value)):
        loaded, source = pair
        nisa.dma_copy(
            dst=loaded,
            src=source.reshape((shape.batch, sequence_size)).ap(
                pattern=[[head_dim, shape.window], [shape.window * head_dim, rows.heads], [1, head_dim]],
                offset=current.sequence * sequence_size + rows.first_head * shape.window * head_dim,
                scalar_offset=current.sequence_index,
                indirect_dim=0,
            ),
        )


def prepare_window(shape, rows, window, keep, inverse_scales):
    """The window's keys transposed, a tile [part of D, heads, T] for each part of D, and its values [T, heads, D].

    Args:
        keep: [T, 1] of 1 where a window row is live, of 0 in rows of padding, whose values may be anything and are
            cleared.
        inverse_scales: [T, Hkv] fp32, what values are multiplied by to be in the cache's units, or None.
    """
    keys = window[0]
    values = tile(keys.shape, shape.dtype)
    silence(shape, values.expand_dim(2), window[1].expand_dim(2), keep)
    if inverse_scales != None:  # noqa: E711
        own_scales = inverse_scales[:, rows.first_head : rows.first_head + rows.heads]
        nisa.tensor_tensor(
            dst=values, data1=values, data2=own_scales.expand_dim(2).broadcast(2, shape.head_dim), op=nl.multiply
        )
    transposed = []
    for part_of_head in head_parts(shape.head_dim):
        first, part = part_of_head
        moving = tile((part, rows.heads, shape.window), shape.dtype)
        staged = psum((part, rows.heads, psum_width(shape.window)), shape.dtype)
        for head in range(rows.heads):
            nisa.nc_transpose(
                dst=staged[:, head, 0 : shape.window],
                data=keys[:, head, first : first + part],
                engine=nisa.engine.tensor,
            )
        nisa.tensor_copy(dst=moving, src=staged[:, :, 0 : shape.window], engine=nisa.engine.scalar)
        transposed.append(moving)
    return transposed, values


def new_slots(shape, chunk, rows, dtype):
    """Room for each segment of a pass as it lies in a cache: [partitions, heads, run, D]."""
    segments = []
    for _ in range(chunk.segments):
        if shape.cache_layout == "NPHD":
            by_token = tile((chunk.partitions, chunk.run, rows.heads, shape.head_dim), dtype)
            segments.append(by_token.permute((0, 2, 1, 3)))
        else:
            segments.append(tile((chunk.partitions, rows.heads, chunk.run, shape.head_dim), dtype))
    return segments


def fetch_slots(shape, chunk, rows, cache, current, index, places, segments):
    """Fills what new_slots made, or its first heads, from `index` on, or, of a paged cache, from `places`."""
    head_dim = shape.head_dim
    head_size = shape.slots * head_dim
    for segment in range(chunk.segments):
        if shape.block_size > 0:
            fetch_runs(shape, chunk, rows, cache, places[:, segment : segment + 1], segments[segment])
            continue
        first = chunk.first + segment * (chunk.partitions // chunk.pieces) * chunk.run
        nisa.dma_copy(
            dst=segments[segment],
            src=cache.reshape((shape.batch * shape.heads * shape.slots, head_dim)).ap(
                pattern=[
                    [chunk.slots // chunk.pieces * head_dim, chunk.pieces],
                    [chunk.run * head_dim, chunk.partitions // chunk.pieces],
                    [head_size, rows.heads],
                    [1, chunk.run * head_dim],
                ],
                offset=(current.sequence * shape.heads + rows.first_head) * head_size + first * head_dim,
                scalar_offset=index,
                indirect_dim=0,
            ),
        )


def new_keys(shape, chunk, rows, dtype):
    """Room for a pass's keys: as new_slots, or, for each part of D, a tile [part, heads, slots] if they are stored
    transposed, [part, heads, run, runs] if they come transposed."""
    if shape.cache_layout != "BHDS" and not chunk.transposed:
        return new_slots(shape, chunk, rows, dtype)
    keys = []
    for part_of_head in head_parts(shape.head_dim):
        _, part = part_of_head
        if shape.cache_layout == "BHDS":
            own = tile((part, rows.heads, chunk.slots), dtype)
        elif shape.cache_layout == "NPHD":
            by_token = tile((part, chunk.run, rows.heads, chunk.segments * chunk.partitions), dtype)
            own = by_token.permute((0, 2, 1, 3))
        else:
            own = tile((part, rows.heads, chunk.run, chunk.segments * chunk.partitions), dtype)
        keys.append(own)
    return keys


def fetch_keys(shape, chunk, rows, key_cache, current, places, keys, begin=PIECE):
    """Fills what new_keys made, or its first heads; `places` as for fetch_slots, `begin` slots before all others."""
    if chunk.transposed:
        fetch_transposed_runs(shape, chunk, rows, key_cache, places, keys)
        return
    if shape.cache_layout != "BHDS":
        fetch_slots(shape, chunk, rows, key_cache, current, current.key_index, places, keys)
        return
    # In pieces, each scored as soon as it is there.
    head_size = shape.head_dim * shape.slots
    parts = head_parts(shape.head_dim)
    for i in range(len(parts)):
        size, heads = keys[i].shape[0:2]
        ends = [min(begin, chunk.slots)]
        for end in range(PIECE, chunk.slots + PIECE, PIECE):
            if end > begin:
                ends.append(min(end, chunk.slots))
        first = 0
        for end in ends:
            count = end - first
            nisa.dma_copy(
                dst=keys[i][:, :, first : first + count],
                src=key_cache.reshape((shape.batch * shape.heads * head_size, 1)).ap(
                    pattern=[[shape.slots, size], [head_size, heads], [1, count]],
                    offset=(current.sequence * shape.heads + rows.first_head) * head_size
                    + parts[i][0] * shape.slots
                    + chunk.first
                    + first,
                    scalar_offset=current.key_index,
                    indirect_dim=0,
                ),
            )
            first = end


def new_moving_keys(shape, chunk, rows):
    """Room for the keys of a pass that is to be transposed: for each segment, for each part of D, a tile
    [part, heads, run, partitions]."""
    segments = []
    come_transposed = shape.cache_layout == "BHDS" or chunk.transposed
    for _ in range(0 if come_transposed else chunk.segments):
        parts = []
        for part_of_head in head_parts(shape.head_dim):
            parts.append(tile((part_of_head[1], rows.heads, chunk.run, chunk.partitions), shape.dtype))
        segments.append(parts)
    return segments


def transpose_keys(shape, chunk, rows, keys, room):
    """A pass's keys from where they lie to `room`, as new_moving_keys makes it."""
    banks = 0
    for segment in range(len(room)):
        slots_first = keys[segment]
        if slots_first.dtype != shape.dtype:
            widened = tile(slots_first.shape, shape.dtype)
            # GpSimd describes the gathers of a paged cache.
            engine = nisa.engine.gpsimd if shape.block_size == 0 else nisa.engine.scalar
            nisa.tensor_copy(dst=widened, src=slots_first, engine=engine)
            slots_first = widened
        parts = head_parts(shape.head_dim)
        for i in range(len(parts)):
            first, part = parts[i]
            for head in range(rows.heads):
                moved = room[segment][i][:, head, :, :]
                banks += transpose_all(moved, slots_first[:, head, :, first : first + part], banks)


def moving_keys(shape, chunk, rows, keys, room):
    """A pass's keys, D on partitions: for each segment, for each part of D, a tile [part, heads, pieces, partitions of
    each, run]; of `keys` if they come so, else of `room`, where transpose_keys put them."""
    moving = []
    per_piece = chunk.partitions // chunk.pieces
    for segment in range(chunk.segments):
        parts = []
        if shape.cache_layout == "BHDS":
            for part in keys:
                size = (part.shape[0], rows.heads, chunk.pieces, chunk.segments, per_piece, chunk.run)
                parts.append(part.reshape(size)[:, :, :, segment, :, :])
        elif chunk.transposed:
            own = slice(segment * chunk.partitions, (segment + 1) * chunk.partitions)
            for part in keys:
                parts.append(part[:, :, :, own].permute((0, 1, 3, 2)).expand_dim(2))
        else:
            for part in room[segment]:
                parts.append(part.permute((0, 1, 3, 2)).reshape_dim(2, (chunk.pieces, per_piece)))
        moving.append(parts)
    return moving


def transpose_all(dst, data, before):
    """dst [N, n, M] = each data[:, i, :] of [M, n, N] transposed, through PSUM a bank at a time; returns how many.

    `before`: how many there were before, so that the engines take turns.
    """
    size, count, width = dst.shape
    bank = max(1, PSUM_BANK_BYTES // (psum_width(width) * (4 if dst.dtype == nl.float32 else 2)))
    for first in range(0, count, bank):
        some = min(bank, count - first)
        staged = psum((size, some, psum_width(width)), dst.dtype)
        for i in range(some):
            nisa.nc_transpose(dst=staged[:, i, 0:width], data=data[:, first + i, :], engine=nisa.engine.tensor)
        # Vector first: Scalar still exponentiates.
        engine = EVICTION_ENGINES[(before + first // bank + 1) % 2]
        nisa.tensor_copy(dst=dst[:, first : first + some, :], src=staged[:, :, 0:width], engine=engine)
    return (count + bank - 1) // bank


def slots_to_keep(shape, slot, current, dtype):
    """[partitions, segments, run] of 1 in the slots that a pass may weigh, of 0 in others that it loads."""
    here = current.end[0 : slot.shape[0]]
    keep = tile(slot.shape, bits_of(shape.head_dim, dtype))
    nisa.tensor_scalar(dst=keep, data=slot, op0=nl.less, operand0=here)
    if shape.sliding_window > 0 or shape.ring:
        nisa.scalar_tensor_tensor(
            dst=keep,
            data=slot,
            op0=nl.greater_equal,
            operand0=current.first[0 : slot.shape[0]],
            op1=nl.multiply,
            operand1=keep,
        )
    return keep


def bits_of(head_dim, dtype):
    """The widest integer dtype in which a head's values can be masked, as bits."""
    size = head_dim * (4 if dtype == nl.float32 else 1 if dtype == nl.float8_e4m3 else 2)
    return nl.int32 if size % 4 == 0 else nl.int16 if size % 2 == 0 else nl.int8


def silence(shape, silenced, values, keep):
    """silenced = `values` [partitions, heads, n, D], or zeros where `keep` [partitions, n] is 0, not 1: no weight
    silences a NaN."""
    integer = bits_of(values.shape[3], values.dtype)
    silenced = silenced.view(integer)
    bits = values.view(integer)
    if shape.block_size == 0:
        # Products of integers are GpSimd's, and exact there.
        own = keep.expand_dim(1).broadcast(1, bits.shape[1]).expand_dim(3).broadcast(3, bits.shape[3])
        nisa.tensor_tensor(dst=silenced, data1=bits, data2=own, op=nl.multiply)
        return
    # GpSimd describes gathers.
    mask = tile(keep.shape, integer)
    nisa.tensor_scalar(dst=mask, data=keep, op0=nl.multiply, operand0=-1.0)
    for i in range(bits.shape[2]):
        nisa.tensor_scalar(
            dst=silenced[:, :, i, :], data=bits[:, :, i, :], op0=nl.bitwise_and, operand0=mask[:, i : i + 1]
        )
