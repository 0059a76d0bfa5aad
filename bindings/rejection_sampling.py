"""rejection_sampling: drafts kept so that every emitted token follows the target's law."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch_by_rows
from draft_verify.parameters import draft_law, per_sequence, truncation
from draft_verify.project_draft_law import over_target_ids
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.rejection_sampling import rejection_sampling as reference


@public
def rejection_sampling(
    draft_tokens: Any,
    target_logits: Any,
    uniforms: Any,
    *,
    draft_logits: Any = None,
    draft_probs: Any = None,
    draft_lens: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    rule: str = "token",
    vocab_size: int | None = None,
    allowed_mask: Any = None,
    draft_to_target: Any = None,
    target_to_draft: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """The longest prefix of drafts that leaves the target's distribution exactly as it is, and one token after it.

    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.

    Args:
        draft_tokens: [B, K] int32; -1, or any id outside the vocabulary, stops the sequence there.
        target_logits: [B, T, V] fp32 or bf16, T = K + 1 <= 128; row i follows draft i.
        uniforms: [B, T + 1] fp32 in (0, 1): K accept tests, then two for the last token (`uniforms_for`).
        draft_logits: [B, K, V] fp32 or bf16, raw, processed like their target row; or
        draft_probs: [B, K, V] fp32 or bf16, the laws the drafts were drawn from, as they are; with neither, a draft
            has no law of its own (greedy drafts, prompt lookup).
        draft_lens: [B] int32, drafts of each sequence, 0..K, -1 an empty slot; default K.
        temperature: number or [B] fp32, 0 greedy; default 1.
        top_k, top_p, min_p: number or [B]; 0 or -1, 1 and 0 are off, the default.
        rule: "token"; or "block" (Sun et al., arXiv 2403.10444), whose prefixes pass as a whole, and which accepts
            as many drafts or more on average, for a second read of the rows between.
        vocab_size: columns that count; default V.
        allowed_mask: [B, T, ceil(V / 32)] int32 bits of the ids a grammar allows (`mask_logits`); default all.
        draft_to_target: [Vd] int32, many to one allowed, where the draft has a vocabulary of its own: draft laws are
            then [.., Vd], processed there (allowed_mask is not applied to them), and draft_tokens still target ids; or
        target_to_draft: [M, vocab_size] int32, the same map made once by `invert_draft_to_target`: on a device always.
        backend, lnc: see the package.

    Returns:
        Acceptance.

    Raises:
        ValueError: a shape, dtype or value that does not fit. On a device, a sequence with bad values becomes an
            empty slot with `invalid` set.
    """
    batch, rows, vocab_size = checks.acceptance.rejection_sampling(
        draft_tokens,
        target_logits,
        uniforms,
        draft_logits,
        draft_probs,
        draft_lens,
        temperature,
        top_k,
        top_p,
        min_p,
        rule,
        vocab_size,
        draft_to_target,
        target_to_draft,
    )
    checks.acceptance.allowed_ids(allowed_mask, target_logits.shape)
    draft_lens = per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens)
    temperature = per_sequence(temperature, 1.0, batch, "float32", draft_tokens)
    cut, top_k, top_p, min_p = truncation(top_k, top_p, min_p, batch, draft_tokens)
    if backend == "reference":
        return reference(
            draft_tokens,
            target_logits,
            uniforms,
            draft_logits=draft_logits,
            draft_probs=draft_probs,
            draft_lens=draft_lens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            rule=rule,
            vocab_size=vocab_size,
            allowed_mask=allowed_mask,
            draft_to_target=draft_to_target,
            target_to_draft=target_to_draft,
        )
    target_logits, draft_logits, draft_probs = over_target_ids(
        target_logits,
        draft_logits,
        draft_probs,
        draft_to_target,
        target_to_draft,
        allowed_mask,
        vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        backend=backend,
        lnc=lnc,
    )
    law, draft_kind = draft_law(draft_logits, draft_probs)
    if rows == 1:
        draft_tokens, law, draft_kind = None, None, "one_hot"
    tokens, num_accepted, path, invalid = launch_by_rows(
        "rejection_sampling",
        draft_tokens,
        target_logits,
        uniforms,
        law,
        draft_lens,
        temperature,
        top_k,
        top_p,
        min_p,
        draft_kind,
        rule,
        cut,
        vocab_size,
        batch=batch,
        rows=rows,
        truncated=vocab_size if cut else 0,
        backend=backend,
        lnc=lnc,
    )
    return Acceptance(tokens, num_accepted, path, invalid != 0)
