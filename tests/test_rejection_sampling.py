"""rejection_sampling: the kernel against the reference, what must not matter, and bad input."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify import backends
from draft_verify.reference import tolerances
from tests.acceptance_cases import (
    LARGEST_UNIFORM,
    SMALLEST_UNIFORM,
    Tally,
    assert_block_agrees,
    assert_chain_agrees,
    chain_case,
)

# batch, drafts, vocabulary, padding columns, dtype, kind of draft: few shapes, so that programs are traced once.
SHAPES = [
    (1, 0, 300, 0, np.float32, "one_hot"),
    (1, 3, 4, 3, np.float32, "logits"),
    (3, 2, 129, 2, np.float32, "probs"),
    (2, 5, 1021, 0, ml_dtypes.bfloat16, "logits"),
    (5, 1, 128, 0, ml_dtypes.bfloat16, "probs"),
    (2, 7, 640, 61, np.float32, "one_hot"),
    (19, 1, 50, 0, np.float32, "logits"),
]


def assert_same(actual, expected):
    for mine, theirs in zip(actual, expected):
        np.testing.assert_array_equal(mine, theirs)


@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    lnc=st.sampled_from([1, 2]),
)
def test_kernel_accepts_and_draws_as_the_reference_says(shape, seed, spread, lnc):
    batch, num_drafts, vocab_size, padding, dtype, draft = shape
    case = chain_case(np.random.default_rng(seed), batch, num_drafts, vocab_size, dtype, draft, spread, padding)
    actual = draft_verify.rejection_sampling(**case, backend="emulator", lnc=lnc)
    assert_chain_agrees(actual, case, Tally())


@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    lnc=st.sampled_from([1, 2]),
)
def test_kernel_keeps_the_longest_passing_block(shape, seed, spread, lnc):
    batch, num_drafts, vocab_size, padding, dtype, draft = shape
    case = chain_case(np.random.default_rng(seed), batch, num_drafts, vocab_size, dtype, draft, spread, padding)
    actual = draft_verify.rejection_sampling(**case, rule="block", backend="emulator", lnc=lnc)
    assert_block_agrees(actual, case, Tally())


def test_kernel_cuts_rows_under_the_block_rule():
    for seed in range(4):
        case = chain_case(np.random.default_rng(seed), 2, 3, 129, np.float32, "logits", cut=True)
        actual = draft_verify.rejection_sampling(**case, rule="block", backend="emulator")
        assert_block_agrees(actual, case, Tally())


def unlike_laws(rng, batch, num_drafts, vocab_size):
    """Drafts from laws unlike the target's, so that most are rejected somewhere inside the window."""
    laws = rng.dirichlet(np.full(vocab_size, 0.5), (batch, num_drafts))
    return {
        "draft_tokens": np.array([[rng.choice(vocab_size, p=law) for law in row] for row in laws], np.int32),
        "target_logits": rng.standard_normal((batch, num_drafts + 1, vocab_size)).astype(np.float32),
        "uniforms": rng.uniform(0.01, 0.99, (batch, num_drafts + 2)).astype(np.float32),
        "draft_probs": laws.astype(np.float32),
        "temperature": np.ones(batch, np.float32),
        "draft_lens": np.full(batch, num_drafts, np.int32),
        "vocab_size": vocab_size,
    }


def test_residuals_of_unlike_laws_are_drawn_from():
    for seed in range(2):
        case = unlike_laws(np.random.default_rng(seed), 32, 3, 12)
        assert_chain_agrees(draft_verify.rejection_sampling(**case, backend="emulator"), case, Tally())
        assert_block_agrees(draft_verify.rejection_sampling(**case, rule="block", backend="emulator"), case, Tally())


@pytest.mark.parametrize("draft", ["logits", "probs", "one_hot"])
def test_few_blocks_lie_within_rounding(draft):
    shares = Tally()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        case = chain_case(rng, 40, 5, 640, np.float32, draft, temperatures=(0.6, 1.0))
        actual = draft_verify.rejection_sampling(**case, rule="block", backend="emulator")
        assert_block_agrees(actual, case, shares)
    print(draft, shares)
    assert shares.decisions > 100
    assert shares.undecided <= max(1, tolerances.MAX_UNDECIDED_SHARE * shares.decisions), str(shares)
    assert shares.other_token == 0


@given(
    shape=st.sampled_from([SHAPES[1], SHAPES[2], SHAPES[3], SHAPES[5]]),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    lnc=st.sampled_from([1, 2]),
)
def test_kernel_cuts_rows_by_top_k_top_p_and_min_p_as_the_reference(shape, seed, spread, lnc):
    batch, num_drafts, vocab_size, padding, dtype, draft = shape
    rng = np.random.default_rng(seed)
    case = chain_case(rng, batch, num_drafts, vocab_size, dtype, draft, spread, padding, cut=True)
    actual = draft_verify.rejection_sampling(**case, backend="emulator", lnc=lnc)
    assert_chain_agrees(actual, case, Tally())


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "draft"),
    [(8193, np.float32, "logits"), (49152, ml_dtypes.bfloat16, "probs"), (151936, ml_dtypes.bfloat16, "logits")],
)
def test_kernel_takes_real_vocabularies(vocab_size, dtype, draft):
    for seed in range(2):
        case = chain_case(np.random.default_rng(seed), 2, 3, vocab_size, dtype, draft, spread=2.0)
        assert_chain_agrees(draft_verify.rejection_sampling(**case, backend="emulator"), case, Tally())


