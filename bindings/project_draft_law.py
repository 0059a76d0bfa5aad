"""Drafts with a vocabulary of their own: its map onto the target's, and their laws as laws over the target's ids."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import from_lists, public
from draft_verify.backends import TRACING, launch_by_rows
from draft_verify.checks.general import expect, whole_number
from draft_verify.mask_logits import mask_logits
from draft_verify.parameters import draft_law, per_sequence, truncation
from draft_verify.reference.project_draft_law import invert_draft_to_target as inverse
from draft_verify.reference.project_draft_law import project_draft_law as reference
from draft_verify.reference.tensors import is_torch, to_numpy, to_torch


def invert_draft_to_target(draft_to_target: Any, vocab_size: int) -> Any:
    """The map the other way round, as the kernels gather by it: made once, when the models are loaded.

    Args:
        draft_to_target: [Vd] int32, the target id of each draft id; many to one allowed. A tensor's values are read.
        vocab_size: target ids. A rank that holds V / n columns of the target's logits takes the same columns of the
            result for n * (V / n) ids.

    Returns:
        [M, vocab_size] int32 of the same kind and on the same device: row m the m-th draft id of each target id, or -1;
        M is the most draft ids that one target id has; the kernel takes 38 of them for 152k target ids, 20 for 262k.

    Raises:
        ValueError: ids outside the target's vocabulary.
    """
    draft_to_target = from_lists("draft_to_target", draft_to_target)
    whole_number("vocab_size", vocab_size, 1, checks.acceptance.MAX_VOCAB)
    on_cpu = to_numpy(draft_to_target.cpu() if is_torch(draft_to_target) else draft_to_target)
    checks.acceptance.draft_to_target_ids(on_cpu, vocab_size)
    table = inverse(on_cpu, vocab_size)
    return to_torch(table).to(draft_to_target.device) if is_torch(draft_to_target) else table


@public
def project_draft_law(
    target_to_draft: Any,
    *,
    draft_logits: Any = None,
    draft_probs: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """Draft laws [B, R, Vd] as laws over target ids, which every acceptance rule takes as `draft_probs`.

    The rules call it themselves where they get `target_to_draft`; it is of use where one law serves several calls.

    Args:
        target_to_draft: [M, V] int32 of `invert_draft_to_target`; entries outside 0 to Vd - 1 stand for no draft id.
        draft_logits: [B, R, Vd] fp32 or bf16, raw, processed in the draft's own vocabulary; or
        draft_probs: [B, R, Vd] fp32 or bf16, the laws as they are.
        temperature, top_k, top_p, min_p: as `rejection_sampling`, for draft_logits; greedy sequences, whose laws are
            not looked at, get those of temperature 1.
        backend, lnc: see the package.

    Returns:
        [B, R, V] fp32: the masses of all draft ids of a target id, summed. NaN where draft_logits have no law.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch = checks.acceptance.project_draft_law(
        target_to_draft, draft_logits, draft_probs, temperature, top_k, top_p, min_p
    )
    temperature = per_sequence(temperature, 1.0, batch, "float32", target_to_draft)
    cut, top_k, top_p, min_p = truncation(top_k, top_p, min_p, batch, target_to_draft)
    if backend == "reference":
        return reference(
            target_to_draft,
            draft_logits=draft_logits,
            draft_probs=draft_probs,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        ).astype("float32")
    checks.acceptance.shared_target_ids(target_to_draft)
    law, draft_kind = draft_law(draft_logits, draft_probs)
    return launch_by_rows(
        "project_draft_law",
        law,
        target_to_draft,
        per_sequence(None, 0, batch, "int32", target_to_draft),
        temperature,
        top_k,
        top_p,
        min_p,
        draft_kind,
        cut,
        batch=batch,
        rows=law.shape[1],
        truncated=law.shape[2] if cut else 0,
        shared=(target_to_draft,),
        backend=backend,
        lnc=lnc,
    )[0]


def over_target_ids(
    target_logits: Any,
    draft_logits: Any,
    draft_probs: Any,
    draft_to_target: Any,
    target_to_draft: Any,
    allowed_mask: Any,
    vocab_size: int,
    *,
    backend: str,
    lnc: int | None,
    **parameters: Any,
) -> tuple[Any, Any, Any]:
    """(target_logits, draft_logits, draft_probs) as the kernels of the rules take them: over target ids, those not
    allowed at -inf. The first rows of the mask are the draft's; `backend` is resolved where there is `draft_to_target`.
    """
    if draft_to_target is not None and backend != TRACING:  # which has no values to invert the map by
        expected = "target_to_draft, the map as `invert_draft_to_target` gives it, made once"
        expect(backend != "device", "draft_to_target", "a tensor on a device", expected)
        target_to_draft = invert_draft_to_target(draft_to_target, vocab_size)
    if draft_to_target is not None or target_to_draft is not None:
        given = draft_probs if draft_logits is None else draft_logits
        if target_to_draft is not None and given.shape[1] > 0:
            given = project_draft_law(
                target_to_draft,
                draft_logits=draft_logits,
                draft_probs=draft_probs,
                backend=backend,
                lnc=lnc,
                **parameters,
            )
        draft_logits, draft_probs = None, given
    if allowed_mask is not None:
        target_logits = mask_logits(target_logits, allowed_mask, vocab_size=vocab_size, backend=backend, lnc=lnc)
        if draft_logits is not None and draft_logits.shape[1] > 0:
            own_mask = allowed_mask[:, : draft_logits.shape[1]]
            draft_logits = mask_logits(draft_logits, own_mask, vocab_size=vocab_size, backend=backend, lnc=lnc)
    return target_logits, draft_logits, draft_probs
