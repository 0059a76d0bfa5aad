"""Vocabulary-parallel acceptance: the same tokens over 1, 2 and 4 ranks, and the unsharded law whatever the cut."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.reference.sampling import sampling_law
from tests.acceptance_cases import Tally, assert_chain_agrees, chain_case, cut_undecided, rounding


def over_ranks(case, num_shards, backend, lnc=1, rule="token"):
    """The steps on every rank; what columns past the vocabulary hold is NaN."""
    vocab_size = case["vocab_size"]
    width = -(-vocab_size // num_shards)
    shared = {name: case[name] for name in ("draft_lens", "temperature")}
    shared |= {"vocab_size": vocab_size, "backend": backend, "lnc": lnc}
    limits = {name: case[name] for name in ("top_k", "top_p", "min_p") if name in case}
    names = [name for name in ("draft_logits", "draft_probs") if name in case]
    kind = names[0].removeprefix("draft_") if names else "one_hot"

    def columns(array, shard):
        held = array[..., :vocab_size][..., shard * width : (shard + 1) * width]
        padding = np.full((*held.shape[:-1], width - held.shape[-1]), np.nan, held.dtype)
        return np.concatenate([held, padding], axis=-1)

    tokens, uniforms = case["draft_tokens"], case["uniforms"]
    parts = [columns(case["target_logits"], shard) for shard in range(num_shards)]
    laws = [{name: columns(case[name], shard) for name in names} for shard in range(num_shards)]

    def of_all(step):
        """What all ranks give, gathered."""
        return [
            np.stack(arrays)
            for arrays in zip(*(step(shard, part, law) for shard, (part, law) in enumerate(zip(parts, laws))))
        ]

    if limits:
        statistics, candidates = of_all(
            lambda shard, part, law: draft_verify.shard_statistics(
                tokens, part, uniforms, shard=shard, num_shards=num_shards, truncated=True, **law, **shared
            )
        )
        shared["cuts"] = cuts_of(case, statistics, candidates, parts, laws, kind, backend, lnc)
    else:
        (statistics,) = of_all(
            lambda shard, part, law: (
                draft_verify.shard_statistics(
                    tokens, part, uniforms, shard=shard, num_shards=num_shards, **law, **shared
                ),
            )
        )
    if rule == "block":
        if kind != "one_hot" and tokens.shape[1] > 0:
            (excess,) = of_all(
                lambda shard, part, law: (
                    draft_verify.shard_excess(statistics, tokens, part, uniforms, shard=shard, **law, **shared),
                )
            )
            shared["excess"] = excess
        shared["rule"] = rule
    (draws,) = of_all(
        lambda shard, part, law: (
            draft_verify.shard_draws(statistics, tokens, part, uniforms, shard=shard, **law, **shared),
        )
    )
    return draft_verify.combine_shards(statistics, draws, tokens, uniforms, draft=kind, **shared)


def cuts_of(case, statistics, candidates, parts, laws, kind, backend, lnc):
    """The cuts of every row, the same on every rank."""
    torch = pytest.importorskip("torch")
    from draft_verify.parallel import cut_deep_rows

    num_shards, vocab_size = len(parts), case["vocab_size"]
    where = {"backend": backend, "lnc": lnc}
    limits = {name: case.get(name) for name in ("top_k", "top_p", "min_p")}
    cuts = draft_verify.shard_cuts(
        statistics,
        candidates,
        vocab_size=vocab_size,
        draft=kind,
        temperature=case["temperature"],
        **limits,
        **where,
    )

    def weigh(trials, by_mass):
        weights = [
            draft_verify.shard_weights(
                cuts,
                trials.numpy(),
                part,
                shard=shard,
                num_shards=num_shards,
                vocab_size=vocab_size,
                by_mass=by_mass,
                draft_logits=law.get("draft_logits"),
                temperature=case["temperature"],
                **where,
            )
            for shard, (part, law) in enumerate(zip(parts, laws))
        ]
        return torch.from_numpy(np.concatenate(weights)).sum(0)

    tensors = {name: limit if limit is None else torch.as_tensor(limit) for name, limit in limits.items()}
    num_bits = 32 if candidates.dtype == np.float32 else 16
    temperature = torch.as_tensor(case["temperature"])
    return cut_deep_rows(
        torch.from_numpy(cuts), weigh, num_bits, vocab_size, temperature=temperature, **tensors
    ).numpy()


def assert_same(actual, expected):
    for mine, theirs in zip(actual, expected):
        np.testing.assert_array_equal(mine, theirs)


# bf16 logits, fp32 probabilities and one-hot drafts: few kinds, so that every rank's program is traced once.
KINDS = [("logits", ml_dtypes.bfloat16), ("probs", np.float32), ("one_hot", np.float32)]


RULES = st.sampled_from(["token", "block"])


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), num_shards=st.sampled_from([1, 2, 4]), rule=RULES)
def test_ranks_of_whole_groups_give_the_unsharded_tokens(seed, kind, num_shards, rule):
    draft, dtype = kind
    case = chain_case(np.random.default_rng(seed), 3, 3, 640, dtype, draft)
    expected = draft_verify.rejection_sampling(**case, rule=rule, backend="emulator")
    assert_same(over_ranks(case, num_shards, "emulator", rule=rule), expected)


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS), num_shards=st.sampled_from([1, 2, 4]), rule=RULES)
def test_ranks_of_whole_groups_cut_rows_as_one_core_does(seed, kind, num_shards, rule):
    draft, dtype = kind
    case = chain_case(np.random.default_rng(seed), 3, 3, 640, dtype, draft, cut=True)
    expected = draft_verify.rejection_sampling(**case, rule=rule, backend="emulator")
    assert_same(over_ranks(case, num_shards, "emulator", rule=rule), expected)


@given(seed=st.integers(0, 2**32 - 1), draft=st.sampled_from(["logits", "probs", "one_hot"]), rule=RULES)
def test_the_reference_over_ranks_cuts_rows_as_the_reference(seed, draft, rule):
    case = chain_case(np.random.default_rng(seed), 2, 3, 256, np.float32, draft, cut=True)
    expected = draft_verify.rejection_sampling(**case, rule=rule, backend="reference")
    for num_shards in (1, 2, 4):
        assert_same(over_ranks(case, num_shards, "reference", rule=rule), expected)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_blocks_over_ranks_pass_where_the_token_rule_rejects(backend):
    longer = 0
    for seed in range(3):
        case = chain_case(np.random.default_rng(seed), 12, 4, 256, np.float32, "probs", 2.0, temperatures=(1.0,))
        case["draft_lens"][:] = 4
        expected = draft_verify.rejection_sampling(**case, rule="block", backend=backend)
        blocks = over_ranks(case, 2, backend, rule="block")
        assert_same(blocks, expected)
        longer += (blocks.num_accepted > over_ranks(case, 2, backend).num_accepted).sum()
    assert longer > 0


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_block_passes_by_the_weighted_residual_mass_of_all_ranks(backend):
    """The first draft's weight is 1/2. What then exceeds the draft's law is id 200 alone: 0.15, so u = 0.1 passes."""
    target, draft = np.zeros((2, 256)), np.zeros((2, 256))
    target[0, [3, 4]], draft[0, [3, 4]] = (0.4, 0.6), (0.8, 0.2)
    target[1, [3, 10, 200]], draft[1, [3, 10, 200]] = (0.1, 0.5, 0.4), (0.65, 0.3, 0.05)
    batch = 8
    uniforms = np.full((batch, 4), 0.1, np.float32)
    uniforms[:, 1] = 0.5
    uniforms[:, 2] = (np.arange(batch) + 0.5) / batch
    with np.errstate(divide="ignore"):
        logits = np.log(target[[0, 1, 1]]).astype(np.float32)
    case = {
        "draft_tokens": np.full((batch, 2), 3, np.int32),
        "target_logits": np.tile(logits, (batch, 1, 1)),
        "uniforms": uniforms,
        "draft_probs": np.tile(draft.astype(np.float32), (batch, 1, 1)),
        "temperature": np.ones(batch, np.float32),
        "draft_lens": np.full(batch, 2, np.int32),
        "vocab_size": 256,
    }
    results = [over_ranks(case, num_shards, backend, rule="block") for num_shards in (1, 2, 4)]
    for result in (draft_verify.rejection_sampling(**case, rule="block", backend=backend), *results):
        assert result.tokens.tolist() == [[3, 200, -1]] * batch


# More ids a lane than the 64 that are candidates of a lane; no width of a rank is a multiple of 8.
DEEP_VOCABULARY = 128 * 72 - 4
DEEP_LIMITS = [
    {"top_k": 9000},
    {"top_p": 0.9999},
    {"min_p": 1e-3},
    {"top_k": 8900, "top_p": 0.999, "min_p": 1e-3},
    {"top_k": 50, "top_p": 0.9},
]


def deep_case(seed, dtype, draft="logits", law="flat", limits=DEEP_LIMITS):
    """A sequence for each set of limits, over laws so flat that most are cut below their candidates."""
    rng = np.random.default_rng(seed)
    case = chain_case(rng, len(limits), 1, DEEP_VOCABULARY, dtype, draft, spread=0.5, temperatures=(0.7, 1.0))
    case["draft_lens"][:] = 1
    names = ("target_logits", "draft_logits") if "draft_logits" in case else ("target_logits",)
    for name in names:
        logits = rng.standard_normal(case[name].shape) * 0.5 - 3
        case[name] = (np.round(2 * logits) / 2 if law == "ties" else logits).astype(dtype)
    for name, off, kind in (("top_k", 0, np.int32), ("top_p", 1, np.float32), ("min_p", 0, np.float32)):
        case[name] = np.array([limit.get(name, off) for limit in limits], kind)
    return case


@pytest.mark.parametrize("law", ["flat", "ties"])
@pytest.mark.parametrize("backend", ["reference", "emulator"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_cut_below_their_candidates_are_cut_exactly_over_any_number_of_ranks(backend, dtype, law):
    case = deep_case(2, dtype, law=law)
    # The reference takes its time.
    results = [over_ranks(case, num_shards, backend) for num_shards in ((2,) if backend == "reference" else (1, 2, 4))]
    expected = draft_verify.rejection_sampling(**case, backend="reference")
    for result in results:
        assert_same((result.num_accepted, result.invalid), (expected.num_accepted, expected.invalid))
        assert_support(result, case)


@pytest.mark.parametrize("draft", ["logits", "probs", "one_hot"])
def test_any_number_of_ranks_of_whole_groups_gives_the_same_tokens_of_rows_cut_deep(draft):
    case = deep_case(3, np.float32, draft)
    rng = np.random.default_rng(4)
    wide = {"target_logits": rng.standard_normal((5, 2, DEEP_VOCABULARY + 4)).astype(np.float32)}
    if draft == "logits":
        wide["draft_logits"] = wide["target_logits"][:, :1] + rng.random((5, 1, DEEP_VOCABULARY + 4), np.float32)
    elif draft == "probs":
        wide["draft_probs"] = np.full((5, 1, DEEP_VOCABULARY + 4), 1 / DEEP_VOCABULARY, np.float32)
    case |= {**wide, "vocab_size": DEEP_VOCABULARY + 4}
    expected = draft_verify.rejection_sampling(**case, backend="emulator")
    for num_shards, lnc in ((1, 1), (2, 2), (4, 1)):
        assert_same(over_ranks(case, num_shards, "emulator", lnc), expected)


def assert_support(result, case):
    """Every emitted token is one that the limits leave."""
    for b, accepted in enumerate(result.num_accepted):
        parameters = {name: float(case[name][b]) for name in ("temperature", "top_k", "top_p", "min_p")}
        for row in range(accepted + 1):
            law = sampling_law(case["target_logits"][b, row, : case["vocab_size"]], **parameters)
            assert law[result.tokens[b, row]] > 0


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_cuts_over_ranks_are_exact_thresholds(backend):
    """Top-k's is the k-th largest logit or lies between it and the next; the mass is that of what stays."""
    case = deep_case(5, np.float32)
    width = -(-DEEP_VOCABULARY // 2)
    target = case["target_logits"][..., :DEEP_VOCABULARY]
    parts = [np.pad(target[..., s * width : (s + 1) * width], [(0, 0), (0, 0), (0, 0)]) for s in (0, 1)]
    shared = {"vocab_size": DEEP_VOCABULARY, "temperature": case["temperature"], "backend": backend}
    gathered = zip(
        *(
            draft_verify.shard_statistics(
                case["draft_tokens"], part, case["uniforms"], shard=s, num_shards=2, truncated=True, **shared
            )
            for s, part in enumerate(parts)
        )
    )
    statistics, candidates = (np.stack(arrays) for arrays in gathered)
    cuts = cuts_of(case, statistics, candidates, parts, [{}, {}], "one_hot", backend, 1)
    assert cuts[0, :4, :, 2].all(), "these are cut deep"
    for b in range(len(target)):
        parameters = {name: float(case[name][b]) for name in ("temperature", "top_k", "top_p", "min_p")}
        for row in range(target.shape[1]):
            logits = target[b, row].astype(np.float64)
            if cut_undecided(logits, parameters["temperature"], parameters, rounding(logits, 0.7)):
                continue
            kept = sampling_law(logits, **parameters) > 0
            threshold, mass = cuts[0, b, row, :2]
            np.testing.assert_array_equal(logits >= threshold, kept)
            weights = np.exp((logits - logits.max()) / parameters["temperature"])
            np.testing.assert_allclose(mass, weights[kept].sum(), rtol=1e-5)


def test_each_rank_may_have_two_cores():
    for cut, rule in ((False, "token"), (True, "token"), (False, "block")):
        case = chain_case(np.random.default_rng(0), 3, 3, 640, np.float32, "probs", cut=cut)
        expected = draft_verify.rejection_sampling(**case, rule=rule, backend="emulator")
        assert_same(over_ranks(case, 2, "emulator", lnc=2, rule=rule), expected)


@given(seed=st.integers(0, 2**32 - 1), draft=st.sampled_from(["logits", "probs", "one_hot"]), rule=RULES)
def test_the_reference_over_ranks_is_the_reference(seed, draft, rule):
    case = chain_case(np.random.default_rng(seed), 2, 3, 256, np.float32, draft)
    expected = draft_verify.rejection_sampling(**case, rule=rule, backend="reference")
    assert_same(over_ranks(case, 1 + seed % 2, "reference", rule=rule), expected)
    assert_same(over_ranks(case, 4, "reference", rule=rule), expected)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_any_cut_keeps_the_decisions_and_the_support(num_shards, truncated):
    """Ranks that are no whole groups draw from other groups, so only tokens may differ."""
    for seed in range(2):
        case = chain_case(np.random.default_rng(seed), 4, 3, 1001, np.float32, "probs", cut=truncated)
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