@pytest.mark.parametrize(("draft", "cut"), [("logits", False), ("probs", False), ("one_hot", False), ("logits", True)])
def test_few_decisions_and_draws_lie_within_rounding(draft, cut):
    shares = Tally()
    for seed in range(1 if cut else 6):
        rng = np.random.default_rng(seed)
        case = chain_case(rng, 40, 7, 1021, np.float32, draft, temperatures=(0.6, 1.0), cut=cut)
        assert_chain_agrees(draft_verify.rejection_sampling(**case, backend="emulator"), case, shares)
    print(draft, cut, shares)
    assert shares.decisions > (30 if cut else 200)
    assert shares.undecided <= tolerances.MAX_UNDECIDED_SHARE * shares.decisions, str(shares)
    assert shares.other_token == 0, "V <= 1024: the reference's token always"


@given(seed=st.integers(0, 2**32 - 1), lnc=st.sampled_from([1, 2]))
def test_other_sequences_leave_a_sequence_bit_for_bit(seed, lnc):
    rng = np.random.default_rng(seed)
    case, company = (chain_case(rng, 3, 2, 129, np.float32, "probs") for _ in range(2))
    b = int(rng.integers(3))
    for name, array in case.items():
        if isinstance(array, np.ndarray):
            company[name][b] = array[b]
    alone = draft_verify.rejection_sampling(**case, backend="emulator", lnc=lnc)
    mixed = draft_verify.rejection_sampling(**company, backend="emulator", lnc=lnc)
    assert_same((array[b] for array in mixed), (array[b] for array in alone))


@given(seed=st.integers(0, 2**32 - 1))
def test_rows_after_the_first_rejection_may_hold_anything(seed):
    case = chain_case(np.random.default_rng(seed), 2, 5, 1021, ml_dtypes.bfloat16, "logits", temperatures=(0.0, 1.0))
    before = draft_verify.rejection_sampling(**case, backend="emulator")
    for b, accepted in enumerate(before.num_accepted):
        case["target_logits"][b, max(accepted, 0) + 1 :] = np.nan
        case["draft_logits"][b, max(accepted, 0) + 1 :] = np.nan
        case["uniforms"][b, max(accepted, 0) + 1 : -2] = 0.25
    assert_same(draft_verify.rejection_sampling(**case, backend="emulator"), before)


@given(seed=st.integers(0, 2**32 - 1), shift=st.sampled_from([-64.0, 16.0, 512.0]))
def test_adding_a_constant_to_all_logits_changes_nothing(seed, shift):
    case = chain_case(np.random.default_rng(seed), 3, 2, 129, np.float32, "probs")
    case["target_logits"] = np.round(case["target_logits"] * 64) / 64  # the sum stays exact
    before = draft_verify.rejection_sampling(**case, backend="reference")
    case["target_logits"] = case["target_logits"] + np.float32(shift)
    assert_same(draft_verify.rejection_sampling(**case, backend="reference"), before)
    assert_chain_agrees(draft_verify.rejection_sampling(**case, backend="emulator"), case, Tally())


@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("uniform", [SMALLEST_UNIFORM, LARGEST_UNIFORM])
@pytest.mark.parametrize("draft", ["logits", "probs", "one_hot"])
def test_extreme_uniforms_emit_nothing_of_zero_probability(backend, uniform, draft):
    rng = np.random.default_rng(0)
    for _ in range(20):
        case = chain_case(rng, 3, 2, 129, np.float32, draft, temperatures=(0.5, 1.0))
        support = rng.random(case["target_logits"].shape) < 0.2
        support[..., rng.integers(case["vocab_size"])] = True
        live = np.isfinite(case["target_logits"])
        case["target_logits"][live & ~support] = -np.inf
        case["uniforms"][:] = uniform
        result = draft_verify.rejection_sampling(**case, backend=backend)
        for b, accepted in enumerate(result.num_accepted):
            for row in range(accepted + 1):
                assert support[b, row, result.tokens[b, row]]


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_equal_laws_accept_everything(backend):
    rng = np.random.default_rng(1)
    case = chain_case(rng, 2, 5, 1021, ml_dtypes.bfloat16, "logits", temperatures=(1.0,))
    case["draft_lens"][:] = 5
    case["draft_tokens"] = rng.integers(0, 1021, (2, 5)).astype(np.int32)
    case["target_logits"] = rng.standard_normal((2, 6, 1021)).astype(ml_dtypes.bfloat16)
    case["draft_logits"] = case["target_logits"][:, :5].copy()
    assert (draft_verify.rejection_sampling(**case, backend=backend).num_accepted == 5).all()


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_inputs_are_not_modified(backend):
    case = chain_case(np.random.default_rng(2), 3, 2, 129, np.float32, "probs")
    copies = {name: np.copy(value) for name, value in case.items()}
    draft_verify.rejection_sampling(**case, backend=backend)
    for name, value in case.items():
        np.testing.assert_array_equal(value, copies[name])


