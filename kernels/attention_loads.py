"""Queries, keys and values of one item of work, from HBM to where the Tensor engine wants them."""

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PSUM_BANK_BYTES, head_parts, psum, tile
from .attention_work import END, FIRST, KEY_OFFSET, LIVE_ROWS, SEQUENCE, VALUE_OFFSET

# PSUM is emptied by two engines in turn, Vector being the faster at it and the busier elsewhere.
EVICTION_ENGINES = (nisa.engine.scalar, nisa.engine.vector)


def load_queries(shape, rows, query, entry, stationary):
    """Fills `stationary` [128, parts, heads, rows]: q transposed, each head's rows in that head's copy only.

    A tile's heads have keys of their own but share a score tile: head h adds [.. 0, q_h, 0 ..] x keys_h to it.
    """
    sequence_size = shape.query_heads * shape.window * shape.head_dim
    queries = tile((rows.rows, shape.head_dim), shape.dtype)
    nisa.dma_copy(
        dst=queries,
        src=query.reshape((shape.batch, sequence_size)).ap(
            pattern=[[shape.head_dim, rows.rows], [1, shape.head_dim]],
            offset=rows.first_row * shape.head_dim,
            scalar_offset=entry[0:1, SEQUENCE : SEQUENCE + 1],
            indirect_dim=0,
        ),
    )
    own = rows.rows // rows.heads
    parts = head_parts(shape.head_dim)
    for part in range(len(parts)):
        first, size = parts[part]
        transposed = psum((size, rows.rows), shape.dtype)
        nisa.nc_transpose(dst=transposed, data=queries[:, first : first + size], engine=nisa.engine.tensor)
        for head in range(rows.heads):
            columns = slice(head * own, (head + 1) * own)
            nisa.tensor_copy(dst=stationary[0:size, part, head, columns], src=transposed[:, columns])


def mask_slots(shape, slot, item):
    """Marks [partitions, per_partition] uint8 the loaded slots that are not the chunk's; `slot` are their numbers."""
    here = item[0 : slot.shape[0]]
    invalid = tile(slot.shape, nl.uint8)
    nisa.tensor_scalar(dst=invalid, data=slot, op0=nl.greater_equal, operand0=here[:, END : END + 1])
    if shape.sliding_window > 0:
        nisa.scalar_tensor_tensor(
            dst=invalid, data=slot, op0=nl.less, operand0=here[:, FIRST : FIRST + 1], op1=nl.add, operand1=invalid
        )
    return invalid


def mask_padding(window_row, item):
    """Marks [T, 1] uint8 the window's rows of padding."""
    padding = tile(window_row.shape, nl.uint8)
    nisa.tensor_scalar(
        dst=padding,
        data=window_row,
        op0=nl.greater_equal,
        operand0=item[0 : window_row.shape[0], LIVE_ROWS : LIVE_ROWS + 1],
    )
    return padding


def load_window(shape, rows, key, value, entry, padding):
    """The window's keys transposed, a tile [part of D, heads, T] for each part of D, and its values [T, heads, D].

    `padding` [T, 1] uint8 marks window rows whose values may be anything, and are made 0: a probability of 0 does not
    silence a NaN.
    """
    window = shape.window
    size = (window, rows.heads, shape.head_dim)
    keys = tile(size, shape.dtype)
    values = tile(size, shape.dtype)
    sequence_size = shape.heads * window * shape.head_dim
    for loaded, source in ((keys, key), (values, value)):
        nisa.dma_copy(
            dst=loaded,
            src=source.reshape((shape.batch, sequence_size)).ap(
                pattern=[[shape.head_dim, window], [window * shape.head_dim, rows.heads], [1, shape.head_dim]],
                offset=rows.first_head * window * shape.head_dim,
                scalar_offset=entry[0:1, SEQUENCE : SEQUENCE + 1],
                indirect_dim=0,
            ),
        )
    nisa.tensor_copy_predicated(
        dst=values,
        src=0.0,
        predicate=padding.expand_dim(2).broadcast(1, rows.heads).broadcast(2, shape.head_dim),
    )
    transposed = []
    for first, part in head_parts(shape.head_dim):
        moving = tile((part, rows.heads, window), shape.dtype)
        staged = psum((part, rows.heads, window), shape.dtype)
        for head in range(rows.heads):
            nisa.nc_transpose(
                dst=staged[:, head, :], data=keys[:, head, first : first + part], engine=nisa.engine.tensor
            )
        nisa.tensor_copy(dst=moving, src=staged)
        transposed.append(moving)
    return transposed, values


def load_values(shape, chunk, rows, value_cache, entry, invalid):
    """A chunk's values [partitions, heads, per_partition, D]; those marked in `invalid` are made 0."""
    values = load_slots(shape, chunk, rows, value_cache, entry, VALUE_OFFSET)
    nisa.tensor_copy_predicated(
        dst=values,
        src=0.0,
        predicate=invalid.expand_dim(1).expand_dim(3).broadcast(1, rows.heads).broadcast(3, shape.head_dim),
    )
    return values


def load_slots(shape, chunk, rows, cache, entry, column):
    """A chunk of a cache [B, Hkv, S, D] as it lies: [partitions, heads, per_partition, D]."""
    head_size = shape.slots * shape.head_dim
    run = chunk.per_partition * shape.head_dim
    loaded = tile((chunk.partitions, rows.heads, chunk.per_partition, shape.head_dim), cache.dtype)
    nisa.dma_copy(
        dst=loaded,
        src=cache.reshape((shape.batch * shape.heads * shape.slots, shape.head_dim)).ap(
            pattern=[[run, chunk.partitions], [head_size, rows.heads], [1, run]],
            offset=rows.first_head * head_size,
            scalar_offset=entry[0:1, column : column + 1],
            indirect_dim=0,
        ),
    )
    return loaded


def load_keys(shape, chunk, rows, key_cache, entry):
    """A chunk's keys, D on partitions: for each part of D a tile [part, heads, partitions, per_partition] of slots."""
    keys = []
    if shape.cache_layout == "BHDS":
        head_size = shape.head_dim * shape.slots
        for first, part in head_parts(shape.head_dim):
            loaded = tile((part, rows.heads, chunk.partitions, chunk.per_partition), key_cache.dtype)
            nisa.dma_copy(
                dst=loaded,
                src=key_cache.reshape((shape.batch * shape.heads * head_size, 1)).ap(
                    pattern=[[shape.slots, part], [head_size, rows.heads], [1, chunk.slots]],
                    offset=rows.first_head * head_size + first * shape.slots,
                    scalar_offset=entry[0:1, KEY_OFFSET : KEY_OFFSET + 1],
                    indirect_dim=0,
                ),
            )
            keys.append(loaded)
        return keys

    slots_first = load_slots(shape, chunk, rows, key_cache, entry, KEY_OFFSET)
    for first, part in head_parts(shape.head_dim):
        loaded = tile((part, rows.heads, chunk.per_partition, chunk.partitions), shape.dtype)
        for head in range(rows.heads):
            transpose_all(loaded[:, head, :, :], slots_first[:, head, :, first : first + part])
        keys.append(loaded.permute((0, 1, 3, 2)))
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
