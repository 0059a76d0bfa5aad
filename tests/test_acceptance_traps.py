"""Public defects of other acceptance kernels, as the smallest inputs that show them; each row names its source."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import draft_verify
from draft_verify.reference.rejection_sampling import accept_probability, residual_law
from draft_verify.reference.sampling import sampling_law
from tests.acceptance_cases import LARGEST_UNIFORM, SMALLEST_UNIFORM

BACKENDS = pytest.mark.parametrize("backend", ["reference", "emulator"])
HALF = np.float32(0.5)


def logits_of(*laws):
    with np.errstate(divide="ignore"):
        return np.log(np.array(laws, np.float32))


def verify(tokens, target_laws, uniforms, backend, draft_laws=None, **options):
    """One sequence, laws given as probabilities."""
    return draft_verify.rejection_sampling(
        np.array([tokens], np.int32),
        logits_of(*target_laws)[None],
        np.array([uniforms], np.float32),
        draft_probs=None if draft_laws is None else np.array([draft_laws], np.float32),
        backend=backend,
        **options,
    )


@BACKENDS
@pytest.mark.parametrize("uniform", [SMALLEST_UNIFORM, 1e-6, 0.5])
def test_a_token_without_target_mass_is_rejected_even_by_the_smallest_uniform(backend, uniform):
    """sglang#35771: target [0, .6, .4], coin 0.0 accepted token 0."""
    result = verify([0], [[0, 0.6, 0.4]] * 2, [uniform, uniform, uniform], backend)
    assert result.num_accepted[0] == 0 and result.tokens[0, 0] != 0


@BACKENDS
def test_equality_rejects(backend):
    """uniform * draft = target exactly: 0.5 * 0.5 = 0.25, and 0.5 * 0 = 0."""
    quarter = [0.25] * 4
    result = verify([1], [quarter, quarter], [0.5, 0.5, 0.5], backend, [[0.0, 0.5, 0.5, 0.0]])
    assert result.num_accepted[0] == 0
    result = verify([1], [quarter, quarter], [np.nextafter(HALF, 0), 0.5, 0.5], backend, [[0.0, 0.5, 0.5, 0.0]])
    assert result.num_accepted[0] == 1
    result = verify([3], [[0.5, 0.5, 0.0, 0.0]] * 2, [0.5, 0.5, 0.5], backend, [[0.5, 0.5, 0.0, 0.0]])
    assert result.num_accepted[0] == 0


@BACKENDS
def test_a_draft_of_a_tenth_is_accepted_a_tenth_of_the_time(backend):
    """ascend#13730: uniforms stuck at 0 accepted everything."""
    grid = (np.arange(100) + 0.5) / 100
    uniforms = np.stack([grid, grid * 0 + 0.5, grid * 0 + 0.5], axis=1).astype(np.float32)
    result = draft_verify.rejection_sampling(
        np.zeros((100, 1), np.int32),
        np.broadcast_to(logits_of([0.1, 0.9]), (100, 2, 2)).copy(),
        uniforms,
        backend=backend,
    )
    assert result.num_accepted.sum() == 10


@BACKENDS
@pytest.mark.parametrize("uniform", [SMALLEST_UNIFORM, 0.3, 0.5, LARGEST_UNIFORM])
def test_entries_of_no_mass_between_others_are_never_drawn(backend, uniform):
    """pytorch#192577, pytorch/xla#2562, NxDI sampling.py:368: [.3, 0, .7] gave 1, and u = 0 gave the rejected token."""
    for law in ([0.3, 0, 0.7], [0, 0.6, 0.4]):
        result = draft_verify.sample_tokens(logits_of(law), np.array([[uniform, uniform]], np.float32), backend=backend)
        assert law[result.tokens[0]] > 0


