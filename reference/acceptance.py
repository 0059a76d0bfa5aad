"""What every acceptance operation returns."""

from __future__ import annotations

from typing import Any, NamedTuple


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
