"""Vocabulary-parallel acceptance: the same tokens over 1, 2 and 4 ranks, and the unsharded law whatever the cut."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from tests.acceptance_cases import Tally, assert_chain_agrees, chain_case


def over_ranks(case, num_shards, backend, lnc=1):
    """The three steps on every rank; what columns past the vocabulary hold is NaN."""
    vocab_size = case["vocab_size"]
    width = -(-vocab_size // num_shards)
    shared = {name: case[name] for name in ("draft_lens", "temperature")}
    shared |= {"vocab_size": vocab_size, "backend": backend, "lnc": lnc}
    names = [name for name in ("draft_logits", "draft_probs") if name in case]
    kind = names[0].removeprefix("draft_") if names else "one_hot"

    def columns(array, shard):
        held = array[..., :vocab_size][..., shard * width : (shard + 1) * width]
        padding = np.full((*held.shape[:-1], width - held.shape[-1]), np.nan, held.dtype)
        return np.concatenate([held, padding], axis=-1)

    tokens, uniforms = case["draft_tokens"], case["uniforms"]
    parts = [columns(case["target_logits"], shard) for shard in range(num_shards)]
    laws = [{name: columns(case[name], shard) for name in names} for shard in range(num_shards)]
    statistics = np.stack(
        [
            draft_verify.shard_statistics(tokens, part, uniforms, shard=shard, num_shards=num_shards, **law, **shared)
            for shard, (part, law) in enumerate(zip(parts, laws))
        ]
    )
    draws = np.stack(
        [
            draft_verify.shard_draws(statistics, tokens, part, uniforms, shard=shard, **law, **shared)
            for shard, (part, law) in enumerate(zip(parts, laws))
        ]
    )
    return draft_verify.combine_shards(statistics, draws, tokens, uniforms, draft=kind, **shared)


def assert_same(actual, expected):
    for mine, theirs in zip(actual, expected):
        np.testing.assert_array_equal(mine, theirs)


# bf16 logits, fp32 probabilities and one-hot drafts: few kinds, so that every rank's program is traced once.
KINDS = [("logits", ml_dtypes.bfloat16), ("probs", np.float32), ("one_hot", np.float32)]


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), num_shards=st.sampled_from([1, 2, 4]))
def test_ranks_of_whole_groups_give_the_unsharded_tokens(seed, kind, num_shards):
    draft, dtype = kind
    case = chain_case(np.random.default_rng(seed), 3, 2, 640, dtype, draft)
    expected = draft_verify.rejection_sampling(**case, backend="emulator")
    assert_same(over_ranks(case, num_shards, "emulator"), expected)


def test_each_rank_may_have_two_cores():
    case = chain_case(np.random.default_rng(0), 3, 2, 640, np.float32, "probs")
    assert_same(over_ranks(case, 2, "emulator", lnc=2), draft_verify.rejection_sampling(**case, backend="emulator"))


@given(seed=st.integers(0, 2**32 - 1), draft=st.sampled_from(["logits", "probs", "one_hot"]))
def test_the_reference_over_ranks_is_the_reference(seed, draft):
    case = chain_case(np.random.default_rng(seed), 2, 2, 256, np.float32, draft)
    expected = draft_verify.rejection_sampling(**case, backend="reference")
    assert_same(over_ranks(case, 1 + seed % 2, "reference"), expected)
    assert_same(over_ranks(case, 4, "reference"), expected)


@pytest.mark.parametrize("num_shards", [2, 4])
def test_any_cut_keeps_the_decisions_and_the_support(num_shards):
    """Ranks that are no whole groups draw from other groups, so only tokens may differ."""
    for seed in range(2):
        case = chain_case(np.random.default_rng(seed), 4, 3, 1001, np.float32, "probs")
        expected = draft_verify.rejection_sampling(**case, backend="reference")
        for backend in ("reference", "emulator"):
            actual = over_ranks(case, num_shards, backend)
            assert_same((actual.num_accepted, actual.invalid), (expected.num_accepted, expected.invalid))
            assert ((actual.tokens >= 0) == (expected.tokens >= 0)).all() and actual.tokens.max() < 1001


def test_kernel_over_ranks_agrees_with_the_law():
    for seed in range(3):
        case = chain_case(np.random.default_rng(seed), 4, 3, 1024, np.float32, "logits")
        assert_chain_agrees(over_ranks(case, 4, "emulator"), case, Tally())


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_near_ties_across_ranks_take_the_lowest_global_id(backend):
    """sglang#31071, vllm#17498: ranks took their own argmax and accepted different counts."""
    logits = np.zeros((1, 2, 512), np.float32)
    logits[0, :, [40, 300, 500]] = 3
    case = {
        "draft_tokens": np.array([[300]], np.int32),
        "target_logits": logits,
        "uniforms": np.full((1, 3), 0.5, np.float32),
        "temperature": np.zeros(1, np.float32),
        "draft_lens": np.ones(1, np.int32),
        "vocab_size": 512,
    }
    result = over_ranks(case, 4, backend)
    assert result.num_accepted[0] == 0 and result.tokens[0, 0] == 40
    case["draft_tokens"][:] = 40
    assert over_ranks(case, 4, backend).tokens[0].tolist() == [40, 40]


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_spoiled_row_on_one_rank_is_flagged_on_all(backend):
    case = chain_case(np.random.default_rng(7), 2, 1, 256, np.float32, "probs", temperatures=(1.0,))
    case["draft_lens"][:] = 1
    case["target_logits"] = np.zeros((2, 2, 256), np.float32)
    case["target_logits"][1, 0, 200], case["target_logits"][1, 0, 130] = np.nan, 2.0
    case["draft_probs"] = np.full((2, 1, 256), 1 / 256, np.float32)
    result = over_ranks(case, 4, backend)
    assert result.invalid.tolist() == [False, True] and result.tokens[1, 0] == 130 and result.num_accepted[1] == 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_shards", 3),
        ("shard", 2),
        ("vocab_size", 257),
        ("target_logits", np.zeros((2, 3, 128), np.float64)),
        ("draft_probs", np.zeros((2, 2, 64), np.float32)),
        ("uniforms", np.zeros((2, 4), np.float32)),
        ("temperature", -1.0),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    case = {
        "draft_tokens": np.zeros((2, 2), np.int32),
        "target_logits": np.zeros((2, 3, 128), np.float32),
        "uniforms": np.full((2, 4), 0.5, np.float32),
        "shard": 1,
        "num_shards": 2,
        "vocab_size": 256,
        argument: value,
    }
    with pytest.raises(ValueError, match=argument):
        draft_verify.shard_statistics(**case, backend="emulator")
