"""rejection_sampling leaves the target's law as it is: exact enumeration in float64, no statistics."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.reference.rejection_sampling import (
    accept_probability,
    block_probabilities,
    one_hot,
    rejection_sampling,
    residual_law,
)
from draft_verify.reference.sampling import draw, group_size, sampling_law

LIMIT = 1e-12


def random_law(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """A law with zeros in it more often than not."""
    weights = rng.random(vocab_size) * (rng.random(vocab_size) < 0.7)
    weights[rng.integers(vocab_size)] += 0.1
    return weights / weights.sum()


def random_model(rng: np.random.Generator, vocab_size: int, length: int) -> dict[tuple, np.ndarray]:
    """A law for every prefix of up to `length` tokens."""
    prefixes = (p for n in range(length + 1) for p in itertools.product(range(vocab_size), repeat=n))
    return {prefix: random_law(rng, vocab_size) for prefix in prefixes}


def complete(joint: np.ndarray, target: dict, prefix: tuple, mass: float) -> None:
    """Adds `mass` times the target's own continuation of `prefix` to the joint law of all tokens."""
    if len(prefix) == joint.ndim:
        joint[prefix] += mass
        return
    for token, probability in enumerate(target[prefix]):
        complete(joint, target, (*prefix, token), mass * probability)


def emitted_law(target: dict, draft: dict, vocab_size: int, num_drafts: int, as_one_hot: bool) -> np.ndarray:
    """Joint law of K + 1 tokens: the emitted ones, then the target's own continuation; over all draft strings.

    The strings come from `draft`; they are verified with that law, or as if they had none.
    """
    joint = np.zeros((vocab_size,) * (num_drafts + 1))

    def verify(prefix: tuple, mass: float) -> None:
        if len(prefix) == num_drafts:
            complete(joint, target, prefix, mass)
            return
        for token, probability in enumerate(draft[prefix]):
            law = one_hot(token, vocab_size) if as_one_hot else draft[prefix]
            accept = accept_probability(target[prefix], law, token)
            verify((*prefix, token), mass * probability * accept)
            for other, residual in enumerate(residual_law(target[prefix], law)):
                complete(joint, target, (*prefix, other), mass * probability * (1 - accept) * residual)

    verify((), 1.0)
    return joint


def target_law(target: dict, vocab_size: int, num_drafts: int) -> np.ndarray:
    joint = np.zeros((vocab_size,) * (num_drafts + 1))
    complete(joint, target, (), 1.0)
    return joint


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(1, 4), num_drafts=st.integers(0, 3))
def test_all_draft_strings_together_leave_the_target_law(seed, vocab_size, num_drafts):
    rng = np.random.default_rng(seed)
    target, draft = (random_model(rng, vocab_size, num_drafts) for _ in range(2))
    for as_one_hot in (False, True):
        emitted = emitted_law(target, draft, vocab_size, num_drafts, as_one_hot)
        distance = np.abs(emitted - target_law(target, vocab_size, num_drafts)).sum() / 2
        assert distance < LIMIT


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(2, 4))
def test_a_draft_is_accepted_with_the_overlap_of_the_laws(seed, vocab_size):
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, vocab_size), random_law(rng, vocab_size)
    accepted = sum(draft[x] * accept_probability(target, draft, x) for x in range(vocab_size))
    assert abs(accepted - np.minimum(target, draft).sum()) < LIMIT


