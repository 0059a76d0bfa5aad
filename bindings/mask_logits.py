"""mask_logits: logits of the ids a grammar allows, the others of no probability."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch_by_rows
from draft_verify.reference.mask_logits import mask_logits as reference


@public
def mask_logits(
    logits: Any, allowed_mask: Any, *, vocab_size: int | None = None, backend: str = "auto", lnc: int | None = None
) -> Any:
    """Applies a grammar's mask before any other processing: for every acceptance rule, and for the drafts' own logits.

    Args:
        logits: [B, T, V] fp32 or bf16 (any other [B, V] as [B, 1, V]).
        allowed_mask: [B, T, ceil(V / 32)] int32: id i is allowed iff bit i % 32 of word i // 32 is set.
        vocab_size: columns that count; default V.
        backend, lnc: see the package.

    Returns:
        [B, T, vocab_size] of the logits' dtype, a new array: -inf for ids that are not allowed, whatever they held.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    vocab_size = checks.acceptance.mask_logits(logits, allowed_mask, vocab_size)
    if backend == "reference":
        return reference(logits, allowed_mask, vocab_size=vocab_size)
    return launch_by_rows(
        "mask_logits",
        logits,
        allowed_mask,
        vocab_size,
        batch=logits.shape[0],
        rows=logits.shape[1],
        backend=backend,
        lnc=lnc,
    )[0]
