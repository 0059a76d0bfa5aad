"""What is known of an attention call before any data: its sizes, and how rows and slots are cut into tiles.

A row is one query head of one window row. The rows of a sequence are contiguous in HBM, [Hq * T, D], those of one
key/value head are R = Hq / Hkv * T of them. Rows lie on partitions and cache slots along the free axis, so that what
a row sees is an interval for range_select, its maximum comes with the mask, and its sum with the exponential.

Few rows would leave lanes idle. A row tile therefore holds the rows of several heads, or, of one head, the same rows
several times: each copy, a stream, attends to its own share of the slots.
"""

from dataclasses import dataclass

import nki.language as nl

PARTITIONS = 128
PSUM_BANK = 512  # fp32 a partition
PSUM_BANK_BYTES = 2048
LONGEST_RUN = 16  # slots a descriptor: 4 KiB of bf16 at D = 128 saturate the DMA engines
PIECE = 2048  # slots of transposed keys a descriptor: the same


@dataclass
class Shape(nl.NKIObject):
    """Sizes and variants of one call. `heads`, `window` and `slots` are Hkv, T, and S or M * P."""

    batch: int
    query_heads: int
    heads: int
    window: int
    head_dim: int
    slots: int
    rows: int  # of one key/value head
    dtype: object  # of the Tensor engine's operands
    cache_layout: str
    block_size: int  # P; 0 unless paged
    table_size: int  # M; 0 unless paged
    ring: bool
    scale: float
    sliding_window: int  # 0 is none
    softcap: float  # 0.0 is none
    scaled: bool  # fp8 caches, which have scales of their own
    cache_only: bool  # there are no window keys
    positioned: bool  # the cache's first slot and row 0 have positions of their own, not 0 and seq_lens


@dataclass
class RowTile(nl.NKIObject):
    """Rows first_row.. of a sequence, those of key/value heads first_head.., in `streams` copies.

    Copies begin at multiples of count / streams, where an instruction may start.
    """

    first_row: int
    rows: int
    first_head: int
    heads: int
    streams: int
    count: int  # partitions


@dataclass
class Chunk(nl.NKIObject):
    """The slots of one pass of the softmax, on this core: `segments` tiles of partitions * run slots.

    Slot i of a segment is entry i % run of partition i // run. Of the segments, each stream has an equal share, and of
    each of `pieces` of the slots an equal part, so that what has arrived can be scored. Where two cores share the
    slots, this one takes those from `first` on of every `step`.
    """

    slots: int
    segments: int
    partitions: int
    run: int
    streams: int
    pieces: int  # that a segment has partitions of; more than one only if it has all slots of a stream
    first: int
    step: int
    most: int  # passes that one sequence can need
    transposed: bool = False  # the DMA engines transpose its keys on the way


def tile(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def psum_width(count):
    """Room for `count` transposed values side by side with others: addresses in PSUM are multiples of four bytes.

    UNVERIFIED: the value of nl.tile_size.psum_min_align is not documented.
    """
    return count + count % 2


def plan_rows(shape, query_heads, most_streams):
    """Row tiles of query heads first..last - 1, given as `query_heads`, in groups that share their keys and values."""
    first, last = query_heads
    groups = []
    if shape.rows > PARTITIONS:
        step = PARTITIONS // shape.window * shape.window  # whole windows: every tile starts with window row 0
        first_row = first * shape.window
        last_row = last * shape.window
        while first_row < last_row:
            head = first_row // shape.rows
            end = min(last_row, (head + 1) * shape.rows)
            tiles = []
            for row in range(first_row, end, step):
                count = min(step, end - row)
                tiles.append(RowTile(row, count, head, 1, 1, count))
            groups.append(tiles)
            first_row = end
        return groups

    group = shape.query_heads // shape.heads
    first_head = first // group
    last_head = last // group
    # What a tile's heads weigh up to shares one PSUM bank.
    most = min(PARTITIONS // shape.rows, PSUM_BANK // shape.head_dim)
    together = min(most, last_head - first_head)
    for head in range(first_head, last_head, together):
        heads = min(together, last_head - head)
        rows = heads * shape.rows
        streams = 1
        while together == 1 and 2 * streams <= min(PARTITIONS // rows, most_streams):
            streams *= 2
        groups.append([RowTile(head * shape.rows, rows, head, heads, streams, PARTITIONS if streams > 1 else rows)])
    return groups


def count_row_tiles(groups):
    count = 0
    for group in groups:
        count += len(group)
    return count


def plan_chunk(slots, longest, streams, core, cores):
    """Passes of at most `longest` slots a core over a cache of `slots`."""
    share = min(slots // cores, longest)
    if share < PARTITIONS:
        return Chunk(
            share, 1, share, 1, 1, 1, core * share, cores * share, (slots + cores * share - 1) // (cores * share)
        )
    if share < streams * PARTITIONS:
        streams = 1
    run = share // (streams * PARTITIONS)
    if run > 4:
        # A power of two, so that whole runs fill a PSUM bank.
        longest_run = run
        run = LONGEST_RUN
        while run > longest_run:
            run //= 2
    size = PARTITIONS * run
    segments = share // (streams * size) * streams
    own = segments * size
    pieces = max(1, own // PIECE) if streams > 1 else 1
    most = (slots + cores * own - 1) // (cores * own)
    return Chunk(own, segments, PARTITIONS, run, streams, pieces, core * own, cores * own, most)


def two_byte_cache(shape):
    """Whether the keys' elements are of two bytes: those DMA engines can transpose."""
    return shape.dtype == nl.bfloat16 and not shape.scaled


def plan_runs(shape, longest, rows, all_live):
    """Passes of at most `longest` slots over the runs of a paged cache, wherever its blocks end.

    `all_live`: whether they load no run without a live slot.
    """
    streams = rows.streams if all_live else 1
    run = LONGEST_RUN  # a power of two, so that whole runs fill a PSUM bank
    while run > 1 and (shape.block_size % run > 0 or run * PARTITIONS > longest):
        run //= 2
    partitions = min(PARTITIONS, shape.slots // run)
    segments = max(1, min(longest, shape.slots) // (partitions * run))
    while segments < streams:
        streams //= 2
    segments = segments // streams * streams
    own = segments * partitions * run
    most = (shape.slots + own - 1) // own
    if shape.sliding_window > 0:
        most += 1  # it may begin inside a run
    transposed = all_live and two_byte_cache(shape) and partitions % 16 == 0  # a gather transposes 16 rows at a time
    return Chunk(own, segments, partitions, run, streams, 1, 0, own, most, transposed)


def head_parts(head_dim):
    """The head size as contractions of at most 128: a list of (first, size)."""
    parts = []
    for first in range(0, head_dim, PARTITIONS):
        parts.append((first, min(PARTITIONS, head_dim - first)))
    return parts
