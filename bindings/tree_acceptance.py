"""tree_acceptance: the path of a tree of drafts that is kept, and the one token after it."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch_by_rows
from draft_verify.parameters import draft_law, per_sequence, truncation
from draft_verify.project_draft_law import over_target_ids
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.tree_acceptance import tree_acceptance as reference


@public
def tree_acceptance(
    tree: Any,
    draft_tokens: Any,
    target_logits: Any,
    uniforms: Any = None,
    *,
    rule: str = "greedy",
    draft_logits: Any = None,
    draft_probs: Any = None,
    draft_lens: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    vocab_size: int | None = None,
    allowed_mask: Any = None,
    draft_to_target: Any = None,
    target_to_draft: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """Walks from the root to the accepted child of each row, in the rows' order, and emits one more token at the end.

    All rules but greedy leave the target's distribution as it is, if the siblings came about as they say:

        "greedy"               the child that is the target's best token (arXiv 2305.09781)
        "target_only"          siblings without a law, such as the draft's best m; repeated ones are skipped
        "without_replacement"  siblings drawn one after the other from the draft law without those before, which is
                               what their order must be (2402.14160, 2402.12374)
        "independent"          siblings drawn independently from the draft law (2305.09781)

    Args:
        tree: parents [T] or [B, T] int32, row 0 the root with -1, parents before children; padding is -2 and last.
        draft_tokens: [B, T - 1] int32, of rows 1..; a row whose id is -1 or outside the vocabulary is not taken.
        target_logits: [B, T, V] fp32 or bf16, T <= 128.
        uniforms: [B, T + 1] fp32 in (0, 1): row r is tested with column r - 1, the last two draw; not for "greedy".
        rule: see above; sequences of temperature 0 are greedy under every rule.
        draft_logits, draft_probs: [B, T, V], row i the law its children were drawn from; for the last two rules.
        draft_lens: [B] int32, rows after the root that count, 0..T - 1, -1 an empty slot.
        temperature, top_k, top_p, min_p, vocab_size: as `rejection_sampling`.
        allowed_mask: [B, T, ceil(V / 32)] int32 bits of the ids a grammar allows (`mask_logits`); default all.
        draft_to_target: [Vd] int32, many to one allowed, where the draft has a vocabulary of its own: draft laws are
            then [.., Vd], processed there (allowed_mask is not applied to them), and draft_tokens still target ids; or
        target_to_draft: [M, vocab_size] int32, the same map made once by `invert_draft_to_target`: on a device always.
        backend, lnc: see the package.

    Returns:
        Acceptance; num_accepted counts the accepted rows, path holds them.

    Raises:
        ValueError: a shape, dtype or value that does not fit. On a device, a sequence with bad values becomes an
            empty slot with `invalid` set.
    """
    batch, rows, vocab_size = checks.acceptance.tree_acceptance(
        tree,
        draft_tokens,
        target_logits,
        uniforms,
        rule,
        draft_logits,
        draft_probs,
        draft_lens,
        temperature,
        top_k,
        top_p,
        min_p,
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
            tree,
            draft_tokens,
            target_logits,
            uniforms,
            rule=rule,
            draft_logits=draft_logits,
            draft_probs=draft_probs,
            draft_lens=draft_lens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
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
    tokens, num_accepted, path, invalid = launch_by_rows(
        "tree_acceptance",
        tree,
        draft_tokens if rows > 1 else None,
        target_logits,
        uniforms,
        law,
        draft_lens,
        temperature,
        top_k,
        top_p,
        min_p,
        rule,
        draft_kind,
        cut,
        vocab_size,
        batch=batch,
        rows=rows,
        truncated=vocab_size if cut else 0,
        backend=backend,
        lnc=lnc,
    )
    return Acceptance(tokens, num_accepted, path, invalid != 0)
