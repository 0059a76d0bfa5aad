"""sample_tokens: the kernel against the reference, its law, and that verification undoes what it drew."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.reference.sampling import best_token, draw, group_size, sampling_law
from tests.acceptance_cases import LARGEST_UNIFORM, SMALLEST_UNIFORM, Tally, check_draw, cut_undecided, rounding

BACKENDS = ["reference", "emulator"]
SHAPES = [(1, 4, np.float32), (3, 129, np.float32), (5, 640, ml_dtypes.bfloat16), (18, 300, np.float32)]


def sampler_case(rng, batch, vocab_size, dtype, cut):
    case = {
        "logits": (rng.standard_normal((batch, vocab_size + 3)) * 4).astype(dtype),
        "uniforms": rng.uniform(1e-6, 1 - 1e-6, (batch, 2)).astype(np.float32),
        "temperature": rng.choice(np.array([0.0, 0.7, 1.5], np.float32), batch),
        "vocab_size": vocab_size,
    }
    case["logits"][:, vocab_size:] = np.nan
    if cut:
        case["top_k"] = rng.choice(np.array([0, 1, 7, vocab_size], np.int32), batch)
        case["top_p"] = rng.choice(np.array([1.0, 0.8, 0.3], np.float32), batch)
        case["min_p"] = rng.choice(np.array([0.0, 0.05], np.float32), batch)
    return case


@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 2**32 - 1), cut=st.booleans(), lnc=st.sampled_from([1, 2]))
def test_kernel_draws_from_the_law_of_the_reference(shape, seed, cut, lnc):
    case = sampler_case(np.random.default_rng(seed), *shape, cut)
    result = draft_verify.sample_tokens(**case, return_law=True, backend="emulator", lnc=lnc)
    expected = draft_verify.sample_tokens(**case, return_law=True, backend="reference")
    assert not result.invalid.any()
    vocab_size = case["vocab_size"]
    for b, temperature in enumerate(case["temperature"].tolist()):
        row = case["logits"][b, :vocab_size].astype(np.float64)
        error = rounding(row, temperature)
        parameters = {name: float(case[name][b]) for name in ("top_k", "top_p", "min_p") if name in case}
        assert (
            result.probs[b] == result.law[b, result.tokens[b]]
            or abs(result.probs[b] / result.law[b, result.tokens[b]] - 1) < 1e-5
        )
        assert (result.law[b, vocab_size:] == 0).all()
        if temperature == 0:
            assert result.tokens[b] == best_token(row) and result.probs[b] == 1 and result.law[b].sum() == 1
        elif not cut_undecided(row, temperature, parameters, error):
            np.testing.assert_allclose(result.law[b], expected.law[b], rtol=error + 1e-5, atol=1e-37)
            check_draw(
                result.tokens[b], sampling_law(row, temperature, **parameters), case["uniforms"][b], error, Tally()
            )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("uniform", [SMALLEST_UNIFORM, LARGEST_UNIFORM])
def test_extreme_uniforms_draw_nothing_of_zero_probability(backend, uniform):
    rng = np.random.default_rng(0)
    logits = np.where(rng.random((6, 300)) < 0.1, 0, -np.inf).astype(np.float32)
    logits[:, 17] = -3
    result = draft_verify.sample_tokens(logits, np.full((6, 2), uniform, np.float32), backend=backend)
    assert np.isfinite(logits[np.arange(6), result.tokens]).all()


TAIL, GAP = 262_144, 20.5


def tail_logits():
    """vllm#43150: one token, and 262,144 others 20.5 below it, which share 3.3e-4 of the mass."""
    logits = np.full(TAIL + 1, -GAP, np.float32)
    logits[0] = 0
    return logits, TAIL * np.exp(-GAP) / (1 + TAIL * np.exp(-GAP))


