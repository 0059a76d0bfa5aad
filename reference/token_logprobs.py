"""token_logprobs: log-probabilities of emitted tokens, under the law they were sampled from and under the raw one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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
) -> Logprobs:
    """See `draft_verify.token_logprobs`."""
    batch, num_rows, width = target_logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    result = Logprobs(np.zeros((batch, num_rows), np.float32), np.zeros((batch, num_rows), np.float32))
    for b in range(batch):
        heat = 1.0 if temperature is None else float(temperature[b])
        for place in range(num_rows):
            token = int(tokens[b, place])
            if token < 0:
                continue
            logits = np.asarray(target_logits[b, path[b, place], :vocab_size], np.float64)
            if not has_law(logits):
                result.processed[b, place] = result.raw[b, place] = np.nan
                continue
            with np.errstate(divide="ignore"):
                result.raw[b, place] = np.log(sampling_law(logits)[token])
                if heat != 0:  # a greedy row is certain of its token
                    law = sampling_law(
                        logits,
                        heat,
                        0 if top_k is None else int(top_k[b]),
                        1.0 if top_p is None else float(top_p[b]),
                        0.0 if min_p is None else float(min_p[b]),
                    )
                    result.processed[b, place] = np.log(law[token])
    return result
