"""verify_attention: the rows of each window attend to the KV cache and to each other, in one pass over the cache."""

import nki
import nki.isa as nisa
import nki.language as nl

from .attention_loads import load_keys, load_queries, load_values, load_window, mask_padding, mask_slots
from .attention_plan import PARTITIONS, Shape, head_parts, plan_chunk, plan_rows, tile
from .attention_softmax import (
    attend,
    fresh_state,
    log_sum_exp,
    mask_rows,
    new_state,
    restart,
    row_constants,
    store_output,
)
from .attention_work import load_item, plan_work

SHORT_CHUNK = 512  # slots


@nki.jit
def verify_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    lengths,
    cache_layout,
    scale,
    sliding_window,
    softcap,
    return_lse,
):
    """One runtime loop over a work list of (sequence, chunk of its live slots), all heads in each trip.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hkv, T, D]; None for a call on the cache only.
        key_cache, value_cache: in `cache_layout`.
        lengths: seq_lens, draft_lens [B] int32; or these, cache_start and query_positions.
        scale: of the scores.
        sliding_window: 0 for none.
        softcap: 0.0 for none.
        return_lse: whether to return log-sum-exps.

    Returns:
        output [B, Hq, T, D], and the log-sum-exp [B, Hq, T] fp32.
    """
    batch, query_heads, window, head_dim = query.shape
    heads = value_cache.shape[1]
    shape = Shape(
        batch=batch,
        query_heads=query_heads,
        heads=heads,
        window=window,
        head_dim=head_dim,
        slots=value_cache.shape[2],
        rows=query_heads // heads * window,
        dtype=nl.float32 if value_cache.dtype == nl.float32 else nl.bfloat16,
        cache_layout=cache_layout,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        cache_only=key == None,  # noqa: E711
        positioned=len(lengths) > 2,
    )
    chunk = plan_chunk(shape.slots, SHORT_CHUNK)
    # The cores share the heads where they can.
    shares = nl.num_programs(0) if heads % nl.num_programs(0) == 0 else 1
    first_head = heads // shares * nl.program_id(0)
    tiles = plan_rows(shape, first_head, min(heads, first_head + heads // shares))
    work = plan_work(shape, chunk, lengths)

    output = nl.ndarray(query.shape, dtype=query.dtype, buffer=nl.shared_hbm)
    sums = None
    if return_lse:
        sums = nl.ndarray((2, batch, query_heads * window), dtype=nl.float32, buffer=nl.shared_hbm)

    all_rows = tile((1, query_heads * window))
    nisa.iota(dst=all_rows, pattern=[[0, query_heads], [1, window]], offset=0, channel_multiplier=0)
    slot = tile((chunk.partitions, chunk.per_partition))
    nisa.iota(dst=slot, pattern=[[1, chunk.per_partition]], offset=0, channel_multiplier=chunk.per_partition)
    window_row = tile((window, 1))
    nisa.iota(dst=window_row, pattern=[[0, 1]], offset=0, channel_multiplier=1)

    constants = []
    fresh = []
    states = []
    stationaries = []
    for rows in tiles:
        constants.append(row_constants(shape, rows, all_rows))
        fresh.append(fresh_state(shape, rows))
        states.append(new_state(shape, rows))
        # Zero outside each head's own rows, once for all.
        stationary = tile((min(head_dim, PARTITIONS), len(head_parts(head_dim)), rows.heads, rows.rows), shape.dtype)
        if rows.heads > 1:
            nisa.memset(dst=stationary, value=0.0)
        stationaries.append(stationary)
        if chunk.most > 1:
            nisa.tensor_copy(dst=states[-1].all, src=fresh[-1])

    def attend_item(index):
        entry, item = load_item(work, index)
        invalid = mask_slots(shape, slot, item)
        for i in range(len(tiles)):
            rows = tiles[i]
            load_queries(shape, rows, query, entry, stationaries[i])
            keys = load_keys(shape, chunk, rows, key_cache, entry)
            values = load_values(shape, chunk, rows, value_cache, entry, invalid)
            loaded_window = ()
            if not shape.cache_only:
                padding = mask_padding(window_row, item)
                loaded_window = load_window(shape, rows, key, value, entry, padding)
            masks = mask_rows(shape, rows, constants[i], item)
            restart(states[i], fresh[i], entry, chunk.most == 1)
            attend(shape, chunk, rows, stationaries[i], keys, values, loaded_window, masks, states[i])
            store_output(shape, rows, constants[i], states[i], output, sums, entry, item)

    nl.fori_loop(0, work.count, attend_item)

    if not return_lse:
        return output
    lse = nl.ndarray((batch, query_heads, window), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.num_programs(0) > 1:
        nisa.core_barrier(data=sums, cores=(0, 1))
    if nl.program_id(0) == 0:
        log_sum_exp(lse, sums)
    return output, lse