@BACKENDS
def test_the_draw_ignores_the_uniforms_of_the_accept_tests(backend):
    """ascend#16370: a recovery drawn with the accept uniform sees the upper part of its CDF only."""
    laws = [[0.25, 0.25, 0.25, 0.25]] * 2
    drawn = set()
    for group in (0.1, 0.4, 0.6, 0.9):
        tokens = {
            int(verify([0], laws, [accept, group, 0.5], backend, [[1, 0, 0, 0]]).tokens[0, 0])
            for accept in (0.3, 0.6, 0.99)
        }
        assert len(tokens) == 1
        drawn |= tokens
    assert drawn == {1, 2, 3}


def test_draft_and_verify_streams_leave_the_law_unbiased():
    """vllm#47386, #54282: one stream for both gave .1016/.6304/.2680 for .10/.60/.30 over 131,072 trials."""
    target, draft = np.array([0.1, 0.6, 0.3]), np.array([0.3, 0.1, 0.6])
    seeds = np.arange(8_000, dtype=np.uint32)
    positions = np.zeros(len(seeds), np.int32)
    proposals = draft_verify.uniforms_for(seeds, positions, 0, purpose="draft")
    tokens = draft_verify.sample_tokens(np.broadcast_to(logits_of(draft), (len(seeds), 3)), proposals).tokens
    result = draft_verify.rejection_sampling(
        tokens[:, None],
        np.broadcast_to(logits_of(target, target), (len(seeds), 2, 3)),
        draft_verify.uniforms_for(seeds, positions, 1),
        draft_probs=np.broadcast_to(draft.astype(np.float32), (len(seeds), 1, 3)),
    )
    counts = np.bincount(result.tokens[:, 0], minlength=3)
    chi2 = ((counts - len(seeds) * target) ** 2 / (len(seeds) * target)).sum()
    assert chi2 < 16  # 2 degrees of freedom: one in 3,000


@BACKENDS
def test_a_residual_of_a_difference_near_one_keeps_its_digits(backend):
    """vllm#46665: log(1 - draft / target) is 0 at 1e-8 and cancels near 1."""
    target = np.array([0.5, 0.25, 0.25])
    draft = np.array([0.5 + 2**-12, 0.25 - 2**-12, 0.25])
    result = verify([0], [target, target], [LARGEST_UNIFORM, 0.5, 0.5], backend, [draft])
    assert result.num_accepted[0] == 0 and result.tokens[0, 0] == 1


@BACKENDS
def test_greedy_rows_do_not_depend_on_the_uniforms(backend):
    """vllm#13196: at temperature 0 a seed changes nothing."""
    for uniform in (0.01, 0.99):
        result = verify([1], [[0.1, 0.6, 0.3]] * 2, [uniform] * 3, backend, temperature=np.zeros(1, np.float32))
        assert result.tokens[0].tolist() == [1, 1]


@BACKENDS
def test_equal_laws_fall_back_to_the_target_where_rounding_rejects(backend):
    """NxDI model_base.py:1689: a residual of nothing became uniform over the top-k."""
    law = np.array([0.0, 0.9, 0.1])
    assert (residual_law(law, law) == law).all()
    result = verify([1], [law, law], [LARGEST_UNIFORM, 0.5, 0.5], backend, [law])
    assert result.tokens[0, 0] == 1


@BACKENDS
@pytest.mark.parametrize(("law", "top_p"), [([0.6, 0.3, 0.1], 0.7), ([0.4, 0.35, 0.25], 0.6)])
def test_the_token_that_crosses_top_p_stays(backend, law, top_p):
    """NxDI sampling.py:337, esm#360, fish-speech#1171: one token was left instead of two."""
    result = draft_verify.sample_tokens(
        logits_of(law, law), np.full((2, 2), 0.5, np.float32), top_p=top_p, return_law=True, backend=backend
    )
    assert ((result.law > 0).sum(axis=1) == 2).all()


@BACKENDS
def test_top_p_is_each_row_its_own(backend):
    """NxDI sampling.py:421: the minimum was taken over the whole batch."""
    laws = logits_of([0.98, 0.01, 0.01], [0.4, 0.35, 0.25])
    result = draft_verify.sample_tokens(
        laws, np.full((2, 2), 0.5, np.float32), top_p=0.6, return_law=True, backend=backend
    )
    assert (result.law > 0).sum(axis=1).tolist() == [1, 2]


