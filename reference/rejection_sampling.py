"""rejection_sampling: drafts kept so that every emitted token follows the target's law.

Token rule: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2.
Block rule: Sun et al., arXiv 2403.10444, algorithm 2.
"""

from __future__ import annotations

import numpy as np

from draft_verify.reference.acceptance import Acceptance, empty_acceptance, write_chain
from draft_verify.reference.project_draft_law import over_target_ids
from draft_verify.reference.sampling import best_token, draw, has_law, sampling_law

Pair = tuple[np.ndarray, np.ndarray, int]  # a row's target law, its draft's law and the draft


def accept_probability(target_law: np.ndarray, draft_law: np.ndarray, token: int) -> float:
    """min(1, target / draft) at the draft; 0 where the target gives it no mass (2211.17192, section 2.3)."""
    if target_law[token] == 0:
        return 0.0
    if draft_law[token] <= target_law[token]:
        return 1.0
    return float(target_law[token] / draft_law[token])


def residual_law(target_law: np.ndarray, draft_law: np.ndarray, weight: float = 1.0) -> np.ndarray:
    """norm(max(weight * target - draft, 0)), or the target's own law where that is zero everywhere."""
    excess = np.maximum(weight * target_law - draft_law, 0)
    return excess / excess.sum() if excess.sum() > 0 else target_law


def block_probabilities(pairs: list[Pair]) -> tuple[list[float], list[float]]:
    """Weights w_0..w_k of the prefixes of k drafts, and the probabilities that the prefix of i drafts passes.

    w_i = min(1, w_(i-1) * target / draft); a prefix before the last passes with S / (S + 1 - w_i), where S is the
    mass of max(w_i * target - draft, 0) in the row after it, and the whole block with w_k (2403.10444, equations 3-5).
    """
    weights, passes = [1.0], [1.0]
    for target_law, draft_law, draft in pairs:
        ratio = target_law[draft] / max(draft_law[draft], np.finfo(np.float64).tiny)
        weights.append(min(1.0, weights[-1] * ratio))
    for i in range(1, len(pairs)):
        target_law, draft_law, _ = pairs[i]
        excess = np.maximum(weights[i] * target_law - draft_law, 0).sum()
        denominator = excess + 1 - weights[i]
        passes.append(excess / denominator if denominator > 0 else 1.0)
    return weights, passes + weights[len(passes) :]


def one_hot(token: int, vocab_size: int) -> np.ndarray:
    law = np.zeros(vocab_size)
    law[token] = 1
    return law


def draft_law_at(
    draft_logits: np.ndarray | None,
    draft_probs: np.ndarray | None,
    draft: int,
    where: tuple[int, int],
    vocab_size: int,
    parameters: dict[str, float],
) -> np.ndarray | None:
    """The law [vocab_size] that the draft at (sequence, row) was drawn from; None where it holds a NaN or infinity."""
    if draft_logits is not None:
        return sampling_law(draft_logits[where][:vocab_size], **parameters)
    if draft_probs is not None:
        law = np.asarray(draft_probs[where][:vocab_size], np.float64)
        return law if np.isfinite(law).all() else None
    return one_hot(draft, vocab_size)


def leading_pairs(
    logits: np.ndarray,
    drafts: list[int | None],
    draft_logits: np.ndarray | None,
    draft_probs: np.ndarray | None,
    b: int,
    vocab_size: int,
    parameters: dict[str, float],
) -> list[Pair]:
    """Of sequence b, the rows before the first that has no law, no draft, or a draft without a law."""
    pairs = []
    for row, draft in enumerate(drafts):
        if draft is None or not has_law(logits[row]):
            break
        draft_law = draft_law_at(draft_logits, draft_probs, draft, (b, row), vocab_size, parameters)
        if draft_law is None:
            break
        pairs.append((sampling_law(logits[row], **parameters), draft_law, draft))
    return pairs


def greedy_prefix(logits: np.ndarray, drafts: list[int | None]) -> int:
    """Drafts before the first that is not its row's best token."""
    row = 0
    while has_law(logits[row]) and drafts[row] == best_token(logits[row]):
        row += 1
    return row


def token_prefix(pairs: list[Pair], uniforms: np.ndarray) -> int:
    """Drafts before the first with uniform * draft >= target."""
    for row, (target_law, draft_law, draft) in enumerate(pairs):
        if not uniforms[row] * draft_law[draft] < target_law[draft]:
            return row
    return len(pairs)


def rejection_sampling(
    draft_tokens: np.ndarray,
    target_logits: np.ndarray,
    uniforms: np.ndarray,
    *,
    draft_logits: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    draft_lens: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    top_k: np.ndarray | None = None,
    top_p: np.ndarray | None = None,
    min_p: np.ndarray | None = None,
    rule: str = "token",
    vocab_size: int | None = None,
    allowed_mask: np.ndarray | None = None,
    draft_to_target: np.ndarray | None = None,
    target_to_draft: np.ndarray | None = None,
) -> Acceptance:
    """See `draft_verify.rejection_sampling`."""
    batch, num_rows, width = target_logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    target_logits, draft_logits, draft_probs = over_target_ids(
        target_logits,
        draft_logits,
        draft_probs,
        draft_to_target,
        target_to_draft,
        allowed_mask,
        vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    result = empty_acceptance(batch, num_rows)
    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        if num_drafts < 0:
            continue
        parameters = {
            "temperature": 1.0 if temperature is None else float(temperature[b]),
            "top_k": 0 if top_k is None else int(top_k[b]),
            "top_p": 1.0 if top_p is None else float(top_p[b]),
            "min_p": 0.0 if min_p is None else float(min_p[b]),
        }
        logits = np.asarray(target_logits[b, :, :vocab_size], np.float64)
        drafts = [int(draft) if 0 <= draft < vocab_size else None for draft in draft_tokens[b, :num_drafts]] + [None]
        greedy = parameters["temperature"] == 0
        weight = 1.0
        if greedy:
            accepted = greedy_prefix(logits, drafts)
        else:
            pairs = leading_pairs(logits, drafts, draft_logits, draft_probs, b, vocab_size, parameters)
            if rule == "token":
                accepted = token_prefix(pairs, uniforms[b])
            else:
                weights, passes = block_probabilities(pairs)
                accepted = max(i for i, h in enumerate(passes) if i == 0 or uniforms[b, i - 1] <= h)
                weight = weights[accepted]

        if not has_law(logits[accepted]):
            last = best_token(logits[accepted])
            result.invalid[b] = True
        elif greedy:
            last = best_token(logits[accepted])
        elif accepted < len(pairs):
            target_law, draft_law, _ = pairs[accepted]
            last = draw(residual_law(target_law, draft_law, weight), uniforms[b, -2], uniforms[b, -1])
        else:
            last = draw(sampling_law(logits[accepted], **parameters), uniforms[b, -2], uniforms[b, -1])
            result.invalid[b] = drafts[accepted] is not None  # a draft whose own law holds a NaN
        write_chain(result, b, draft_tokens[b, :accepted], last)
    return result
