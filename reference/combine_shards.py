"""Vocabulary-parallel rejection sampling: what ranks tell each other, and the decision from it.

Where rows are truncated, ranks also give the largest entries of their groups, and thresholds follow from those, or,
of rows that are cut below them, from how much all ranks hold above thresholds on trial.

A rank of n holds `width` consecutive columns, cut into 128 / n groups of ceil(width * n / 128) ids. First every rank
gives each group's statistics of every row; from all of them each rank knows the decision, and gives each group's mass
and drawn id in the row after the accepted drafts; the first uniform then picks the group. The block rule needs each
row's residual mass before the decision, which ranks give by group too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_verify.reference.acceptance import Acceptance, empty_acceptance, write_chain
from draft_verify.reference.sampling import NUM_GROUPS, best_token, inverse_cdf

GROUP_STATISTICS = 5  # target maximum, total, first id of the maximum; draft maximum, total
SEGMENTS, BEST = 8, 8  # every 8th id of a group gives its 8 largest entries
CUTS = 5  # of a truncated row: threshold, mass it leaves, whether it is deep; largest entry and mass uncut
DRAWS = 6  # residual and target mass, residual and target id, largest finite entry and its id


class Row(NamedTuple):
    """Of one window row: peaks and totals of exp((x - peak) / T), what is cut, and both laws at the draft."""

    target_peak: float
    target_total: float
    target_threshold: float
    draft_peak: float
    draft_total: float
    draft_threshold: float
    has_law: bool
    draft_ok: bool
    best: int
    token: int  # -1 where there is no draft
    target_mass: float  # 0 without a draft or a law
    draft_mass: float


class Decision(NamedTuple):
    """Of one sequence: drafts accepted, the row after them, and the law to draw from there."""

    accepted: int
    row: Row
    weight: float  # of the target in the residual
    residual: bool  # target less draft, or the target alone
    greedy: bool
    invalid: bool


def groups_of(row: np.ndarray, shard: int, num_shards: int, vocab_size: int) -> list[tuple[int, np.ndarray]]:
    """(first id, entries) of each group of a rank's row; the last ones may be short or empty."""
    width = len(row)
    count = NUM_GROUPS // num_shards
    size = -(-width // count)
    live = row[: max(0, vocab_size - shard * width)]
    return [(shard * width + i * size, live[i * size : (i + 1) * size]) for i in range(count)]


def scale_of(temperature: np.ndarray | None, b: int) -> float:
    """1 / T; greedy rows take their statistics at temperature 1."""
    return 1.0 if temperature is None or temperature[b] == 0 else 1.0 / float(temperature[b])


def shard_statistics(
    draft_tokens: np.ndarray,
    target_logits: np.ndarray,
    uniforms: np.ndarray,
    *,
    shard: int,
    num_shards: int,
    vocab_size: int,
    draft_logits: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    draft_lens: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    truncated: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """See `draft_verify.shard_statistics`."""
    batch, num_rows, width = target_logits.shape
    count = NUM_GROUPS // num_shards
    statistics = np.zeros((batch, num_rows, GROUP_STATISTICS * count + 2))
    for b in range(batch):
        scale = scale_of(temperature, b)
        for row in range(num_rows):
            out = statistics[b, row, : GROUP_STATISTICS * count].reshape(GROUP_STATISTICS, count)
            target = np.asarray(target_logits[b, row], np.float64)
            groups = groups_of(target, shard, num_shards, vocab_size)
            out[:3] = np.transpose([exponentials(*group, scale) for group in groups])
            if row == num_rows - 1:
                continue
            local = int(draft_tokens[b, row]) - shard * width
            inside = 0 <= local < min(width, vocab_size - shard * width)
            statistics[b, row, -2] = target[local] if inside else 0
            if draft_logits is not None:
                draft = np.asarray(draft_logits[b, row], np.float64)
                groups = groups_of(draft, shard, num_shards, vocab_size)
                out[3:] = np.transpose([exponentials(*group, scale)[:2] for group in groups])
            elif draft_probs is not None:
                draft = np.asarray(draft_probs[b, row], np.float64)
                out[4] = [group.sum() for _, group in groups_of(draft, shard, num_shards, vocab_size)]
            if inside and (draft_logits is not None or draft_probs is not None):
                statistics[b, row, -1] = draft[local]
    if truncated:
        laws = [target_logits] if draft_logits is None else [target_logits, draft_logits]
        return statistics.astype(np.float32), group_candidates(laws, shard, num_shards, vocab_size)
    return statistics.astype(np.float32)


def group_candidates(laws: list[np.ndarray], shard: int, num_shards: int, vocab_size: int) -> np.ndarray:
    """[laws, B, T, 8, SEGMENTS * groups]: the 8 largest of every segment of every group, -inf where it has fewer."""
    batch, num_rows, _ = laws[0].shape
    count = NUM_GROUPS // num_shards
    dtype = np.result_type(*(law.dtype for law in laws))
    candidates = np.full((len(laws), batch, num_rows, BEST, SEGMENTS, count), -np.inf)
    for i, law in enumerate(laws):
        for b in range(batch):
            for row in range(law.shape[1]):
                for group, (_, entries) in enumerate(groups_of(law[b, row], shard, num_shards, vocab_size)):
                    for segment in range(SEGMENTS):
                        largest = np.sort(entries[segment::SEGMENTS].astype(np.float64))[::-1][:BEST]
                        candidates[i, b, row, : len(largest), segment, group] = largest
    return candidates.reshape(*candidates.shape[:4], -1).astype(dtype)


def shard_cuts(
    statistics: np.ndarray,
    candidates: np.ndarray,
    *,
    vocab_size: int,
    draft: str = "one_hot",
    temperature: np.ndarray | None = None,
    top_k: np.ndarray | None = None,
    top_p: np.ndarray | None = None,
    min_p: np.ndarray | None = None,
) -> np.ndarray:
    """See `draft_verify.shard_cuts`."""
    _, num_laws, batch, num_rows, _, _ = candidates.shape
    cuts = np.zeros((num_laws, batch, num_rows, CUTS))
    for i in range(num_laws):
        for b in range(batch):
            scale = scale_of(temperature, b)
            k = int(top_k[b]) if top_k is not None and 0 < top_k[b] < vocab_size else None
            p = float(top_p[b]) if top_p is not None and top_p[b] < 1 else None
            by_ratio = min_p is not None and min_p[b] > 0
            for row in range(num_rows):
                peak, total = law_of(statistics, b, row, i, scale)
                cuts[i, b, row] = -np.inf, total, 0, peak, total
                if not (np.isfinite(total) and total > 0):
                    continue
                values = np.asarray(candidates[:, i, b, row], np.float64)
                by_min_p = peak + np.log(float(min_p[b])) / scale if by_ratio else -np.inf
                threshold, mass, by_k = cut(values.ravel(), peak, total, scale, k, p, by_min_p)
                # No entry that is not a candidate is above the least of the 8 in any segment.
                uncovered = values[:, BEST - 1].max()
                on = k is not None or p is not None or by_ratio
                certain = by_k if k is not None else threshold
                deep = on and certain <= uncovered and not np.isneginf(uncovered)
                cuts[i, b, row, :3] = threshold, mass, deep
    return cuts.astype(np.float32)


def cut(
    values: np.ndarray, peak: float, total: float, scale: float, k: int | None, p: float | None, by_min_p: float
) -> tuple[float, float, float]:
    """Threshold of top-k, top-p and min-p, the mass not below it, and top-k's threshold alone, of entries [n]."""
    values = np.sort(values[np.isfinite(values)])[::-1]
    masses = np.exp((values - peak) * scale)
    by_k = values[k - 1] if k is not None and k <= len(values) else -np.inf
    left = masses[values >= by_k].sum() if k is not None else total
    by_p = -np.inf
    if p is not None:
        reached = np.flatnonzero(np.cumsum(masses) >= p * left)
        by_p = values[reached[0]] if len(reached) else -np.inf
    threshold = max(by_k, by_p, by_min_p)
    return threshold, total if np.isneginf(threshold) else masses[values >= threshold].sum(), by_k


def shard_weights(
    cuts: np.ndarray,
    trials: np.ndarray,
    target_logits: np.ndarray,
    *,
    shard: int,
    num_shards: int,
    vocab_size: int,
    by_mass: bool,
    draft_logits: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
) -> np.ndarray:
    """See `draft_verify.shard_weights`."""
    num_laws, batch, num_rows, num_trials = trials.shape
    weights = np.zeros((NUM_GROUPS // num_shards, num_laws, batch, num_rows, num_trials))
    for i, b, row in np.argwhere(cuts[..., 2] > 0):
        law = np.asarray((target_logits, draft_logits)[i][b, row], np.float64)
        for group, (_, entries) in enumerate(groups_of(law, shard, num_shards, vocab_size)):
            masses = np.exp((entries - float(cuts[i, b, row, 3])) * scale_of(temperature, b))
            for trial in range(num_trials):
                with np.errstate(invalid="ignore"):  # trials below every float are NaN, and nothing is not below them
                    above = entries >= trials[i, b, row, trial]
                weights[group, i, b, row, trial] = masses[above].sum() if by_mass else above.sum()
    return weights.astype(np.float32)


def exponentials(first_id: int, entries: np.ndarray, scale: float) -> tuple[float, float, float]:
    """Largest entry, sum of exp((x - largest) * scale), id of the first largest."""
    finite = np.where(np.isfinite(entries), entries, -np.inf)
    if len(entries) == 0 or (np.isneginf(finite).all() and not np.isnan(entries).any()):
        return -np.inf, 0.0, float(first_id)
    with np.errstate(invalid="ignore"):
        return finite.max(), np.exp((entries - finite.max()) * scale).sum(), float(first_id + finite.argmax())


def law_of(statistics: np.ndarray, b: int, row: int, law: int, scale: float) -> tuple[float, float]:
    """Peak and total of a row of the target (law 0) or the draft (1) from all ranks' statistics."""
    count = NUM_GROUPS // len(statistics)
    groups = statistics[:, b, row, : GROUP_STATISTICS * count].reshape(len(statistics), GROUP_STATISTICS, count)
    return combine(groups[:, 3 * law].ravel(), groups[:, 3 * law + 1].ravel(), scale)


def row_of(
    statistics: np.ndarray,
    draft_tokens: np.ndarray,
    b: int,
    row: int,
    num_drafts: int,
    vocab_size: int,
    scale: float,
    draft: str,
    cuts: np.ndarray | None,
) -> Row:
    """A row of sequence b from all ranks' statistics [n, B, T, ..] and, where rows are truncated, their cuts."""
    count = NUM_GROUPS // len(statistics)
    groups = statistics[:, b, row, : GROUP_STATISTICS * count].reshape(len(statistics), GROUP_STATISTICS, count)
    maxima, totals, ids, draft_maxima, draft_totals = np.moveaxis(groups, 1, 0).reshape(GROUP_STATISTICS, -1)
    peak, total = combine(maxima, totals, scale)
    has_law = bool(np.isfinite(total) and total > 0)
    best = int(ids[maxima == peak].min()) if has_law else -1
    draft_peak, draft_total = combine(draft_maxima, draft_totals, scale) if draft == "logits" else (0.0, 1.0)
    draft_ok = draft == "one_hot" or bool(np.isfinite(draft_totals.sum() if draft == "probs" else draft_total))
    draft_ok = draft_ok and (draft != "logits" or draft_total > 0)
    thresholds = [-np.inf, -np.inf]
    if cuts is not None:
        thresholds[: len(cuts)] = cuts[:, b, row, 0]
        total = float(cuts[0, b, row, 1]) if has_law else total
        draft_total = float(cuts[1, b, row, 1]) if draft == "logits" and draft_ok else draft_total
    token = int(draft_tokens[b, row]) if row < num_drafts else -1
    token = token if 0 <= token < vocab_size else -1
    target_mass = draft_mass = 0.0
    if has_law and token >= 0 and draft_ok:
        target_entry, draft_entry = statistics[:, b, row, -2:].sum(axis=0)
        target_mass = np.exp((target_entry - peak) * scale) / total * (target_entry >= thresholds[0])
        draft_mass = {"one_hot": 1.0, "probs": draft_entry}.get(draft)
        if draft == "logits":
            draft_mass = np.exp((draft_entry - draft_peak) * scale) / draft_total * (draft_entry >= thresholds[1])
    return Row(
        peak, total, thresholds[0], draft_peak, draft_total, thresholds[1],
        has_law, draft_ok, best, token, float(target_mass), float(draft_mass),
    )  # fmt: skip


def leading_rows(rows: list[Row]) -> list[Row]:
    """The rows before the first that has no law, no draft, or a draft without a law."""
    count = next((i for i, row in enumerate(rows) if not (row.has_law and row.token >= 0 and row.draft_ok)), len(rows))
    return rows[:count]


def prefix_weights(pairs: list[Row]) -> list[float]:
    """w_0..w_k of `reference.rejection_sampling.block_probabilities`."""
    weights = [1.0]
    for row in pairs:
        weights.append(min(1.0, weights[-1] * row.target_mass / max(row.draft_mass, np.finfo(np.float64).tiny)))
    return weights


def decide(
    statistics: np.ndarray,
    draft_tokens: np.ndarray,
    uniforms: np.ndarray,
    b: int,
    num_drafts: int,
    vocab_size: int,
    temperature: np.ndarray | None,
    draft: str,
    cuts: np.ndarray | None,
    rule: str,
    excess: np.ndarray | None,
) -> Decision:
    """Sequence b's decision; `excess` [n, B, T, groups] of `shard_excess`, where the block rule needs it."""
    scale = scale_of(temperature, b)
    greedy = temperature is not None and temperature[b] == 0
    where = (num_drafts, vocab_size, scale, draft, cuts)
    rows = [row_of(statistics, draft_tokens, b, row, *where) for row in range(statistics.shape[2])]
    weight = 1.0
    if greedy:
        accepted = next(
            i for i, row in enumerate(rows) if not (row.has_law and row.token >= 0 and row.token == row.best)
        )
    elif rule == "token":
        passed = [uniforms[b, i] * row.draft_mass < row.target_mass for i, row in enumerate(rows)]
        accepted = passed.index(False)
    else:
        pairs = leading_rows(rows)
        weights = prefix_weights(pairs)
        accepted = 0
        for i in range(1, len(pairs) + 1):
            passes = weights[i]
            if i < len(pairs):
                mass = weights[i] * (1 - pairs[i].target_mass)
                if draft != "one_hot":
                    mass = float(excess[:, b, i].sum(dtype=np.float64)) / pairs[i].draft_total
                passes = mass / (mass + 1 - weights[i]) if mass + 1 - weights[i] > 0 else 1.0
            if uniforms[b, i - 1] <= passes:
                accepted = i
        weight = weights[accepted]
    row = rows[accepted]
    sampled_draft = row.has_law and row.token >= 0 and not greedy
    invalid = not row.has_law or (sampled_draft and not row.draft_ok)
    return Decision(accepted, row, weight, sampled_draft and row.draft_ok, greedy, invalid)


def combine(maxima: np.ndarray, totals: np.ndarray, scale: float) -> tuple[float, float]:
    """Peak and total of a row from those of its groups."""
    peak = maxima.max()
    if np.isneginf(peak):
        return peak, float(totals.sum())
    return peak, float((totals * np.exp((maxima - peak) * scale)).sum())


def group_laws(
    row: Row,
    target: np.ndarray,
    draft_entries: np.ndarray | None,
    first_id: int,
    scale: float,
    draft: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Both laws on one group's ids, from its entries [m] of the target and of the draft."""
    target = np.exp((target - row.target_peak) * scale) / row.target_total * (target >= row.target_threshold)
    if draft == "one_hot":
        return target, (first_id + np.arange(len(target)) == row.token).astype(np.float64)
    if draft == "logits":
        kept = draft_entries >= row.draft_threshold
        draft_entries = np.exp((draft_entries - row.draft_peak) * scale) / row.draft_total * kept
    return target, draft_entries


def shard_excess(
    statistics: np.ndarray,
    draft_tokens: np.ndarray,
    target_logits: np.ndarray,
    uniforms: np.ndarray,
    *,
    shard: int,
    vocab_size: int,
    draft_logits: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    draft_lens: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    cuts: np.ndarray | None = None,
) -> np.ndarray:
    """See `draft_verify.shard_excess`."""
    num_shards = len(statistics)
    batch, num_rows, _ = target_logits.shape
    draft, law = ("logits", draft_logits) if draft_logits is not None else ("probs", draft_probs)
    excess = np.zeros((batch, num_rows, NUM_GROUPS // num_shards))
    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        scale = scale_of(temperature, b)
        where = (num_drafts, vocab_size, scale, draft, cuts)
        pairs = leading_rows([row_of(statistics, draft_tokens, b, row, *where) for row in range(num_rows)])
        weights = prefix_weights(pairs)
        for i in range(1, len(pairs)):
            target_groups, draft_groups = (
                groups_of(np.asarray(array[b, i], np.float64), shard, num_shards, vocab_size)
                for array in (target_logits, law)
            )
            for group, ((first_id, entries), (_, draft_entries)) in enumerate(zip(target_groups, draft_groups)):
                target, masses = group_laws(pairs[i], entries, draft_entries, first_id, scale, draft)
                excess[b, i, group] = np.maximum(weights[i] * target - masses, 0).sum() * pairs[i].draft_total
    return excess.astype(np.float32)


def shard_draws(
    statistics: np.ndarray,
    draft_tokens: np.ndarray,
    target_logits: np.ndarray,
    uniforms: np.ndarray,
    *,
    shard: int,
    vocab_size: int,
    draft_logits: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    draft_lens: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    cuts: np.ndarray | None = None,
    rule: str = "token",
    excess: np.ndarray | None = None,
) -> np.ndarray:
    """See `draft_verify.shard_draws`."""
    num_shards = len(statistics)
    batch, num_rows, _ = target_logits.shape
    draft = "logits" if draft_logits is not None else "probs" if draft_probs is not None else "one_hot"
    draws = np.zeros((batch, DRAWS, NUM_GROUPS // num_shards))
    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        if num_drafts < 0:
            continue
        scale = scale_of(temperature, b)
        decision = decide(
            statistics, draft_tokens, uniforms, b, num_drafts, vocab_size, temperature, draft, cuts, rule, excess
        )
        row = np.asarray(target_logits[b, decision.accepted], np.float64)
        draft_groups = [(0, None)] * (NUM_GROUPS // num_shards)
        if decision.residual and draft != "one_hot":
            law = draft_logits if draft == "logits" else draft_probs
            draft_row = np.asarray(law[b, decision.accepted], np.float64)
            draft_groups = groups_of(draft_row, shard, num_shards, vocab_size)
        for group, (first_id, entries) in enumerate(groups_of(row, shard, num_shards, vocab_size)):
            finite = np.where(np.isfinite(entries), entries, -np.inf)
            if not np.isneginf(finite).all():
                draws[b, 4:, group] = finite.max(), first_id + best_token(entries)
            else:
                draws[b, 4, group] = -np.inf
            if not decision.row.has_law or len(entries) == 0:
                continue
            kind = draft if decision.residual else "one_hot"
            target, masses = group_laws(decision.row, entries, draft_groups[group][1], first_id, scale, kind)
            residual = np.maximum(decision.weight * target - masses, 0) if decision.residual else np.zeros(len(entries))
            for law, masses in enumerate((residual, target)):
                draws[b, law, group] = masses.sum()
                draws[b, 2 + law, group] = first_id + (inverse_cdf(masses, uniforms[b, -1]) if masses.any() else 0)
    return draws.astype(np.float32)


def combine_shards(
    statistics: np.ndarray,
    draws: np.ndarray,
    draft_tokens: np.ndarray,
    uniforms: np.ndarray,
    *,
    vocab_size: int,
    draft: str = "one_hot",
    draft_lens: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    cuts: np.ndarray | None = None,
    rule: str = "token",
    excess: np.ndarray | None = None,
) -> Acceptance:
    """See `draft_verify.combine_shards`."""
    _, batch, num_rows, _ = statistics.shape
    result = empty_acceptance(batch, num_rows)
    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        if num_drafts < 0:
            continue
        decision = decide(
            statistics, draft_tokens, uniforms, b, num_drafts, vocab_size, temperature, draft, cuts, rule, excess
        )
        by_group = np.moveaxis(draws[:, b], 1, 0).reshape(DRAWS, -1)
        residual, target, residual_ids, target_ids, finite, finite_ids = by_group
        if not decision.row.has_law:
            last = 0 if np.isneginf(finite.max()) else int(finite_ids[finite == finite.max()].min())
        elif decision.greedy:
            last = decision.row.best
        else:
            use_residual = decision.residual and residual.sum() > 0
            masses, ids = (residual, residual_ids) if use_residual else (target, target_ids)
            last = int(ids[inverse_cdf(masses, uniforms[b, -2])])
        result.invalid[b] = decision.invalid
        write_chain(result, b, draft_tokens[b, : decision.accepted], last)
    return result
