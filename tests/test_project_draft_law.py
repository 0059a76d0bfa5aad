"""Drafts with a vocabulary of their own: the law stays the target's, many draft ids may be one target id."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.reference.project_draft_law import invert_draft_to_target, project_draft_law
from draft_verify.reference.rejection_sampling import accept_probability, residual_law
from tests.acceptance_cases import Tally, assert_chain_agrees, chain_case, cut_undecided, rounding
from tests.test_rejection_sampling_law import LIMIT, random_law

BACKENDS = ["reference", "emulator"]
# B, R, Vd, V, and how many target ids the draft ids fall on: one to one, many to one, more rows than fit at a time, a
# row's target ids in several rounds, a law in two parts.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 20, 50, 50),
    (3, 2, 129, 128, 128),
    (1, 17, 33, 1000, 20),
    (2, 4, 7, 24_700, 24_700),
    (1, 3, 44_000, 300, 300),
]


def random_map(rng, draft_size, vocab_size, targets):
    """Every draft id's target id; as many of them one to one as can be, in no order."""
    ids = rng.permutation(vocab_size)[:targets]
    return ids[rng.permutation(draft_size) % len(ids)].astype(np.int32)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(SHAPES[:-1]),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    lnc=st.sampled_from([1, 2]),
)
def test_kernel_sums_what_the_reference_sums(seed, shape, dtype, lnc):
    batch, rows, draft_size, vocab_size, targets = shape
    rng = np.random.default_rng(seed)
    table = invert_draft_to_target(random_map(rng, draft_size, vocab_size, targets), vocab_size)
    # What is no draft id counts for nothing, and the ids left out may hold anything.
    out = rng.random(table.shape) < 0.2
    laws = rng.dirichlet(np.ones(draft_size), (batch, rows)).astype(dtype)
    laws[..., table[out & (table >= 0)]] = np.nan
    table[out] = rng.choice(np.array([-1, -(2**31), draft_size, 2**31 - 1], np.int32), out.sum())
    spoiled = rng.integers(batch)
    laws[spoiled, 0] = np.nan
    actual = draft_verify.project_draft_law(table, draft_probs=laws, backend="emulator", lnc=lnc)
    expected = draft_verify.project_draft_law(table, draft_probs=laws, backend="reference")
    assert actual.shape == (batch, rows, vocab_size) and actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_law_that_does_not_fit_on_the_chip_is_gathered_in_parts(lnc):
    rng = np.random.default_rng(1)
    batch, rows, draft_size, vocab_size, targets = SHAPES[-1]
    table = invert_draft_to_target(random_map(rng, draft_size, vocab_size, targets), vocab_size)[:3]
    table[0, :12] = [0, draft_size - 1, *range(38_899, 38_909)]  # on either side of the cut
    laws = rng.dirichlet(np.ones(draft_size), (batch, rows)).astype(np.float32)
    actual = draft_verify.project_draft_law(table, draft_probs=laws, backend="emulator", lnc=lnc)
    np.testing.assert_allclose(actual, project_draft_law(table, draft_probs=laws), rtol=1e-6)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(SHAPES[:4]),
    cut=st.booleans(),
    lnc=st.sampled_from([1, 2]),
)
def test_kernel_processes_logits_in_the_drafts_vocabulary(seed, shape, cut, lnc):
    batch, rows, draft_size, vocab_size, targets = shape
    rng = np.random.default_rng(seed)
    table = invert_draft_to_target(random_map(rng, draft_size, vocab_size, targets), vocab_size)
    logits = (rng.standard_normal((batch, rows, draft_size)) * 3).astype(ml_dtypes.bfloat16)
    parameters = {"temperature": rng.choice(np.array([0.0, 0.6, 1.5], np.float32), batch)}
    if cut:
        parameters["top_k"] = rng.choice(np.array([0, 1, 5], np.int32), batch)
        parameters["top_p"] = rng.choice(np.array([1.0, 0.6], np.float32), batch)
        parameters["min_p"] = rng.choice(np.array([0.0, 0.05], np.float32), batch)
    logits[rng.integers(batch), rows - 1, rng.integers(draft_size)] = np.nan
    actual = draft_verify.project_draft_law(table, draft_logits=logits, **parameters, backend="emulator", lnc=lnc)
    expected = project_draft_law(table, draft_logits=logits, **parameters)
    for b in range(batch):
        heat = float(parameters["temperature"][b]) or 1.0
        own = {name: float(parameters[name][b]) for name in ("top_k", "top_p", "min_p") if name in parameters}
        for row in range(rows):
            values = logits[b, row].astype(np.float64)
            if np.isnan(values).any():
                assert np.isnan(actual[b, row, table[0] >= 0]).all()
            elif not cut_undecided(values, heat, own, rounding(values, heat)):
                np.testing.assert_allclose(actual[b, row], expected[b, row], rtol=1e-5, atol=1e-12)


