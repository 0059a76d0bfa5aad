"""greedy_acceptance: the kernel against the reference, ties, NaN and what must not matter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify

BACKENDS = ["reference", "emulator"]
SHAPES = [
    (1, 0, 300, np.float32),
    (3, 4, 5, ml_dtypes.bfloat16),
    (2, 7, 129, ml_dtypes.bfloat16),
    (4, 3, 1021, np.float32),
    (33, 7, 128, np.float32),
]


def greedy_case(rng, batch, num_drafts, vocab_size, dtype, levels):
    """Logits of few distinct values, so that ties are everywhere; NaN wherever none may look."""
    logits = rng.integers(0, levels, (batch, num_drafts + 1, vocab_size + 3)).astype(dtype)
    best = logits[:, :num_drafts, :vocab_size].astype(np.float32).argmax(-1)
    other = rng.integers(-1, vocab_size + 2, best.shape)
    lens = rng.integers(-1, num_drafts + 1, batch).astype(np.int32)
    logits[..., vocab_size:] = np.nan
    for b in range(batch):
        logits[b, max(lens[b] + 1, 0) :] = np.nan
    return {
        "draft_tokens": np.where(rng.random(best.shape) < 0.85, best, other).astype(np.int32),
        "target_logits": logits,
        "draft_lens": lens,
        "vocab_size": vocab_size,
    }


def assert_same(actual, expected):
    for mine, theirs in zip(actual, expected):
        np.testing.assert_array_equal(mine, theirs)


@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32 - 1),
    levels=st.sampled_from([1, 3, 60]),
    holes=st.booleans(),
    lnc=st.sampled_from([1, 2]),
)
def test_kernel_equals_the_reference(shape, seed, levels, holes, lnc):
    rng = np.random.default_rng(seed)
    case = greedy_case(rng, *shape, levels)
    if holes:
        logits = case["target_logits"]
        logits[rng.random(logits.shape) < 0.5 / logits.shape[2]] = np.nan
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        logits[rng.random(logits.shape[:2]) < 0.1] = -np.inf
    actual = draft_verify.greedy_acceptance(**case, backend="emulator", lnc=lnc)
    assert_same(actual, draft_verify.greedy_acceptance(**case, backend="reference"))


@pytest.mark.parametrize("vocab_size", [8193, 151936])
def test_kernel_takes_real_vocabularies(vocab_size):
    case = greedy_case(np.random.default_rng(0), 2, 7, vocab_size, ml_dtypes.bfloat16, 30000)
    actual = draft_verify.greedy_acceptance(**case, backend="emulator")
    assert_same(actual, draft_verify.greedy_acceptance(**case, backend="reference"))
    assert actual.num_accepted.max() > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", [0, 3, 130, 254])
def test_lowest_id_wins_a_tie_across_and_inside_groups(backend, first):
    logits = np.zeros((1, 2, 257), np.float32)
    logits[0, :, [first, 255, 256]] = 2.5
    for draft, accepted in ((first, 1), (255, 0), (256, 0)):
        result = draft_verify.greedy_acceptance(np.array([[draft]], np.int32), logits, backend=backend)
        assert result.num_accepted[0] == accepted and result.tokens[0, accepted] == first


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_rejection_sampling_at_temperature_0(backend):
    rng = np.random.default_rng(1)
    case = greedy_case(rng, 4, 3, 1021, np.float32, 500)
    sampled = draft_verify.rejection_sampling(
        **case, uniforms=rng.random((4, 5)).astype(np.float32), temperature=np.zeros(4, np.float32), backend=backend
    )
    assert_same(draft_verify.greedy_acceptance(**case, backend=backend), sampled)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("draft_tokens", np.zeros((3, 3), np.int32)),
        ("draft_tokens", np.zeros((3, 4), np.float32)),
        ("target_logits", np.zeros((3, 5), np.float32)),
        ("target_logits", np.zeros((3, 5, 8), np.float64)),
        ("target_logits", np.zeros((3, 129, 8), np.float32)),
        ("draft_lens", np.zeros(4, np.int32)),
        ("draft_lens", np.full(3, 5, np.int32)),
        ("draft_lens", np.full(3, -2, np.int32)),
        ("vocab_size", 0),
        ("vocab_size", 9),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    case = greedy_case(np.random.default_rng(2), 3, 4, 5, np.float32, 3)
    with pytest.raises(ValueError, match=argument):
        draft_verify.greedy_acceptance(**{**case, argument: value}, backend="emulator")
