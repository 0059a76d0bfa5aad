"""Verification over several ranks through torch.distributed: context shards, vocabulary shards, merged counters.

Every collective gathers small things and every rank computes the same from them, in rank order, so that all ranks
reach the same decision without a second round. gloo on CPUs; on the device XLA's own collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from draft_verify.acceptance_stats import AcceptanceStats
from draft_verify.combine_shards import (
    combine_shards,
    shard_cuts,
    shard_draws,
    shard_excess,
    shard_statistics,
    shard_weights,
)
from draft_verify.mask_logits import mask_logits
from draft_verify.merge_attention import merge_attention
from draft_verify.parameters import draft_law
from draft_verify.project_draft_law import over_target_ids
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.sample_tokens import SampledTokens
from draft_verify.reference.token_logprobs import Logprobs
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
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    rule: str = "token",
    allowed_mask: torch.Tensor | None = None,
    target_to_draft: torch.Tensor | None = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """rejection_sampling where each of n ranks holds V / n columns of the logits; none gathers them.

    What is gathered of a row: 2.6 KB from all ranks together, and where rows are truncated their 8192 candidates a law,
    16 KB in bf16. A row that is cut below them (`shard_cuts`) is narrowed down in rounds, of 8 KB a row and law each:
    4 a limit for bf16 logits, 8 for fp32. On a device these are always launched, and find nothing to do in other rows;
    on a CPU they are left out where no row needs them. The block rule gathers 512 bytes a row more for drafts with a
    law (`shard_excess`).

    Args:
        draft_tokens, uniforms: [B, K] int32 global ids and [B, T + 1] fp32, the same on every rank.
        target_logits: [B, T, V / n], this rank's columns (`shard_statistics`).
        vocab_size: ids of the whole vocabulary.
        group: the ranks that share the vocabulary, a power of two; default all.
        draft_logits, draft_probs: [B, K, V / n], this rank's columns of the draft's law, or neither.
        allowed_mask: [B, T, ceil(V / n / 32)] int32 bits of this rank's columns (`mask_logits`); default all.
        target_to_draft: [M, V / n] int32, this rank's columns of the map of n * (V / n) ids that
            `invert_draft_to_target` gives; the draft's laws are then whole, [B, K, Vd], on every rank.
        draft_lens, temperature, top_k, top_p, min_p, rule, backend, lnc: as in `rejection_sampling`.

    Returns:
        Acceptance, the same on every rank.
    """
    if draft_tokens.shape[1] == 0:
        draft_logits = draft_probs = target_to_draft = None
    target_logits, draft_logits, draft_probs = over_target_ids(
        target_logits,
        draft_logits,
        draft_probs,
        None,
        target_to_draft,
        allowed_mask,
        target_logits.shape[2],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        backend=backend,
        lnc=lnc,
    )
    shared = {"vocab_size": vocab_size, "draft_lens": draft_lens, "temperature": temperature}
    shared |= {"backend": backend, "lnc": lnc}
    laws = {"draft_logits": draft_logits, "draft_probs": draft_probs}
    _, draft = draft_law(**laws)
    window = (draft_tokens, target_logits, uniforms)
    limits = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    statistics, shared["cuts"] = _gathered_statistics(*window, group, limits, **laws, **shared)
    rank = {"shard": dist.get_rank(group)}
    if rule == "block" and draft != "one_hot":
        excess = shard_excess(statistics, *window, **rank, **laws, **shared)
        shared["excess"] = gather(excess, group)
    shared["rule"] = rule
    draws = gather(shard_draws(statistics, *window, **rank, **laws, **shared), group)
    return combine_shards(statistics, draws, draft_tokens, uniforms, draft=draft, **shared)


def _gathered_statistics(
    draft_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    group: dist.ProcessGroup | None,
    limits: dict[str, torch.Tensor | None],
    *,
    draft_logits: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    vocab_size: int,
    temperature: torch.Tensor | None,
    **shared: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All ranks' `shard_statistics`, and the cuts of every row, exact, or None without limits."""
    ranks = dist.get_world_size(group)
    rank = {"shard": dist.get_rank(group), "num_shards": ranks, "vocab_size": vocab_size, "temperature": temperature}
    laws = {"draft_logits": draft_logits, "draft_probs": draft_probs}
    where = {name: shared[name] for name in ("backend", "lnc")}
    cut = any(limit is not None for limit in limits.values())
    own = shard_statistics(draft_tokens, target_logits, uniforms, truncated=cut, **rank, **laws, **shared)
    if not cut:
        return gather(own, group), None
    statistics, candidates = (gather(part, group) for part in own)
    _, draft = draft_law(**laws)
    limits = {"temperature": temperature, **limits}
    cuts = shard_cuts(statistics, candidates, vocab_size=vocab_size, draft=draft, **limits, **where)

    def weigh(trials: torch.Tensor, by_mass: bool) -> torch.Tensor:
        weights = shard_weights(
            cuts, trials, target_logits, by_mass=by_mass, draft_logits=draft_logits, **rank, **where
        )
        return gather(weights, group).flatten(0, 1).sum(0)  # of the 128 groups, in one order for every n

    num_bits = 16 if candidates.dtype == torch.bfloat16 else 32
    return statistics, cut_deep_rows(cuts, weigh, num_bits, vocab_size, **limits)