def emitted_law(target, draft, own, draft_to_target):
    """Of the first token, drafts being drawn in the draft's vocabulary."""
    emitted = np.zeros(len(target))
    for draft_id, mass in enumerate(own):
        token = draft_to_target[draft_id]
        accept = accept_probability(target, draft, token)
        emitted[token] += mass * accept
        emitted += mass * (1 - accept) * residual_law(target, draft)
    return emitted


@given(seed=st.integers(0, 2**32 - 1), draft_size=st.integers(1, 5))
def test_the_target_law_is_left_as_it_is(seed, draft_size):
    rng = np.random.default_rng(seed)
    target, own = random_law(rng, 4), random_law(rng, draft_size)
    draft_to_target = rng.integers(0, 4, draft_size).astype(np.int32)
    table = invert_draft_to_target(draft_to_target, 4)
    draft = project_draft_law(table, draft_probs=own[None, None])[0, 0]
    assert np.abs(emitted_law(target, draft, own, draft_to_target) - target).sum() / 2 < LIMIT


@given(seed=st.integers(0, 2**32 - 1))
def test_the_kernels_projection_leaves_the_target_law_as_it_is(seed):
    """Masses in 1024ths, which fp32 sums exactly."""
    rng = np.random.default_rng(seed)
    target, own = random_law(rng, 4), rng.multinomial(1024, random_law(rng, 5)) / 1024
    draft_to_target = rng.integers(0, 4, 5).astype(np.int32)
    table = np.full((5, 4), -1, np.int32)  # one program for every map
    held = invert_draft_to_target(draft_to_target, 4)
    table[: len(held)] = held
    probs = own[None, None].astype(np.float32)
    draft = draft_verify.project_draft_law(table, draft_probs=probs, backend="emulator")[0, 0].astype(np.float64)
    assert np.abs(emitted_law(target, draft, own, draft_to_target) - target).sum() / 2 < LIMIT


@pytest.mark.parametrize("backend", BACKENDS)
def test_top_k_counts_draft_ids(backend):
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


