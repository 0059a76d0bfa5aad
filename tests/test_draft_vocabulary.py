"""Drafts with a vocabulary of their own: the law stays the target's, many draft ids may be one target id."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.reference.draft_vocabulary import onto_target
from draft_verify.reference.rejection_sampling import accept_probability, residual_law
from tests.test_rejection_sampling_law import LIMIT, random_law

BACKENDS = ["reference", "emulator"]


@given(seed=st.integers(0, 2**32 - 1), draft_size=st.integers(1, 5))
def test_the_target_law_is_left_as_it_is(seed, draft_size):
    rng = np.random.default_rng(seed)
    target, own = random_law(rng, 4), random_law(rng, draft_size)
    draft_to_target = rng.integers(0, 4, draft_size).astype(np.int32)
    draft = onto_target(None, own[None, None], draft_to_target, 4, None, None, None, None)[0, 0]
    emitted = np.zeros(4)
    for draft_id, mass in enumerate(own):  # drafts are drawn in the draft's vocabulary
        token = draft_to_target[draft_id]
        accept = accept_probability(target, draft, token)
        emitted[token] += mass * accept
        emitted += mass * (1 - accept) * residual_law(target, draft)
    assert np.abs(emitted - target).sum() / 2 < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_processed_in_the_drafts_vocabulary(backend):
    """Two draft ids of one target id: top-k 2 keeps both, and their masses add up."""
    draft_to_target = np.array([3, 3, 1], np.int32)
    draft_logits = np.log(np.array([[[0.4, 0.35, 0.25]]], np.float32))
    target = np.log(np.array([[[0.1, 0.2, 0.1, 0.6]] * 2], np.float32))
    options = {"draft_logits": draft_logits, "draft_to_target": draft_to_target, "top_k": 2, "backend": backend}
    # After top-k the target is {1: .25, 3: .75}, the draft {3: 1}: accepted below .75, else token 1.
    for uniform, accepted in ((0.74, 1), (0.76, 0)):
        result = draft_verify.rejection_sampling(
            np.array([[3]], np.int32), target, np.array([[uniform, 0.5, 0.5]], np.float32), **options
        )
        assert result.num_accepted[0] == accepted
        assert accepted or result.tokens[0, 0] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_take_it_too(backend):
    rng = np.random.default_rng(0)
    draft_to_target = rng.integers(0, 50, 20).astype(np.int32)
    target = rng.standard_normal((2, 4, 50)).astype(np.float32)
    own = rng.dirichlet(np.ones(20), (2, 4)).astype(np.float32)
    law = onto_target(None, own, draft_to_target, 50, None, None, None, None).astype(np.float32)
    tokens = draft_to_target[rng.integers(0, 20, (2, 3))]
    uniforms = rng.random((2, 5)).astype(np.float32)
    tree = np.array([-1, 0, 0, 1], np.int32)
    arguments = (tree, tokens, target, uniforms)
    with_map = draft_verify.tree_acceptance(
        *arguments, rule="independent", draft_probs=own, draft_to_target=draft_to_target, backend=backend
    )
    without = draft_verify.tree_acceptance(*arguments, rule="independent", draft_probs=law, backend=backend)
    for mine, theirs in zip(with_map, without):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    "value",
    [np.array([0, 4], np.int32), np.array([0, -1], np.int32), np.zeros((2, 1), np.int32), np.zeros(2, np.int64)],
)
def test_a_bad_map_is_refused_by_name(value):
    with pytest.raises(ValueError, match="draft_to_target"):
        draft_verify.rejection_sampling(
            np.zeros((1, 1), np.int32),
            np.zeros((1, 2, 4), np.float32),
            np.full((1, 3), 0.5, np.float32),
            draft_probs=np.full((1, 1, 2), 0.5, np.float32),
            draft_to_target=value,
        )
