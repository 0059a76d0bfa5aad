"""mask_logits: the kernel against the reference, and what the acceptance rules make of its result."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.verify_step import verify_step
from tests.acceptance_cases import chain_case
from tests.test_combine_shards import over_ranks

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
    assert (masked[~allowed] == -np.inf).all()
    expected = draft_verify.mask_logits(logits, mask, vocab_size=vocab_size, backend="reference")
    np.testing.assert_array_equal(masked, expected)


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


ROWS, V = 3, 70
MEDUSA = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}
# A rule, the arguments it takes with the logits of 2 windows masked by the caller or by itself, and its options.
RULES = {
    "greedy": ("greedy_acceptance", "drafts logits", {}),
    "token": ("rejection_sampling", "drafts logits uniforms", {"draft_logits": "chain"}),
    "token one-hot": ("rejection_sampling", "drafts logits uniforms", {"top_p": 0.8}),
    "block": ("rejection_sampling", "drafts logits uniforms", {"draft_logits": "chain", "rule": "block", "top_k": 9}),
    "tree greedy": ("tree_acceptance", "tree drafts logits", {}),
    "target_only": ("tree_acceptance", "tree drafts logits uniforms", {"rule": "target_only"}),
    "without_replacement": (
        "tree_acceptance",
        "tree drafts logits uniforms",
        {"rule": "without_replacement", "draft_logits": "tree", "top_k": 9},
    ),
    "independent": (
        "tree_acceptance",
        "tree drafts logits uniforms",
        {"rule": "independent", "draft_logits": "tree"},
    ),
    "typical": ("typical_acceptance", "drafts logits uniforms", MEDUSA),
    "typical tree": ("typical_acceptance", "drafts logits uniforms", MEDUSA | {"tree": "tree"}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_the_mask_itself(name, backend):
    rule, names, options = RULES[name]
    rng = np.random.default_rng(1)
    logits, draft_logits = (rng.standard_normal((2, 2, ROWS, V)) * 5).astype(np.float32)
    _, mask = random_mask(rng, 2, ROWS, V, 0.5)
    masked, masked_drafts = (draft_verify.mask_logits(array, mask) for array in (logits, draft_logits))
    given = {
        "drafts": masked_drafts[:, :-1].argmax(-1).astype(np.int32),
        "tree": np.array([-1, 0, 1], np.int32),
        "uniforms": rng.random((2, ROWS + 1)).astype(np.float32),
    }

    def call(target, draft, **mask):
        laws = {"chain": draft[:, :-1], "tree": draft} if "draft_logits" in options else {"tree": given["tree"]}
        keywords = {key: laws.get(value, value) if isinstance(value, str) else value for key, value in options.items()}
        arrays = [target if name == "logits" else given[name] for name in names.split()]
        return getattr(draft_verify, rule)(*arrays, **keywords, **mask, backend=backend)

    unmasked, inside, before = (
        call(logits, draft_logits),
        call(logits, draft_logits, allowed_mask=mask),
        call(masked, masked_drafts),
    )
    for mine, theirs in zip(inside, before):
        np.testing.assert_array_equal(mine, theirs)
    assert (unmasked.tokens != inside.tokens).any()
    with pytest.raises(ValueError, match="allowed_mask"):
        call(logits, draft_logits, allowed_mask=mask[..., :-1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_drafts_sampler_takes_it_too(backend):
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((5, V + 3)) * 5).astype(np.float32)
    logits[:, V:] = np.nan
    allowed, mask = random_mask(rng, 5, 1, V + 3, 0.4)
    allowed = allowed.reshape(5, -1)[:, : V + 3]
    uniforms = rng.random((5, 2)).astype(np.float32)
    options = {"top_p": 0.9, "vocab_size": V, "return_law": True, "backend": backend}
    result = draft_verify.sample_tokens(logits, uniforms, allowed_mask=mask[:, 0], **options)
    assert allowed[np.arange(5), result.tokens].all() and not result.invalid.any()
    assert result.law.shape == logits.shape and (result.law[~allowed] == 0).all()
    np.testing.assert_allclose(result.law.sum(-1), 1, rtol=1e-6)
    banned = np.where(allowed, logits, -np.inf).astype(np.float32)
    for mine, theirs in zip(result, draft_verify.sample_tokens(banned, uniforms, **options)):
        np.testing.assert_array_equal(mine, theirs)
    with pytest.raises(ValueError, match="allowed_mask"):
        draft_verify.sample_tokens(logits, uniforms, allowed_mask=mask, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_masks_its_own_columns(backend):
    """Shards take logits that `mask_logits` has been over, each by the bits of its own columns."""
    rng = np.random.default_rng(3)
    case = chain_case(rng, 3, 2, 640, np.float32, "one_hot")
    case["target_logits"] = (rng.standard_normal((3, ROWS, 640)) * 3).astype(np.float32)
    _, mask = random_mask(rng, 3, ROWS, 640, 0.5)
    expected = draft_verify.rejection_sampling(**case, allowed_mask=mask, backend=backend)
    for num_shards in (2, 4):
        width = 640 // num_shards
        parts = [
            draft_verify.mask_logits(
                case["target_logits"][..., shard * width : (shard + 1) * width],
                mask[..., shard * width // 32 : (shard + 1) * width // 32],
                backend=backend,
            )
            for shard in range(num_shards)
        ]
        result = over_ranks(case | {"target_logits": np.concatenate(parts, axis=-1)}, num_shards, backend)
        for mine, theirs in zip(result, expected):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_whole_step_takes_it(backend):
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((2, ROWS, V)) * 5).astype(np.float32)
    allowed, mask = random_mask(rng, 2, ROWS, V, 0.3)
    drafts = np.zeros((2, ROWS - 1), np.int32)
    step = verify_step(
        drafts, logits, np.zeros(2, np.int32), seeds=np.array([1, 2]), allowed_mask=mask, backend=backend
    )
    for b, count in enumerate(step.num_emitted):
        for row in range(count):
            assert allowed.reshape(2, ROWS, -1)[b, row, step.tokens[b, row]]


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


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_a_mask_over_a_window_without_drafts_leaves_no_rows_of_theirs(backend):
    logits = np.zeros((1, 1, 64), np.float32)
    mask = np.array([[[0, 1 << 5]]], np.int32)
    uniforms = np.full((1, 2), 0.5, np.float32)
    none = np.zeros((1, 0, 64), np.float32)
    step = draft_verify.rejection_sampling(
        np.zeros((1, 0), np.int32), logits, uniforms, draft_logits=none, allowed_mask=mask, backend=backend
    )
    assert step.tokens.tolist() == [[37]]
