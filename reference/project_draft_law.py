"""Draft laws over a vocabulary of the draft's own, as laws over the target's."""

from __future__ import annotations

import numpy as np

from draft_verify.reference.mask_logits import mask_logits
from draft_verify.reference.sampling import sampling_law


def invert_draft_to_target(draft_to_target: np.ndarray, vocab_size: int) -> np.ndarray:
    """See `draft_verify.invert_draft_to_target`."""
    meant_by: list[list[int]] = [[] for _ in range(vocab_size)]
    for draft_id, target_id in enumerate(draft_to_target.tolist()):
        meant_by[target_id].append(draft_id)
    table = np.full((max(1, *map(len, meant_by)), vocab_size), -1, np.int32)
    for target_id, draft_ids in enumerate(meant_by):
        table[: len(draft_ids), target_id] = draft_ids
    return table


def project_draft_law(
    target_to_draft: np.ndarray,
    *,
    draft_logits: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    top_k: np.ndarray | None = None,
    top_p: np.ndarray | None = None,
    min_p: np.ndarray | None = None,
) -> np.ndarray:
    """See `draft_verify.project_draft_law`; float64."""
    given = draft_probs if draft_logits is None else draft_logits
    batch, rows, draft_size = given.shape
    laws = np.zeros((batch, rows, target_to_draft.shape[1]))
    known = (target_to_draft >= 0) & (target_to_draft < draft_size)
    for b in range(batch):
        for row in range(rows):
            law = np.asarray(given[b, row], np.float64)
            if draft_logits is not None:
                law = sampling_law(
                    law,
                    1.0 if temperature is None or temperature[b] == 0 else float(temperature[b]),
                    0 if top_k is None else int(top_k[b]),
                    1.0 if top_p is None else float(top_p[b]),
                    0.0 if min_p is None else float(min_p[b]),
                )
            if law is None:
                laws[b, row] = np.nan
                continue
            for draft_ids, is_known in zip(target_to_draft, known):
                laws[b, row, is_known] += law[draft_ids[is_known]]
    return laws


def over_target_ids(
    target_logits: np.ndarray,
    draft_logits: np.ndarray | None,
    draft_probs: np.ndarray | None,
    draft_to_target: np.ndarray | None,
    target_to_draft: np.ndarray | None,
    allowed_mask: np.ndarray | None,
    vocab_size: int,
    **parameters: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(target_logits, draft_logits, draft_probs) as the rules see them: over target ids, those not allowed at -inf.

    The first rows of the mask are the draft's.
    """
    if draft_to_target is not None:
        target_to_draft = invert_draft_to_target(draft_to_target, vocab_size)
    if target_to_draft is not None:
        draft_probs = project_draft_law(
            target_to_draft, draft_logits=draft_logits, draft_probs=draft_probs, **parameters
        )
        draft_logits = None
    if allowed_mask is not None:
        target_logits = mask_logits(target_logits, allowed_mask, vocab_size=vocab_size)
        if draft_logits is not None:
            own_mask = allowed_mask[:, : draft_logits.shape[1]]
            draft_logits = mask_logits(draft_logits, own_mask, vocab_size=vocab_size)
    return target_logits, draft_logits, draft_probs
