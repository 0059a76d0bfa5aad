"""verify_attention: the rows of each window attend to the cache and to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import TRACING, concatenate, launch
from draft_verify.caches import full_like_lengths, layer_scales, smaller
from draft_verify.checks.general import ITEMSIZES, dtype_name
from draft_verify.reference.verify_attention import verify_attention as reference

PARTITIONS = 128  # rows of a tile
MOST_ROW_TILES = 32  # of a core: keeps programs below 20,000 instructions
MOST_QUERY_BYTES = 1 << 20  # of a core: SBUF holds the queries and what they weigh so far beside a pass over the cache


@public
def verify_attention(
    query: Any,
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    seq_lens: Any,
    *,
    draft_lens: Any = None,
    tree: Any = None,
    block_table: Any = None,
    cache_layout: str = "BHSD",
    scale: float | None = None,
    sliding_window: int | None = None,
    ring: bool = False,
    sinks: Any = None,
    softcap: float | None = None,
    key_scale: Any = None,
    value_scale: Any = None,
    cache_start: Any = None,
    query_positions: Any = None,
    return_lse: bool = False,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """Attention of the T window rows of each sequence, in one pass over its live cache slots.

    Row t sees the cached positions up to its own, itself, and its ancestors in the window (all rows before it in a
    chain). Scores are scale * q.k, then softcap * tanh(score / softcap), then the mask. The caches are only read.

    Args:
        query: [B, Hq, T, D] fp32 or bf16, rotated.
        key, value: [B, Hkv, T, D] of query's dtype, the window; both None to attend to the cache only.
        key_cache, value_cache: of query's dtype or fp8 (see the package): "BHSD" [B, Hkv, S, D]; "BHDS" the same
            with keys [B, Hkv, D, S]; "NHPD" [N, Hkv, P, D] and "NPHD" [N, P, Hkv, D] blocks of P tokens.
        seq_lens: [B] int32, tokens in the cache; seq_lens + draft_lens + 1 <= S or M * P, or absolute for a ring.
        draft_lens: [B] int32, drafts in the window, 0..T-1; default T - 1; -1 is an empty slot. Later rows are padding.
        tree: parents [T] or [B, T] int32, before their children; the root's is -1; -2 is padding, which comes last.
        block_table: [B, M] int32 ids of each sequence's blocks, for the paged layouts; unused entries may be -1.
        cache_layout: see above.
        scale: of the scores; default D**-0.5.
        sliding_window: W, a row at position p sees positions p - W + 1 to p.
        ring: position p lives in slot p mod S.
        sinks: [Hq] fp32 logits that count in the denominator only.
        softcap: see above.
        key_scale, value_scale: what fp8 keys and values are multiplied by: a number or [Hkv] fp32; default 1.
        cache_start: [B] int32, position of slot 0; default 0.
        query_positions: [B] int32, position of row 0; default seq_lens.
        return_lse: whether to return log-sum-exps too.
        backend, lnc: see the package.

    Returns:
        output [B, Hq, T, D] of query's dtype, 0 in rows of padding; with return_lse also lse [B, Hq, T] fp32, the
        natural log-sum-exp with the sink, -inf where a row sees nothing.

    Raises:
        ValueError: a shape, dtype or value that does not fit. On a device, a sequence with bad values counts as empty.
    """
    options = {
        "draft_lens": draft_lens,
        "tree": tree,
        "block_table": block_table,
        "cache_layout": cache_layout,
        "scale": scale,
        "sliding_window": sliding_window,
        "ring": ring,
        "sinks": sinks,
        "softcap": softcap,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "cache_start": cache_start,
        "query_positions": query_positions,
    }
    checks.attention.verify_attention(query, key, value, key_cache, value_cache, seq_lens, **options)
    if backend == "reference":
        return reference(query, key, value, key_cache, value_cache, seq_lens, return_lse=return_lse, **options)

    lnc = lnc or 1  # not resolved while tracing
    checks.attention.attention_cores(value_cache, cache_layout, lnc)
    if block_table is not None and backend != TRACING:  # whose sizes may be any
        checks.attention.attention_runs(block_table, value_cache.shape[1 if cache_layout == "NPHD" else 2])
    rows, head_dim = query.shape[2:]
    if draft_lens is None:
        draft_lens = full_like_lengths(seq_lens, rows - 1)
    if tree is not None:
        tree = tree.reshape(-1, rows)
        draft_lens = smaller(draft_lens, (tree != -2).sum(-1) - 1)
    lengths = (seq_lens, draft_lens)
    if cache_start is not None or query_positions is not None:
        start = full_like_lengths(seq_lens, 0) if cache_start is None else cache_start
        lengths = (*lengths, start, seq_lens if query_positions is None else query_positions)
    heads = value_cache.shape[2 if cache_layout == "NPHD" else 1]
    scales = [layer_scales(scale_, value_cache, 1, heads) for scale_ in (key_scale, value_scale)]

    def attend(query: Any, sinks: Any) -> tuple:
        return launch(
            "verify_attention",
            query,
            key,
            value,
            key_cache,
            value_cache,
            lengths,
            tree,
            block_table,
            sinks,
            *scales,
            cache_layout,
            float(head_dim**-0.5 if scale is None else scale),
            sliding_window or 0,
            ring,
            float(softcap or 0.0),
            return_lse,
            backend=backend,
            lnc=lnc,
        )

    most = most_grouped(rows, head_dim, ITEMSIZES[dtype_name(query)], heads // lnc if heads % lnc == 0 else heads)
    outputs = by_groups(attend, query, sinks, heads, most)
    return outputs if return_lse else outputs[0]


def most_grouped(rows: int, head_dim: int, itemsize: int, heads: int) -> int:
    """Query heads of each key/value head for which one launch has room.

    Of windows of `rows` and `heads` key/value heads a core; a tile holds whole windows of one of these, or of several.
    """
    tiles = min(MOST_ROW_TILES, MOST_QUERY_BYTES // (PARTITIONS * head_dim * itemsize))
    return max(1, tiles // heads) * (PARTITIONS // rows)


def by_groups(attend: Callable, query: Any, sinks: Any, heads: int, most: int) -> tuple:
    """`attend` of at most `most` query heads of each key/value head at a time, its outputs in the order of all."""
    batch, query_heads, *row = query.shape
    group = query_heads // heads
    if group <= most:
        return attend(query, sinks)
    parts = []
    for first in range(0, group, most):
        some = slice(first, first + most)
        own_query = query.reshape(batch, heads, group, *row)[:, :, some].reshape(batch, -1, *row)
        own_sinks = None if sinks is None else sinks.reshape(heads, group)[:, some].reshape(-1)
        parts.append(attend(own_query, own_sinks))
    return tuple(
        concatenate([part.reshape(batch, heads, -1, *part.shape[2:]) for part in outputs], 2).reshape(
            batch, query_heads, *outputs[0].shape[2:]
        )
        for outputs in zip(*parts)
    )
