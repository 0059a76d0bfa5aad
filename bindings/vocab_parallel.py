"""Acceptance over vocabulary shards: no rank ever holds, or gathers, a whole row of logits.

Each rank sums up its columns in a few numbers a row; what is gathered is those numbers, and all ranks combine them in
rank order, so that all reach the same decision (traps.md T34 is what happens when they do not). Four small gathers: a
row's facts, the masses of the 128 groups, the ranks' shares of the group drawn, and the token drawn in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from draft_verify.parallel import gather
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.sampling import NUM_GROUPS, group_size


class _Facts(NamedTuple):
    """What all ranks know of each row, [B, R]."""

    peak: torch.Tensor  # the largest finite logit
    best: torch.Tensor  # its id, the lowest among equals; 0 where there is none
    total: torch.Tensor  # sum of exp((logit - peak) / temperature)
    at_token: torch.Tensor  # the draft's logit, -inf where its id is outside the vocabulary
    has_law: torch.Tensor  # no NaN or +inf, and something above -inf


def vocab_parallel_sampling(
    draft_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    draft_logits: torch.Tensor | None = None,
    draft_lens: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
) -> Acceptance:
    """rejection_sampling, token rule, where rank r of n holds the vocabulary's columns r * W to (r + 1) * W - 1.

    Leviathan et al., arXiv 2211.17192. Truncation (top-k, top-p, min-p) is not offered over shards.

    Args:
        draft_tokens: [B, K] int32 global ids, the same on every rank; outside 0..vocab_size - 1 they stop a sequence.
        target_logits: [B, T, W] fp32 or bf16, this rank's columns; those from vocab_size on are padding.
        uniforms: [B, T + 1] fp32 in (0, 1), the same on every rank (`uniforms_for`).
        vocab_size: columns that count, over all ranks.
        group: the ranks that share the vocabulary; default all.
        draft_logits: [B, K, W], this rank's columns of the draft's; None for drafts without a law.
        draft_lens: [B] int32; default K.
        temperature: [B] fp32, 0 greedy; default 1.

    Returns:
        Acceptance, the same on every rank. Computed in float64 on a CPU, in float32 on a device.
    """
    batch, rows, width = target_logits.shape
    device = target_logits.device
    work = torch.float64 if device.type == "cpu" else torch.float32
    ids = dist.get_rank(group) * width + torch.arange(width, device=device)
    if draft_lens is None:
        draft_lens = torch.full((batch,), rows - 1, dtype=torch.int32, device=device)
    if temperature is None:
        temperature = torch.ones(batch, device=device)
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature).to(work)[:, None]

    # Which drafts stay.
    tokens = torch.cat([draft_tokens, draft_tokens.new_full((batch, 1), -1)], dim=1).to(torch.int64)
    known = (tokens >= 0) & (tokens < vocab_size)
    target = _facts(target_logits.to(work), ids, vocab_size, tokens, scale, group)
    draft = None
    if draft_logits is not None and rows > 1:
        draft = _facts(draft_logits.to(work), ids, vocab_size, tokens[:, :-1], scale, group)
    target_at = torch.exp((target.at_token - target.peak) / scale) / target.total
    draft_at = torch.ones_like(target_at[:, :-1])
    if draft is not None:
        draft_at = torch.exp((draft.at_token - draft.peak) / scale) / draft.total
    keep = torch.where(greedy[:, None], tokens == target.best, False)[:, :-1]
    drawn_fits = uniforms[:, : rows - 1].to(work) * draft_at < target_at[:, :-1]
    if draft is not None:
        drawn_fits = drawn_fits & draft.has_law
    keep = keep | (~greedy[:, None] & drawn_fits)
    index = torch.arange(rows, device=device)
    keep = keep & known[:, :-1] & target.has_law[:, :-1] & (index[:-1] < draft_lens[:, None])
    num_accepted = keep.to(torch.int32).cumprod(dim=1).sum(dim=1)

    # The law of the token after them, this rank's columns of it.
    here = num_accepted[:, None]
    scale = scale[:, 0]
    law = _column_masses(target_logits.to(work), target, here, ids, vocab_size, scale)
    rejected = (num_accepted < draft_lens) & known.gather(1, here)[:, 0]
    draft_is_law = torch.ones_like(rejected)
    if draft is None:
        other = (ids == tokens.gather(1, here)).to(work)
    else:
        at = here.clamp(max=rows - 2)
        other = _column_masses(draft_logits.to(work), draft, at, ids, vocab_size, scale)
        draft_is_law = draft.has_law.gather(1, at)[:, 0]
    excess = (law - torch.where((rejected & draft_is_law)[:, None], other, 0)).clamp(min=0)
    drawn = _draw(excess, law, uniforms[:, -2:].to(work), ids, vocab_size, group)

    has_law = target.has_law.gather(1, here)[:, 0]
    last = torch.where(greedy | ~has_law, target.best.gather(1, here)[:, 0], drawn)
    live = draft_lens >= 0
    num_accepted = torch.where(live, num_accepted, -1).to(torch.int32)
    kept = index <= num_accepted[:, None]
    emitted = torch.where(index == num_accepted[:, None], last[:, None], tokens)
    return Acceptance(
        tokens=torch.where(kept, emitted, -1).to(torch.int32),
        num_accepted=num_accepted,
        path=torch.where(kept, index, -1).to(torch.int32),
        invalid=live & (~has_law | (rejected & ~draft_is_law & ~greedy)),
    )


def _facts(logits, ids, vocab_size, tokens, scale, group) -> _Facts:
    inside = ids < vocab_size
    finite = torch.isfinite(logits) & inside
    values = torch.where(finite, logits, -torch.inf)
    peak = values.amax(dim=2)
    first = torch.where(values == peak[..., None], ids, vocab_size).amin(dim=2)
    total = torch.where(finite, torch.exp((values - peak[..., None]) / scale[..., None]), 0).sum(dim=2)
    at_token = torch.where(ids == tokens[..., None], values, -torch.inf).amax(dim=2)
    spoilt = ((torch.isnan(logits) | (logits == torch.inf)) & inside).any(dim=2)
    local = torch.stack([peak, first.to(peak.dtype), total, at_token, spoilt.to(peak.dtype)])
    peaks, firsts, totals, at_tokens, spoilts = gather(local, group).unbind(1)

    peak = peaks.amax(dim=0)
    found = peak > -torch.inf
    best = torch.where(peaks == peak, firsts, vocab_size).amin(dim=0)
    share = torch.where(peaks > -torch.inf, torch.exp((peaks - peak) / scale), 0)
    return _Facts(
        peak=peak,
        best=torch.where(found, best, 0).to(torch.int64),
        total=(totals * share).sum(dim=0),
        at_token=at_tokens.amax(dim=0),
        has_law=found & (spoilts.amax(dim=0) == 0),
    )


def _column_masses(logits, facts, row, ids, vocab_size, scale):
    """[B, W] probabilities of this rank's columns in row [B, 1] of each sequence; 0 where there is no law."""
    logits = logits.gather(1, row[:, :, None].expand(-1, 1, logits.shape[2]))[:, 0]
    peak, total = (fact.gather(1, row) for fact in (facts.peak, facts.total))
    masses = torch.exp((logits - peak) / scale[:, None]) / total
    return torch.where(torch.isfinite(logits) & (ids < vocab_size), masses, 0)


