"""Queries, keys and values of one pass, from HBM to where the Tensor engine wants them."""

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import load_runs
from .attention_plan import PARTITIONS, PSUM_BANK_BYTES, head_parts, psum, tile

LONG_COLUMN = 2048

# A DMA engine serves 8 partitions: what is small lies partly on upper ones, and the first engines are free for keys.
UPPER = 64

# PSUM is emptied by two engines in turn.
EVICTION_ENGINES = (nisa.engine.scalar, nisa.engine.vector)


def load_queries(shape, rows, query, current, stationary):
    """Fills `stationary` [128, parts of D, groups, count]: q transposed, each group's rows in that group's copy only.

    The groups of a tile, heads or streams, have keys of their own but share a score tile: group g adds
    [.. 0, q_g, 0 ..] x keys_g to it.
    """
    head_dim = shape.head_dim
    sequence_size = shape.query_heads * shape.window * head_dim
    upper = UPPER if rows.rows <= PARTITIONS - UPPER else 0
    queries = tile((upper + rows.rows, head_dim), shape.dtype)[upper : upper + rows.rows]
    nisa.dma_copy(
        dst=queries,
        src=query.reshape((shape.batch, sequence_size)).ap(
            pattern=[[head_dim, rows.rows], [1, head_dim]],
            offset=current.sequence * sequence_size + rows.first_row * head_dim,
            scalar_offset=current.sequence_index,
            indirect_dim=0,
        ),
    )
    groups = stationary.shape[2]
    own = rows.rows // rows.heads
    stride = rows.count // groups
    parts = head_parts(head_dim)
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


def load_window(shape, rows, key, value, current, keep, inverse_scales):
    """The window's keys transposed, a tile [part of D, heads, T] for each part of D, and its values [T, heads, D].

    Args:
        keep: [T, 1] of 1 where a window row is live, of 0 in rows of padding, whose values may be anything and are
            cleared.
        inverse_scales: [T, Hkv] fp32, what values are multiplied by to be in the cache's units, or None.
    """
    window = shape.window
    head_dim = shape.head_dim
    keys = tile((UPPER + window, rows.heads, head_dim), shape.dtype)[UPPER : UPPER + window]
    values = tile((window, rows.heads, head_dim), shape.dtype)
    sequence_size = shape.heads * window * head_dim
    for loaded, source in ((keys, key), (values, value)):
        nisa.dma_copy(
            dst=loaded,
            src=source.reshape((shape.batch, sequence_size)).ap(
                pattern=[[head_dim, window], [window * head_dim, rows.heads], [1, head_dim]],
                offset=current.sequence * sequence_size + rows.first_head * window * head_dim,
                scalar_offset=current.sequence_index,
                indirect_dim=0,
            ),
        )
    silence(values.expand_dim(2), keep)
    if inverse_scales != None:  # noqa: E711
        own_scales = inverse_scales[:, rows.first_head : rows.first_head + rows.heads]
        nisa.tensor_tensor(
            dst=values, data1=values, data2=own_scales.expand_dim(2).broadcast(2, head_dim), op=nl.multiply
        )
    transposed = []
    for first, part in head_parts(head_dim):
        moving = tile((part, rows.heads, window), shape.dtype)
        staged = psum((part, rows.heads, window), shape.dtype)
        for head in range(rows.heads):
            nisa.nc_transpose(
                dst=staged[:, head, :], data=keys[:, head, first : first + part], engine=nisa.engine.tensor
            )
        nisa.tensor_copy(dst=moving, src=staged, engine=nisa.engine.scalar)
        transposed.append(moving)
    return transposed, values


def load_slots(shape, chunk, rows, cache, current, index, segment, places):
    """A segment of a cache as it lies: [partitions, heads, run, D]; `places` as find_runs leaves them, or None."""
    if places != None:  # noqa: E711
        return load_runs(shape, chunk, rows, cache, places[segment])
    head_dim = shape.head_dim
    head_size = shape.slots * head_dim
    first = chunk.first + segment * chunk.partitions * chunk.run
    loaded = tile((chunk.partitions, rows.heads, chunk.run, head_dim), cache.dtype)
    nisa.dma_copy(
        dst=loaded,
        src=cache.reshape((shape.batch * shape.heads * shape.slots, head_dim)).ap(
            pattern=[[chunk.run * head_dim, chunk.partitions], [head_size, rows.heads], [1, chunk.run * head_dim]],
            offset=(current.sequence * shape.heads + rows.first_head) * head_size + first * head_dim,
            scalar_offset=index,
            indirect_dim=0,
        ),
    )
    return loaded


