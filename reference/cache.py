"""Where the key and the value of a position live: the arithmetic that attention and rollback share.

Layouts (design page, "Caches"), `num_slots` S or M * P:

    "BHSD"  keys and values [B, Hkv, S, D]
    "BHDS"  keys [B, Hkv, D, S], values [B, Hkv, S, D]
    "NHPD"  [N, Hkv, P, D] blocks, with a block_table [B, M]
    "NPHD"  [N, P, Hkv, D] blocks, with a block_table [B, M]
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

PAGED = ("NHPD", "NPHD")
FLOAT8_MAX = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3).max)


def block_size(value_cache: np.ndarray, cache_layout: str) -> int:
    """P, the tokens a block holds."""
    return value_cache.shape[2 if cache_layout == "NHPD" else 1]


def num_slots(value_cache: np.ndarray, cache_layout: str, block_table: np.ndarray | None = None) -> int:
    """How many positions a sequence has room for: S, or M * P."""
    if cache_layout in PAGED:
        return block_table.shape[1] * block_size(value_cache, cache_layout)
    return value_cache.shape[2]


def num_heads(value_cache: np.ndarray, cache_layout: str) -> int:
    """Hkv."""
    return value_cache.shape[2 if cache_layout == "NPHD" else 1]


def slot_of(position: int, slots: int, ring: bool = False) -> int:
    """The slot of a position among a sequence's `slots`: a ring keeps position p in slot p mod S."""
    return position % slots if ring else position


def key_at(
    key_cache: np.ndarray,
    sequence: int,
    position: int,
    *,
    cache_layout: str = "BHSD",
    block_table: np.ndarray | None = None,
    ring: bool = False,
) -> np.ndarray:
    """The keys [Hkv, D] of one position of one sequence, as a writable view of the cache."""
    if cache_layout == "BHDS":
        return key_cache[sequence, :, :, slot_of(position, key_cache.shape[3], ring)]
    return value_at(key_cache, sequence, position, cache_layout=cache_layout, block_table=block_table, ring=ring)


def value_at(
    value_cache: np.ndarray,
    sequence: int,
    position: int,
    *,
    cache_layout: str = "BHSD",
    block_table: np.ndarray | None = None,
    ring: bool = False,
) -> np.ndarray:
    """The values [Hkv, D] of one position of one sequence, as a writable view of the cache."""
    slot = slot_of(position, num_slots(value_cache, cache_layout, block_table), ring)
    if cache_layout not in PAGED:
        return value_cache[sequence, :, slot]
    index, offset = divmod(slot, block_size(value_cache, cache_layout))
    block = value_cache[block_table[sequence, index]]
    return block[:, offset] if cache_layout == "NHPD" else block[offset]


def to_cache(rows: np.ndarray, dtype: np.dtype, scale: np.ndarray | float | None = None) -> np.ndarray:
    """Rows [Hkv, D] as a cache of `dtype` holds them: divided by `scale` (scalar or [Hkv]); fp8 saturates at 240."""
    if rows.dtype == dtype and scale is None:
        return rows
    scaled = rows.astype(np.float64)
    if scale is not None:
        scaled = scaled / np.broadcast_to(np.asarray(scale, np.float64), rows.shape[:1])[:, None]
    if dtype == ml_dtypes.float8_e4m3:
        scaled = np.clip(scaled, -FLOAT8_MAX, FLOAT8_MAX)
    return scaled.astype(dtype)