@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(["logits", "probs"]), lnc=st.sampled_from([1, 2]))
def test_verification_decides_as_the_reference_does(seed, kind, lnc):
    batch, drafts, vocab_size, draft_size = 3, 3, 131, 20
    rng = np.random.default_rng(seed)
    case = chain_case(rng, batch, drafts, vocab_size, np.float32, draft="one_hot")
    draft_to_target = random_map(rng, draft_size, vocab_size, 15)
    table = invert_draft_to_target(draft_to_target, vocab_size)
    known = draft_to_target[rng.integers(0, draft_size, (batch, drafts))]
    case["draft_tokens"] = np.where(rng.random(known.shape) < 0.8, known, case["draft_tokens"])
    if kind == "logits":
        law = {"draft_logits": rng.standard_normal((batch, drafts, draft_size)).astype(np.float32)}
    else:
        law = {"draft_probs": rng.dirichlet(np.ones(draft_size), (batch, drafts)).astype(np.float32)}
    actual = draft_verify.rejection_sampling(**case, **law, target_to_draft=table, backend="emulator", lnc=lnc)
    projected = project_draft_law(table, **law, temperature=case["temperature"]).astype(np.float32)
    assert_chain_agrees(actual, case | {"draft_probs": projected}, Tally())
    for backend in BACKENDS:
        by_table, by_map, ready = (
            draft_verify.rejection_sampling(**case, **given, rule="block", backend=backend)
            for given in (
                law | {"target_to_draft": table},
                law | {"draft_to_target": draft_to_target},
                {"draft_probs": projected},
            )
        )
        for mine, theirs in zip(by_table, by_map):
            np.testing.assert_array_equal(mine, theirs)
        if kind == "probs":
            for mine, theirs in zip(by_table, ready):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("rule", ["independent", "without_replacement"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_trees_take_it_too(backend, rule):
    rng = np.random.default_rng(0)
    draft_to_target = rng.integers(0, 50, 20).astype(np.int32)
    table = invert_draft_to_target(draft_to_target, 50)
    target = rng.standard_normal((2, 4, 50)).astype(np.float32)
    own = rng.dirichlet(np.ones(20), (2, 4)).astype(np.float32)
    law = project_draft_law(table, draft_probs=own).astype(np.float32)
    tokens = draft_to_target[rng.integers(0, 20, (2, 3))]
    uniforms = rng.random((2, 5)).astype(np.float32)
    arguments = (np.array([-1, 0, 0, 1], np.int32), tokens, target, uniforms)
    options = {"rule": rule, "backend": backend}
    expected = draft_verify.tree_acceptance(*arguments, draft_probs=law, **options)
    for mapped in ({"draft_to_target": draft_to_target}, {"target_to_draft": table}):
        result = draft_verify.tree_acceptance(*arguments, draft_probs=own, **mapped, **options)
        for mine, theirs in zip(result, expected):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", [None, np.array([-1, 0, 0, 1], np.int32)], ids=["chain", "tree"])
def test_a_whole_step_takes_either_map(backend, tree):
    rng = np.random.default_rng(3)
    draft_to_target = random_map(rng, 20, 50, 15)
    table = invert_draft_to_target(draft_to_target, 50)
    logits, tokens = rng.standard_normal((2, 4, 50)).astype(np.float32), draft_to_target[rng.integers(0, 20, (2, 3))]
    own = rng.dirichlet(np.ones(20), (2, 3 if tree is None else 4)).astype(np.float32)
    arguments = (tokens, logits, np.zeros(2, np.int32))
    options = {"seeds": np.array([5, 6]), "tree": tree, "rule": "block" if tree is None else "independent"}
    options["backend"] = backend
    law = draft_verify.project_draft_law(table, draft_probs=own, backend=backend)
    expected = draft_verify.verify_step(*arguments, draft_probs=law, **options)
    for mapped in ({"draft_to_target": draft_to_target}, {"target_to_draft": table}):
        step = draft_verify.verify_step(*arguments, draft_probs=own, **mapped, **options)
        np.testing.assert_array_equal(step.tokens, expected.tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_takes_its_columns_of_the_map(backend):
    """What `shard_statistics` and `shard_draws` need of a draft law, columns past the vocabulary included."""
    rng = np.random.default_rng(2)
    vocab_size, num_shards, width = 250, 4, 63
    draft_to_target = random_map(rng, 40, vocab_size, 30)
    law = {"draft_logits": rng.standard_normal((2, 3, 40)).astype(np.float32), "top_p": 0.8}
    table = draft_verify.invert_draft_to_target(draft_to_target, num_shards * width)
    whole = draft_verify.project_draft_law(table, **law, backend=backend)
    for shard in range(num_shards):
        columns = slice(shard * width, (shard + 1) * width)
        part = draft_verify.project_draft_law(np.ascontiguousarray(table[:, columns]), **law, backend=backend)
        np.testing.assert_array_equal(part, whole[..., columns])
    assert (whole[..., vocab_size:] == 0).all()


@given(seed=st.integers(0, 2**32 - 1))
def test_the_map_turned_round_lists_every_draft_id_once(seed):
    rng = np.random.default_rng(seed)
    draft_to_target = rng.integers(0, 9, rng.integers(1, 20)).astype(np.int32)
    table = draft_verify.invert_draft_to_target(draft_to_target, 9)
    assert sorted(table[table >= 0]) == list(range(len(draft_to_target)))
    assert len(table) == np.bincount(draft_to_target).max()
    for target_id in range(9):
        draft_ids = table[table[:, target_id] >= 0, target_id]
        assert (draft_to_target[draft_ids] == target_id).all()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("draft_to_target", np.array([0, 4], np.int32)),
        ("draft_to_target", np.array([0, -1], np.int32)),
        ("draft_to_target", np.zeros((2, 1), np.int32)),
        ("draft_to_target", np.zeros(2, np.int64)),
        ("target_to_draft", np.zeros((1, 5), np.int32)),
        ("target_to_draft", np.zeros((0, 4), np.int32)),
        ("target_to_draft", np.zeros((1, 4), np.int64)),
    ],
)
def test_a_bad_map_is_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        draft_verify.rejection_sampling(
            np.zeros((1, 1), np.int32),
            np.zeros((1, 2, 4), np.float32),
            np.full((1, 3), 0.5, np.float32),
            draft_probs=np.full((1, 1, 2), 0.5, np.float32),
            **{argument: value},
        )


def test_more_draft_ids_of_one_target_id_than_the_kernel_has_room_for_are_refused():
    probs = np.full((1, 1, 2), 0.5, np.float32)
    widest = np.full((38, 151_936), -1, np.int32)
    widest[-1, -1] = 1
    law = draft_verify.project_draft_law(widest, draft_probs=probs, backend="emulator")
    assert law[0, 0, -1] == 0.5 and law.sum() == 0.5
    table = np.full((39, 151_936), -1, np.int32)
    with pytest.raises(ValueError, match="target_to_draft: got 39 draft ids"):
        draft_verify.project_draft_law(table, draft_probs=probs, backend="emulator")
    assert draft_verify.project_draft_law(table, draft_probs=probs).sum() == 0


def test_one_map_and_one_law_are_wanted():
    arguments = (np.zeros((1, 1), np.int32), np.zeros((1, 2, 4), np.float32), np.full((1, 3), 0.5, np.float32))
    probs, targets = np.full((1, 1, 2), 0.5, np.float32), np.zeros(2, np.int32)
    table = draft_verify.invert_draft_to_target(targets, 4)
    with pytest.raises(ValueError, match="one of the two maps"):
        draft_verify.rejection_sampling(*arguments, draft_probs=probs, draft_to_target=targets, target_to_draft=table)
    with pytest.raises(ValueError, match="target_to_draft: got no draft law"):
        draft_verify.rejection_sampling(*arguments, target_to_draft=table)
    with pytest.raises(ValueError, match="draft_probs"):
        draft_verify.project_draft_law(table, draft_probs=probs, draft_logits=probs)
