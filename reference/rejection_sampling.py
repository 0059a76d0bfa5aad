"""rejection_sampling: drafts kept so that every emitted token follows the target's law.

Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318, algorithm 2.
"""

from __future__ import annotations

import numpy as np

from draft_verify.reference.acceptance import Acceptance, empty_acceptance, write_chain
from draft_verify.reference.sampling import best_token, draw, has_law, sampling_law


def accept_probability(target_law: np.ndarray, draft_law: np.ndarray, token: int) -> float:
    """min(1, target / draft) at the draft; 0 where the target gives it no mass (2211.17192, section 2.3)."""
    if target_law[token] == 0:
        return 0.0
    if draft_law[token] <= target_law[token]:
        return 1.0
    return float(target_law[token] / draft_law[token])


def residual_law(target_law: np.ndarray, draft_law: np.ndarray) -> np.ndarray:
    """norm(max(target - draft, 0)), or the target's own law where that is zero everywhere."""
    excess = np.maximum(target_law - draft_law, 0)
    return excess / excess.sum() if excess.sum() > 0 else target_law


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
) -> Acceptance:
    """See `draft_verify.rejection_sampling`. A draft is accepted iff uniform * draft < target, strictly."""
    if rule != "token":
        raise NotImplementedError(f"rule {rule!r}")
    batch, num_rows, width = target_logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    result = empty_acceptance(batch, num_rows)

    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        if num_drafts < 0:
            continue
        greedy = temperature is not None and temperature[b] == 0
        parameters = {
            "temperature": 1.0 if temperature is None else float(temperature[b]),
            "top_k": 0 if top_k is None else int(top_k[b]),
            "top_p": 1.0 if top_p is None else float(top_p[b]),
            "min_p": 0.0 if min_p is None else float(min_p[b]),
        }

        accepted = 0
        last = None
        while last is None:
            row = accepted
            logits = np.asarray(target_logits[b, row, :vocab_size], np.float64)
            draft = int(draft_tokens[b, row]) if row < num_drafts else -1
            has_draft = 0 <= draft < vocab_size
            if not has_law(logits):
                last = best_token(logits)
                result.invalid[b] = True
            elif greedy:
                if has_draft and draft == best_token(logits):
                    accepted += 1
                else:
                    last = best_token(logits)
            else:
                target_law = sampling_law(logits, **parameters)
                draft_law = None
                if has_draft:
                    draft_law = draft_law_at(draft_logits, draft_probs, draft, (b, row), vocab_size, parameters)
                if draft_law is None:
                    last = draw(target_law, uniforms[b, -2], uniforms[b, -1])
                    result.invalid[b] = has_draft
                elif uniforms[b, row] * draft_law[draft] < target_law[draft]:
                    accepted += 1
                else:
                    last = draw(residual_law(target_law, draft_law), uniforms[b, -2], uniforms[b, -1])
        write_chain(result, b, draft_tokens[b, :accepted], last)
    return result
