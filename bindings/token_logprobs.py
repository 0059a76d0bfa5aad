"""token_logprobs: log-probabilities of emitted tokens, under the law they were sampled from and under the raw one."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch_by_rows
from draft_verify.mask_logits import mask_logits
from draft_verify.parameters import per_sequence, truncation
from draft_verify.reference.token_logprobs import Logprobs
from draft_verify.reference.token_logprobs import token_logprobs as reference


@public
def token_logprobs(
    target_logits: Any,
    tokens: Any,
    path: Any,
    *,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    vocab_size: int | None = None,
    allowed_mask: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Logprobs:
    """Natural logarithms of the probabilities of what an acceptance rule emitted, whichever rule it was.

    A call of its own, which reads the logits again, so that verification itself stays one read.

    Args:
        target_logits: [B, T, V] fp32 or bf16, as verified.
        tokens, path: [B, T] int32, `Acceptance.tokens` and `Acceptance.path`: token j came from row path[:, j].
        temperature, top_k, top_p, min_p, vocab_size, allowed_mask: as verified with.
        backend, lnc: see the package.

    Returns:
        Logprobs: processed and raw, [B, T] fp32; raw is of the softmax of target_logits as they are, without the mask.
        0 where there is no token, NaN where the row has no law. A greedy row's processed value is 0.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch, vocab_size = checks.acceptance.token_logprobs(
        target_logits, tokens, path, temperature, top_k, top_p, min_p, vocab_size
    )
    checks.acceptance.allowed_ids(allowed_mask, target_logits.shape)
    temperature = per_sequence(temperature, 1.0, batch, "float32", tokens)
    cut, top_k, top_p, min_p = truncation(top_k, top_p, min_p, batch, tokens)
    if backend == "reference":
        return reference(
            target_logits,
            tokens,
            path,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            vocab_size=vocab_size,
            allowed_mask=allowed_mask,
        )
    masked_logits = target_logits
    if allowed_mask is not None:
        masked_logits = mask_logits(target_logits, allowed_mask, vocab_size=vocab_size, backend=backend, lnc=lnc)
    outputs = launch_by_rows(
        "token_logprobs",
        target_logits,
        masked_logits,
        tokens,
        path,
        per_sequence(None, 0, batch, "int32", tokens),
        temperature,
        top_k,
        top_p,
        min_p,
        cut,
        vocab_size,
        batch=batch,
        rows=tokens.shape[1],
        truncated=vocab_size if cut else 0,
        backend=backend,
        lnc=lnc,
    )
    return Logprobs(*outputs)
