"""greedy_acceptance: drafts kept while they are the target's own first choice."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch_by_rows
from draft_verify.mask_logits import mask_logits
from draft_verify.parameters import per_sequence
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.greedy_acceptance import greedy_acceptance as reference


@public
def greedy_acceptance(
    draft_tokens: Any,
    target_logits: Any,
    *,
    draft_lens: Any = None,
    vocab_size: int | None = None,
    allowed_mask: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """The longest prefix of drafts that greedy decoding would have emitted, and its next token.

    Args:
        draft_tokens: [B, K] int32; -1, or any id outside the vocabulary, stops the sequence there.
        target_logits: [B, T, V] fp32 or bf16, T = K + 1 <= 128; the lowest id wins a tie.
        draft_lens: [B] int32, drafts of each sequence, 0..K, -1 an empty slot; default K.
        vocab_size: columns that count; default V.
        allowed_mask: [B, T, ceil(V / 32)] int32 bits of the ids a grammar allows (`mask_logits`); default all.
        backend, lnc: see the package.

    Returns:
        Acceptance.

    Raises:
        ValueError: a shape, dtype or value that does not fit. On a device, a sequence with bad values becomes an
            empty slot with `invalid` set.
    """
    batch, rows, vocab_size = checks.acceptance.every_rule(draft_tokens, target_logits, draft_lens, vocab_size)
    checks.acceptance.allowed_ids(allowed_mask, target_logits.shape)
    if backend == "reference":
        return reference(
            draft_tokens,
            target_logits,
            draft_lens=draft_lens,
            vocab_size=vocab_size,
            allowed_mask=allowed_mask,
        )
    if allowed_mask is not None:
        target_logits = mask_logits(target_logits, allowed_mask, vocab_size=vocab_size, backend=backend, lnc=lnc)
    tokens, num_accepted, path, invalid = launch_by_rows(
        "greedy_acceptance",
        draft_tokens if rows > 1 else None,
        target_logits,
        per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens),
        vocab_size,
        batch=batch,
        rows=rows,
        backend=backend,
        lnc=lnc,
    )
    return Acceptance(tokens, num_accepted, path, invalid != 0)
