"""Acceptance rules and what samples, masks or scores logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from draft_verify.checks.attention import attention_tree
from draft_verify.checks.general import FLOATS, array, expect, in_range, positive_number, values_known, whole_number

MAX_ROWS = 128  # a row's facts share one partition each
MAX_VOCAB = 1 << 22  # ids are exact in fp32, and the masses of one row fit on the chip
MAX_PLACES = 50_000  # of a partition, where the draft ids of its target ids are
SEEDS = ("uint32", "int32", "uint64", "int64")
CHAIN_RULES = ("token", "block")
TREE_RULES = ("greedy", "target_only", "without_replacement", "independent")


def every_rule(draft_tokens: Any, target_logits: Any, draft_lens: Any, vocab_size: int | None) -> tuple[int, int, int]:
    """What all rules share. Returns batch, rows of a window and the columns that count."""
    array("target_logits", target_logits, ("B", "T", "V"), FLOATS)
    batch, rows, width = target_logits.shape
    expect(rows <= MAX_ROWS, "target_logits", f"a window of {rows} rows", f"1 to {MAX_ROWS}")
    array("draft_tokens", draft_tokens, (batch, rows - 1), ("int32",))
    vocab_size = columns_that_count(vocab_size, width)
    if draft_lens is not None:
        array("draft_lens", draft_lens, (batch,), ("int32",))
        in_range("draft_lens", draft_lens, -1, rows - 1, f"-1 (an empty slot) to K = {rows - 1}")
    return batch, rows, vocab_size


def rejection_sampling(
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    draft_logits: Any,
    draft_probs: Any,
    draft_lens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    rule: str,
    vocab_size: int | None,
    draft_to_target: Any = None,
    target_to_draft: Any = None,
) -> tuple[int, int, int]:
    expect(rule in CHAIN_RULES, "rule", repr(rule), " or ".join(map(repr, CHAIN_RULES)))
    batch, rows, vocab_size = every_rule(draft_tokens, target_logits, draft_lens, vocab_size)
    uniforms(uniforms_, batch, rows + 1)
    expect(draft_logits is None or draft_probs is None, "draft_probs", "draft_logits as well", "one draft law")
    shape = (batch, rows - 1, target_logits.shape[2])
    draft_laws(draft_logits, draft_probs, shape, draft_to_target, target_to_draft, vocab_size)
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch, rows, vocab_size


def tree_acceptance(
    tree: Any,
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    rule: str,
    draft_logits: Any,
    draft_probs: Any,
    draft_lens: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    vocab_size: int | None,
    draft_to_target: Any = None,
    target_to_draft: Any = None,
) -> tuple[int, int, int]:
    expect(rule in TREE_RULES, "rule", repr(rule), " or ".join(map(repr, TREE_RULES)))
    batch, rows, vocab_size = every_rule(draft_tokens, target_logits, draft_lens, vocab_size)
    attention_tree(tree, batch, rows, draft_lens)
    if uniforms_ is not None or rule != "greedy":
        uniforms(uniforms_, batch, rows + 1)
    laws = [law for law in (draft_logits, draft_probs) if law is not None]
    needed = rule in ("without_replacement", "independent")
    expect(len(laws) == needed, "draft_probs", f"{len(laws)} draft laws", f"{int(needed)} for rule {rule!r}")
    shape = (batch, rows, target_logits.shape[2])
    draft_laws(draft_logits, draft_probs, shape, draft_to_target, target_to_draft, vocab_size)
    sampling(batch, temperature, top_k, top_p, min_p)
    if rule == "greedy":
        temperature = None if is_zero(temperature) else temperature
        unused("with rule 'greedy'", temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    return batch, rows, vocab_size


def typical_acceptance(
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    posterior_threshold: float,
    posterior_alpha: float,
    tree: Any,
    temperature: Any,
    draft_lens: Any,
    vocab_size: int | None,
) -> tuple[int, int, int]:
    batch, rows, vocab_size = every_rule(draft_tokens, target_logits, draft_lens, vocab_size)
    uniforms(uniforms_, batch, rows + 1)
    positive_number("posterior_threshold", posterior_threshold, 1.0)
    positive_number("posterior_alpha", posterior_alpha)
    if tree is not None:
        attention_tree(tree, batch, rows, draft_lens)
    sampling(batch, temperature, None, None, None)
    return batch, rows, vocab_size


def sample_tokens(
    logits: Any, uniforms_: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, vocab_size: int | None
) -> tuple[int, int]:
    array("logits", logits, ("B", "V"), FLOATS)
    batch, width = logits.shape
    vocab_size = columns_that_count(vocab_size, width)
    uniforms(uniforms_, batch, 2)
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch, vocab_size


def token_logprobs(
    target_logits: Any,
    tokens: Any,
    path: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    vocab_size: int | None,
) -> tuple[int, int]:
    array("target_logits", target_logits, ("B", "T", "V"), FLOATS)
    batch, rows, width = target_logits.shape
    expect(rows <= MAX_ROWS, "target_logits", f"a window of {rows} rows", f"1 to {MAX_ROWS}")
    vocab_size = columns_that_count(vocab_size, width)
    for argument, value, largest in (("tokens", tokens, vocab_size - 1), ("path", path, rows - 1)):
        array(argument, value, (batch, rows), ("int32",))
        in_range(argument, value, -1, largest, f"-1 to {largest}")
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch, vocab_size


def mask_logits(logits: Any, allowed_mask: Any, vocab_size: int | None) -> int:
    array("logits", logits, ("B", "T", "V"), FLOATS)
    expect(allowed_mask is not None, "allowed_mask", None, "an array")
    batch, rows, width = logits.shape
    vocab_size = columns_that_count(vocab_size, width)
    allowed_ids(allowed_mask, (batch, rows, width))
    return vocab_size


def project_draft_law(
    target_to_draft: Any,
    draft_logits: Any,
    draft_probs: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
) -> int:
    """Returns the batch."""
    target_to_draft_ids(target_to_draft, "V")
    laws = [law for law in (draft_logits, draft_probs) if law is not None]
    expect(len(laws) == 1, "draft_probs", f"{len(laws)} draft laws", "draft_logits or draft_probs, one of them")
    argument = "draft_probs" if draft_logits is None else "draft_logits"
    array(argument, laws[0], ("B", "R", "Vd"), FLOATS)
    batch, rows, size = laws[0].shape
    expect(rows <= MAX_ROWS, argument, f"{rows} rows", f"1 to {MAX_ROWS}")
    expect(size <= MAX_VOCAB, argument, f"{size} draft ids", f"1 to {MAX_VOCAB}")
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch


def uniforms_for(seeds: Any, positions: Any, K: int, purpose: str, purposes: tuple[str, ...]) -> None:
    array("seeds", seeds, ("B",), SEEDS)
    array("positions", positions, tuple(seeds.shape), ("int32", "int64", "uint32"))
    in_range("positions", positions, 0, 2**32 - 1, "a position, 0 or more")
    expect(hasattr(K, "__index__") and K >= 0, "K", repr(K), "a number of drafts, 0 or more")
    expect(purpose in purposes, "purpose", repr(purpose), " or ".join(map(repr, purposes)))


def columns_that_count(vocab_size: int | None, width: int) -> int:
    """vocab_size, by default all columns."""
    vocab_size = width if vocab_size is None else vocab_size
    whole_number("vocab_size", vocab_size, 1, min(width, MAX_VOCAB))
    return vocab_size


def uniforms(value: Any, batch: int, columns: int) -> None:
    array("uniforms", value, (batch, columns), ("float32",))
    smallest = np.finfo(np.float32).tiny
    in_range("uniforms", value, smallest, np.nextafter(np.float32(1), np.float32(0)), "numbers strictly within (0, 1)")


def sampling(batch: int, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> None:
    """Parameters are None, numbers, or one value a sequence."""
    for argument, value, dtype, low, high, what in (
        ("temperature", temperature, "float32", 0, 1e6, "0 (greedy) or a finite number above it"),
        ("top_k", top_k, "int32", -1, np.iinfo(np.int32).max, "0 or -1 (off), or how many logits stay"),
        ("top_p", top_p, "float32", np.finfo(np.float32).tiny, 1, "a number in (0, 1]"),
        ("min_p", min_p, "float32", 0, 1, "a number in [0, 1]"),
    ):
        if value is None:
            continue
        if getattr(value, "ndim", 0) > 0:
            array(argument, value, (batch,), (dtype,))
            in_range(argument, value, low, high, what)
        elif not hasattr(value, "dtype") or values_known(value):
            number = isinstance(value, int | float | np.ndarray)
            whole = number and (dtype == "float32" or float(value).is_integer())
            expect(whole and low <= value <= high, argument, value, what)


def is_zero(value: Any) -> bool:
    """Whether a number, or an array whose values are known, is 0 throughout."""
    if isinstance(value, int | float):
        return value == 0
    return isinstance(value, np.ndarray | np.generic) and not value.any()


def unused(why: str, **arguments: Any) -> None:
    """Refuses arguments that would be ignored without a word, and says why they would."""
    for argument, value in arguments.items():
        got = value if isinstance(value, int | float) else type(value).__name__
        expect(value is None, argument, got, f"None {why}")


def allowed_ids(allowed_mask: Any, shape: tuple[int, ...]) -> None:
    """Checks a grammar's bits, if there are any, for logits of `shape`."""
    if allowed_mask is not None:
        array("allowed_mask", allowed_mask, (*shape[:-1], -(-shape[-1] // 32)), ("int32",))


def draft_laws(
    draft_logits: Any,
    draft_probs: Any,
    shape: tuple[int, int, int],
    draft_to_target: Any,
    target_to_draft: Any,
    vocab_size: int,
) -> None:
    """Checks a draft law, if there is one: of `shape`, or with as many columns as the draft's own vocabulary has."""
    given = draft_logits is not None or draft_probs is not None
    for argument, mapped in (("draft_to_target", draft_to_target), ("target_to_draft", target_to_draft)):
        expect(given or mapped is None, argument, "no draft law", "draft_logits or draft_probs with it")
    columns: int | str = shape[2]
    if draft_to_target is not None:
        expect(target_to_draft is None, "target_to_draft", "draft_to_target as well", "one of the two maps")
        draft_to_target_ids(draft_to_target, vocab_size)
        columns = draft_to_target.shape[0]
    if target_to_draft is not None:
        target_to_draft_ids(target_to_draft, vocab_size)
        columns = "Vd"
    for argument, law in (("draft_logits", draft_logits), ("draft_probs", draft_probs)):
        if law is not None:
            array(argument, law, (*shape[:2], columns), FLOATS)


def draft_to_target_ids(draft_to_target: Any, vocab_size: int) -> None:
    array("draft_to_target", draft_to_target, ("Vd",), ("int32",))
    in_range("draft_to_target", draft_to_target, 0, vocab_size - 1, f"target ids, 0 to {vocab_size - 1}")


def target_to_draft_ids(target_to_draft: Any, vocab_size: int | str) -> None:
    array("target_to_draft", target_to_draft, ("M", vocab_size), ("int32",))
    width = target_to_draft.shape[1]
    expect(width <= MAX_VOCAB, "target_to_draft", f"{width} target ids", f"1 to {MAX_VOCAB}")


def shared_target_ids(target_to_draft: Any) -> None:
    """Checks that the kernel has room for the places of all draft ids beside a law."""
    entries, width = target_to_draft.shape
    most = MAX_PLACES // -(-width // 128) - 4
    expect(
        entries <= most, "target_to_draft", f"{entries} draft ids of one target id", f"at most {most} of {width} ids"
    )