def load_keys(shape, chunk, rows, key_cache, current, places):
    """A pass's keys, D on partitions: for each segment, for each part of D, a tile [part, heads, partitions, run]."""
    if shape.cache_layout == "BHDS":
        return load_columns(shape, chunk, rows, key_cache, current)
    keys = []
    for segment in range(chunk.segments):
        slots_first = load_slots(shape, chunk, rows, key_cache, current, current.key_index, segment, places)
        if slots_first.dtype != shape.dtype:
            widened = tile(slots_first.shape, shape.dtype)
            nisa.tensor_copy(dst=widened, src=slots_first, engine=nisa.engine.gpsimd)
            slots_first = widened
        parts = []
        for first, part in head_parts(shape.head_dim):
            loaded = tile((part, rows.heads, chunk.run, chunk.partitions), shape.dtype)
            for head in range(rows.heads):
                transpose_all(loaded[:, head, :, :], slots_first[:, head, :, first : first + part])
            parts.append(loaded.permute((0, 1, 3, 2)))
        keys.append(parts)
    return keys


def load_columns(shape, chunk, rows, key_cache, current):
    """The same from keys stored transposed, some columns of each stream at a time."""
    head_size = shape.head_dim * shape.slots
    stream_slots = chunk.slots // chunk.streams
    loads = []
    for first_dim, part in head_parts(shape.head_dim):
        loaded = tile((part, rows.heads, chunk.streams, stream_slots), key_cache.dtype)
        for first in range(0, stream_slots, LONG_COLUMN):
            columns = min(LONG_COLUMN, stream_slots - first)
            nisa.dma_copy(
                dst=loaded[:, :, :, first : first + columns],
                src=key_cache.reshape((shape.batch * shape.heads * head_size, 1)).ap(
                    pattern=[
                        [shape.slots, part],
                        [head_size, rows.heads],
                        [stream_slots, chunk.streams],
                        [1, columns],
                    ],
                    offset=(current.sequence * shape.heads + rows.first_head) * head_size
                    + first_dim * shape.slots
                    + chunk.first
                    + first,
                    scalar_offset=current.key_index,
                    indirect_dim=0,
                ),
            )
        loads.append(loaded.reshape((part, rows.heads, chunk.segments, chunk.partitions, chunk.run)))
    keys = []
    for segment in range(chunk.segments):
        parts = []
        for loaded in loads:
            parts.append(loaded[:, :, segment, :, :])
        keys.append(parts)
    return keys


def transpose_all(dst, data):
    """dst [N, n, M] = each data[:, i, :] of [M, n, N] transposed, through PSUM a bank at a time."""
    size, count, width = dst.shape
    bank = max(1, PSUM_BANK_BYTES // (width * (4 if dst.dtype == nl.float32 else 2)))
    for first in range(0, count, bank):
        some = min(bank, count - first)
        staged = psum((size, some, width), dst.dtype)
        for i in range(some):
            nisa.nc_transpose(dst=staged[:, i, :], data=data[:, first + i, :], engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=dst[:, first : first + some, :], src=staged, engine=EVICTION_ENGINES[first // bank % 2])


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


def silence(values, keep):
    """Clears those of `values` [partitions, heads, n, D] whose `keep` [partitions, n] is 0: no weight silences a NaN.

    Products of integers are GpSimd's, which has little else to do, and exact there.
    """
    bits = values.view(bits_of(values.shape[3], values.dtype))
    own = keep.expand_dim(1).broadcast(1, bits.shape[1]).expand_dim(3).broadcast(3, bits.shape[3])
    nisa.tensor_tensor(dst=bits, data1=bits, data2=own, op=nl.multiply)
