"""What is known of an attention call before any data: its shape, how rows and slots are cut into tiles.

A row is one query head of one window row. The rows of a sequence are contiguous in HBM, [Hq * T, D], those of one
key/value head are R = Hq / Hkv * T of them. Rows lie on partitions, cache slots along the free axis: a row's slots are
then an interval of a range_select, its maximum comes with the mask, its sum with the exponential.

A row tile is up to 128 consecutive rows: several whole heads where they fit, so that lanes are not idle, else a part
of one. A chunk is the slots that one pass of the softmax covers.
"""

from typing import NamedTuple

import nki.language as nl

PARTITIONS = 128
PSUM_BANK = 512  # fp32 a partition
PSUM_BANK_BYTES = 2048
NOTHING_SEEN = 1e20  # minus the maximum of a row that saw no key yet: exp(score + this) is 0 for a masked score


class Shape(NamedTuple):
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
    scale: float
    sliding_window: int  # 0 is none
    softcap: float  # 0.0 is none
    cache_only: bool  # there are no window keys
    positioned: bool  # the cache's first slot and row 0 have positions of their own, not 0 and seq_lens


class Chunk(NamedTuple):
    """A pass over `slots` slots. Slot p * per_partition + j is entry j of partition p, one descriptor a partition."""

    slots: int
    partitions: int
    per_partition: int
    most: int  # chunks that one sequence can need


class RowTile(NamedTuple):
    """Rows first_row.. of a sequence, of key/value heads first_head.."""

    first_row: int
    rows: int
    first_head: int
    heads: int


def tile(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(shape, dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def plan_chunk(slots, longest):
    """Chunks of a multiple of 128 slots, at most `longest`; of all slots where there are fewer than 128."""
    if slots < PARTITIONS:
        return Chunk(slots, slots, 1, 1)
    per_partition = min(slots, longest) // PARTITIONS
    size = per_partition * PARTITIONS
    return Chunk(size, PARTITIONS, per_partition, (slots + size - 1) // size)


def plan_rows(shape, first_head, last_head):
    """Row tiles of the heads first_head..last_head - 1."""
    tiles = []
    if shape.rows <= PARTITIONS:
        # The outputs of a tile's heads share one PSUM bank.
        most = min(PARTITIONS // shape.rows, PSUM_BANK // shape.head_dim)
        for head in range(first_head, last_head, most):
            heads = min(most, last_head - head)
            tiles.append(RowTile(head * shape.rows, heads * shape.rows, head, heads))
    else:
        for head in range(first_head, last_head):
            for row in range(0, shape.rows, PARTITIONS):
                tiles.append(RowTile(head * shape.rows + row, min(PARTITIONS, shape.rows - row), head, 1))
    return tiles


def head_parts(head_dim):
    """The head size as contractions of at most 128: a list of (first, size)."""
    parts = []
    for first in range(0, head_dim, PARTITIONS):
        parts.append((first, min(PARTITIONS, head_dim - first)))
    return parts
