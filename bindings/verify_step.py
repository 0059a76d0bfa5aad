"""verify_step: everything between the target's logits and the next window, for those without an engine of their own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from draft_verify import checks
from draft_verify.arrays import from_lists, is_torch, rehearse, to_numpy
from draft_verify.caches import chain_path, expect_tensors
from draft_verify.checks.general import FLOATS, array, expect, in_range, values_known, whole_number
from draft_verify.commit_window import commit_window
from draft_verify.greedy_acceptance import greedy_acceptance
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.tensors import to_torch
from draft_verify.rejection_sampling import rejection_sampling
from draft_verify.tree_acceptance import tree_acceptance
from draft_verify.typical_acceptance import typical_acceptance
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


# What the rules that do not take all of them take of a law's parameters.
_PARAMETERS = {"greedy": (), "typical": ("temperature", "posterior_threshold", "posterior_alpha")}


def verify_step(
    draft_tokens: Any,
    target_logits: Any,
    seq_lens: Any,
    caches: Sequence[CacheWindow] | CacheWindow = (),
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
    posterior_threshold: float | None = None,
    posterior_alpha: float | None = None,
    stop_token_ids: Sequence[int] | int | None = (),
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
        seq_lens: [B] int32, tokens in the caches before the step; anything in an empty slot.
        caches: what to commit the accepted rows to, in place: target's and draft's alike.
        seeds: [B] int, one a sequence, from which and from seq_lens the uniforms are computed (`uniforms_for`); or
        uniforms: [B, T + 1] in (0, 1). With neither, greedy.
        rule: "greedy"; "token" or "block" for a chain; for a tree any rule of `tree_acceptance`; "typical" for both.
            Default greedy without randomness, else "token", for a tree without a draft law "target_only".
        tree, draft_logits, draft_probs, draft_lens, temperature, top_k, top_p, min_p, vocab_size, allowed_mask,
            draft_to_target, target_to_draft, backend, lnc: as in `rejection_sampling` and `tree_acceptance`. What the
            rule would not use is refused.
        posterior_threshold, posterior_alpha: of `typical_acceptance`, for that rule.
        stop_token_ids: ids (or one) that end a sequence; the first one emitted is its last token.
        max_length: the most tokens a sequence may have, prompt included; default no limit.

    Returns:
        Step.

    Raises:
        ValueError: arguments that do not fit; nothing is written then, of any cache. Neither is it where a kernel
            refuses a shape: all are traced before the first runs.
    """
    law = {
        "draft_logits": draft_logits,
        "draft_probs": draft_probs,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "draft_to_target": draft_to_target,
        "target_to_draft": target_to_draft,
        "posterior_threshold": posterior_threshold,
        "posterior_alpha": posterior_alpha,
    }
    law = {name: value for name, value in law.items() if value is not None}
    rule = _rule(rule, seeds, uniforms, tree is not None, law)
    caches = [caches] if isinstance(caches, CacheWindow) else caches
    windows = isinstance(caches, tuple | list) and all(isinstance(cache, CacheWindow) for cache in caches)
    expect(windows, "caches", type(caches).__name__, "CacheWindow, one or some")
    if max_length is not None:
        whole_number("max_length", max_length, 1, np.iinfo(np.int32).max)
    stop_ids = _stop_ids(stop_token_ids)
    seeds = from_lists("seeds", seeds)
    seq_lens, draft_lens = _same_kind(from_lists("seq_lens", seq_lens), from_lists("draft_lens", draft_lens))
    if not _is_traced(seq_lens):
        _check_lengths(target_logits, seq_lens, draft_lens, seeds)
    rows = target_logits.shape[1]
    if max_length is not None:
        # A sequence has seq_lens + 1 tokens before the step: the cached ones and row 0.
        has_room = seq_lens + 1 < max_length
        draft_lens = _int32(_where(has_room, rows - 1 if draft_lens is None else draft_lens, -1))
    if seeds is not None:
        positions = seq_lens if draft_lens is None else _where(draft_lens >= 0, seq_lens, 0)
        uniforms = uniforms_for(seeds, positions, rows - 1, backend=backend, lnc=lnc)
    shared = {
        "draft_lens": draft_lens,
        "vocab_size": vocab_size,
        "allowed_mask": allowed_mask,
        "backend": backend,
        "lnc": lnc,
    }
    if rule == "typical":
        acceptance = typical_acceptance(draft_tokens, target_logits, uniforms, tree=tree, **law, **shared)
    elif tree is not None:
        acceptance = tree_acceptance(tree, draft_tokens, target_logits, uniforms, rule=rule, **law, **shared)
    elif rule == "greedy":
        acceptance = greedy_acceptance(draft_tokens, target_logits, **shared)
    else:
        acceptance = rejection_sampling(draft_tokens, target_logits, uniforms, rule=rule, **law, **shared)
    seq_lens, *accepted = _same_kind(seq_lens, *acceptance)
    step = _cut(Acceptance(*accepted), seq_lens, stop_ids, max_length)
    path = None if tree is None else _deep_enough(step.path, tree)
    commits = [_commit(cache, seq_lens, step.num_accepted, path, backend, lnc) for cache in caches]
    if not _is_traced(seq_lens):
        for arguments in commits:  # all of them before anything is written
            if is_torch(seq_lens):
                expect_tensors("key_cache", arguments["key_cache"])
                expect_tensors("value_cache", arguments["value_cache"])
            rehearse(commit_window, **arguments)
    committed = tuple(commit_window(**arguments) for arguments in commits)
    return step._replace(caches=committed)