def on_device(case):
    """The kernel without the binding's checks of values, which a device's tensors do not get."""
    return backends.launch(
        "rejection_sampling",
        case["draft_tokens"],
        case["target_logits"],
        case["uniforms"],
        case["draft_probs"],
        case["draft_lens"],
        case["temperature"],
        None,
        None,
        None,
        "probs",
        "token",
        False,
        case["vocab_size"],
        backend="emulator",
        lnc=1,
    )


@pytest.mark.parametrize(
    ("argument", "value"),
    [("draft_lens", 3), ("draft_lens", -2), ("draft_lens", 2**30), ("temperature", -1), ("temperature", np.nan)],
)
def test_on_the_device_a_sequence_with_bad_values_is_an_empty_slot(argument, value):
    case = chain_case(np.random.default_rng(5), 3, 2, 129, np.float32, "probs")
    before = on_device(case)
    case[argument][1] = value
    tokens, num_accepted, path, invalid = on_device(case)
    assert num_accepted[1] == -1 and (tokens[1] == -1).all() and (path[1] == -1).all() and invalid[1] == 1
    for b in (0, 2):
        for mine, theirs in zip((tokens, num_accepted, path, invalid), before):
            np.testing.assert_array_equal(mine[b], theirs[b])


def test_a_residual_of_nothing_falls_back_to_the_target():
    """Equal laws that only rounding rejects; a uniform of 1 does so for certain."""
    case = chain_case(np.random.default_rng(7), 3, 2, 4, np.float32, "probs", temperatures=(1.0,))
    case["draft_lens"][:] = 2
    case["draft_tokens"][:] = 1
    case["target_logits"] = np.zeros((3, 3, 4), np.float32)
    case["draft_probs"] = np.full((3, 2, 4), 0.25, np.float32)
    case["uniforms"][:, :2] = 1
    case["uniforms"][:, 2] = [0.1, 0.3, 0.9]
    tokens, num_accepted, _, _ = on_device(case)
    assert num_accepted.tolist() == [0, 0, 0] and tokens[:, 0].tolist() == [0, 1, 3]


def test_on_the_device_a_uniform_of_1_stays_inside_the_vocabulary():
    case = chain_case(np.random.default_rng(6), 3, 2, 129, np.float32, "probs", temperatures=(1.0,))
    case["draft_lens"][:] = 2
    case["target_logits"] = np.zeros((3, 3, 129), np.float32)
    case["uniforms"][:] = 1
    tokens, num_accepted, _, _ = on_device(case)
    assert (tokens[np.arange(3), num_accepted] < 129).all()


BAD = {
    "draft_tokens": [np.zeros((3, 3), np.int32), np.zeros((3, 2), np.int64), [[1, 2.5]] * 3],
    "target_logits": [np.zeros((3, 129), np.float32), np.zeros((3, 3, 129)), np.zeros((0, 3, 129), np.float32)],
    "uniforms": [
        np.full((3, 3), 0.5, np.float32),
        np.full((3, 4), 0.5),
        np.zeros((3, 4), np.float32),
        np.ones((3, 4), np.float32),
        np.full((3, 4), np.nan, np.float32),
    ],
    "draft_probs": [np.zeros((3, 3, 129), np.float32), np.zeros((3, 2, 128), np.float32), np.zeros((3, 2, 129))],
    "draft_logits": [np.zeros((3, 2, 129), np.float32)],  # next to draft_probs
    "draft_lens": [np.zeros(2, np.int32), np.zeros(3), np.full(3, 3, np.int32), np.full(3, -2, np.int32)],
    "temperature": [-0.5, np.nan, np.inf, np.ones(2, np.float32), np.full(3, -1, np.float32), np.ones(3)],
    "top_k": [-2, np.full(3, -2, np.int32), np.ones(3, np.float32)],
    "top_p": [0.0, 1.5, np.full(3, np.nan, np.float32)],
    "min_p": [-0.1, 1.1, np.zeros(4, np.float32)],
    "rule": ["greedy", "tokens"],
    "vocab_size": [0, 132],
}


@pytest.mark.parametrize(("argument", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_input_is_refused_by_name(argument, value):
    case = chain_case(np.random.default_rng(3), 3, 2, 129, np.float32, "probs")
    case = {**case, "target_logits": np.nan_to_num(case["target_logits"]), argument: value}
    with pytest.raises(ValueError, match=argument):
        draft_verify.rejection_sampling(**case, backend="emulator")