def test_a_long_tail_gets_its_share_of_the_draws():
    logits, share = tail_logits()
    masses = np.exp(logits.astype(np.float64))
    sums = np.add.reduceat(masses, np.arange(0, TAIL + 1, group_size(TAIL + 1)))
    draws = 100_000
    uniforms = draw_uniforms(draws)
    # The draw's two steps, with the group sums computed once.
    groups = np.searchsorted(np.cumsum(sums), uniforms[:, 0].astype(np.float64) * sums.sum(), side="right")
    in_first = uniforms[groups == 0, 1].astype(np.float64) * sums[0] >= masses[0]
    hits = (groups > 0).sum() + in_first.sum()
    assert abs(hits - draws * share) < 4 * np.sqrt(draws * share)
    for row in np.flatnonzero(groups > 0)[:5]:
        assert draw(masses, *uniforms[row].astype(np.float64)) // group_size(TAIL + 1) == groups[row]


def draw_uniforms(draws):
    seeds = np.arange(draws, dtype=np.uint32)
    return draft_verify.uniforms_for(seeds, np.zeros(draws, np.int32), 0, purpose="draft")


def test_the_kernel_reaches_the_tail_where_the_reference_does():
    logits, share = tail_logits()
    uniforms = np.array([[1 - 1.01 * share, 0.5], [1 - 0.9 * share, 0.3], [1 - 0.1 * share, 0.7]], np.float32)
    actual = draft_verify.sample_tokens(np.repeat(logits[None], 3, axis=0), uniforms, backend="emulator")
    law = sampling_law(logits.astype(np.float64))
    for b in range(3):
        check_draw(actual.tokens[b], law, uniforms[b], rounding(logits, 1.0), Tally())
    assert actual.tokens[0] == 0 and (actual.tokens[1:] > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_law_give_their_best_finite_token(backend):
    logits = np.zeros((4, 50), np.float32)
    logits[0, [3, 9]] = np.nan, 2.0
    logits[1] = -np.inf
    logits[2] = np.nan
    logits[3, 5] = 1000.0
    result = draft_verify.sample_tokens(logits, np.full((4, 2), 0.5, np.float32), return_law=True, backend=backend)
    assert result.tokens.tolist() == [9, 0, 0, 5]
    assert result.invalid.tolist() == [True, True, True, False]
    assert (result.probs == 1).all() and (result.law.sum(axis=1) == 1).all()


def test_what_was_drawn_is_what_is_verified():
    """Drafts drawn from the target's own processed law are always accepted, whatever the uniforms of the tests."""
    rng = np.random.default_rng(1)
    case = sampler_case(rng, 5, 640, ml_dtypes.bfloat16, True)
    case["temperature"] = np.maximum(case["temperature"], 0.7)
    drawn = draft_verify.sample_tokens(**case, return_law=True, backend="emulator")
    parameters = {name: case[name] for name in ("temperature", "top_k", "top_p", "min_p", "vocab_size")}
    target = np.stack([case["logits"], case["logits"]], axis=1)
    uniforms = rng.uniform(0.01, 0.999, (5, 3)).astype(np.float32)
    for law in ({"draft_logits": target[:, :1].copy()}, {"draft_probs": drawn.law[:, None]}):
        result = draft_verify.rejection_sampling(
            drawn.tokens[:, None], target, uniforms, **law, **parameters, backend="emulator"
        )
        assert (result.num_accepted == 1).all()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("logits", np.zeros(50, np.float32)),
        ("logits", np.zeros((3, 50), np.float16)),
        ("uniforms", np.full((3, 3), 0.5, np.float32)),
        ("uniforms", np.zeros((3, 2), np.float32)),
        ("temperature", np.full(3, -1, np.float32)),
        ("top_p", 0.0),
        ("vocab_size", 200),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    case = sampler_case(np.random.default_rng(2), 3, 129, np.float32, True)
    with pytest.raises(ValueError, match=argument):
        draft_verify.sample_tokens(**{**case, argument: value}, backend="emulator")
