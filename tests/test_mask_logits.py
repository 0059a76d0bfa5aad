"""mask_logits: the kernel against the reference, and what the acceptance rules make of its result."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify

BACKENDS = ["reference", "emulator"]
SHAPES = [(1, 1, 5, 5), (2, 3, 33, 31), (3, 2, 4096, 4096), (1, 5, 8193, 8190)]


def random_mask(rng, batch, rows, width, share=0.3):
    allowed = rng.random((batch, rows, -(-width // 32), 32)) < share
    return allowed, (allowed * (np.uint64(1) << np.arange(32, dtype=np.uint64))).sum(-1).astype(np.uint32).view(
        np.int32
    )


@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
    lnc=st.sampled_from([1, 2]),
)
def test_kernel_keeps_the_allowed_ids_bit_for_bit(shape, seed, dtype, lnc):
    batch, rows, width, vocab_size = shape
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((batch, rows, width)).astype(dtype)
    allowed, mask = random_mask(rng, batch, rows, width)
    allowed = allowed.reshape(batch, rows, -1)[..., :vocab_size]
    before = logits.copy()
    logits[..., :vocab_size][~allowed & (rng.random(allowed.shape) < 0.5)] = np.nan
    logits[..., vocab_size:] = np.nan
    masked = draft_verify.mask_logits(logits, mask, vocab_size=vocab_size, backend="emulator", lnc=lnc)
    assert masked.shape == (batch, rows, vocab_size) and masked.dtype == dtype
    np.testing.assert_array_equal(masked[allowed], before[..., :vocab_size][allowed])
    assert (masked[~allowed] == -(2.0**127)).all()
    expected = draft_verify.mask_logits(logits, mask, vocab_size=vocab_size, backend="reference")
    np.testing.assert_array_equal(np.where(masked == -(2.0**127), np.array(-np.inf, dtype), masked), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_allowed_ids_are_emitted(backend):
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((3, 3, 200)) * 5).astype(np.float32)
    allowed, mask = random_mask(rng, 3, 3, 200, 0.05)
    allowed[..., 3, 7] = True
    mask = mask | np.where(np.arange(mask.shape[-1]) == 3, 1 << 7, 0).astype(np.int32)
    allowed = allowed.reshape(3, 3, -1)[..., :200]
    masked = draft_verify.mask_logits(logits, mask, backend=backend)
    drafts = rng.integers(0, 200, (3, 2)).astype(np.int32)
    uniforms = rng.random((3, 4)).astype(np.float32)
    for result in (
        draft_verify.greedy_acceptance(drafts, masked, backend=backend),
        draft_verify.rejection_sampling(drafts, masked, uniforms, backend=backend),
        draft_verify.rejection_sampling(drafts, masked, uniforms, top_k=300, top_p=0.9, backend=backend),
    ):
        for b, accepted in enumerate(result.num_accepted):
            for row in range(accepted + 1):
                assert allowed[b, row, result.tokens[b, row]]
        assert not result.invalid.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rule_takes_the_mask_itself(backend):
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((2, 3, 70)) * 5).astype(np.float32)
    draft_logits = (rng.standard_normal((2, 3, 70)) * 5).astype(np.float32)
    _, mask = random_mask(rng, 2, 3, 70, 0.5)
    masked = draft_verify.mask_logits(logits, mask)
    masked_drafts = draft_verify.mask_logits(draft_logits, mask)
    drafts, tree = masked_drafts[:, :2].argmax(-1).astype(np.int32), np.array([-1, 0, 1], np.int32)
    uniforms = rng.random((2, 4)).astype(np.float32)
    medusa = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}
    sampled, walked = draft_verify.rejection_sampling, draft_verify.tree_acceptance
    for rule, before, after in (
        (draft_verify.greedy_acceptance, (drafts, logits), (drafts, masked)),
        (draft_verify.typical_acceptance, (drafts, logits, uniforms, medusa), (drafts, masked, uniforms, medusa)),
        (
            sampled,
            (drafts, logits, uniforms, {"draft_logits": draft_logits[:, :2]}),
            (drafts, masked, uniforms, {"draft_logits": masked_drafts[:, :2]}),
        ),
        (
            walked,
            (tree, drafts, logits, uniforms, {"rule": "independent", "draft_logits": draft_logits}),
            (tree, drafts, masked, uniforms, {"rule": "independent", "draft_logits": masked_drafts}),
        ),
    ):
        results = []
        for arguments, allowed_mask in ((before, mask), (after, None)):
            options = arguments[-1] if isinstance(arguments[-1], dict) else {}
            arrays = [array for array in arguments if not isinstance(array, dict)]
            results.append(rule(*arrays, **options, allowed_mask=allowed_mask, backend=backend))
        for masked_inside, masked_before in zip(*results):
            np.testing.assert_array_equal(masked_inside, masked_before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_allows_nothing_is_flagged(backend):
    logits = np.ones((1, 1, 40), np.float32)
    masked = draft_verify.mask_logits(logits, np.zeros((1, 1, 2), np.int32), backend=backend)
    result = draft_verify.greedy_acceptance(np.zeros((1, 0), np.int32), masked, backend=backend)
    assert result.invalid[0] and result.tokens[0, 0] == 0


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("logits", np.zeros((2, 40), np.float32)),
        ("allowed_mask", np.zeros((2, 3, 1), np.int32)),
        ("allowed_mask", np.zeros((2, 3, 2), np.uint32)),
        ("vocab_size", 41),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    case = {"logits": np.zeros((2, 3, 40), np.float32), "allowed_mask": np.zeros((2, 3, 2), np.int32)}
    with pytest.raises(ValueError, match=argument):
        draft_verify.mask_logits(**{**case, argument: value}, backend="emulator")
