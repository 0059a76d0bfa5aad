"""What every acceptance operation returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Acceptance(NamedTuple):
    """The outcome of verifying one window a sequence; NumPy arrays, or torch tensors where torch tensors came in.

    tokens       [B, T] int32: emitted tokens, the first num_accepted + 1 valid, then -1
    num_accepted [B] int32: accepted drafts, 0..draft_lens; -1 in an empty batch slot
    path         [B, T] int32: window rows kept, path[:, 0] = 0, num_accepted + 1 valid, then -1
    invalid      [B] bool: a row that counted held a NaN or nothing but -inf, or the sequence's own values were bad
    """

    tokens: Any
    num_accepted: Any
    path: Any
    invalid: Any


def empty_acceptance(batch: int, num_rows: int) -> Acceptance:
    """Every sequence an empty slot, for references to fill."""
    return Acceptance(
        tokens=np.full((batch, num_rows), -1, np.int32),
        num_accepted=np.full(batch, -1, np.int32),
        path=np.full((batch, num_rows), -1, np.int32),
        invalid=np.zeros(batch, bool),
    )


def write_chain(result: Acceptance, b: int, accepted_tokens: np.ndarray, last_token: int) -> None:
    """Sequence b of a chain: the accepted drafts and the one token after them."""
    accepted = len(accepted_tokens)
    result.tokens[b, :accepted] = accepted_tokens
    result.tokens[b, accepted] = last_token
    result.num_accepted[b] = accepted
    result.path[b, : accepted + 1] = np.arange(accepted + 1)