@BACKENDS
@pytest.mark.parametrize("vocab_size", [3, 129, 8193, 10000])
def test_a_spoiled_row_emits_an_id_of_the_vocabulary_and_is_flagged(backend, vocab_size):
    """vllm#45060, #44744: all-NaN rows and last tiles of no mass gave an id of vocab_size or above."""
    for fill in (np.nan, -np.inf):
        logits = np.full((1, 1, vocab_size), fill, np.float32)
        for uniforms in ([[SMALLEST_UNIFORM] * 2], [[LARGEST_UNIFORM] * 2]):
            result = draft_verify.rejection_sampling(
                np.zeros((1, 0), np.int32), logits, np.array(uniforms, np.float32), backend=backend
            )
            assert result.tokens[0, 0] == 0 and result.invalid[0] and result.num_accepted[0] == 0


@BACKENDS
@pytest.mark.parametrize("vocab_size", [8193, 10000, 151936])
def test_a_last_tile_without_mass_is_never_drawn_from(backend, vocab_size):
    """vllm#44744 (GHSA-8wr5-jm2h-8r4f): padding won the tie among entries of no mass."""
    logits = np.full((1, 1, vocab_size), -np.inf, ml_dtypes.bfloat16)
    logits[0, 0, :5] = 0
    result = draft_verify.rejection_sampling(
        np.zeros((1, 0), np.int32), logits, np.full((1, 2), LARGEST_UNIFORM), backend=backend
    )
    assert result.tokens[0, 0] == 4


@BACKENDS
def test_every_step_emits_at_least_one_token(backend):
    """vllm#33729: an empty output row made the count -1."""
    result = verify([-1, -1], [[0.2, 0.8]] * 3, [0.5] * 4, backend, draft_lens=np.zeros(1, np.int32))
    assert result.num_accepted[0] == 0 and result.tokens[0].tolist() == [1, -1, -1]


