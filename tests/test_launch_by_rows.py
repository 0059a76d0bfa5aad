"""Batches whose rows are more than one launch unrolls: several launches, the same answers."""

import numpy as np
import pytest

import draft_verify
from draft_verify import backends

BATCH, ROWS, VOCAB, DRAFT_VOCAB = 5, 3, 40, 24
RNG = np.random.default_rng(0)
DRAFTS = RNG.integers(DRAFT_VOCAB, size=(BATCH, ROWS - 1), dtype=np.int32)
TARGET = RNG.standard_normal((BATCH, ROWS, VOCAB)).astype(np.float32)
DRAFT = RNG.standard_normal((BATCH, ROWS - 1, DRAFT_VOCAB)).astype(np.float32)
UNIFORMS = RNG.random((BATCH, ROWS + 1), dtype=np.float32)
TREES = np.array([[-1, 0, 0], [-1, 0, 1], [-1, 0, -2], [-1, 0, 0], [-1, 0, 1]], np.int32)
TO_TARGET = np.arange(DRAFT_VOCAB, dtype=np.int32) // 2
MASK = np.full((BATCH, ROWS, 2), 0x7FFFFFFF, np.int32)
# As many entries as sequences in an array that has nothing to do with them.
TO_DRAFT = np.full((BATCH, VOCAB), -1, np.int32)
TO_DRAFT[:2, :12] = np.arange(24).reshape(12, 2).T
SAMPLING = {"temperature": RNG.random(BATCH, dtype=np.float32), "top_k": np.array([3, 0, 9, 1, 40], np.int32)}
PATH = np.tile(np.arange(ROWS, dtype=np.int32), (BATCH, 1))

CALLS = {
    "greedy": lambda **where: draft_verify.greedy_acceptance(DRAFTS, TARGET, **where),
    "masked": lambda **where: draft_verify.greedy_acceptance(DRAFTS, TARGET, allowed_mask=MASK, **where),
    "token": lambda **where: draft_verify.rejection_sampling(DRAFTS, TARGET, UNIFORMS, **SAMPLING, **where),
    "draft vocabulary": lambda **where: draft_verify.rejection_sampling(
        DRAFTS, TARGET, UNIFORMS, draft_logits=DRAFT, draft_to_target=TO_TARGET, **SAMPLING, **where
    ),
    "trees": lambda **where: draft_verify.tree_acceptance(
        TREES, DRAFTS, TARGET, UNIFORMS, rule="target_only", **SAMPLING, **where
    ),
    "one tree": lambda **where: draft_verify.tree_acceptance(TREES[0], DRAFTS, TARGET, UNIFORMS, **where),
    "typical": lambda **where: draft_verify.typical_acceptance(
        DRAFTS, TARGET, UNIFORMS, posterior_threshold=0.1, posterior_alpha=0.3, **where
    ),
    "sample": lambda **where: draft_verify.sample_tokens(
        TARGET[:, 0], UNIFORMS[:, :2], return_law=True, **SAMPLING, **where
    ),
    "log-probabilities": lambda **where: draft_verify.token_logprobs(TARGET, PATH, PATH, **SAMPLING, **where),
    "projection": lambda **where: (draft_verify.project_draft_law(TO_DRAFT, draft_logits=DRAFT, **where),),
}


@pytest.mark.parametrize("name", CALLS)
def test_several_launches_decide_as_one(name, monkeypatch):
    launched = []
    launch = backends.launch
    monkeypatch.setattr(backends, "launch", lambda *args, **where: launched.append(args[0]) or launch(*args, **where))
    whole = CALLS[name](backend="emulator", lnc=1)
    alone = len(launched)
    for limit in ("MOST_ROWS", "MOST_TRUNCATED_ROWS"):
        monkeypatch.setattr(backends, limit, ROWS)
    parts = CALLS[name](backend="emulator", lnc=1)
    assert len(launched) >= 3 * alone
    for have, want in zip(parts, whole):
        np.testing.assert_array_equal(have, want)


def test_torch_tensors_are_joined_too(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(backends, "MOST_ROWS", 2)
    step = draft_verify.greedy_acceptance(torch.from_numpy(DRAFTS), torch.from_numpy(TARGET), backend="emulator")
    np.testing.assert_array_equal(step.tokens.numpy(), draft_verify.greedy_acceptance(DRAFTS, TARGET).tokens)


def test_a_large_batch_with_truncation_fits_the_limit_of_a_program():
    logits = RNG.standard_normal((200, 40)).astype(np.float32)
    uniforms = RNG.random((200, 2), dtype=np.float32)
    sampled = draft_verify.sample_tokens(logits, uniforms, top_k=5, top_p=0.9, backend="emulator")
    expected = draft_verify.sample_tokens(logits, uniforms, top_k=5, top_p=0.9)
    assert (sampled.tokens == expected.tokens).mean() > 0.99
