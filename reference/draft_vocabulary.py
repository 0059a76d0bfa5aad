"""Draft laws over a vocabulary of the draft's own, as laws over the target's."""

from __future__ import annotations

import numpy as np

from draft_verify.reference.sampling import sampling_law


def onto_target(
    draft_logits: np.ndarray | None,
    draft_probs: np.ndarray | None,
    draft_to_target: np.ndarray,
    vocab_size: int,
    temperature: np.ndarray | None,
    top_k: np.ndarray | None,
    top_p: np.ndarray | None,
    min_p: np.ndarray | None,
) -> np.ndarray:
    """[B, R, vocab_size] float64 from laws [B, R, Vd]: logits are processed first, then ids of one target id add up.

    A law with a NaN stays one. `draft_to_target` [Vd] may be many to one.
    """
    given = draft_probs if draft_logits is None else draft_logits
    batch, rows, _ = given.shape
    laws = np.zeros((batch, rows, vocab_size))
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
            if law is None or not np.isfinite(law).all():
                laws[b, row] = np.nan
            else:
                np.add.at(laws[b, row], draft_to_target, law)
    return laws