def logits_of(law: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(law)


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(2, 4), greedy_draft=st.booleans())
def test_decisions_switch_exactly_at_the_accept_probabilities(seed, vocab_size, greedy_draft):
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, vocab_size), random_law(rng, vocab_size)
    for token in range(vocab_size):
        law = one_hot(token, vocab_size) if greedy_draft else draft
        threshold = accept_probability(target, law, token) if law[token] else float(target[token] > 0)
        for uniform, accepted in ((threshold * (1 - 1e-9), 1), (threshold * (1 + 1e-9), 0)):
            if not 0 < uniform < 1:
                continue
            result = rejection_sampling(
                np.array([[token]], np.int32),
                logits_of(np.stack([target, target]))[None],
                np.array([[uniform, 0.5, 0.5]]),
                draft_probs=None if greedy_draft else draft[None, None],
            )
            assert result.num_accepted[0] == accepted


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from([2, 3, 4, 300]))
def test_draws_switch_exactly_at_the_cumulative_masses(seed, vocab_size):
    rng = np.random.default_rng(seed)
    law = random_law(rng, vocab_size)
    size = group_size(vocab_size)
    groups = np.array([law[i : i + size].sum() for i in range(0, vocab_size, size)])
    for step in (-1e-9, 1e-9):
        for group, edge in enumerate(np.cumsum(groups)[:-1]):
            if edge * (1 + step) >= 1 or edge == 0:
                continue
            drawn = draw(law, edge * (1 + step), 0.5) // size
            below = max(g for g in range(group + 1) if groups[g] > 0)
            above = min((g for g in range(group + 1, len(groups)) if groups[g] > 0), default=below)
            assert drawn == (below if step < 0 else above)
        group = int(np.flatnonzero(groups)[0])
        part = law[group * size : (group + 1) * size]
        for column, edge in enumerate(np.cumsum(part)[:-1] / part.sum()):
            if edge * (1 + step) >= 1 or edge == 0:
                continue
            drawn = draw(law, 1e-9 * groups[group], edge * (1 + step)) - group * size
            below = max(c for c in range(column + 1) if part[c] > 0)
            above = min((c for c in range(column + 1, len(part)) if part[c] > 0), default=below)
            assert drawn == (below if step < 0 else above)


@pytest.mark.parametrize("seed", range(3))
def test_the_law_sampled_is_the_law_enumerated(seed):
    """The whole function over a grid of uniforms, V = 3, K = 1: not composed but run."""
    rng = np.random.default_rng(seed)
    target, draft = random_law(rng, 3), random_law(rng, 3)
    grid = (np.arange(40) + 0.5) / 40
    accept, group = (a.ravel() for a in np.meshgrid(grid, grid))
    counts = np.zeros(3)
    for token in range(3):
        if draft[token] == 0:
            continue
        batch = len(accept)
        result = rejection_sampling(
            np.full((batch, 1), token, np.int32),
            np.broadcast_to(logits_of(target), (batch, 2, 3)),
            np.stack([accept, group, group * 0 + 0.5], axis=1),
            draft_probs=np.broadcast_to(draft, (batch, 1, 3)),
        )
        first = result.tokens[:, 0]
        counts += draft[token] * np.bincount(first, minlength=3) / batch
    assert np.abs(counts - target).max() < 2 / 40


def block_emitted_law(target: dict, draft: dict, vocab_size: int, num_drafts: int, as_one_hot: bool) -> np.ndarray:
    """As `emitted_law`, of the block rule: whole strings are drafted, then the longest passing prefix is kept."""
    joint = np.zeros((vocab_size,) * (num_drafts + 1))
    for string in itertools.product(range(vocab_size), repeat=num_drafts):
        prefixes = [string[:i] for i in range(num_drafts)]
        mass = float(np.prod([draft[prefix][x] for prefix, x in zip(prefixes, string)]))
        if mass == 0:
            continue
        pairs = [
            (target[prefix], one_hot(x, vocab_size) if as_one_hot else draft[prefix], x)
            for prefix, x in zip(prefixes, string)
        ]
        weights, passes = block_probabilities(pairs)
        for kept in range(num_drafts, -1, -1):  # later prefixes did not pass
            reached = mass * passes[kept]
            mass *= 1 - passes[kept]
            if kept == num_drafts:
                complete(joint, target, string, reached)
                continue
            target_law_, draft_law, _ = pairs[kept]
            for token, residual in enumerate(residual_law(target_law_, draft_law, weights[kept])):
                complete(joint, target, (*string[:kept], token), reached * residual)
    return joint


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(1, 4), num_drafts=st.integers(0, 3))
def test_the_block_rule_leaves_the_target_law(seed, vocab_size, num_drafts):
    rng = np.random.default_rng(seed)
    target, draft = (random_model(rng, vocab_size, num_drafts) for _ in range(2))
    for as_one_hot in (False, True):
        emitted = block_emitted_law(target, draft, vocab_size, num_drafts, as_one_hot)
        assert np.abs(emitted - target_law(target, vocab_size, num_drafts)).sum() / 2 < LIMIT


