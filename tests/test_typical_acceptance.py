"""typical_acceptance: the rule, the longest path, and the kernel against the reference."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.reference.sampling import sampling_law
from draft_verify.reference.typical_acceptance import typical_limit
from tests.acceptance_cases import Tally, assert_agrees_unless_rounding_decides, rounding, tree_case

BACKENDS = ["reference", "emulator"]
SHAPES = [(1, 1, 50, np.float32), (3, 6, 9, np.float32), (2, 9, 129, ml_dtypes.bfloat16), (2, 12, 640, np.float32)]
MEDUSA = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}


def typical_case(rng, batch, rows, vocab_size, dtype, chain):
    case = tree_case(rng, batch, rows, vocab_size, dtype, "target_only")
    del case["rule"]
    if chain:
        del case["tree"]
    return {**case, **MEDUSA}


def limit_undecided(case):
    """Whether any row's probability of its draft lies within rounding of its limit, sequence by sequence."""
    batch = len(case["draft_tokens"])
    near = np.zeros(batch, bool)
    for b in range(batch):
        for row in range(1, max(int(case["draft_lens"][b]), 0) + 1):
            parent = row - 1 if "tree" not in case else case["tree"][b, row]
            token = case["draft_tokens"][b, row - 1]
            logits = np.asarray(case["target_logits"][b, parent, : case["vocab_size"]], np.float64)
            heat = float(case["temperature"][b]) or 1.0
            if 0 <= token < case["vocab_size"] and np.isfinite(logits).all():
                law = sampling_law(logits, heat)
                limit = typical_limit(law, 0.09, 0.3)
                near[b] |= abs(law[token] - limit) < 4 * rounding(logits, heat) * limit
    return near


@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1), chain=st.booleans(), lnc=st.sampled_from([1, 2]))
def test_kernel_keeps_the_path_of_the_reference(shape, seed, chain, lnc):
    case = typical_case(np.random.default_rng(seed), *shape, chain)
    if limit_undecided(case).any():
        return
    actual = draft_verify.typical_acceptance(**case, backend="emulator", lnc=lnc)
    assert_agrees_unless_rounding_decides(draft_verify.typical_acceptance, actual, case, Tally())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_is_kept_iff_it_exceeds_the_limit_of_its_row(backend):
    # Uniform over 100 of 129 ids: exp(-entropy) is 0.01, the limit 0.3 * 0.01; then a peaked row, limit 0.09.
    logits = np.full((2, 2, 129), -np.inf, np.float32)
    logits[0, :, :100] = 0
    logits[1, :, 0] = np.log(0.92)
    logits[1, :, 1] = np.log(0.08)
    uniforms = np.full((2, 3), 0.5, np.float32)
    for token, kept in ((5, [1, 0]), (0, [1, 1]), (1, [1, 0]), (110, [0, 0])):
        result = draft_verify.typical_acceptance(
            np.full((2, 1), token, np.int32), logits, uniforms, **MEDUSA, backend=backend
        )
        assert result.num_accepted.tolist() == kept
    assert typical_limit(np.full(100, 0.01), **MEDUSA) == pytest.approx(0.003)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_longest_path_wins_then_the_likeliest(backend):
    logits = np.zeros((1, 6, 50), np.float32)
    logits[0, 0, [1, 2, 3]] = 9.0, 9.5, 8.5
    logits[0, 1:, 4] = 9.0
    # 0-{1, 2, 3}: tokens 1, 2, 3 all pass; only row 3 has a passing child.
    tokens = np.array([[1, 2, 3, 7, 4]], np.int32)
    tree = np.array([-1, 0, 0, 0, 2, 3], np.int32)
    uniforms = np.full((1, 7), 0.5, np.float32)
    result = draft_verify.typical_acceptance(tokens, logits, uniforms, tree=tree, **MEDUSA, backend=backend)
    assert result.path[0].tolist() == [0, 3, 5, -1, -1, -1] and result.tokens[0, :2].tolist() == [3, 4]
    tokens[0, 4] = 7
    result = draft_verify.typical_acceptance(tokens, logits, uniforms, tree=tree, **MEDUSA, backend=backend)
    assert result.path[0].tolist() == [0, 2, -1, -1, -1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_spoiled_row_keeps_no_child_and_is_flagged_only_where_the_path_ends(backend):
    logits = np.zeros((1, 4, 50), np.float32)
    logits[0, 0, [1, 2]] = 9.0
    logits[0, 1, 7], logits[0, 1, 30] = np.nan, 5.0
    logits[0, 2, 8] = 20.0
    uniforms = np.full((1, 5), 0.5, np.float32)
    tree = np.array([-1, 0, 0, 1], np.int32)
    result = draft_verify.typical_acceptance(
        np.array([[1, 2, 30]], np.int32), logits, uniforms, tree=tree, **MEDUSA, backend=backend
    )
    assert result.path[0].tolist() == [0, 1, -1, -1] and result.tokens[0, :2].tolist() == [1, 30] and result.invalid[0]
    logits[0, 0, 2] = 9.1
    result = draft_verify.typical_acceptance(
        np.array([[1, 2, 30]], np.int32), logits, uniforms, tree=tree, **MEDUSA, backend=backend
    )
    assert result.tokens[0, :2].tolist() == [2, 8] and not result.invalid[0]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("posterior_threshold", 0.0),
        ("posterior_threshold", 1.5),
        ("posterior_alpha", 0.0),
        ("posterior_alpha", np.nan),
        ("tree", np.array([-1, 0, 2, 0, 0, 0], np.int32)),
        ("uniforms", np.full((3, 6), 0.5, np.float32)),
        ("temperature", -1.0),
        ("draft_lens", np.full(3, 6, np.int32)),
        ("vocab_size", 0),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    case = typical_case(np.random.default_rng(3), 3, 6, 9, np.float32, False)
    case = {**case, "draft_lens": np.full(3, 5, np.int32), "tree": np.array([-1, 0, 0, 1, 1, 2], np.int32)}
    with pytest.raises(ValueError, match=argument):
        draft_verify.typical_acceptance(**{**case, argument: value}, backend="emulator")
