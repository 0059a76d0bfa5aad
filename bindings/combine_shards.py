"""Vocabulary-parallel rejection sampling: no rank ever gathers the logits."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch
from draft_verify.parameters import draft_law, per_sequence
from draft_verify.reference import combine_shards as reference
from draft_verify.reference.acceptance import Acceptance


@public
def shard_statistics(
    draft_tokens: Any,
    target_logits: Any,
    uniforms: Any,
    *,
    shard: int,
    num_shards: int,
    vocab_size: int,
    draft_logits: Any = None,
    draft_probs: Any = None,
    draft_lens: Any = None,
    temperature: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """First of three steps of the token rule over n ranks: every group's statistics of every row.

    A step's results are all-gathered to [n, ...] for the next: shard_statistics, shard_draws, combine_shards. All ranks
    come to the same decision, with global ids. Where a rank's columns are 128 / n whole groups of the vocabulary (V a
    multiple of 128), it is `rejection_sampling`'s, token for token; otherwise the groups differ, but not the law. One
    rank is n = 1. Vector work on a rank does not shrink with n, bytes do.

    Args:
        draft_tokens: [B, K] int32, global ids.
        target_logits: [B, T, V / n] fp32 or bf16, this rank's columns; the last rank's may reach past vocab_size.
        uniforms: [B, T + 1] fp32 in (0, 1), the same on every rank.
        shard, num_shards: this rank, and n, a power of two up to 128.
        vocab_size: ids of the whole vocabulary.
        draft_logits, draft_probs: [B, K, V / n] fp32 or bf16, or neither, as `rejection_sampling`.
        draft_lens, temperature: as `rejection_sampling`.
        backend, lnc: see the package.

    Returns:
        [B, T, 5 * 128 / n + 2] fp32.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch, rows = checks.shard(
        draft_tokens,
        target_logits,
        uniforms,
        shard,
        num_shards,
        vocab_size,
        draft_logits,
        draft_probs,
        draft_lens,
        temperature,
    )
    draft_lens = per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens)
    temperature = per_sequence(temperature, 1.0, batch, "float32", draft_tokens)
    if backend == "reference":
        return reference.shard_statistics(
            draft_tokens,
            target_logits,
            uniforms,
            shard=shard,
            num_shards=num_shards,
            vocab_size=vocab_size,
            draft_logits=draft_logits,
            draft_probs=draft_probs,
            draft_lens=draft_lens,
            temperature=temperature,
        )
    law, draft = draft_law(draft_logits, draft_probs) if rows > 1 else (None, "one_hot")
    return launch(
        "shard_statistics",
        draft_tokens if rows > 1 else None,
        target_logits,
        uniforms,
        law,
        draft_lens,
        temperature,
        draft,
        shard,
        num_shards,
        vocab_size,
        backend=backend,
        lnc=lnc,
    )[0]


@public
def shard_draws(
    statistics: Any,
    draft_tokens: Any,
    target_logits: Any,
    uniforms: Any,
    *,
    shard: int,
    vocab_size: int,
    draft_logits: Any = None,
    draft_probs: Any = None,
    draft_lens: Any = None,
    temperature: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """Second step: in the row after the accepted drafts, every group's mass and the id it would give.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2], all ranks' in their order.
        draft_tokens, target_logits, uniforms, shard, vocab_size, draft_logits, draft_probs, draft_lens, temperature:
            the same as were given to `shard_statistics`.
        backend, lnc: see the package.

    Returns:
        [B, 6, 128 / n] fp32.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch, rows = checks.shard(
        draft_tokens,
        target_logits,
        uniforms,
        shard,
        checks.shard_statistics(statistics, target_logits.shape[0], target_logits.shape[1]),
        vocab_size,
        draft_logits,
        draft_probs,
        draft_lens,
        temperature,
    )
    draft_lens = per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens)
    temperature = per_sequence(temperature, 1.0, batch, "float32", draft_tokens)
    if backend == "reference":
        return reference.shard_draws(
            statistics,
            draft_tokens,
            target_logits,
            uniforms,
            shard=shard,
            vocab_size=vocab_size,
            draft_logits=draft_logits,
            draft_probs=draft_probs,
            draft_lens=draft_lens,
            temperature=temperature,
        )
    law, draft = draft_law(draft_logits, draft_probs) if rows > 1 else (None, "one_hot")
    return launch(
        "shard_draws",
        statistics,
        draft_tokens if rows > 1 else None,
        target_logits,
        uniforms,
        law,
        draft_lens,
        temperature,
        draft,
        shard,
        vocab_size,
        backend=backend,
        lnc=lnc,
    )[0]


@public
def combine_shards(
    statistics: Any,
    draws: Any,
    draft_tokens: Any,
    uniforms: Any,
    *,
    vocab_size: int,
    draft: str = "one_hot",
    draft_lens: Any = None,
    temperature: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """Third step: the acceptance, identical on every rank.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2] and draws: [n, B, 6, 128 / n], all ranks' in their order.
        draft_tokens, uniforms, vocab_size, draft_lens, temperature: as `shard_statistics`.
        draft: "logits", "probs" or "one_hot", what the draft laws were given as.
        backend, lnc: see the package.

    Returns:
        Acceptance.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch, rows = checks.combine_shards(
        statistics, draws, draft_tokens, uniforms, vocab_size, draft, draft_lens, temperature
    )
    draft_lens = per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens)
    temperature = per_sequence(temperature, 1.0, batch, "float32", draft_tokens)
    if backend == "reference":
        return reference.combine_shards(
            statistics,
            draws,
            draft_tokens,
            uniforms,
            vocab_size=vocab_size,
            draft=draft,
            draft_lens=draft_lens,
            temperature=temperature,
        )
    tokens, num_accepted, path, invalid = launch(
        "combine_shards",
        statistics,
        draws,
        draft_tokens if rows > 1 else None,
        uniforms,
        draft_lens,
        temperature,
        draft,
        vocab_size,
        backend=backend,
        lnc=lnc,
    )
    return Acceptance(tokens, num_accepted, path, invalid != 0)