def _draw(excess, law, uniforms, ids, vocab_size, group):
    """[B] global ids by two inverse CDFs, the group and the token in it; from `law` where there is no excess."""
    of_group = (ids // group_size(vocab_size)).clamp(max=NUM_GROUPS - 1)
    masses = torch.zeros((2, len(law), NUM_GROUPS), dtype=law.dtype, device=law.device)
    masses = gather(masses.index_add(2, of_group, torch.stack([excess, law])), group).sum(dim=0)
    no_excess = masses[0].sum(dim=1, keepdim=True) <= 0
    columns, masses = torch.where(no_excess, law, excess), torch.where(no_excess, masses[1], masses[0])
    groups = torch.arange(NUM_GROUPS, device=ids.device)
    chosen = _pick(*_first_and_last(masses, masses.cumsum(dim=1), masses.sum(dim=1), uniforms[:, 0], groups))

    columns = torch.where(of_group == chosen[:, None], columns, 0)
    shares = gather(columns.sum(dim=1), group)
    before = shares[: dist.get_rank(group)].sum(dim=0)
    cumulative = before[:, None] + columns.cumsum(dim=1)
    found = torch.stack(_first_and_last(columns, cumulative, shares.sum(dim=0), uniforms[:, 1], ids))
    firsts, lasts = gather(found, group).unbind(1)
    return _pick(firsts.amin(dim=0), lasts.amax(dim=0))


_NONE = torch.iinfo(torch.int32).max


def _first_and_last(masses, cumulative, total, uniform, ids):
    """[B] the first id whose cumulative mass exceeds uniform * total, _NONE if none does; the last id of any mass."""
    hit = (cumulative > (uniform * total)[:, None]) & (masses > 0)
    return torch.where(hit, ids, _NONE).amin(dim=1), torch.where(masses > 0, ids, -1).amax(dim=1)


def _pick(first, last):
    """Only rounding leaves a total that no cumulative mass exceeds: then the last id of any mass it is."""
    return torch.where(first == _NONE, last, first)
