"""greedy_acceptance: drafts kept while they are the target's own first choice.

Leviathan et al., arXiv 2211.17192, section 2.2: the limit of temperature 0 (argmax, the lowest id among equals).
"""

from __future__ import annotations

import numpy as np

from draft_verify.reference.acceptance import Acceptance, empty_acceptance, write_chain
from draft_verify.reference.mask_logits import mask_logits
from draft_verify.reference.sampling import best_token, has_law


def greedy_acceptance(
    draft_tokens: np.ndarray,
    target_logits: np.ndarray,
    *,
    draft_lens: np.ndarray | None = None,
    vocab_size: int | None = None,
    allowed_mask: np.ndarray | None = None,
) -> Acceptance:
    """See `draft_verify.greedy_acceptance`."""
    batch, num_rows, width = target_logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    if allowed_mask is not None:
        target_logits = mask_logits(target_logits, allowed_mask, vocab_size=vocab_size)
    result = empty_acceptance(batch, num_rows)
    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        if num_drafts < 0:
            continue
        accepted = 0
        logits = np.asarray(target_logits[b, 0, :vocab_size], np.float64)
        while accepted < num_drafts and has_law(logits) and draft_tokens[b, accepted] == best_token(logits):
            accepted += 1
            logits = np.asarray(target_logits[b, accepted, :vocab_size], np.float64)
        result.invalid[b] = not has_law(logits)
        write_chain(result, b, draft_tokens[b, :accepted], best_token(logits))
    return result
