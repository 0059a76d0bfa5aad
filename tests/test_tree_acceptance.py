"""tree_acceptance: the kernel against the reference, trees of all shapes, what must not matter, and bad input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.bench.programs import instead_of_running
from draft_verify.reference import tolerances
from tests.acceptance_cases import Tally, assert_agrees_unless_rounding_decides, tree_case

RULES = ["greedy", "target_only", "without_replacement", "independent"]
BACKENDS = ["reference", "emulator"]
SHAPES = [
    (1, 1, 50, np.float32, "probs"),
    (2, 6, 9, np.float32, "logits"),
    (3, 9, 129, ml_dtypes.bfloat16, "probs"),
    (2, 16, 640, np.float32, "logits"),
]


def assert_same(actual, expected):
    for mine, theirs in zip(actual, expected):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("rule", RULES)
@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1), lnc=st.sampled_from([1, 2]))
def test_kernel_walks_as_the_reference(rule, shape, seed, lnc):
    batch, rows, vocab_size, dtype, draft = shape
    case = tree_case(np.random.default_rng(seed), batch, rows, vocab_size, dtype, rule, draft)
    actual = draft_verify.tree_acceptance(**case, backend="emulator", lnc=lnc)
    assert_agrees_unless_rounding_decides(draft_verify.tree_acceptance, actual, case, Tally())


@pytest.mark.parametrize("rule", RULES)
def test_few_walks_lie_within_rounding(rule):
    tally = Tally()
    for seed in range(12):
        case = tree_case(np.random.default_rng(seed), 8, 9, 129, np.float32, rule)
        actual = draft_verify.tree_acceptance(**case, backend="emulator")
        assert_agrees_unless_rounding_decides(draft_verify.tree_acceptance, actual, case, tally)
    print(rule, tally)
    assert tally.decisions > 100 and tally.undecided <= 1 + tolerances.MAX_UNDECIDED_SHARE * tally.decisions


@pytest.mark.parametrize("rule", ["target_only", "without_replacement", "independent"])
def test_five_siblings_of_a_few_tokens_are_tried_in_turn(rule):
    """Few tokens and unlike laws, so that what an earlier sibling takes out of them decides about the next."""
    rng, shares, tried = np.random.default_rng(0), Tally(), 0
    for _ in range(4):
        draft = rng.dirichlet(np.full(8, 0.7), 16)
        tokens = [rng.choice(8, 5, replace=rule != "without_replacement", p=law) for law in draft]
        case = {
            "tree": np.array([-1, 0, 0, 0, 0, 0], np.int32),
            "draft_tokens": np.array(tokens, np.int32),
            "target_logits": (rng.standard_normal((16, 6, 8)) * 2).astype(np.float32),
            "uniforms": rng.uniform(0.05, 0.95, (16, 7)).astype(np.float32),
            "rule": rule,
        }
        if rule != "target_only":
            case["draft_probs"] = np.repeat(draft[:, None], 6, axis=1).astype(np.float32)
        actual = draft_verify.tree_acceptance(**case, backend="emulator")
        assert_agrees_unless_rounding_decides(draft_verify.tree_acceptance, actual, case, shares)
        tried += (actual.path[:, 1] != 1).sum()
    assert shares.undecided <= 1 and tried > 20  # the first sibling was rejected


@pytest.mark.parametrize("rule", ["target_only", "without_replacement"])
def test_kernel_cuts_rows_by_top_k_and_top_p(rule):
    for seed in range(3):
        case = tree_case(np.random.default_rng(seed), 2, 6, 129, np.float32, rule, "logits", cut=True)
        actual = draft_verify.tree_acceptance(**case, backend="emulator")
        assert_agrees_unless_rounding_decides(draft_verify.tree_acceptance, actual, case, Tally())


def test_kernel_takes_64_rows_of_a_real_vocabulary():
    case = tree_case(np.random.default_rng(0), 1, 64, 8193, ml_dtypes.bfloat16, "target_only")
    actual = draft_verify.tree_acceptance(**case, backend="emulator")
    assert_agrees_unless_rounding_decides(draft_verify.tree_acceptance, actual, case, Tally())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_is_a_tree(backend):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 4, 129)).astype(np.float32) * 3
    tokens = rng.integers(0, 129, (2, 3)).astype(np.int32)
    tokens[0] = logits[0, :3].argmax(-1)
    tree = np.array([-1, 0, 1, 2], np.int32)
    assert_same(
        draft_verify.tree_acceptance(tree, tokens, logits, backend=backend),
        draft_verify.greedy_acceptance(tokens, logits, backend=backend),
    )
    uniforms = rng.random((2, 5)).astype(np.float32)
    probs = rng.dirichlet(np.ones(129), (2, 4)).astype(np.float32)
    sampled = draft_verify.rejection_sampling(tokens, logits, uniforms, draft_probs=probs[:, :3], backend=backend)
    for rule in ("without_replacement", "independent"):
        walked = draft_verify.tree_acceptance(
            tree, tokens, logits, uniforms, rule=rule, draft_probs=probs, backend=backend
        )
        assert_same(walked, sampled)
    assert_same(
        draft_verify.tree_acceptance(tree, tokens, logits, uniforms, rule="target_only", backend=backend),
        draft_verify.rejection_sampling(tokens, logits, uniforms, backend=backend),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unbalanced_tree_ends_at_its_own_leaf(backend):
    """NxDI's token_tree.py pads paths with unrelated nodes: tree 0-{1,2}, 2-3, 3-4 emitted [11, 22, 99] (nxdi.md)."""
    logits = np.zeros((1, 5, 100), np.float32)
    logits[0, 0, 11] = logits[0, 1, 22] = 9.0  # row 1 is a leaf, and its target wants 22
    logits[0, 3, 99] = 9.0
    tokens = np.array([[11, 22, 99, 5]], np.int32)
    result = draft_verify.tree_acceptance(np.array([-1, 0, 0, 2, 3], np.int32), tokens, logits, backend=backend)
    assert result.num_accepted[0] == 1
    assert result.tokens[0].tolist() == [11, 22, -1, -1, -1]
    assert result.path[0].tolist() == [0, 1, -1, -1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_rows_off_the_path_may_hold_anything(backend, rule):
    rng = np.random.default_rng(2)
    for _ in range(4):
        case = tree_case(rng, 3, 9, 129, ml_dtypes.bfloat16, rule)
        before = draft_verify.tree_acceptance(**case, backend=backend)
        for b in range(3):
            off = np.setdiff1d(np.arange(9), before.path[b])
            for name in ("target_logits", "draft_probs"):
                if name in case:
                    case[name][b, off] = np.nan
        assert_same(draft_verify.tree_acceptance(**case, backend=backend), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_spoiled_row_ends_the_walk_and_emits_its_best_finite_token(backend):
    logits = np.zeros((1, 3, 50), np.float32)
    logits[0, 0, 7] = 5.0
    logits[0, 1] = -1.0
    logits[0, 1, 3], logits[0, 1, 30] = np.nan, 2.0
    result = draft_verify.tree_acceptance(
        np.array([-1, 0, 1], np.int32), np.array([[7, 30]], np.int32), logits, backend=backend
    )
    assert result.tokens[0].tolist() == [7, 30, -1] and result.num_accepted[0] == 1 and result.invalid[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["without_replacement", "independent"])
def test_a_spoiled_draft_law_draws_from_the_target(backend, rule):
    rng = np.random.default_rng(3)
    logits = np.zeros((1, 3, 4), np.float32)
    logits[0, 0, 1] = 50.0
    probs = np.full((1, 3, 4), 0.25, np.float32)
    probs[0, 0, 2] = np.nan
    result = draft_verify.tree_acceptance(
        np.array([-1, 0, 0], np.int32),
        np.array([[1, 2]], np.int32),
        logits,
        rng.random((1, 4)).astype(np.float32),
        rule=rule,
        draft_probs=probs,
        backend=backend,
    )
    assert result.num_accepted[0] == 0 and result.tokens[0, 0] == 1 and result.invalid[0]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tree", np.array([0, 0, 0, 0, 0, 0], np.int32)),
        ("tree", np.array([-1, 0, 2, 0, 0, 0], np.int32)),
        ("tree", np.array([-1, -2, 0, 0, 0, 0], np.int32)),
        ("tree", np.array([-1, 0, 0], np.int32)),
        ("tree", np.array([-1, 0, 0, 0, 0, 0], np.int64)),
        ("rule", "beam"),
        ("uniforms", None),
        ("uniforms", np.zeros((2, 7), np.float32)),
        ("draft_probs", None),
        ("draft_probs", np.zeros((2, 5, 11), np.float32)),
        ("draft_lens", np.full(2, 6, np.int32)),
        ("temperature", np.full(2, -1, np.float32)),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    case = tree_case(np.random.default_rng(4), 2, 6, 9, np.float32, "independent")
    case = {**case, "draft_lens": np.full(2, 5, np.int32), "tree": np.array([-1, 0, 0, 1, 1, 2], np.int32)}
    with pytest.raises(ValueError, match=argument):
        draft_verify.tree_acceptance(**{**case, argument: value}, backend="emulator")


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_greedy_rule_refuses_what_it_would_not_use_T35(sampling):
    inputs = np.array([-1, 0, 0], np.int32), np.zeros((1, 2), np.int32), np.zeros((1, 3, 9), np.float32)
    (argument,) = sampling
    with pytest.raises(ValueError, match=f"^{argument}: got .*, expected None with rule 'greedy'"):
        draft_verify.tree_acceptance(*inputs, **sampling)
    assert draft_verify.tree_acceptance(*inputs, temperature=0.0).tokens[0, 0] == 0


def test_two_cores_walk_the_only_tree_in_as_few_steps_as_one():
    batch, rows, vocab_size = 1, 8, 256
    tree = ((np.arange(rows) - 1) // 2).astype(np.int32)
    tokens = np.full((batch, rows - 1), 3, np.int32)
    logits = np.zeros((batch, rows, vocab_size), np.float32)
    uniforms = np.full((batch, rows + 1), 0.5, np.float32)
    steps = []
    for lnc in (1, 2):
        programs = []
        with instead_of_running(programs):
            draft_verify.tree_acceptance(
                tree, tokens, logits, uniforms, rule="target_only", backend="emulator", lnc=lnc
            )
        steps.append({max(program.trips.values()) for program in programs})
    assert steps[0] == steps[1] and max(steps[0]) < rows - 1
