"""compact_window: the accepted rows of a window already in the cache, made contiguous."""

from __future__ import annotations

import numpy as np

from draft_verify.reference.cache import PAGED, block_size, key_at, num_slots, slot_of, value_at


def compact_window(
    key_cache,
    value_cache,
    seq_lens: np.ndarray,
    path: np.ndarray,
    num_accepted: np.ndarray,
    *,
    draft_lens: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    cache_layout: str = "BHSD",
    scrub: bool = False,
    ring: bool = False,
):
    """What position seq_lens[b] + path[b, j] holds goes to seq_lens[b] + j, all read before any is written; in place.

    With `scrub`, the window's later positions up to seq_lens[b] + draft_lens[b] are set to zero, where the sequence
    has a slot for them. Returns (key_cache, value_cache).
    """
    if isinstance(key_cache, tuple):
        for keys, values in zip(key_cache, value_cache):
            compact_window(
                keys,
                values,
                seq_lens,
                path,
                num_accepted,
                draft_lens=draft_lens,
                block_table=block_table,
                cache_layout=cache_layout,
                scrub=scrub,
                ring=ring,
            )
        return key_cache, value_cache

    place = {"cache_layout": cache_layout, "block_table": block_table, "ring": ring}
    slots = num_slots(value_cache, cache_layout, block_table)
    rows = path.shape[1]
    for b in np.flatnonzero(num_accepted >= 0):
        length, kept = int(seq_lens[b]), int(num_accepted[b]) + 1
        last = rows - 1 if draft_lens is None else int(draft_lens[b])
        for cache, at in ((key_cache, key_at), (value_cache, value_at)):
            tokens = [at(cache, b, length + int(row), **place).copy() for row in path[b, :kept]]
            for j, token in enumerate(tokens):
                at(cache, b, length + j, **place)[:] = token
            for position in range(length + kept, length + last + 1) if scrub else ():
                slot = slot_of(position, slots, ring)
                if slot >= slots:
                    break
                if cache_layout in PAGED and block_table[b, slot // block_size(cache, cache_layout)] < 0:
                    continue
                at(cache, b, position, **place)[:] = 0
    return key_cache, value_cache