def vocabulary_parallel_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    allowed_mask: torch.Tensor | None = None,
    return_law: bool = False,
    backend: str = "auto",
    lnc: int | None = None,
) -> SampledTokens:
    """sample_tokens where each of n ranks holds V / n columns of the logits: a window without drafts.

    Args:
        logits: [B, V / n], this rank's columns.
        uniforms: [B, 2] fp32, the same on every rank.
        allowed_mask: [B, ceil(V / n / 32)] int32 bits of this rank's columns; default all.
        return_law: whether this rank's columns of the processed law are wanted.
        vocab_size, group: as in `vocabulary_parallel_sampling`.
        temperature, top_k, top_p, min_p, backend, lnc: as in `sample_tokens`.

    Returns:
        SampledTokens, the same on every rank but for law, [B, V / n].
    """
    where = {"backend": backend, "lnc": lnc}
    rows = logits[:, None]
    if allowed_mask is not None:
        rows = mask_logits(rows, allowed_mask[:, None], **where)
    window = (torch.zeros((len(logits), 0), dtype=torch.int32, device=logits.device), rows, uniforms)
    shared = {"vocab_size": vocab_size, "temperature": temperature, **where}
    limits = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    statistics, shared["cuts"] = _gathered_statistics(*window, group, limits, **shared)
    draws = gather(shard_draws(statistics, *window, shard=dist.get_rank(group), **shared), group)
    acceptance = combine_shards(statistics, draws, window[0], uniforms, **shared)

    law = _RowLaws.of(statistics, shared["cuts"], temperature)
    token = acceptance.tokens
    sampled = law.has_law & ~law.greedy
    entry = _entries_at(rows, token, torch.zeros_like(token), group)
    probs = torch.where(sampled, law.log_probability(entry).exp(), 1.0) * (token >= 0)
    own_law = None
    if return_law:
        width = logits.shape[1]
        ids = dist.get_rank(group) * width + torch.arange(width, device=logits.device)
        one_hot = (ids == token).to(torch.float32)
        own_law = torch.where(sampled, law.log_probability(rows[:, 0].float()).exp(), one_hot) * (token >= 0)
        own_law = torch.where(ids < vocab_size, own_law, 0.0)
    return SampledTokens(token[:, 0].contiguous(), probs[:, 0], acceptance.invalid, own_law)


