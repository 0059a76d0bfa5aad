"""Vocabulary-parallel rejection sampling: no rank ever gathers the logits."""

from __future__ import annotations

from typing import Any, NamedTuple

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch
from draft_verify.parameters import draft_law, per_sequence, truncation
from draft_verify.reference import combine_shards as reference
from draft_verify.reference.acceptance import Acceptance


class _Windows(NamedTuple):
    """A rank's part of a batch of windows, as the references take it."""

    draft_tokens: Any
    target_logits: Any
    uniforms: Any
    draft_logits: Any
    draft_probs: Any
    draft_lens: Any
    temperature: Any

    def for_kernel(self) -> tuple[Any, ...]:
        """draft_tokens, target_logits, uniforms, draft_law, draft_lens, temperature and draft_kind."""
        tokens, (law, draft) = self.draft_tokens, draft_law(self.draft_logits, self.draft_probs)
        if self.target_logits.shape[1] == 1:
            tokens, law, draft = None, None, "one_hot"
        return tokens, self.target_logits, self.uniforms, law, self.draft_lens, self.temperature, draft


def _windows(
    draft_tokens: Any,
    target_logits: Any,
    uniforms: Any,
    shard: int,
    num_shards: int,
    vocab_size: int,
    draft_logits: Any,
    draft_probs: Any,
    draft_lens: Any,
    temperature: Any,
) -> _Windows:
    """Checked, and with what was left out."""
    given = (draft_logits, draft_probs, draft_lens, temperature)
    batch, rows = checks.shards.shard(draft_tokens, target_logits, uniforms, shard, num_shards, vocab_size, *given)
    draft_lens = per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens)
    temperature = per_sequence(temperature, 1.0, batch, "float32", draft_tokens)
    return _Windows(draft_tokens, target_logits, uniforms, draft_logits, draft_probs, draft_lens, temperature)


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
    truncated: bool = False,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """First of three steps of rejection sampling over n ranks: every group's statistics of every row.

    A step's results are all-gathered to [n, ...] for the next: shard_statistics, shard_draws, combine_shards. With
    top-k, top-p or min-p, shard_cuts stands after the first, and `parallel.vocabulary_parallel_sampling` shows what
    rows need that are cut deep; under the block rule shard_excess stands before the second. All ranks come to the same
    decision, with global ids. Where a rank's columns are 128 / n whole groups of the vocabulary (V a multiple of 128),
    it is `rejection_sampling`'s, token for token; otherwise the groups differ, but not the law. One rank is n = 1.
    Vector work on a rank does not shrink with n, bytes do.

    Args:
        draft_tokens: [B, K] int32, global ids.
        target_logits: [B, T, V / n] fp32 or bf16, this rank's columns; the last rank's may reach past vocab_size.
        uniforms: [B, T + 1] fp32 in (0, 1), the same on every rank.
        shard, num_shards: this rank, and n, a power of two up to 128.
        vocab_size: ids of the whole vocabulary.
        draft_logits, draft_probs: [B, K, V / n] fp32 or bf16, or neither, as `rejection_sampling`.
        draft_lens, temperature: as `rejection_sampling`.
        truncated: whether `shard_cuts` comes next.
        backend, lnc: see the package.

    Returns:
        [B, T, 5 * 128 / n + 2] fp32; and if truncated, candidates [laws, B, T, 8, 8 * 128 / n], the 8 largest entries
        of every 8th id of each group, bf16 if all logits are, else fp32. Laws: the target's, and the draft's logits.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    given = (shard, num_shards, vocab_size, draft_logits, draft_probs, draft_lens, temperature)
    windows = _windows(draft_tokens, target_logits, uniforms, *given)
    if backend == "reference":
        where = {"shard": shard, "num_shards": num_shards, "vocab_size": vocab_size}
        return reference.shard_statistics(**windows._asdict(), **where, truncated=truncated)
    arguments = (*windows.for_kernel(), shard, num_shards, truncated, vocab_size)
    results = launch("shard_statistics", *arguments, backend=backend, lnc=lnc)
    return results if truncated else results[0]


@public
def shard_cuts(
    statistics: Any,
    candidates: Any,
    *,
    vocab_size: int,
    draft: str = "one_hot",
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """Where top-k, top-p and min-p cut every row, the same on every rank: exact but for rows it flags as deep.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2] and candidates: [n, laws, B, T, 8, 8 * 128 / n], all ranks'.
        vocab_size: ids of the whole vocabulary.
        draft: "logits", "probs" or "one_hot", what the draft laws were given as.
        temperature, top_k, top_p, min_p: as `rejection_sampling`.
        backend, lnc: see the package.

    Returns:
        [laws, B, T, 5] fp32: the threshold that a logit must not be below, the sum of exp((x - largest) / T) that it
        leaves, 1 where the row is deep (its cut lies below its candidates), and the largest entry and sum uncut.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch = checks.shards.shard_cuts(statistics, candidates, vocab_size, draft, temperature, top_k, top_p, min_p)
    temperature = per_sequence(temperature, 1.0, batch, "float32", statistics)
    _, top_k, top_p, min_p = truncation(0 if top_k is None else top_k, top_p, min_p, batch, statistics)
    if backend == "reference":
        limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return reference.shard_cuts(statistics, candidates, vocab_size=vocab_size, draft=draft, **limits)
    empty = per_sequence(None, 0, batch, "int32", statistics)
    arguments = (statistics, candidates, empty, temperature, top_k, top_p, min_p, draft, vocab_size)
    return launch("shard_cuts", *arguments, backend=backend, lnc=lnc)[0]


