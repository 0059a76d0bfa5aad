"""typical_acceptance: drafts kept where the target finds them typical enough. It changes the target's law.

Cai et al. (Medusa), arXiv 2401.10774, section 2.3.1: accept iff target(x) > min(threshold, alpha * exp(-entropy)).
"""

from __future__ import annotations

import numpy as np

from draft_verify.reference.acceptance import Acceptance, empty_acceptance
from draft_verify.reference.mask_logits import mask_logits
from draft_verify.reference.sampling import best_token, draw, has_law, sampling_law


def typical_limit(law: np.ndarray, posterior_threshold: float, posterior_alpha: float) -> float:
    """What a draft's probability must exceed."""
    positive = law[law > 0]
    entropy = -(positive * np.log(positive)).sum()
    return float(min(posterior_threshold, posterior_alpha * np.exp(-entropy)))


def typical_acceptance(
    draft_tokens: np.ndarray,
    target_logits: np.ndarray,
    uniforms: np.ndarray,
    *,
    posterior_threshold: float,
    posterior_alpha: float,
    tree: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    draft_lens: np.ndarray | None = None,
    vocab_size: int | None = None,
    allowed_mask: np.ndarray | None = None,
) -> Acceptance:
    """See `draft_verify.typical_acceptance`."""
    batch, num_rows, width = target_logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    if allowed_mask is not None:
        target_logits = mask_logits(target_logits, allowed_mask, vocab_size=vocab_size)
    tree = np.arange(-1, num_rows - 1) if tree is None else tree
    result = empty_acceptance(batch, num_rows)
    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        if num_drafts < 0:
            continue
        parents = tree if tree.ndim == 1 else tree[b]
        heat = 1.0 if temperature is None else float(temperature[b])
        logits = np.asarray(target_logits[b, :, :vocab_size], np.float64)
        tokens = [-1, *(int(token) for token in draft_tokens[b])]

        # Paths from the root to every row that is kept, with their log-likelihoods.
        paths, likelihoods = {0: [0]}, {0: 0.0}
        for row in range(1, num_drafts + 1):
            parent = int(parents[row])
            if parent not in paths or not 0 <= tokens[row] < vocab_size or not has_law(logits[parent]):
                continue
            law = sampling_law(logits[parent], heat or 1.0)
            if heat == 0:
                kept = tokens[row] == best_token(logits[parent])
            else:
                kept = law[tokens[row]] > typical_limit(law, posterior_threshold, posterior_alpha)
            if kept:
                paths[row] = [*paths[parent], row]
                likelihoods[row] = likelihoods[parent] + np.log(law[tokens[row]])
        # The longest, then the likeliest, then the first.
        last_row = max(paths, key=lambda row: (len(paths[row]), likelihoods[row], -row))
        path = paths[last_row]

        row = logits[last_row]
        result.invalid[b] = not has_law(row)
        if result.invalid[b] or heat == 0:
            last = best_token(row)
        else:
            last = draw(sampling_law(row, heat), uniforms[b, -2], uniforms[b, -1])
        accepted = len(path) - 1
        result.tokens[b, : accepted + 1] = [*(tokens[r] for r in path[1:]), last]
        result.num_accepted[b] = accepted
        result.path[b, : accepted + 1] = path
    return result