def expected_accepted(target: np.ndarray, draft: np.ndarray, num_drafts: int) -> tuple[float, float]:
    """Mean accepted drafts of the token and of the block rule, for laws that do not depend on the prefix."""
    token = block = 0.0
    for string in itertools.product(range(len(target)), repeat=num_drafts):
        pairs = [(target, draft, x) for x in string]
        mass = float(np.prod(draft[list(string)]))
        accepts = np.cumprod([accept_probability(*pair) for pair in pairs])
        token += mass * accepts.sum()
        _, passes = block_probabilities(pairs)
        fails = np.cumprod([1 - h for h in passes[::-1]])[::-1]  # no prefix from i on passes
        block += mass * sum(1 - fails[i] for i in range(1, num_drafts + 1))
    return token, block


def test_the_block_rule_accepts_what_its_paper_says():
    token, block = expected_accepted(np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3]), 2)
    assert abs(token - 10 / 9) < LIMIT and abs(block - 11 / 9) < LIMIT  # 2403.10444, section 2


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.integers(2, 4), num_drafts=st.integers(1, 3))
def test_the_block_rule_never_accepts_fewer_on_average(seed, vocab_size, num_drafts):
    rng = np.random.default_rng(seed)
    token, block = expected_accepted(random_law(rng, vocab_size), random_law(rng, vocab_size), num_drafts)
    assert block >= token - LIMIT


@given(seed=st.integers(0, 2**32 - 1), num_drafts=st.integers(1, 3))
def test_block_decisions_switch_exactly_at_their_probabilities(seed, num_drafts):
    rng = np.random.default_rng(seed)
    targets = [random_law(rng, 3) for _ in range(num_drafts + 1)]
    drafts = [random_law(rng, 3) for _ in range(num_drafts)]
    tokens = [int(rng.integers(3)) for _ in range(num_drafts)]
    _, passes = block_probabilities(list(zip(targets, drafts, tokens)))
    for i in range(1, num_drafts + 1):
        for uniform, passed in ((passes[i] * (1 - 1e-9), True), (passes[i] * (1 + 1e-9), False)):
            if not 0 < uniform < 1:
                continue
            # All later prefixes fail, earlier ones fail unless they pass always.
            uniforms = np.full((1, num_drafts + 2), 1 - 1e-12)
            uniforms[0, i - 1] = uniform
            result = rejection_sampling(
                np.array([tokens], np.int32),
                logits_of(np.stack(targets))[None],
                uniforms,
                draft_probs=np.stack(drafts)[None],
                rule="block",
            )
            always = [j for j in range(1, num_drafts + 1) if j != i and passes[j] > 1 - 1e-12]
            assert result.num_accepted[0] == max([0, *always, *([i] if passed else [])])


@given(
    seed=st.integers(0, 2**32 - 1),
    top_k=st.sampled_from([0, 1, 3, 7]),
    top_p=st.sampled_from([1.0, 0.8, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_the_law_does_not_depend_on_the_order_of_ids_a_constant_or_columns_of_no_mass(seed, top_k, top_p, min_p):
    rng = np.random.default_rng(seed)
    logits = rng.integers(-20, 20, 9) / 4.0  # ties are common, and sums with a constant exact
    parameters = (0.7, top_k, top_p, min_p)
    law = sampling_law(logits, *parameters)
    order = rng.permutation(9)
    np.testing.assert_allclose(sampling_law(logits[order], *parameters), law[order], atol=LIMIT)
    np.testing.assert_allclose(sampling_law(logits + 64.0, *parameters), law, atol=LIMIT)
    widened = sampling_law(np.concatenate([logits, np.full(4, -np.inf)]), *parameters)
    np.testing.assert_allclose(widened, np.concatenate([law, np.zeros(4)]), atol=LIMIT)
    assert law[logits == logits.max()].min() > 0 and len(set(law[law > 0])) <= len(set(logits))
