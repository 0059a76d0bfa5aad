"""Batches and models of more rows and layers than one launch unrolls: several launches, the same answers."""

import importlib

import numpy as np
import pytest

import draft_verify
from draft_verify import backends, caches
from tests.cache_cases import make_case, same_bytes

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


ROLLBACK = {
    "commit_window": lambda case, caches, **where: draft_verify.commit_window(
        *caches, case.keys, case.values, case.seq_lens, case.num_accepted, **case.options, **where
    ),
    "compact_window": lambda case, caches, **where: draft_verify.compact_window(
        *caches, case.seq_lens, case.path, case.num_accepted, ring=True, **where
    ),
    "save_ring": lambda case, caches, **where: draft_verify.save_ring(*caches, case.seq_lens, 5, **where),
    "restore_ring": lambda case, caches, **where: draft_verify.restore_ring(
        *caches, *saved(case), case.seq_lens, case.num_accepted, **where
    ),
}


def saved(case):
    """Copies, since those of a case hold NaN in rows that were rejected, which are what a ring restores."""
    return tuple(tuple(np.nan_to_num(window) for window in windows) for windows in (case.keys, case.values))


@pytest.mark.parametrize("name", ROLLBACK)
def test_layers_in_several_launches_are_rolled_back_as_in_one(name, monkeypatch):
    case = make_case(3, layers=5, ring=True, tree=name == "compact_window", fp8=name == "commit_window")
    whole, parts = case.cache_copies(), case.cache_copies()
    launched = []
    module = importlib.import_module(f"draft_verify.{name if name.endswith('window') else 'ring'}")
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda *args, **where: launched.append(args[1]) or launch(*args, **where))
    expected = ROLLBACK[name](case, whole, backend="emulator", lnc=1)
    monkeypatch.setattr(caches, "MOST_TILES", 2)
    actual = ROLLBACK[name](case, parts, backend="emulator", lnc=1)
    assert [len(entries) if isinstance(entries, tuple) else 1 for entries in launched] == [5, 2, 2, 1]
    for have, want in zip(actual, expected, strict=True):
        assert same_bytes(have, want)
    if name.startswith("save"):
        whole, parts = case.cache_copies(), whole
    assert same_bytes(parts[0], whole[0]) and same_bytes(parts[1], whole[1])
