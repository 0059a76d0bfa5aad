"""typical_acceptance: drafts kept where the target finds them typical enough. It changes the target's law."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch_by_rows
from draft_verify.mask_logits import mask_logits
from draft_verify.parameters import per_sequence
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.typical_acceptance import typical_acceptance as reference


@public
def typical_acceptance(
    draft_tokens: Any,
    target_logits: Any,
    uniforms: Any,
    *,
    posterior_threshold: float,
    posterior_alpha: float,
    tree: Any = None,
    temperature: Any = None,
    draft_lens: Any = None,
    vocab_size: int | None = None,
    allowed_mask: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """Keeps a draft iff its probability exceeds min(threshold, alpha * exp(-entropy)) of its row (arXiv 2401.10774).

    Lossy: what is emitted no longer follows the target's law. The window's row 0 is the token that is always kept, so
    num_accepted may be 0; the last token is drawn from the target's law. Of a tree, the longest path is kept, among
    equals the likeliest. Medusa's own defaults are a threshold of 0.09 and an alpha of 0.3.

    Args:
        draft_tokens: [B, T - 1] int32; a row whose id is -1 or outside the vocabulary is not taken.
        target_logits: [B, T, V] fp32 or bf16, T <= 128.
        uniforms: [B, T + 1] fp32 in (0, 1), of which the last two columns draw.
        posterior_threshold, posterior_alpha: numbers in (0, 1] and above 0.
        tree: parents [T] or [B, T] int32, as `tree_acceptance`; default a chain.
        temperature: number or [B] fp32; default 1; 0 keeps the target's best tokens only.
        draft_lens: [B] int32, rows after the root that count, -1 an empty slot; default T - 1.
        vocab_size: columns that count; default V.
        allowed_mask: [B, T, ceil(V / 32)] int32 bits of the ids a grammar allows (`mask_logits`); default all.
        backend, lnc: see the package.

    Returns:
        Acceptance.

    Raises:
        ValueError: a shape, dtype or value that does not fit. On a device, a sequence with bad values becomes an
            empty slot with `invalid` set.
    """
    batch, rows, vocab_size = checks.acceptance.typical_acceptance(
        draft_tokens,
        target_logits,
        uniforms,
        posterior_threshold,
        posterior_alpha,
        tree,
        temperature,
        draft_lens,
        vocab_size,
    )
    checks.acceptance.allowed_ids(allowed_mask, target_logits.shape)
    draft_lens = per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens)
    temperature = per_sequence(temperature, 1.0, batch, "float32", draft_tokens)
    if backend == "reference":
        return reference(
            draft_tokens,
            target_logits,
            uniforms,
            posterior_threshold=posterior_threshold,
            posterior_alpha=posterior_alpha,
            tree=tree,
            temperature=temperature,
            draft_lens=draft_lens,
            vocab_size=vocab_size,
            allowed_mask=allowed_mask,
        )
    if allowed_mask is not None:
        target_logits = mask_logits(target_logits, allowed_mask, vocab_size=vocab_size, backend=backend, lnc=lnc)
    tokens, num_accepted, path, invalid = launch_by_rows(
        "typical_acceptance",
        draft_tokens if rows > 1 else None,
        target_logits,
        uniforms,
        tree,
        draft_lens,
        temperature,
        float(posterior_threshold),
        float(posterior_alpha),
        tree is None,
        vocab_size,
        batch=batch,
        rows=rows,
        backend=backend,
        lnc=lnc,
    )
    return Acceptance(tokens, num_accepted, path, invalid != 0)
