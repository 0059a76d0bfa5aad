"""verify_step: everything between the target's logits and the next window, for those without an engine of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from draft_verify import checks
from draft_verify.arrays import is_torch, to_numpy
from draft_verify.caches import as_layers, chain_path
from draft_verify.commit_window import commit_window
from draft_verify.greedy_acceptance import greedy_acceptance
from draft_verify.reference.acceptance import Acceptance
from draft_verify.rejection_sampling import rejection_sampling
from draft_verify.tree_acceptance import tree_acceptance
from draft_verify.uniforms_for import uniforms_for


class CacheWindow(NamedTuple):
    """A cache and the window's rows for it, as `commit_window` takes them: one model's layers, for instance."""

    key_cache: Any
    value_cache: Any
    key: Any
    value: Any
    block_table: Any = None
    cache_layout: str = "BHSD"
    ring: bool = False
    key_scale: Any = None
    value_scale: Any = None


class Step(NamedTuple):
    """What a step hands on.

    tokens       [B, T] int32: emitted tokens, the first num_emitted valid, then -1
    num_emitted  [B] int32: 0 for an empty slot or a sequence without room, else at least 1
    num_accepted [B] int32: accepted drafts after the cut, num_emitted - 1: what the caches now hold beside row 0
    next_tokens  [B] int32: row 0 of the next window, -1 where nothing was emitted
    next_seq_lens [B] int32: seq_lens + num_emitted, the committed length
    finished     [B] bool: a stop token was emitted, the maximum length reached, or the slot is empty
    path         [B, T] int32: window rows kept, then -1
    invalid      [B] bool: see Acceptance
    caches       one (key_cache, value_cache) for each CacheWindow, as commit_window returns them
    """

    tokens: Any
    num_emitted: Any
    num_accepted: Any
    next_tokens: Any
    next_seq_lens: Any
    finished: Any
    path: Any
    invalid: Any
    caches: tuple = ()


def verify_step(
    draft_tokens: Any,
    target_logits: Any,
    seq_lens: Any,
    caches: Sequence[CacheWindow] = (),
    *,
    seeds: Any = None,
    uniforms: Any = None,
    rule: str | None = None,
    tree: Any = None,
    draft_logits: Any = None,
    draft_probs: Any = None,
    draft_lens: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    stop_token_ids: Sequence[int] = (),
    max_length: int | None = None,
    vocab_size: int | None = None,
    allowed_mask: Any = None,
    draft_to_target: Any = None,
    target_to_draft: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Step:
    """Accepts, cuts at stop tokens and at the maximum length, commits, and prepares the next window.

    Traceable: with tensors, torch.compile(fullgraph=True) sees one operator for the uniforms, one for the acceptance
    and one for each cache; no value is looked at in Python.

    Args:
        draft_tokens: [B, T-1] int32.
        target_logits: [B, T, V] fp32 or bf16, of the window's rows.
        seq_lens: [B] int32, tokens in the caches before the step.
        caches: what to commit the accepted rows to, in place: target's and draft's alike.
        seeds: [B] int, one a sequence, from which and from seq_lens the uniforms are computed (`uniforms_for`); or
        uniforms: [B, T + 1] in (0, 1). With neither, greedy.
        rule: "greedy"; "token" or "block" for a chain; for a tree any rule of `tree_acceptance`. Default greedy without
            randomness, else "token", for trees "target_only".
        tree, draft_logits, draft_probs, draft_lens, temperature, top_k, top_p, min_p, vocab_size, allowed_mask,
            draft_to_target, target_to_draft, backend, lnc: as in `rejection_sampling` and `tree_acceptance`.
        stop_token_ids: ids that end a sequence; the first one emitted is its last token.
        max_length: the most tokens a sequence may have, prompt included; default no limit.

    Raises:
        ValueError: arguments that do not fit; nothing is written then.
    """
    rows = target_logits.shape[1]
    if max_length is not None:
        # A sequence has seq_lens + 1 tokens before the step: the cached ones and row 0.
        has_room = seq_lens + 1 < max_length
        draft_lens = _int32(_where(has_room, rows - 1 if draft_lens is None else draft_lens, -1))
    if uniforms is None and seeds is not None:
        uniforms = uniforms_for(seeds, seq_lens, rows - 1, backend=backend, lnc=lnc)
    if rule is None:
        rule = "greedy" if uniforms is None else "token" if tree is None else "target_only"
    shared = {
        "draft_lens": draft_lens,
        "vocab_size": vocab_size,
        "allowed_mask": allowed_mask,
        "backend": backend,
        "lnc": lnc,
    }
    law = {
        "draft_logits": draft_logits,
        "draft_probs": draft_probs,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "draft_to_target": draft_to_target,
        "target_to_draft": target_to_draft,
    }
    if tree is not None:
        acceptance = tree_acceptance(tree, draft_tokens, target_logits, uniforms, rule=rule, **law, **shared)
    elif rule == "greedy":
        acceptance = greedy_acceptance(draft_tokens, target_logits, **shared)
    else:
        acceptance = rejection_sampling(draft_tokens, target_logits, uniforms, rule=rule, **law, **shared)
    step = _cut(acceptance, seq_lens, stop_token_ids, max_length)
    for cache in caches[1:]:  # the first is checked by its own commit, before anything is written
        _check(cache, seq_lens, step)
    committed = tuple(
        commit_window(
            *cache[:4],
            seq_lens,
            step.num_accepted,
            path=step.path,
            **dict(zip(CacheWindow._fields[4:], cache[4:])),
            backend=backend,
            lnc=lnc,
        )
        for cache in caches
    )
    return step._replace(caches=committed)


def _check(cache: CacheWindow, seq_lens: Any, step: Step) -> None:
    """Raises ValueError where the arguments of a commit do not fit; under tracing the operators check themselves."""
    if is_torch(seq_lens) and sys.modules["torch"].compiler.is_compiling():
        return
    key_cache, value_cache, key, value, block_table, layout, ring, key_scale, value_scale = map(to_numpy, cache)
    checks.commit_window(
        *as_layers(key_cache, value_cache, key, value),
        *map(to_numpy, (seq_lens, step.num_accepted, step.path)),
        block_table,
        layout,
        ring,
        key_scale,
        value_scale,
    )


def _cut(acceptance: Acceptance, seq_lens: Any, stop_token_ids: Sequence[int], max_length: int | None) -> Step:
    """The emitted tokens end with the first stop token, and where the sequence is full.

    The last token emitted is always the next row 0, without a key: a cut accepts one draft less and emits that one.
    """
    xp = sys.modules["torch"] if is_torch(acceptance.tokens) else np
    tokens = acceptance.tokens
    batch, rows = tokens.shape
    index = chain_path(tokens, batch, rows)
    stops = tokens == -2  # nothing yet
    for token in stop_token_ids:
        stops = stops | (tokens == token)
    first_stop = xp.amin(_where(stops, index, rows), axis=1)
    most = first_stop if max_length is None else xp.clip(max_length - 2 - seq_lens, -1, rows)
    num_accepted = _int32(xp.minimum(acceptance.num_accepted, xp.minimum(first_stop, most)))
    finished = (num_accepted < 0) | (num_accepted == first_stop)
    if max_length is not None:
        finished = finished | (num_accepted == most)
    kept = index <= num_accepted[:, None]
    last = _where(index == num_accepted[:, None], tokens, 0).sum(axis=1)
    return Step(
        tokens=_int32(_where(kept, tokens, -1)),
        num_emitted=num_accepted + 1,
        num_accepted=num_accepted,
        next_tokens=_int32(_where(num_accepted >= 0, last, -1)),
        next_seq_lens=_int32(seq_lens + num_accepted + 1),
        finished=finished,
        path=_int32(_where(kept, acceptance.path, -1)),
        invalid=acceptance.invalid,
    )


def _where(condition: Any, chosen: Any, other: Any) -> Any:
    return (sys.modules["torch"] if is_torch(condition) else np).where(condition, chosen, other)


def _int32(array: Any) -> Any:
    return array.to(sys.modules["torch"].int32) if is_torch(array) else np.asarray(array, np.int32)
