"""The lossless tree rules leave the target's law as it is: exact enumeration in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.reference.tree_acceptance import sibling_thresholds, tree_acceptance
from tests.acceptance_cases import random_tree
from tests.test_rejection_sampling_law import LIMIT, complete, logits_of, random_law, random_model, target_law

RULES = ["target_only", "without_replacement", "independent"]


def sibling_strings(rule: str, draft_law: np.ndarray, count: int, rng: np.random.Generator):
    """(tokens, probability) of the children of one row, however the rule says they come about."""
    if count == 0:
        yield (), 1.0
    elif rule == "target_only":
        yield tuple(int(x) for x in rng.integers(0, len(draft_law), count)), 1.0  # any choice, repeats as well
    elif rule == "independent":
        for tokens in itertools.product(range(len(draft_law)), repeat=count):
            yield tokens, float(np.prod(draft_law[list(tokens)]))
    else:
        # A draft with nothing left to draw repeats a token, which is skipped.
        support = [token for token, mass in enumerate(draft_law) if mass > 0]
        for tokens in itertools.permutations(support, min(count, len(support))):
            probability, law = 1.0, draft_law.copy()
            for token in tokens:
                probability *= law[token] / law.sum()
                law[token] = 0
            yield tokens + tokens[:1] * (count - len(tokens)), probability


def emitted_law(rule: str, tree: list[int], target: dict, draft: dict, vocab_size: int, depth: int, rng) -> np.ndarray:
    """Joint law of depth + 1 tokens: the path, the token after it, then the target's own continuation."""
    joint = np.zeros((vocab_size,) * (depth + 1))

    def verify(row: int, prefix: tuple, mass: float) -> None:
        children = [child for child, parent in enumerate(tree) if parent == row]
        for tokens, probability in sibling_strings(rule, draft[prefix], len(children), rng):
            if probability == 0:
                continue
            reached, left_law = mass * probability, target[prefix]
            thresholds = sibling_thresholds(rule, target[prefix], draft[prefix], tokens)
            for child, token, (threshold, left_law) in zip(children, tokens, thresholds):  # noqa: B007
                accept = min(1.0, threshold)
                verify(child, (*prefix, token), reached * accept)
                reached *= 1 - accept
            for token, left in enumerate(left_law):
                complete(joint, target, (*prefix, token), reached * left)

    verify(0, (), 1.0)
    return joint


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(3, 4), rows=st.integers(1, 6), depth=st.integers(1, 2))
def test_every_tree_leaves_the_target_law(rule, seed, vocab_size, rows, depth):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, min(rows, 5 if rule == "independent" else 6), depth)
    target, draft = (random_model(rng, vocab_size, depth) for _ in range(2))
    emitted = emitted_law(rule, tree, target, draft, vocab_size, depth, rng)
    assert np.abs(emitted - target_law(target, vocab_size, depth)).sum() / 2 < LIMIT


def mean_accepted(rule: str, target: np.ndarray, draft: np.ndarray, count: int) -> float:
    accepted = 0.0
    for tokens, probability in sibling_strings(rule, draft, count, np.random.default_rng(0)):
        fails = 1.0
        if probability > 0:
            for threshold, _ in sibling_thresholds(rule, target, draft, tokens):
                fails *= 1 - min(1.0, threshold)
            accepted += probability * (1 - fails)
    return accepted


def test_drawing_without_replacement_accepts_more_than_independently():
    rng = np.random.default_rng(0)
    better = 0.0
    for _ in range(50):
        target, draft = random_law(rng, 4), rng.dirichlet(np.ones(4))
        better += mean_accepted("without_replacement", target, draft, 3) - mean_accepted(
            "independent", target, draft, 3
        )
    assert better > 0


@pytest.mark.parametrize("rule", RULES)
@given(seed=st.integers(0, 2**32 - 1))
def test_decisions_switch_exactly_at_the_sibling_thresholds(rule, seed):
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, 4), random_law(rng, 4)
    tokens = [int(x) for x in rng.permutation(4)[:3]]
    thresholds = [threshold for threshold, _ in sibling_thresholds(rule, target, draft, tokens)]
    for sibling, threshold in enumerate(thresholds):
        for uniform, accepted in ((threshold * (1 - 1e-9), 1), (threshold * (1 + 1e-9), 0)):
            if not 0 < uniform < 1:
                continue
            uniforms = np.full((1, 5), 1 - 1e-12)
            uniforms[0, sibling] = uniform
            result = tree_acceptance(
                np.array([-1, 0, 0, 0]),
                np.array([tokens], np.int32),
                np.broadcast_to(logits_of(target), (1, 4, 4)),
                uniforms,
                rule=rule,
                draft_probs=None if rule == "target_only" else np.broadcast_to(draft, (1, 4, 4)),
            )
            always = [i for i, other in enumerate(thresholds) if other > 1 - 1e-12 and i != sibling]
            first = min([*always, *([sibling] if accepted else [])], default=None)
            assert list(result.path[0][:2]) == ([0, -1] if first is None else [0, first + 1])
