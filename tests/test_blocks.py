"""Paged bookkeeping, and the draft model's own cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.blocks import blocks_needed, blocks_to_free, draft_cache_lens


def test_blocks_are_counted_by_whole_windows():
    # algorithms.md 8: L=15, K=3, P=4: no acceptance frees 1, three free 0. The rule `L % P == 1` gives L=2, K=3 none.
    assert blocks_needed(15, 3, 4) == 1
    assert [blocks_to_free(15, accepted, 3, 4) for accepted in range(4)] == [1, 0, 0, 0]
    assert blocks_needed(2, 3, 4) == 1


def test_t46_a_window_padded_past_its_drafts_needs_what_its_drafts_need():
    """ROCm/ATOM#250, RBLN#1128: L=13, P=16, two drafts need no second block, although a padded window of 5 would."""
    assert blocks_needed(np.array([13, 13, 12], np.int32), np.array([2, 4, -1], np.int32), 16).tolist() == [0, 1, 0]


@given(
    block_size=st.integers(1, 40),
    length=st.integers(0, 100),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
)
def test_a_sequence_always_owns_as_many_blocks_as_its_length_fills(block_size, length, steps):
    owned = -(-length // block_size)
    for drafts, accepted in steps:
        accepted = min(accepted, drafts)
        owned += blocks_needed(length, drafts, block_size)
        assert owned * block_size >= length + drafts + 1
        owned -= blocks_to_free(length, accepted, drafts, block_size)
        length += accepted + 1
        assert owned == -(-length // block_size)


def test_an_empty_slot_needs_and_frees_nothing_whatever_its_length():
    lengths, empty = np.array([0, 16, 31], np.int32), np.full(3, -1, np.int32)
    assert not blocks_needed(lengths, empty, 16).any()
    assert not blocks_to_free(lengths, empty, empty, 16).any()
    assert draft_cache_lens(lengths, empty, empty).tolist() == lengths.tolist()


def test_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    lengths, drafts = torch.tensor([15, 2], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
    accepted = torch.tensor([3, 0], dtype=torch.int32)
    assert blocks_needed(lengths, drafts, 4).tolist() == [1, 1]
    assert blocks_to_free(lengths, accepted, drafts, 4).tolist() == [0, 1]
    assert draft_cache_lens(lengths, accepted, drafts).dtype == torch.int32
    assert draft_cache_lens(lengths, accepted, drafts).tolist() == [18, 3]


@given(
    seed=st.integers(0, 2**32 - 1),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20),
)
def test_t47_the_row_missing_after_all_drafts_were_accepted_is_fed_before_the_next_proposal(seed, steps):
    """vllm#9730: all K accepted, the last draft's key was never written in the draft model's cache."""
    rng = np.random.default_rng(seed)
    text = [int(rng.integers(100))]  # its last token is row 0: emitted, not yet in any cache
    draft_cache: list[int] = []

    for drafts, accepted in steps:
        accepted = min(accepted, drafts)
        window = [text[-1], *rng.integers(100, size=drafts).tolist()]
        if drafts:
            # The recipe: everything that the draft's cache lacks, row 0 last, and then its proposals but the last.
            draft_cache += text[len(draft_cache) :]
            assert draft_cache == text, "every proposal must be made from the whole text"
            draft_cache += window[1:-1]
            length = draft_cache_lens(len(text) - 1, accepted, drafts)
        else:
            length = len(draft_cache)
        text += [*window[1 : accepted + 1], int(rng.integers(100))]
        draft_cache = draft_cache[:length]
        assert draft_cache == text[:length]
        if drafts:
            assert len(text) - 1 - length == (accepted == drafts)
