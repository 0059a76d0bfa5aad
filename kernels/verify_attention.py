"""verify_attention: the rows of each window attend to the KV cache and to each other, in one pass over the cache."""

import nki
import nki.isa as nisa
import nki.language as nl

from .attention_few import attend_few
from .attention_many import attend_many
from .attention_output import log_sum_exp
from .attention_paged import attend_paged
from .attention_passes import MOST_STREAMS, Operands, plan_dense, plan_paged, share_heads, shares_sequences
from .attention_plan import Shape, count_row_tiles, plan_rows
from .attention_softmax import load_exponential
from .attention_tree import ancestor_table, tree_matters
from .merge_attention import merge_all

MOST_UNROLLED = 8  # row tiles times sequences


@nki.jit
def verify_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    lengths,
    parents,
    block_table,
    sinks,
    key_scale,
    value_scale,
    cache_layout,
    scale,
    sliding_window,
    ring,
    softcap,
    return_lse,
):
    """Passes of up to 4096 slots, each an online-softmax step for all rows of a head.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hkv, T, D]; None for a call on the cache only.
        key_cache, value_cache: in `cache_layout`.
        lengths: seq_lens, draft_lens [B] int32; or these, cache_start and query_positions.
        parents: [1, T] or [B, T] int32, or None for chains.
        block_table: [B, M] int32, or None.
        sinks: [Hq] fp32, or None.
        key_scale, value_scale: [Hkv] fp32 for fp8 caches, else None.
        scale: of the scores.
        sliding_window: 0 for none.
        ring: whether position p lives in slot p mod S.
        softcap: 0.0 for none.
        return_lse: whether to return log-sum-exps.

    Returns:
        output [B, Hq, T, D], and the log-sum-exp [B, Hq, T] fp32.
    """
    batch, query_heads, window, head_dim = query.shape
    heads = value_cache.shape[2 if cache_layout == "NPHD" else 1]
    slots = value_cache.shape[2]
    block_size = 0
    table_size = 0
    if block_table != None:  # noqa: E711
        block_size = value_cache.shape[1 if cache_layout == "NPHD" else 2]
        table_size = block_table.shape[1]
        slots = table_size * block_size
    shape = Shape(
        batch=batch,
        query_heads=query_heads,
        heads=heads,
        window=window,
        head_dim=head_dim,
        slots=slots,
        rows=query_heads // heads * window,
        dtype=nl.float32 if value_cache.dtype == nl.float32 else nl.bfloat16,
        cache_layout=cache_layout,
        block_size=block_size,
        table_size=table_size,
        ring=ring,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        scaled=key_scale != None,  # noqa: E711
        cache_only=key == None,  # noqa: E711
        positioned=len(lengths) > 2,
    )

    # Two cores share query heads, or sequences, the slots of each pass, or the passes of each item.
    cores = nl.num_programs(0)
    core = nl.program_id(0)
    own_heads = share_heads(shape, core, cores)
    by_slots = own_heads == None  # noqa: E711
    if by_slots:
        own_heads = (0, query_heads)
    slot_cores = cores if by_slots else 1
    shard = core if by_slots else 0

    groups = plan_rows(shape, own_heads, 1)
    if plan_dense(shape, groups[0][0], shard, slot_cores) != None:  # noqa: E711
        groups = plan_rows(shape, own_heads, MOST_STREAMS)
    few = batch * count_row_tiles(groups) <= MOST_UNROLLED
    if block_table != None and plan_paged(shape, groups[0][0], shard, slot_cores) == None:  # noqa: E711
        few = False

    sequence_cores = 1
    if by_slots and not few and shares_sequences(shape):
        sequence_cores = cores
        slot_cores = 1
        shard = 0

    # Cores that share the passes of many sequences leave HBM what each saw.
    shards = 1 if few else slot_cores
    output = nl.ndarray(query.shape, dtype=query.dtype, buffer=nl.shared_hbm)
    outputs = output.reshape((1, batch, query_heads, window, head_dim))
    sums = None
    if shards > 1:
        outputs = nl.ndarray((shards, batch, query_heads, window, head_dim), dtype=nl.float32, buffer=nl.shared_hbm)
    if shards > 1 or return_lse:
        sums = nl.ndarray((shards, 2, batch, query_heads, window), dtype=nl.float32, buffer=nl.shared_hbm)

    table = None
    if parents != None and tree_matters(shape, key != None):  # noqa: E711
        load_exponential()
        table = ancestor_table(shape, parents)
    operands = Operands(
        query,
        key,
        value,
        key_cache,
        value_cache,
        table,
        block_table,
        sinks,
        key_scale,
        value_scale,
        outputs,
        sums,
        shard,
        slot_cores,
    )

    if few and block_table != None:  # noqa: E711
        attend_paged(shape, own_heads, operands, lengths, slot_cores)
    elif few:
        attend_few(shape, groups, operands, lengths, slot_cores)
    else:
        attend_many(shape, own_heads, operands, lengths, slot_cores, core, sequence_cores)

    lse = None
    if return_lse:
        lse = nl.ndarray((batch, query_heads, window), dtype=nl.float32, buffer=nl.shared_hbm)
    if shards > 1:
        nisa.core_barrier(data=sums, cores=(0, 1))
        nisa.core_barrier(data=outputs, cores=(0, 1))
        merge_all(outputs, None, sums, output, lse)
    elif return_lse:
        if cores > 1:
            nisa.core_barrier(data=sums, cores=(0, 1))
        if core == 0:
            log_sum_exp(lse, sums)
    return (output, lse) if return_lse else output
