"""sample_tokens: the processed law of a row and one token drawn from it, for the drafts' own proposals."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch_by_rows
from draft_verify.mask_logits import mask_logits
from draft_verify.parameters import per_sequence, truncation
from draft_verify.reference.sample_tokens import SampledTokens
from draft_verify.reference.sample_tokens import sample_tokens as reference


@public
def sample_tokens(
    logits: Any,
    uniforms: Any,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    *,
    vocab_size: int | None = None,
    allowed_mask: Any = None,
    return_law: bool = False,
    backend: str = "auto",
    lnc: int | None = None,
) -> SampledTokens:
    """One token a row by the processing and the draw that verification uses, so that what is verified was drafted so.

    Args:
        logits: [B, V] fp32 or bf16.
        uniforms: [B, 2] fp32 in (0, 1), for the group of ids and for the id (`uniforms_for(..., purpose="draft")`).
        temperature, top_k, top_p, min_p, vocab_size: as `rejection_sampling`.
        allowed_mask: [B, ceil(V / 32)] int32 bits of the ids a grammar allows (`mask_logits`); default all.
        return_law: whether the processed law is wanted too, for `draft_probs`.
        backend, lnc: see the package.

    Returns:
        SampledTokens: tokens [B] int32, probs [B] fp32 of the law at the token, invalid [B] bool, law [B, V] fp32 or
        None. A row without a law (NaN, nothing finite) gives its best finite token, as if greedy, and sets invalid.

    Raises:
        ValueError: a shape, dtype or value that does not fit. On a device, a row of bad values gives token -1,
            probability and law 0, and sets invalid.
    """
    batch, vocab_size = checks.acceptance.sample_tokens(logits, uniforms, temperature, top_k, top_p, min_p, vocab_size)
    checks.acceptance.allowed_ids(allowed_mask, logits.shape)
    temperature = per_sequence(temperature, 1.0, batch, "float32", logits)
    cut, top_k, top_p, min_p = truncation(top_k, top_p, min_p, batch, logits)
    if backend == "reference":
        return reference(
            logits,
            uniforms,
            temperature,
            top_k,
            top_p,
            min_p,
            vocab_size=vocab_size,
            allowed_mask=allowed_mask,
            return_law=return_law,
        )
    if allowed_mask is not None:
        rows, masks = logits.reshape(batch, 1, -1), allowed_mask.reshape(batch, 1, -1)
        logits = mask_logits(rows, masks, backend=backend, lnc=lnc).reshape(batch, -1)
    outputs = launch_by_rows(
        "sample_tokens",
        logits,
        uniforms,
        per_sequence(None, 0, batch, "int32", logits),
        temperature,
        top_k,
        top_p,
        min_p,
        cut,
        return_law,
        vocab_size,
        batch=batch,
        rows=1,
        truncated=vocab_size if cut else 0,
        backend=backend,
        lnc=lnc,
    )
    return SampledTokens(outputs[0], outputs[1], outputs[2] != 0, outputs[3] if return_law else None)
