"""commit_window: the accepted rows of a window written into the cache, one row at a time."""

from __future__ import annotations

import numpy as np

from draft_verify.reference.cache import key_at, num_slots, to_cache, value_at


def commit_window(
    key_cache,
    value_cache,
    key,
    value,
    seq_lens: np.ndarray,
    num_accepted: np.ndarray,
    *,
    path: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    cache_layout: str = "BHSD",
    ring: bool = False,
    key_scale=None,
    value_scale=None,
):
    """Window row path[b, j] goes to position seq_lens[b] + j for j = 0..num_accepted[b]; in place.

    Returns (key_cache, value_cache). A ring keeps the last S of the accepted rows: earlier ones would be pushed out by
    them.
    """
    if isinstance(key_cache, tuple):
        for layer in range(len(key_cache)):
            commit_window(
                key_cache[layer],
                value_cache[layer],
                key[layer],
                value[layer],
                seq_lens,
                num_accepted,
                path=path,
                block_table=block_table,
                cache_layout=cache_layout,
                ring=ring,
                key_scale=key_scale if key_scale is None else key_scale[layer],
                value_scale=value_scale if value_scale is None else value_scale[layer],
            )
        return key_cache, value_cache

    place = {"cache_layout": cache_layout, "block_table": block_table, "ring": ring}
    slots = num_slots(value_cache, cache_layout, block_table)
    for b in range(len(seq_lens)):
        kept = num_accepted[b] + 1
        for j in range(max(0, kept - slots) if ring else 0, kept):
            row = j if path is None else path[b, j]
            position = int(seq_lens[b]) + j
            key_at(key_cache, b, position, **place)[:] = to_cache(key[b, :, row], key_cache.dtype, key_scale)
            value_at(value_cache, b, position, **place)[:] = to_cache(value[b, :, row], value_cache.dtype, value_scale)
    return key_cache, value_cache
