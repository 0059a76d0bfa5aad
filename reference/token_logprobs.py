"""token_logprobs: log-probabilities of emitted tokens, under the law they were sampled from and under the raw one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draft_verify.reference.mask_logits import mask_logits
from draft_verify.reference.sampling import has_law, sampling_law


class Logprobs(NamedTuple):
    """[B, T] fp32 each, 0 where there is no token, NaN where the row has no law."""

    processed: np.ndarray
    raw: np.ndarray


def token_logprobs(
    target_logits: np.ndarray,
    tokens: np.ndarray,
    path: np.ndarray,
    *,
    temperature: np.ndarray | None = None,
    top_k: np.ndarray | None = None,
    top_p: np.ndarray | None = None,
    min_p: np.ndarray | None = None,
    vocab_size: int | None = None,
    allowed_mask: np.ndarray | None = None,
) -> Logprobs:
    """See `draft_verify.token_logprobs`."""
    batch, num_rows, width = target_logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    masked_logits = target_logits if allowed_mask is None else mask_logits(target_logits, allowed_mask)
    result = Logprobs(np.zeros((batch, num_rows), np.float32), np.zeros((batch, num_rows), np.float32))
    for b in range(batch):
        heat = 1.0 if temperature is None else float(temperature[b])
        for place in range(num_rows):
            token = int(tokens[b, place])
            if token < 0:
                continue
            raw_logits, logits = (
                np.asarray(rows[b, path[b, place], :vocab_size], np.float64) for rows in (target_logits, masked_logits)
            )
            result.raw[b, place] = log_probability(sampling_law(raw_logits), token)
            if heat == 0 and has_law(logits):
                continue  # a greedy row is certain of its token
            law = sampling_law(
                logits,
                heat or 1.0,
                0 if top_k is None else int(top_k[b]),
                1.0 if top_p is None else float(top_p[b]),
                0.0 if min_p is None else float(min_p[b]),
            )
            result.processed[b, place] = log_probability(law, token)
    return result


def log_probability(law: np.ndarray | None, token: int) -> float:
    with np.errstate(divide="ignore"):
        return np.nan if law is None else np.log(law[token])
