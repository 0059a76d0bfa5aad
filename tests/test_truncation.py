"""top-k, top-p and min-p in the kernels: cuts inside a row's candidates and below them, and the price of the latter."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.bench.programs import instead_of_running
from tests.acceptance_cases import Tally, assert_chain_agrees, chain_case, cut_undecided, rounding

V = 128 * 80 - 3  # 80 ids a lane, of which 64 are candidates
LAWS = ("normal", "flat", "uniform", "ties", "one lane", "few")
CUTS = {
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    "top-k deep": {"top_k": 9000},
    "top-p deep": {"top_p": 0.999},
    "min-p deep": {"min_p": 1e-5},
    "all deep": {"top_k": 9990, "top_p": 0.99, "min_p": 1e-4},
    "off": {},
}


def row_of(rng, law, dtype):
    """[V] logits."""
    if law == "normal":
        row = 3 * rng.standard_normal(V)
    elif law == "flat":
        row = 0.3 * rng.standard_normal(V) - 7
    elif law == "uniform":
        row = np.full(V, -2.5)
    elif law == "ties":
        row = np.round(2 * rng.standard_normal(V))
    elif law == "one lane":  # neighbouring ids share most of the mass, more of them than a lane has candidates
        row = rng.standard_normal(V)
        row[160:240] += 12
    else:  # a grammar left fewer ids than top-k asks for
        row = np.where(rng.random(V) < 30 / V, rng.standard_normal(V), -np.inf)
        row[7] = 1
    return row.astype(dtype)


def sampled(logits, parameters, **options):
    """The laws of rows [B, V] with one set of parameters each."""
    batch = len(logits)
    columns = {
        name: np.array([p.get(name, off) for p in parameters], dtype)
        for name, off, dtype in (("top_k", 0, np.int32), ("top_p", 1.0, np.float32), ("min_p", 0.0, np.float32))
    }
    uniforms = np.full((batch, 2), 0.5, np.float32)
    temperature = np.full(batch, 0.7, np.float32)
    return draft_verify.sample_tokens(logits, uniforms, temperature, **columns, return_law=True, **options)


def assert_laws_agree(logits, parameters, lnc=1):
    actual = sampled(logits, parameters, backend="emulator", lnc=lnc)
    expected = sampled(logits, parameters, backend="reference")
    compared = 0
    for b, own in enumerate(parameters):
        row = np.asarray(logits[b], np.float64)
        np.testing.assert_array_equal(actual.invalid[b], expected.invalid[b])
        if expected.invalid[b] or cut_undecided(row, 0.7, own, rounding(row, 0.7)):
            continue
        np.testing.assert_allclose(actual.law[b], expected.law[b], rtol=rounding(row, 0.7) + 1e-5, atol=1e-37)
        compared += 1
    return compared


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("law", LAWS)
def test_every_cut_of_every_law_is_the_references(law, dtype):
    rng = np.random.default_rng(LAWS.index(law))
    cuts = list(CUTS.values())
    logits = np.stack([row_of(rng, law, dtype) for _ in cuts])
    assert assert_laws_agree(logits, cuts) >= len(cuts) - 4


@given(seed=st.integers(0, 2**32 - 1), lnc=st.sampled_from([1, 2]))
def test_rows_of_different_depth_do_not_disturb_each_other(seed, lnc):
    rng = np.random.default_rng(seed)
    logits = np.stack([row_of(rng, rng.choice(LAWS), np.float32) for _ in range(5)])
    if rng.random() < 0.5:
        logits[rng.integers(5), rng.integers(V)] = rng.choice([np.nan, np.inf])
    assert_laws_agree(logits, [CUTS[rng.choice(list(CUTS))] for _ in range(5)], lnc)


def test_more_rows_than_a_group_of_16_are_cut_each_by_its_own_limits():
    rng = np.random.default_rng(3)
    names = [list(CUTS)[i % len(CUTS)] for i in range(37)]
    logits = np.stack([row_of(rng, "normal", ml_dtypes.bfloat16) for _ in names])
    assert assert_laws_agree(logits, [CUTS[name] for name in names]) > 25


def deep_searches(logits, parameters, lnc=1):
    """Trips of the search of whole rows, two rows each, on each core."""
    programs = []
    with instead_of_running(programs):
        sampled(logits, parameters, backend="emulator", lnc=lnc)
    (program,) = programs
    (deep,) = {
        trips
        for loop, trips in program.trips.items()
        if any("truncation.py" in call.source for call in loop.body.calls())
    }
    return deep


def test_only_rows_cut_below_their_candidates_are_searched_whole():
    rng = np.random.default_rng(0)
    logits = np.stack([row_of(rng, "normal", np.float32) for _ in range(4)])
    assert deep_searches(logits, [CUTS["all"]] * 4) == 0
    assert deep_searches(logits, [CUTS["all"], CUTS["off"], CUTS["top-k deep"], CUTS["top-k"]]) == 1
    assert deep_searches(logits, [CUTS["all deep"]] * 3 + [CUTS["all"]]) == 2
    assert deep_searches(logits, [CUTS["all deep"]] * 4) == 2
    few = np.stack([row_of(rng, "few", np.float32) for _ in range(4)])
    assert deep_searches(few, [CUTS["all"]] * 4) == 0


def test_both_cores_make_the_trips_of_the_one_with_more():
    rng = np.random.default_rng(1)
    logits = np.stack([row_of(rng, "normal", np.float32) for _ in range(4)])
    assert deep_searches(logits, [CUTS["off"], CUTS["top-k"], CUTS["top-k deep"], CUTS["top-k deep"]], lnc=2) == 1


@pytest.mark.parametrize("draft_dtype", [np.float32, ml_dtypes.bfloat16])
def test_more_rows_than_are_held_at_once_are_cut_part_by_part(draft_dtype):
    """Ten windows of 8 rows: two parts of the target, of which the draft shares the second if its dtype is the same."""
    rng = np.random.default_rng(5)
    batch, num_drafts = 10, 7
    case = chain_case(rng, batch, num_drafts, V, ml_dtypes.bfloat16, temperatures=(0.7, 1.3))
    case["draft_logits"] = case["draft_logits"].astype(draft_dtype)
    cuts = [list(CUTS.values())[b % len(CUTS)] for b in range(batch)]
    case["top_k"] = np.array([cut.get("top_k", 0) for cut in cuts], np.int32)
    case["top_p"] = np.array([cut.get("top_p", 1.0) for cut in cuts], np.float32)
    case["min_p"] = np.array([cut.get("min_p", 0.0) for cut in cuts], np.float32)
    tally = Tally()
    assert_chain_agrees(draft_verify.rejection_sampling(**case, backend="emulator"), case, tally)
    assert tally.decisions > batch


def test_rows_of_a_million_ids_are_searched_whole_one_at_a_time():
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((3, 1_000_003)).astype(np.float32)
    assert assert_laws_agree(logits, [CUTS["top-k deep"], CUTS["top-p deep"], CUTS["top-k"]]) > 0
