"""The law a row of logits stands for, and how one token is drawn from a law with two uniforms.

A law is a float64 array [V] that sums to one, or None where the row has none: it holds a NaN or +inf, or nothing
above -inf.
"""

from __future__ import annotations

import numpy as np

NUM_GROUPS = 128


def best_token(logits: np.ndarray) -> int:
    """The largest finite entry, the lowest id among equals; 0 where there is none."""
    return int(np.argmax(np.where(np.isfinite(logits), logits, -np.inf)))


def has_law(logits: np.ndarray) -> bool:
    return not np.isnan(logits).any() and np.isfinite(logits.max())


def sampling_law(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray | None:
    """The processed law of raw logits [V]: temperature, top-k, top-p, min-p, in that order.

    Args:
        logits: [V], any float dtype.
        temperature: > 0; greedy rows (0) have no law to process, they take `best_token`.
        top_k: ids not below the k-th largest logit stay, so ties stay; 0 or -1 is off.
        top_p: an id stays iff the mass of the strictly more probable ids, in the law left by top-k, is below it, so
            the token that crosses it stays; 1 is off.
        min_p: ids below min_p times the largest probability go; 0 is off.
    """
    logits = np.asarray(logits, np.float64)
    if not has_law(logits):
        return None
    weights = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(logits):
        weights[logits < np.sort(logits)[-int(top_k)]] = 0
    if top_p < 1:
        law = weights / weights.sum()
        descending = np.sort(law)[::-1]
        mass_of_first = np.concatenate([[0.0], np.cumsum(descending)])
        strictly_above = np.searchsorted(-descending, -law, side="left")
        weights[mass_of_first[strictly_above] >= top_p] = 0
    if min_p > 0:
        weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


def group_size(vocab_size: int) -> int:
    return -(-vocab_size // NUM_GROUPS)


def inverse_cdf(masses: np.ndarray, uniform: float) -> int:
    """The first index whose cumulative mass exceeds uniform times the total; never one of zero mass for u in [0, 1)."""
    cumulative = np.cumsum(masses)
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(masses)[-1]))


def draw(masses: np.ndarray, group_uniform: float, token_uniform: float) -> int:
    """One id from unnormalised masses [V]: first one of 128 consecutive groups, then a token inside it.

    One 24-bit uniform cannot resolve the tail of 150k tokens; two do, 48 bits in all.
    """
    size = group_size(len(masses))
    groups = [masses[start : start + size] for start in range(0, len(masses), size)]
    group = inverse_cdf(np.array([part.sum() for part in groups]), group_uniform)
    return group * size + inverse_cdf(groups[group], token_uniform)
