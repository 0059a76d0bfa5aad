"""Synthetic acceptance, for end-to-end benches without a trained draft: outcomes with given rates, whatever the logits.

The rates fall off as vLLM's synthetic rejection sampler has it (vllm#38045): P(drafts 1..i accepted) =
a^i gamma^(i(i-1)/2), with a found by bisection so that the mean length comes out right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draft_verify.reference.acceptance import Acceptance

GAMMA = 0.85


def synthetic_rates(mean_length: float, num_draft_tokens: int, gamma: float = GAMMA) -> list[float]:
    """Unconditional rates P_1..P_K with 1 + sum P_i = `mean_length` emitted tokens a step.

    Raises ValueError unless 1 <= mean_length <= K + 1. When it is too long for `gamma`, gamma rises until it fits.
    """
    if not 1 <= mean_length <= num_draft_tokens + 1:
        raise ValueError(f"mean length {mean_length} at K = {num_draft_tokens}: expected 1..{num_draft_tokens + 1}")
    positions = np.arange(1, num_draft_tokens + 1)

    def rates(first: float, falloff: float) -> np.ndarray:
        return first**positions * falloff ** (positions * (positions - 1) / 2)

    def bisect(function) -> float:
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if 1 + function(middle).sum() < mean_length else (low, middle)
        return high

    if 1 + rates(1.0, gamma).sum() < mean_length:
        return rates(1.0, bisect(lambda falloff: rates(1.0, falloff))).tolist()
    return rates(bisect(lambda first: rates(first, gamma)), gamma).tolist()


def synthetic_acceptance(
    draft_tokens: np.ndarray,
    next_tokens: np.ndarray,
    conditional_rates: Sequence[float],
    uniforms: np.ndarray,
    draft_lens: np.ndarray | None = None,
) -> Acceptance:
    """Accept chains with given probabilities.

    Args:
        draft_tokens: [B,K] int32; accepted slots emit them.
        next_tokens: [B,T] int32, what follows each window row, emitted after the last accepted draft.
        conditional_rates: [K] P(draft i accepted | those before it were).
        uniforms: [B,T+1] float32 as rejection_sampling takes them; column i tests draft i.
        draft_lens: [B] drafts proposed, default K; -1 is an empty slot.
    """
    batch, num_draft_tokens = draft_tokens.shape
    draft_lens = np.full(batch, num_draft_tokens, np.int32) if draft_lens is None else draft_lens
    passed = uniforms[:, :num_draft_tokens] < np.asarray(conditional_rates)
    passed &= np.arange(num_draft_tokens) < draft_lens[:, None]
    num_accepted = np.logical_and.accumulate(passed, axis=1).sum(axis=1).astype(np.int32)
    num_accepted[draft_lens < 0] = -1
    tokens = np.full((batch, num_draft_tokens + 1), -1, np.int32)
    path = np.full((batch, num_draft_tokens + 1), -1, np.int32)
    for b, accepted in enumerate(num_accepted):
        if accepted >= 0:
            tokens[b, :accepted] = draft_tokens[b, :accepted]
            tokens[b, accepted] = next_tokens[b, accepted]
            path[b, : accepted + 1] = np.arange(accepted + 1)
    return Acceptance(tokens, num_accepted, path, np.zeros(batch, bool))
