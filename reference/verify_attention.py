"""Verify attention: the T rows of each window attend to the KV cache and to each other (FlashAttention, 2205.14135)."""

from __future__ import annotations

import numpy as np

from draft_verify.reference.cache import PAGED, block_size, num_heads, num_slots


def verify_attention(
    query: np.ndarray,
    key: np.ndarray | None,
    value: np.ndarray | None,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    seq_lens: np.ndarray,
    *,
    draft_lens: np.ndarray | None = None,
    tree: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    cache_layout: str = "BHSD",
    scale: float | None = None,
    sliding_window: int | None = None,
    ring: bool = False,
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
    key_scale: np.ndarray | float | None = None,
    value_scale: np.ndarray | float | None = None,
    cache_start: np.ndarray | None = None,
    query_positions: np.ndarray | None = None,
    return_lse: bool = False,
):
    """Row t of sequence b sees the cached positions up to its own, itself and its ancestors in the window.

    Returns output [B, Hq, T, D] of query's dtype, and with `return_lse` the natural log-sum-exp [B, Hq, T] fp32.
    """
    batch, query_heads, rows, head_dim = query.shape
    heads = num_heads(value_cache, cache_layout)
    slots = num_slots(value_cache, cache_layout, block_table)
    scale = head_dim**-0.5 if scale is None else scale
    key_scales = np.broadcast_to(np.asarray(1.0 if key_scale is None else key_scale, np.float64), (heads,))
    value_scales = np.broadcast_to(np.asarray(1.0 if value_scale is None else value_scale, np.float64), (heads,))
    output = np.zeros(query.shape, query.dtype)
    lse = np.full(query.shape[:3], -np.inf, np.float32)

    for b in range(batch):
        length = int(seq_lens[b])
        draft_len = rows - 1 if draft_lens is None else int(draft_lens[b])
        parents = chain(rows) if tree is None else np.broadcast_to(tree, (batch, rows))[b]
        ancestors = [path_to(parents, t) for t in range(draft_len + 1) if parents[t] != -2]
        first_position = length if query_positions is None else int(query_positions[b])
        start = 0 if cache_start is None else int(cache_start[b])
        cached = np.arange(max(0, length - slots) if ring else 0, length)
        where = cached % slots if ring else cached
        table = None if block_table is None else block_table[b]

        for head in range(query_heads):
            kv_head = head // (query_heads // heads)
            keys = cached_rows(key_cache, b, kv_head, where, cache_layout, table, is_key=True) * key_scales[kv_head]
            values = cached_rows(value_cache, b, kv_head, where, cache_layout, table) * value_scales[kv_head]

            for t, path in enumerate(ancestors):
                position = first_position + len(path) - 1
                oldest = 0 if sliding_window is None else position - sliding_window + 1
                seen = (cached + start >= oldest) & (cached + start <= position)
                row_keys, row_values = keys[seen], values[seen]
                if key is not None:
                    in_reach = [row for depth, row in enumerate(path) if first_position + depth >= oldest]
                    row_keys = np.concatenate([row_keys, key[b, kv_head, in_reach].astype(np.float64)])
                    row_values = np.concatenate([row_values, value[b, kv_head, in_reach].astype(np.float64)])

                scores = scale * (row_keys @ query[b, head, t].astype(np.float64))
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                sink = -np.inf if sinks is None else float(sinks[head])
                largest = max(scores.max(initial=-np.inf), sink)
                if largest == -np.inf:
                    continue  # nothing to see: 0, and a log-sum-exp of -inf
                weights = np.exp(scores - largest)
                total = weights.sum() + np.exp(sink - largest)
                output[b, head, t] = weights @ row_values / total
                lse[b, head, t] = largest + np.log(total)

    return (output, lse) if return_lse else output


def chain(rows: int) -> np.ndarray:
    """The parents of a chain: -1, 0, 1, 2, ..."""
    return np.arange(-1, rows - 1)


def path_to(parents: np.ndarray, row: int) -> list[int]:
    """Window rows from the root to `row`, both included; its length less one is the row's depth."""
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return path


def cached_rows(
    cache: np.ndarray,
    sequence: int,
    head: int,
    slots: np.ndarray,
    cache_layout: str,
    table: np.ndarray | None,
    is_key: bool = False,
) -> np.ndarray:
    """The keys or values [len(slots), D] in these slots of one sequence and head, float64."""
    if cache_layout in PAGED:
        size = block_size(cache, cache_layout)
        blocks, offsets = table[slots // size], slots % size
        rows = cache[blocks, head, offsets] if cache_layout == "NHPD" else cache[blocks, offsets, head]
    elif cache_layout == "BHDS" and is_key:
        rows = cache[sequence, head][:, slots].T
    else:
        rows = cache[sequence, head, slots]
    return rows.astype(np.float64)
