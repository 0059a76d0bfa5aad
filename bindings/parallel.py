"""Verification over several ranks through torch.distributed: context shards, vocabulary shards, merged counters.

Every collective gathers small things and every rank computes the same from them, in rank order, so that all ranks
reach the same decision without a second round. gloo on CPUs; on the device XLA's own collectives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from draft_verify.acceptance_stats import AcceptanceStats
from draft_verify.combine_shards import combine_shards, shard_draws, shard_statistics
from draft_verify.mask_logits import mask_logits
from draft_verify.merge_attention import merge_attention
from draft_verify.parameters import draft_law
from draft_verify.project_draft_law import project_draft_law
from draft_verify.reference.acceptance import Acceptance
from draft_verify.verify_attention import verify_attention


def gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """All ranks' tensors on every rank.

    Args:
        tensor: this rank's, of the same shape and dtype on every rank.
        group: the ranks; default all.

    Returns:
        [ranks, ...] in rank order.
    """
    ranks = dist.get_world_size(group)
    tensor = tensor.contiguous()
    if tensor.device.type == "xla":
        import torch_xla.core.xla_model as xm

        # A graph that all ranks share names all replica groups; NxD keeps them as `_mesh` (UNVERIFIED on a device).
        return xm.all_gather(tensor[None], dim=0, groups=getattr(group, "_mesh", None), pin_layout=False)
    gathered = tensor.new_empty((ranks, *tensor.shape))
    dist.all_gather(list(gathered.unbind(0)), tensor, group=group)
    return gathered


def context_parallel_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    draft_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """verify_attention where rank r of n holds cache positions r * S to (r + 1) * S - 1.

    Each rank attends to its own part of the cache, and all alike to the window, whose keys they have. What is exchanged
    is one output and one log-sum-exp a rank, not keys.

    Args:
        query, key, value: the whole window, the same on every rank.
        key_cache, value_cache: this rank's part, "BHSD" or "BHDS", S slots on every rank.
        seq_lens: [B] int32, tokens in all parts together.
        group: the ranks that share the sequences; default all.
        draft_lens, sinks, return_lse, options: as in `verify_attention` (no paged or ring caches); a tree's rows attend
            to each other in the window.

    Returns:
        As `verify_attention`, the same bits on every rank.
    """
    slots, rows = value_cache.shape[2], query.shape[2]
    start = torch.full_like(seq_lens, dist.get_rank(group) * slots)
    shared = {"draft_lens": draft_lens, "query_positions": seq_lens, "return_lse": True, **options}
    output, lse = verify_attention(
        query, None, None, key_cache, value_cache, (seq_lens - start).clamp(0, slots), cache_start=start, **shared
    )
    no_cache = value_cache.new_zeros((*value_cache.shape[:2], rows, value_cache.shape[3]))
    no_keys = no_cache.transpose(2, 3).contiguous() if options.get("cache_layout") == "BHDS" else no_cache
    window, window_lse = verify_attention(
        query, key, value, no_keys, no_cache, torch.zeros_like(seq_lens), sinks=sinks, **shared
    )
    output, lse = merge_attention(
        torch.cat([gather(output, group), window[None]]), torch.cat([gather(lse, group), window_lse[None]])
    )
    return (output, lse) if return_lse else output


def vocabulary_parallel_sampling(
    draft_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    draft_logits: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    draft_lens: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    allowed_mask: torch.Tensor | None = None,
    target_to_draft: torch.Tensor | None = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """rejection_sampling, token rule, where each of n ranks holds V / n columns of the logits; none gathers them.

    Args:
        draft_tokens, uniforms: [B, K] int32 global ids and [B, T + 1] fp32, the same on every rank.
        target_logits: [B, T, V / n], this rank's columns (`shard_statistics`).
        vocab_size: ids of the whole vocabulary.
        group: the ranks that share the vocabulary, a power of two; default all.
        draft_logits, draft_probs: [B, K, V / n], this rank's columns of the draft's law, or neither.
        allowed_mask: [B, T, ceil(V / n / 32)] int32 bits of this rank's columns (`mask_logits`); default all.
        target_to_draft: [M, V / n] int32, this rank's columns of the map of n * (V / n) ids that
            `invert_draft_to_target` gives; the draft's laws are then whole, [B, K, Vd], on every rank.
        draft_lens, temperature, backend, lnc: as in `rejection_sampling`.

    Returns:
        Acceptance, the same on every rank.
    """
    shared = {"draft_lens": draft_lens, "temperature": temperature, "backend": backend, "lnc": lnc}
    where = {"backend": backend, "lnc": lnc}
    if target_to_draft is not None:
        draft_probs = project_draft_law(
            target_to_draft, draft_logits=draft_logits, draft_probs=draft_probs, temperature=temperature, **where
        )
        draft_logits = None
    if allowed_mask is not None:
        target_logits = mask_logits(target_logits, allowed_mask, **where)
        if draft_logits is not None:
            draft_logits = mask_logits(draft_logits, allowed_mask[:, :-1], **where)
    shard = {
        "shard": dist.get_rank(group),
        "vocab_size": vocab_size,
        "draft_logits": draft_logits,
        "draft_probs": draft_probs,
        **shared,
    }
    ranks = dist.get_world_size(group)
    statistics = shard_statistics(draft_tokens, target_logits, uniforms, num_shards=ranks, **shard)
    statistics = gather(statistics, group)
    draws = gather(shard_draws(statistics, draft_tokens, target_logits, uniforms, **shard), group)
    _, draft = draft_law(draft_logits, draft_probs)
    return combine_shards(statistics, draws, draft_tokens, uniforms, vocab_size=vocab_size, draft=draft, **shared)


def same_decision(acceptance: Acceptance, group: dist.ProcessGroup | None = None) -> Acceptance:
    """Rank 0's decision on every rank, where ranks computed it each from logits that may differ in their last bits.

    Ranks that accept different numbers of drafts wait for each other for ever at the next collective.

    Args:
        acceptance: this rank's, of any rule.
        group: the ranks that decide together; default all. Its first rank's decision holds.

    Returns:
        Acceptance, the same on every rank.
    """
    fields = [acceptance.tokens, acceptance.path, acceptance.num_accepted[:, None], acceptance.invalid[:, None]]
    packed = torch.cat([field.to(torch.int32) for field in fields], dim=1)
    packed = gather(packed, group)[0]
    rows = acceptance.tokens.shape[1]
    return Acceptance(
        tokens=packed[:, :rows].contiguous(),
        path=packed[:, rows : 2 * rows].contiguous(),
        num_accepted=packed[:, -2].contiguous(),
        invalid=packed[:, -1] != 0,
    )


def merge_stats(stats: AcceptanceStats, group: dist.ProcessGroup | None = None) -> AcceptanceStats:
    """The counters of all ranks together, on every rank; `stats` stays as it is.

    For ranks that serve different sequences (data parallel): ranks of one tensor-parallel group count the same steps.

    Args:
        stats: this rank's counters.
        group: the ranks whose counters are added; default all.

    Returns:
        AcceptanceStats, equal on every rank.
    """
    gathered: list[dict] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, stats.to_dict(), group=group)
    merged = AcceptanceStats(0)
    for counters in gathered:
        merged.merge(AcceptanceStats.from_dict(counters))
    return merged
