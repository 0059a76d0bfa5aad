"""The steps of acceptance over vocabulary shards."""

from __future__ import annotations

from typing import Any

from draft_verify.checks.acceptance import CHAIN_RULES, MAX_VOCAB, every_rule, sampling, uniforms
from draft_verify.checks.general import FLOATS, array, expect, in_range, whole_number

NUM_SHARDS = (1, 2, 4, 8, 16, 32, 64, 128)
DRAFT_KINDS = ("one_hot", "logits", "probs")


def shard(
    draft_tokens: Any,
    target_logits: Any,
    uniforms_: Any,
    shard: int,
    num_shards: int,
    vocab_size: int,
    draft_logits: Any,
    draft_probs: Any,
    draft_lens: Any,
    temperature: Any,
) -> tuple[int, int]:
    """One rank's part of a vocabulary. Returns batch and rows of a window."""
    batch, rows, width = every_rule(draft_tokens, target_logits, draft_lens, None)
    expect(num_shards in NUM_SHARDS, "num_shards", num_shards, "a power of two up to 128")
    whole_number("shard", shard, 0, num_shards - 1)
    whole_number("vocab_size", vocab_size, 1, min(width * num_shards, MAX_VOCAB))
    uniforms(uniforms_, batch, rows + 1)
    expect(draft_logits is None or draft_probs is None, "draft_probs", "draft_logits as well", "one draft law")
    for argument, law in (("draft_logits", draft_logits), ("draft_probs", draft_probs)):
        if law is not None:
            array(argument, law, (batch, rows - 1, width), FLOATS)
    sampling(batch, temperature, None, None, None)
    return batch, rows


def ranks(statistics: Any, target_logits: Any) -> int:
    """Returns how many ranks the statistics of these rows came from."""
    array("target_logits", target_logits, ("B", "T", "V / n"), FLOATS)
    return shard_statistics(statistics, *target_logits.shape[:2])


def shard_statistics(statistics: Any, batch: int, rows: int) -> int:
    """Returns the number of ranks."""
    array("statistics", statistics, ("n", batch, rows, "5 * 128 / n + 2"), ("float32",))
    num_shards, *_, columns = statistics.shape
    expect(num_shards in NUM_SHARDS, "statistics", f"{num_shards} ranks", "a power of two up to 128")
    expect(
        columns == 5 * (128 // num_shards) + 2,
        "statistics",
        f"{columns} columns of {num_shards} ranks",
        "5 * 128 / n + 2",
    )
    return num_shards


def shard_cuts(
    statistics: Any,
    candidates: Any,
    vocab_size: int,
    draft: str,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
) -> int:
    """Returns the batch."""
    array("statistics", statistics, ("n", "B", "T", "5 * 128 / n + 2"), ("float32",))
    batch, rows = statistics.shape[1:3]
    num_shards = shard_statistics(statistics, batch, rows)
    expect(draft in DRAFT_KINDS, "draft", repr(draft), " or ".join(map(repr, DRAFT_KINDS)))
    laws = 2 if draft == "logits" else 1
    array("candidates", candidates, (num_shards, laws, batch, rows, 8, 8 * (128 // num_shards)), FLOATS)
    whole_number("vocab_size", vocab_size, 1, MAX_VOCAB)
    sampling(batch, temperature, top_k, top_p, min_p)
    return batch


def cuts(cuts_: Any, batch: int, rows: int, draft: str) -> None:
    """What `shard_cuts` gives; None where nothing is truncated."""
    if cuts_ is not None:
        array("cuts", cuts_, (2 if draft == "logits" else 1, batch, rows, 5), ("float32",))


def shard_excess(draft_logits: Any, draft_probs: Any) -> None:
    expect(draft_logits is not None or draft_probs is not None, "draft_probs", "no draft law", "draft_logits or this")


def excess(excess_: Any, rule: str, num_shards: int, batch: int, rows: int, draft: str) -> Any:
    """What `shard_excess` gives, where the rule needs it; returns None where it does not."""
    expect(rule in CHAIN_RULES, "rule", repr(rule), " or ".join(map(repr, CHAIN_RULES)))
    if rule == "token" or draft == "one_hot" or rows == 1:
        return None
    array("excess", excess_, (num_shards, batch, rows, 128 // num_shards), ("float32",))
    return excess_


def shard_weights(
    cuts_: Any,
    trials: Any,
    target_logits: Any,
    shard_: int,
    num_shards: int,
    vocab_size: int,
    draft_logits: Any,
    temperature: Any,
) -> int:
    """Returns the batch."""
    array("target_logits", target_logits, ("B", "T", "V / n"), FLOATS)
    batch, rows, width = target_logits.shape
    expect(num_shards in NUM_SHARDS, "num_shards", num_shards, "a power of two up to 128")
    whole_number("shard", shard_, 0, num_shards - 1)
    whole_number("vocab_size", vocab_size, 1, min(width * num_shards, MAX_VOCAB))
    expect(cuts_ is not None, "cuts", None, "what `shard_cuts` gives")
    cuts(cuts_, batch, rows, "one_hot" if draft_logits is None else "logits")
    array("trials", trials, (cuts_.shape[0], batch, rows, "N"), ("float32",))
    if draft_logits is not None:
        array("draft_logits", draft_logits, (batch, rows - 1, width), FLOATS)
    sampling(batch, temperature, None, None, None)
    return batch


def combine_shards(
    statistics: Any,
    draws: Any,
    draft_tokens: Any,
    uniforms_: Any,
    vocab_size: int,
    draft: str,
    draft_lens: Any,
    temperature: Any,
) -> tuple[int, int]:
    array("draft_tokens", draft_tokens, ("B", "K"), ("int32",))
    batch, rows = draft_tokens.shape[0], draft_tokens.shape[1] + 1
    num_shards = shard_statistics(statistics, batch, rows)
    array("draws", draws, (num_shards, batch, 6, 128 // num_shards), ("float32",))
    uniforms(uniforms_, batch, rows + 1)
    whole_number("vocab_size", vocab_size, 1, MAX_VOCAB)
    expect(draft in DRAFT_KINDS, "draft", repr(draft), " or ".join(map(repr, DRAFT_KINDS)))
    if draft_lens is not None:
        array("draft_lens", draft_lens, (batch,), ("int32",))
        in_range("draft_lens", draft_lens, -1, rows - 1, f"-1 (an empty slot) to K = {rows - 1}")
    sampling(batch, temperature, None, None, None)
    return batch, rows