def vocabulary_parallel_logprobs(
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    path: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    allowed_mask: torch.Tensor | None = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Logprobs:
    """token_logprobs where each of n ranks holds V / n columns: rows' statistics are gathered, and the tokens' entries.

    Args:
        target_logits: [B, T, V / n], this rank's columns.
        tokens, path: [B, T] int32 global ids and rows, the same on every rank.
        allowed_mask: [B, T, ceil(V / n / 32)] int32 bits of this rank's columns; default all.
        vocab_size, group: as in `vocabulary_parallel_sampling`.
        temperature, top_k, top_p, min_p, backend, lnc: as in `token_logprobs`.

    Returns:
        Logprobs, the same on every rank.
    """
    where = {"backend": backend, "lnc": lnc}
    processed_logits = target_logits
    if allowed_mask is not None:
        processed_logits = mask_logits(target_logits, allowed_mask, **where)
    batch, rows = tokens.shape
    drafts = tokens.new_full((batch, rows - 1), -1)
    uniforms = torch.full((batch, rows + 1), 0.5, device=tokens.device)  # which statistics do not depend on
    results = []
    for logits, heat, limits in (
        (processed_logits, temperature, {"top_k": top_k, "top_p": top_p, "min_p": min_p}),
        (target_logits, None, {"top_k": None, "top_p": None, "min_p": None}),
    ):
        shared = {"vocab_size": vocab_size, "temperature": heat, **where}
        statistics, cuts = _gathered_statistics(drafts, logits, uniforms, group, limits, **shared)
        law = _RowLaws.of(statistics, cuts, heat).at(path)
        value = law.log_probability(_entries_at(logits, tokens, path, group))
        value = torch.where(law.greedy & law.has_law, 0.0, value)
        results.append(torch.where(tokens >= 0, value, 0.0))
    return Logprobs(*results)


class _RowLaws(NamedTuple):
    """exp((x - peak) / T) / total for x not below the threshold, [B, T] each."""

    peak: torch.Tensor
    total: torch.Tensor
    threshold: torch.Tensor
    heat: torch.Tensor
    greedy: torch.Tensor
    has_law: torch.Tensor

    @classmethod
    def of(cls, statistics: torch.Tensor, cuts: torch.Tensor | None, temperature: torch.Tensor | None) -> _RowLaws:
        """From `_gathered_statistics`."""
        ranks, batch, rows, _ = statistics.shape
        groups = statistics[..., :-2].reshape(ranks, batch, rows, 5, -1)
        maxima, totals = (groups[..., kind, :].movedim(0, 2).flatten(2) for kind in (0, 1))
        given = torch.as_tensor(1.0 if temperature is None else temperature, device=statistics.device)
        greedy = (given.float().reshape(-1, 1) == 0).expand(batch, rows)
        heat = torch.where(greedy, 1.0, given.float().reshape(-1, 1).expand(batch, rows))
        peak = maxima.amax(-1)
        total = (totals * ((maxima - peak[..., None]) / heat[..., None]).exp()).sum(-1)
        has_law = torch.isfinite(total) & (total > 0)
        threshold = torch.full_like(peak, -torch.inf)
        if cuts is not None:
            threshold, total = cuts[0, ..., 0], cuts[0, ..., 1]
        return cls(peak, total, threshold, heat, greedy, has_law)

    def at(self, path: torch.Tensor) -> _RowLaws:
        """Of the rows that path [B, T] names."""
        return _RowLaws(*(part.gather(1, path.clamp(min=0).long()) for part in self))

    def log_probability(self, entry: torch.Tensor) -> torch.Tensor:
        """Of entries [B, n] in rows [B, n] or [B, 1]; NaN where a row has no law."""
        value = (entry - self.peak) / self.heat - self.total.log()
        value = torch.where(entry >= self.threshold, value, -torch.inf)
        return torch.where(self.has_law, value, torch.nan)


def _entries_at(
    logits: torch.Tensor, tokens: torch.Tensor, path: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """[B, n] fp32: the logits at tokens [B, n] of rows path [B, n], from the ranks that hold them."""
    width = logits.shape[2]
    local = tokens - dist.get_rank(group) * width
    inside = (tokens >= 0) & (local >= 0) & (local < width)
    index = path.clamp(min=0).long() * width + local.clamp(0, width - 1)
    entry = logits.flatten(1).gather(1, index).float()
    return gather(torch.where(inside, entry, 0.0), group).sum(0)


DIGIT = 4  # bits of a threshold that one round of trials tells
KEEP_ALL = -(2.0**126)  # a threshold that every logit passes


def cut_deep_rows(
    cuts: torch.Tensor,
    weigh: Callable[[torch.Tensor, bool], torch.Tensor],
    num_bits: int,
    vocab_size: int,
    *,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """`shard_cuts` corrected in its deep rows, the same on every rank.

    top-k's threshold, then top-p's, each the largest value that entries of enough number or mass are not below: found
    digit by digit in the order of all floats.

    Args:
        cuts: [laws, B, T, 5] of `shard_cuts`.
        weigh: from trials [laws, B, T, 2^DIGIT] and whether by mass to what all ranks hold not below them.
        num_bits: of a value, from the top, that tell it from others: 16 for bf16, 32 for fp32.
        vocab_size, temperature, top_k, top_p, min_p: as `vocabulary_parallel_sampling`.

    Returns:
        [laws, B, T, 5], as `shard_cuts`.
    """
    threshold, _, deep, largest, total = cuts.unbind(-1)
    if cuts.device.type == "cpu" and not torch.compiler.is_compiling() and not deep.any():
        return cuts

    def of_rows(limit: torch.Tensor | float | None, off: float) -> torch.Tensor:
        limit = torch.as_tensor(off if limit is None else limit, device=cuts.device).to(torch.float32)
        return limit.reshape(1, -1, 1).expand(1, cuts.shape[1], 1)

    def search(goal_of: Callable[[torch.Tensor], torch.Tensor], by_mass: bool, floor: torch.Tensor) -> torch.Tensor:
        """The largest value whose weight reaches the goal, which may depend on that of the floor."""
        key = torch.zeros(cuts.shape[:3], dtype=torch.int64, device=cuts.device)
        digits = torch.arange(1, 1 << DIGIT, device=cuts.device)
        for shift in range(32 - DIGIT, 31 - num_bits, -DIGIT):
            trials = _float_of(key[..., None] | digits << shift)
            weights = weigh(torch.cat([floor[..., None], trials], dim=-1), by_mass)
            reached = weights[..., 1:] >= goal_of(weights[..., 0])[..., None]
            key = key | reached.sum(-1) << shift
        found = _float_of(key)
        return torch.where(found >= KEEP_ALL, found, torch.full_like(found, KEEP_ALL))

    k, p, ratio = of_rows(top_k, 0), of_rows(top_p, 1), of_rows(min_p, 0)
    heat = of_rows(temperature, 1)
    heat = torch.where(heat == 0, torch.ones_like(heat), heat)
    on_k = (k > 0) & (k < vocab_size)
    by_k = by_p = torch.full_like(threshold, KEEP_ALL)
    if top_k is not None:
        by_k = torch.where(on_k, search(lambda _: k, False, by_k), by_k)
    if top_p is not None:
        by_p = torch.where(p < 1, search(lambda left: torch.where(on_k, left, total) * p, True, by_k), by_p)
    by_ratio = torch.where(ratio > 0, largest + heat * ratio.clamp(min=1e-30).log(), by_k)
    cut = torch.maximum(torch.maximum(by_k, by_p), by_ratio)
    left = weigh(cut[..., None].repeat(1, 1, 1, 1 << DIGIT), True)[..., 0]
    corrected = torch.stack([cut, left, deep, largest, total], dim=-1)
    return torch.where(deep[..., None] > 0, corrected, cuts)


def _float_of(key: torch.Tensor) -> torch.Tensor:
    """fp32 values by their place among all floats: int64 keys, 2^31 for 0, smaller ones for negative values."""
    bits = torch.where(key >= 1 << 31, key - (1 << 31), -1 - key)
    return bits.to(torch.int32).view(torch.float32)


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