@public
def shard_weights(
    cuts: Any,
    trials: Any,
    target_logits: Any,
    *,
    shard: int,
    num_shards: int,
    vocab_size: int,
    by_mass: bool,
    draft_logits: Any = None,
    temperature: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """How many of this rank's entries, or how much mass, lie not below thresholds on trial, in deep rows only.

    Args:
        cuts: [laws, B, T, 5] of `shard_cuts`.
        trials: [laws, B, T, N] fp32.
        target_logits: [B, T, V / n], draft_logits: [B, K, V / n], this rank's columns.
        shard, num_shards, vocab_size, temperature: as `shard_statistics`.
        by_mass: exp((x - largest) / T) is added up, instead of 1.
        backend, lnc: see the package.

    Returns:
        [128 / n, laws, B, T, N] fp32, by group; 0 in rows that are not deep.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch = checks.shards.shard_weights(
        cuts, trials, target_logits, shard, num_shards, vocab_size, draft_logits, temperature
    )
    temperature = per_sequence(temperature, 1.0, batch, "float32", cuts)
    if backend == "reference":
        return reference.shard_weights(
            cuts,
            trials,
            target_logits,
            shard=shard,
            num_shards=num_shards,
            vocab_size=vocab_size,
            by_mass=by_mass,
            draft_logits=draft_logits,
            temperature=temperature,
        )
    empty = per_sequence(None, 0, batch, "int32", cuts)
    arguments = (cuts, trials, target_logits, draft_logits, empty, temperature, by_mass, shard, num_shards, vocab_size)
    return launch("shard_weights", *arguments, backend=backend, lnc=lnc)[0]


@public
def shard_excess(
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
    cuts: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """For the block rule: of every row, what each group holds of the residual mass after the drafts before it.

    Drafts without a law need none (the residual leaves out the draft alone). It is the block rule's second read of the
    rows between the first and the last.

    Args:
        statistics, draft_tokens, target_logits, uniforms, shard, vocab_size, draft_logits, draft_probs, draft_lens,
            temperature, cuts: the same as are given to `shard_draws`; draft_logits or draft_probs must be.
        backend, lnc: see the package.

    Returns:
        [B, T, 128 / n] fp32, times the draft's total of exponentials; 0 in a sequence's first and last row.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    num_shards = checks.shards.ranks(statistics, target_logits)
    given = (shard, num_shards, vocab_size, draft_logits, draft_probs, draft_lens, temperature)
    windows = _windows(draft_tokens, target_logits, uniforms, *given)
    checks.shards.shard_excess(draft_logits, draft_probs)
    checks.shards.cuts(cuts, *target_logits.shape[:2], "one_hot" if draft_logits is None else "logits")
    if backend == "reference":
        where = {"shard": shard, "vocab_size": vocab_size}
        return reference.shard_excess(statistics, **windows._asdict(), **where, cuts=cuts)
    arguments = (statistics, cuts, *windows.for_kernel(), shard, vocab_size)
    return launch("shard_excess", *arguments, backend=backend, lnc=lnc)[0]


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
    cuts: Any = None,
    rule: str = "token",
    excess: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Any:
    """Second step: in the row after the accepted drafts, every group's mass and the id it would give.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2], all ranks' in their order.
        draft_tokens, target_logits, uniforms, shard, vocab_size, draft_logits, draft_probs, draft_lens, temperature:
            the same as were given to `shard_statistics`.
        cuts: [laws, B, T, 5] of `shard_cuts`, where rows are truncated.
        rule: "token" or "block", as `rejection_sampling`.
        excess: [n, B, T, 128 / n] of `shard_excess`, all ranks', under the block rule for drafts with a law.
        backend, lnc: see the package.

    Returns:
        [B, 6, 128 / n] fp32.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    num_shards = checks.shards.ranks(statistics, target_logits)
    given = (shard, num_shards, vocab_size, draft_logits, draft_probs, draft_lens, temperature)
    windows = _windows(draft_tokens, target_logits, uniforms, *given)
    batch, rows = target_logits.shape[:2]
    _, draft = draft_law(draft_logits, draft_probs)
    checks.shards.cuts(cuts, batch, rows, draft)
    excess = checks.shards.excess(excess, rule, num_shards, batch, rows, draft)
    if backend == "reference":
        where = {"shard": shard, "vocab_size": vocab_size, "cuts": cuts, "rule": rule, "excess": excess}
        return reference.shard_draws(statistics, **windows._asdict(), **where)
    arguments = (statistics, cuts, excess, *windows.for_kernel(), rule, shard, vocab_size)
    return launch("shard_draws", *arguments, backend=backend, lnc=lnc)[0]


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
    cuts: Any = None,
    rule: str = "token",
    excess: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> Acceptance:
    """Third step: the acceptance, identical on every rank.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2] and draws: [n, B, 6, 128 / n], all ranks' in their order.
        draft_tokens, uniforms, vocab_size, draft_lens, temperature: as `shard_statistics`.
        draft: "logits", "probs" or "one_hot", what the draft laws were given as.
        cuts, rule, excess: as `shard_draws`.
        backend, lnc: see the package.

    Returns:
        Acceptance.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    batch, rows = checks.shards.combine_shards(
        statistics, draws, draft_tokens, uniforms, vocab_size, draft, draft_lens, temperature
    )
    checks.shards.cuts(cuts, batch, rows, draft)
    excess = checks.shards.excess(excess, rule, statistics.shape[0], batch, rows, draft)
    draft_lens = per_sequence(draft_lens, rows - 1, batch, "int32", draft_tokens)
    temperature = per_sequence(temperature, 1.0, batch, "float32", draft_tokens)
    if backend == "reference":
        given = {"draft_lens": draft_lens, "temperature": temperature, "cuts": cuts, "rule": rule, "excess": excess}
        return reference.combine_shards(
            statistics, draws, draft_tokens, uniforms, vocab_size=vocab_size, draft=draft, **given
        )
    tokens = draft_tokens if rows > 1 else None
    arguments = (statistics, cuts, excess, draws, tokens, uniforms, draft_lens, temperature, draft, rule, vocab_size)
    tokens, num_accepted, path, invalid = launch("combine_shards", *arguments, backend=backend, lnc=lnc)
    return Acceptance(tokens, num_accepted, path, invalid != 0)
