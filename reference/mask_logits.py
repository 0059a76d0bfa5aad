"""mask_logits: logits of the ids a grammar allows, -inf for the others."""

from __future__ import annotations

import numpy as np


def mask_logits(logits: np.ndarray, allowed_mask: np.ndarray, *, vocab_size: int | None = None) -> np.ndarray:
    """See `draft_verify.mask_logits`."""
    vocab_size = logits.shape[-1] if vocab_size is None else vocab_size
    ids = np.arange(vocab_size)
    allowed = allowed_mask[..., ids // 32].astype(np.uint32) >> (ids % 32).astype(np.uint32) & 1
    return np.where(allowed == 1, logits[..., :vocab_size], np.array(-np.inf, logits.dtype))