@BACKENDS
@pytest.mark.parametrize("stop", [-1, 3, 2**30])
def test_an_id_outside_the_vocabulary_stops_the_sequence_there(backend, stop):
    """flashinfer#879, trtllm#15233: [1, 0, 1, -1, -1] read index -1 and emitted 4 of at most 3."""
    laws = [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    result = verify([1, 1, stop], laws, [0.5] * 5, backend, [[0.2, 0.6, 0.2], [0.2, 0.6, 0.2], [0, 0, 0]])
    assert result.num_accepted[0] == 2 and result.tokens[0].tolist() == [1, 1, 2, -1] and not result.invalid[0]


@BACKENDS
def test_a_spoiled_draft_law_rejects_and_draws_from_the_target(backend):
    """vllm#41834: a NaN draft row leaked token 0."""
    result = verify([1], [[0.0, 0.1, 0.9]] * 2, [1e-6, 0.5, 0.5], backend, [[0.1, 0.5, np.nan]])
    assert result.num_accepted[0] == 0 and result.tokens[0, 0] == 2 and result.invalid[0]


@BACKENDS
def test_padding_rows_are_neither_accepted_nor_counted(backend):
    """vllm#58080: dummy rows proposed token 0, which was counted."""
    laws = [[1.0, 0.0]] * 4
    result = verify([0, 0, 0], laws, [0.5] * 5, backend, draft_lens=np.ones(1, np.int32))
    assert result.num_accepted[0] == 1 and result.tokens[0].tolist() == [0, 0, -1, -1]


def test_the_residual_is_normalised_by_its_sum():
    """hf#28508: a softmax over max(target - draft, 0) = [.3, 0] gave [.57, .43]."""
    assert residual_law(np.array([0.8, 0.2]), np.array([0.5, 0.5])).tolist() == [1.0, 0.0]


def test_the_whole_draft_law_is_subtracted():
    """xLLM#2175: with the draft's mass taken at the drafted token only, token 1 got .29 instead of .20."""
    target, draft = np.array([0.5, 0.2, 0.3]), np.array([0.6, 0.3, 0.1])
    emitted = np.zeros(3)
    for token in range(3):
        accept = accept_probability(target, draft, token)
        emitted[token] += draft[token] * accept
        emitted += draft[token] * (1 - accept) * residual_law(target, draft)
    np.testing.assert_allclose(emitted, target, atol=1e-12)
    assert residual_law(target, draft).tolist() == [0, 0, 1]


@BACKENDS
def test_mass_beyond_256_tokens_counts_without_top_k(backend):
    """NxDI's sampler keeps the 256 largest logits whatever top_k says."""
    logits = np.zeros((1, 1000), np.float32)
    result = draft_verify.sample_tokens(logits, np.array([[0.9, 0.5]], np.float32), return_law=True, backend=backend)
    assert result.tokens[0] > 256 and (result.law > 0).all()


@BACKENDS
def test_drafts_are_verified_with_the_law_they_were_processed_with(backend):
    """hf#47932, lattice#388, vllm#9834: draft laws from raw logits, or a temperature on one side only."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1, 2, 300)).astype(np.float32) * 3
    options = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    law = sampling_law(logits[0, 0].astype(np.float64), **options)
    for token in np.flatnonzero(law)[:5]:
        result = draft_verify.rejection_sampling(
            np.array([[token]], np.int32),
            logits,
            np.array([[0.999, 0.5, 0.5]], np.float32),
            draft_logits=logits[:, :1].copy(),
            backend=backend,
            **options,
        )
        assert result.num_accepted[0] == 1


@BACKENDS
def test_greedy_and_sampled_sequences_share_a_batch(backend):
    """vllm#27077, ascend#5423, #16396: divisions by 0, and an argmax after the logits were sorted."""
    row = np.array([-8, -3, -2, -1, 0, 9, 1, 2], np.float32)
    logits = np.broadcast_to(row, (2, 1, 8)).copy()
    logits[1] = logits_of([0, 0, 0, 0, 0, 0, 0, 1])
    result = draft_verify.rejection_sampling(
        np.zeros((2, 0), np.int32),
        logits,
        np.full((2, 2), 0.5, np.float32),
        temperature=np.array([0, 0.7], np.float32),
        top_k=2,
        backend=backend,
    )
    assert result.tokens[:, 0].tolist() == [5, 7]


@BACKENDS
def test_ties_take_the_lowest_id_on_both_sides(backend):
    """lattice#280: the last of equal logits won."""
    logits = np.zeros((1, 2, 300), np.float32)
    logits[0, :, [7, 150, 299]] = 3
    assert draft_verify.greedy_acceptance(np.array([[7]], np.int32), logits, backend=backend).num_accepted[0] == 1
    assert draft_verify.sample_tokens(logits[:, 0], np.full((1, 2), HALF), 0.0, backend=backend).tokens[0] == 7


@BACKENDS
def test_min_p_is_applied(backend):
    """vllm#42802: min_p was dropped when drafts were on."""
    result = verify([2], [[0.6, 0.35, 0.05]] * 2, [1e-6, 0.5, 0.5], backend, min_p=np.full(1, 0.2, np.float32))
    assert result.num_accepted[0] == 0 and result.tokens[0, 0] != 2


@BACKENDS
def test_a_replacement_is_emitted_at_the_first_rejection(backend):
    """vllm#8562, #2658, #10604: replacements in column 0 only, and accepted flags summed past the first rejection."""
    laws = [[1, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1], [1, 0, 0]]
    result = verify([0, 0, 0, 2], laws, [0.5] * 6, backend)  # accepts, rejects, accepts, accepts
    assert result.num_accepted[0] == 1 and result.tokens[0].tolist() == [0, 1, -1, -1, -1]
