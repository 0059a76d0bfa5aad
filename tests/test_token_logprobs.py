"""token_logprobs: the kernel against the reference, on what the rules emit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from tests.acceptance_cases import chain_case, cut_undecided, rounding, tree_case
from tests.test_mask_logits import random_mask

BACKENDS = ["reference", "emulator"]


@given(seed=st.integers(0, 2**32 - 1), cut=st.booleans(), lnc=st.sampled_from([1, 2]))
def test_kernel_gives_the_logarithms_of_the_reference(seed, cut, lnc):
    case = chain_case(np.random.default_rng(seed), 3, 2, 129, np.float32, "probs", cut=cut, padding=2)
    emitted = draft_verify.rejection_sampling(**case, backend="reference")
    names = ("temperature", "top_k", "top_p", "min_p", "vocab_size")
    options = {name: case[name] for name in names if name in case}
    arguments = (case["target_logits"], emitted.tokens, emitted.path)
    actual = draft_verify.token_logprobs(*arguments, **options, backend="emulator", lnc=lnc)
    expected = draft_verify.token_logprobs(*arguments, **options, backend="reference")
    for b in range(3):
        own = {name: float(case[name][b]) for name in ("top_k", "top_p", "min_p") if name in case}
        heat = float(case["temperature"][b])
        for place in range(int(emitted.num_accepted[b]) + 1):
            row = case["target_logits"][b, place, :129].astype(np.float64)
            if not cut_undecided(row, heat or 1.0, own, rounding(row, heat)):
                for mine, theirs in zip(actual, expected):
                    np.testing.assert_allclose(mine[b, place], theirs[b, place], rtol=1e-4, atol=1e-4)
    assert (actual.raw[emitted.tokens < 0] == 0).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    rule=st.sampled_from(["target_only", "independent", "without_replacement"]),
    lnc=st.sampled_from([1, 2]),
)
def test_of_a_trees_path_too_cut_and_masked(seed, rule, lnc):
    rng = np.random.default_rng(seed)
    batch, rows, vocab_size = 2, 6, 70
    case = tree_case(rng, batch, rows, vocab_size, np.float32, rule, "logits", cut=True)
    emitted = draft_verify.tree_acceptance(**case, backend="reference")
    _, mask = random_mask(rng, batch, rows, vocab_size + 2, 0.7)
    options = {name: case[name] for name in ("temperature", "top_k", "top_p", "vocab_size")}
    arguments = (case["target_logits"], emitted.tokens, emitted.path)
    actual = draft_verify.token_logprobs(*arguments, **options, allowed_mask=mask, backend="emulator", lnc=lnc)
    expected = draft_verify.token_logprobs(*arguments, **options, allowed_mask=mask, backend="reference")
    unmasked = draft_verify.token_logprobs(*arguments, **options, backend="reference")
    np.testing.assert_array_equal(expected.raw, unmasked.raw)
    np.testing.assert_allclose(actual.raw, expected.raw, rtol=1e-4, atol=1e-4)
    masked = draft_verify.mask_logits(case["target_logits"], mask)[..., :vocab_size].astype(np.float64)
    for b, place in np.argwhere(emitted.tokens >= 0):
        row = masked[b, emitted.path[b, place]]
        own = {name: float(case[name][b]) for name in ("top_k", "top_p")}
        heat = float(case["temperature"][b])
        if not cut_undecided(row, heat or 1.0, own, rounding(row, heat)):
            np.testing.assert_allclose(actual.processed[b, place], expected.processed[b, place], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_token_has_no_probability_and_a_nan_behind_the_mask_spoils_the_raw_value_only(backend):
    logits = np.array([[[1, 2, np.nan, 0], [1, 2, 3, 0]]], np.float32)
    tokens, path = np.array([[1, 2]], np.int32), np.array([[0, 1]], np.int32)
    mask = np.array([[[0b1011], [0b0011]]], np.int32)
    for temperature, processed in ((1.0, [2 - np.log(np.exp([1, 2, 0]).sum()), -np.inf]), (0.0, [0, 0])):
        result = draft_verify.token_logprobs(
            logits, tokens, path, temperature=temperature, allowed_mask=mask, backend=backend
        )
        np.testing.assert_allclose(result.processed[0], processed, rtol=1e-5)
        np.testing.assert_allclose(result.raw[0], [np.nan, 3 - np.log(np.exp([1, 2, 3, 0]).sum())], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_before_and_after_processing_both_come_out(backend):
    """vllm#30846, llama.cpp#27972: raw values read after in-place processing, and 0.0 for accepted drafts."""
    law = np.array([0.5, 0.25, 0.25], np.float32)
    logits = np.log(np.stack([law, law]))[None]
    tokens, path = np.array([[0, 1]], np.int32), np.array([[0, 1]], np.int32)
    result = draft_verify.token_logprobs(logits, tokens, path, temperature=0.5, backend=backend)
    np.testing.assert_allclose(np.exp(result.raw[0]), [0.5, 0.25], rtol=1e-5)
    np.testing.assert_allclose(np.exp(result.processed[0]), [2 / 3, 1 / 6], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_come_from_the_path_and_spoiled_ones_give_nan(backend):
    case = tree_case(np.random.default_rng(0), 2, 6, 9, ml_dtypes.bfloat16, "greedy")
    case["draft_lens"][:] = 5
    logits = np.zeros((2, 6, 9), np.float32)
    logits[:, 4, 3] = 2.0
    logits[1, 0, 0] = np.nan
    tokens = np.array([[8, 3, -1, -1, -1, -1]] * 2, np.int32)
    path = np.array([[0, 4, -1, -1, -1, -1]] * 2, np.int32)
    result = draft_verify.token_logprobs(logits, tokens, path, backend=backend)
    expected = [np.log(1 / 9), 2 - np.log(8 + np.exp(2.0)), 0, 0, 0, 0]
    np.testing.assert_allclose(result.raw[0], expected, rtol=1e-4)
    assert np.isnan(result.raw[1, 0]) and np.isnan(result.processed[1, 0])
    np.testing.assert_allclose(result.raw[1, 1:], expected[1:], rtol=1e-4)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("target_logits", np.zeros((2, 9), np.float32)),
        ("tokens", np.full((2, 3), 9, np.int32)),
        ("tokens", np.zeros((2, 3), np.int64)),
        ("path", np.full((2, 3), 3, np.int32)),
        ("path", np.zeros((2, 2), np.int32)),
        ("top_p", 2.0),
        ("allowed_mask", np.zeros((2, 3, 2), np.int32)),
        ("vocab_size", 10),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    case = {
        "target_logits": np.zeros((2, 3, 9), np.float32),
        "tokens": np.zeros((2, 3), np.int32),
        "path": np.zeros((2, 3), np.int32),
        argument: value,
    }
    with pytest.raises(ValueError, match=argument):
        draft_verify.token_logprobs(**case, backend="emulator")