def _rule(rule: str | None, seeds: Any, uniforms: Any, is_tree: bool, law: dict[str, Any]) -> str:
    """The rule, which uses all of `law` that is given, but for a temperature of 0 where that is what it does anyway."""
    expect(seeds is None or uniforms is None, "uniforms", "seeds as well", "one of the two")
    draws = seeds is not None or uniforms is not None
    if rule is None:
        has_law = "draft_logits" in law or "draft_probs" in law
        expected = "'without_replacement' or 'independent', whichever way a tree's siblings were drawn"
        expect(not (draws and is_tree and has_law), "rule", "None with a tree and a draft law", expected)
        rule = ("target_only" if is_tree else "token") if draws else "greedy"
    expect(draws or rule == "greedy", "uniforms", "None", f"seeds or uniforms with rule {rule!r}")
    temperature = law.get("temperature")
    if rule == "greedy" and not _is_traced(temperature) and checks.acceptance.is_zero(to_numpy(temperature)):
        del law["temperature"]
    for name in ("posterior_threshold", "posterior_alpha"):
        expect(rule != "typical" or name in law, name, "None", "a number with rule 'typical'")
    taken = _PARAMETERS.get(rule, tuple(name for name in law if not name.startswith("posterior")))
    why = f"with rule {rule!r}" if draws else "without seeds or uniforms, which make a greedy step"
    checks.acceptance.unused(why, **{name: value for name, value in law.items() if name not in taken})
    return rule


def _check_lengths(target_logits: Any, seq_lens: Any, draft_lens: Any, seeds: Any) -> None:
    array("target_logits", target_logits, ("B", "T", "V"), FLOATS)
    seq_lens, draft_lens = to_numpy(seq_lens), to_numpy(draft_lens)
    batch = target_logits.shape[0]
    array("seq_lens", seq_lens, (batch,), ("int32",))
    if draft_lens is not None:
        array("draft_lens", draft_lens, (batch,), ("int32",))
    if seeds is not None:
        array("seeds", seeds, (batch,), checks.acceptance.SEEDS)
    if values_known(seq_lens, draft_lens):
        live = seq_lens if draft_lens is None else np.where(draft_lens >= 0, seq_lens, 0)
        in_range("seq_lens", live, 0, np.iinfo(np.int32).max, "0 or more, unless draft_lens is -1")


def _deep_enough(path: Any, tree: Any) -> Any:
    """The columns of a path that a tree is deep enough for: all of them where its parents are not known."""
    parents = None if _is_traced(tree) else to_numpy(tree)
    if not isinstance(parents, np.ndarray):
        return path
    columns = 1
    for row in np.atleast_2d(parents).tolist():
        depths: list[int] = []
        for parent in row:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        columns = max(columns, *(depth + 1 for depth in depths))
    path = path[:, :columns]
    return path.contiguous() if is_torch(path) else np.ascontiguousarray(path)


def _commit(
    cache: CacheWindow, seq_lens: Any, num_accepted: Any, path: Any, backend: str, lnc: int | None
) -> dict[str, Any]:
    """The arguments of a cache's commit."""
    rows = {"seq_lens": seq_lens, "num_accepted": num_accepted, "path": path}
    return {**cache._asdict(), **rows, "backend": backend, "lnc": lnc}


def _cut(acceptance: Acceptance, seq_lens: Any, stop_ids: Sequence[int], max_length: int | None) -> Step:
    """The emitted tokens end with the first stop token, and where the sequence is full.

    The last token emitted is always the next row 0, without a key: a cut accepts one draft less and emits that one.
    """
    xp = sys.modules["torch"] if is_torch(acceptance.tokens) else np
    tokens = acceptance.tokens
    batch, rows = tokens.shape
    index = chain_path(tokens, batch, rows)
    stops = tokens == -2  # nothing yet
    for token in stop_ids:
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


def _stop_ids(stop_token_ids: Any) -> list[int]:
    """As models' configurations give eos_token_id: none, one or several."""
    ids = stop_token_ids.tolist() if hasattr(stop_token_ids, "tolist") else stop_token_ids
    ids = [] if ids is None else list(ids) if isinstance(ids, Iterable) and not isinstance(ids, str) else [ids]
    for token in ids:
        whole_number("stop_token_ids", token, 0, np.iinfo(np.int32).max)
    return ids


def _is_traced(array: Any) -> bool:
    return is_torch(array) and sys.modules["torch"].compiler.is_compiling()


def _same_kind(*values: Any) -> tuple:
    """Arrays among tensors as tensors, as every operation takes them."""
    tensor = next((value for value in values if is_torch(value)), None)
    if tensor is None:
        return values
    return tuple(to_torch(value).to(tensor.device) if isinstance(value, np.ndarray) else value for value in values)


def _where(condition: Any, chosen: Any, other: Any) -> Any:
    return (sys.modules["torch"] if is_torch(condition) else np).where(condition, chosen, other)


def _int32(array: Any) -> Any:
    return array.to(sys.modules["torch"].int32) if is_torch(array) else np.asarray(array, np.int32)
