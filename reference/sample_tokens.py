"""sample_tokens: the processed law of a row and one token drawn from it, for the drafts' own proposals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from draft_verify.reference.mask_logits import mask_logits
from draft_verify.reference.rejection_sampling import one_hot
from draft_verify.reference.sampling import best_token, draw, has_law, sampling_law


class SampledTokens(NamedTuple):
    """NumPy arrays, or torch tensors where torch tensors came in.

    tokens  [B] int32
    probs   [B] fp32: the law at the token; 1 in greedy rows
    invalid [B] bool: the row held a NaN or nothing finite
    law     [B, V] fp32, the processed law, 0 from vocab_size on; None unless asked for
    """

    tokens: Any
    probs: Any
    invalid: Any
    law: Any = None


def sample_tokens(
    logits: np.ndarray,
    uniforms: np.ndarray,
    temperature: np.ndarray | None = None,
    top_k: np.ndarray | None = None,
    top_p: np.ndarray | None = None,
    min_p: np.ndarray | None = None,
    *,
    vocab_size: int | None = None,
    allowed_mask: np.ndarray | None = None,
    return_law: bool = False,
) -> SampledTokens:
    """See `draft_verify.sample_tokens`."""
    batch, width = logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    if allowed_mask is not None:
        logits = mask_logits(logits, allowed_mask)
    tokens = np.zeros(batch, np.int32)
    laws = np.zeros((batch, width), np.float64)
    invalid = np.zeros(batch, bool)
    for b in range(batch):
        row = np.asarray(logits[b, :vocab_size], np.float64)
        invalid[b] = not has_law(row)
        if invalid[b] or (temperature is not None and temperature[b] == 0):
            tokens[b] = best_token(row)
            law = one_hot(tokens[b], vocab_size)
        else:
            law = sampling_law(
                row,
                1.0 if temperature is None else float(temperature[b]),
                0 if top_k is None else int(top_k[b]),
                1.0 if top_p is None else float(top_p[b]),
                0.0 if min_p is None else float(min_p[b]),
            )
            tokens[b] = draw(law, uniforms[b, 0], uniforms[b, 1])
        laws[b, :vocab_size] = law
    probs = laws[np.arange(batch), tokens].astype(np.float32)
    return SampledTokens(tokens, probs, invalid, laws.astype(np.float32) if return_law else None)
