"""Rings: how many slots are enough, and that what rejected rows overwrote comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.commit_window import commit_window
from draft_verify.reference.cache import key_at
from draft_verify.ring import restore_ring, ring_slots, save_ring
from tests.cache_cases import BACKEND, cases, make_case, same_bytes


@given(case=cases(ring=True), lnc=st.sampled_from([1, 2]))
def test_the_kernels_save_and_restore_every_byte_as_the_references_do(case, lnc):
    save_and_restore(case, lnc)


@given(case=cases(ring=True, sizes=((4, 8, 8), (16, 4, 5), (8, 8, 4)), many=True), lnc=st.sampled_from([1, 2]))
def test_many_rows_are_saved_and_restored_in_runs_that_end_where_the_ring_does(case, lnc):
    save_and_restore(case, lnc)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 16, "heads": 8, "rows": 7, "slots": 9, "head_dim": 64, "cache_layout": "BHDS"},  # columns
        {"batch": 100, "heads": 2, "rows": 8, "slots": 9, "head_dim": 128},  # sequences that fill the partitions
        {"batch": 3, "rows": 1, "slots": 1, "cache_layout": "BHDS"},
    ],
    ids=str,
)
def test_rings_of_many_sequences_are_saved_and_restored(sizes):
    save_and_restore(make_case(5, ring=True, **sizes), 1)


def save_and_restore(case, lnc):
    place = {"block_table": case.block_table, "cache_layout": case.cache_layout}
    num_rows = min(case.keys[0].shape[2], case.num_slots)
    num_accepted = np.minimum(case.num_accepted, num_rows - 1)
    caches = case.key_caches, case.value_caches
    lengths = np.where(num_accepted >= 0, case.seq_lens, -1).astype(np.int32)
    expected = save_ring(*caches, lengths, num_rows, **place, backend="reference")
    actual = save_ring(*caches, lengths, num_rows, **place, backend=BACKEND, lnc=lnc)
    assert same_bytes(actual[0] + actual[1], expected[0] + expected[1])

    # Restored from something else, so that every restored row shows.
    other = tuple(tuple((saved.view(np.uint8) ^ 1).view(saved.dtype) for saved in layers) for layers in expected)
    expected, actual = case.cache_copies(), case.cache_copies()
    restore_ring(*expected, *other, lengths, num_accepted, **place, backend="reference")
    restore_ring(*actual, *other, lengths, num_accepted, **place, backend=BACKEND, lnc=lnc)
    assert same_bytes(actual[0] + actual[1], expected[0] + expected[1])


def simulate(window: int, num_draft_tokens: int, slots: int, mode: str, restored: bool = False) -> bool:
    """Whether every row of every step finds its whole window in a ring of positions, over random outcomes."""
    rng = np.random.default_rng(0)
    ring = np.full((1, 1, slots, 1), -1, np.float32)
    length = 0
    for _ in range(60):
        rows = num_draft_tokens + 1
        accepted = int(rng.integers(0, rows))
        positions = np.arange(length, length + rows)
        tokens = positions.astype(np.float32).reshape(1, 1, rows, 1)
        lengths = np.array([length], np.int32)
        everything = np.array([num_draft_tokens], np.int32)
        if mode == "write_first":
            commit_window(ring, ring.copy(), tokens, tokens, lengths, everything, ring=True)
        for position in positions:
            # Keys of the window itself come from the ring only where it has been written first.
            end = position + 1 if mode == "write_first" else length
            for seen in range(max(0, position - window + 1), end):
                if key_at(ring, 0, int(seen), ring=True).item() != seen:
                    return False
        if mode == "read_first":
            if restored:
                saved = save_ring(ring, ring.copy(), lengths, rows)
            commit_window(ring, ring.copy(), tokens, tokens, lengths, everything, ring=True)
            if restored:
                restore_ring(ring, ring.copy(), *saved, lengths, np.array([accepted], np.int32))
        if mode == "accepted_only":
            commit_window(ring, ring.copy(), tokens, tokens, lengths, np.array([accepted], np.int32), ring=True)
        length += accepted + 1
    return True


@pytest.mark.parametrize("mode", ["accepted_only", "read_first", "write_first"])
@pytest.mark.parametrize("window, num_draft_tokens", [(2, 0), (4, 1), (4, 2), (8, 3), (5, 7), (128, 7)])
def test_t45_the_ring_is_as_large_as_the_formula_says_and_no_larger(window, num_draft_tokens, mode):
    """sglang#33872, #34189: a ring padded by a hard-coded 4 silently corrupted requests with 6, 7 and 8 drafts."""
    slots = ring_slots(window, num_draft_tokens, mode)
    assert simulate(window, num_draft_tokens, slots, mode)
    if slots > 1:
        assert not simulate(window, num_draft_tokens, slots - 1, mode)


@pytest.mark.parametrize(
    "mode, expected",
    [("accepted_only", (3, 7, 127)), ("read_first", (5, 10, 134)), ("write_first", (6, 11, 135))],
)
def test_ring_slots_are_those_of_the_published_simulation(mode, expected):
    assert tuple(ring_slots(w, k, mode) for w, k in ((4, 2), (8, 3), (128, 7))) == expected


@pytest.mark.parametrize("window, num_draft_tokens", [(4, 2), (8, 3), (12, 7)])
def test_saving_and_restoring_makes_up_for_the_slots_that_read_first_would_need(window, num_draft_tokens):
    slots = ring_slots(window, num_draft_tokens, "accepted_only")
    assert not simulate(window, num_draft_tokens, slots, "read_first")
    assert simulate(window, num_draft_tokens, slots, "read_first", restored=True)


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_t52_a_ring_is_rolled_back_by_any_number_of_tokens_in_every_layer(backend):
    """mlx-lm#1914, #1109: a rotating cache's trim assumed one token; mlx-swift#173: only layer 0 was trimmed."""
    for rejected in range(1, 6):
        case = make_case(rejected, batch=1, rows=6, slots=7, ring=True, layers=3)
        case.seq_lens[:] = 12
        before, caches = case.cache_copies(), (case.key_caches, case.value_caches)
        windows = tuple(np.ones_like(key) for key in case.keys)
        saved = save_ring(*caches, case.seq_lens, 6, backend=backend)
        commit_window(*caches, windows, windows, case.seq_lens, np.array([5], np.int32), ring=True, backend=backend)
        accepted = np.array([5 - rejected], np.int32)
        restore_ring(*caches, *saved, case.seq_lens, accepted, backend=backend)
        commit_window(*before, windows, windows, case.seq_lens, accepted, ring=True, backend="reference")
        assert same_bytes(caches[0] + caches[1], before[0] + before[1])


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_t51_a_burst_of_drafts_that_reaches_the_window_leaves_the_ring_whole(backend):
    """hf#48280, #37574: the sliding window was reached during a burst of drafts; 13 columns of keys met a mask of 6."""
    window, drafts = 6, 7
    slots = ring_slots(window, drafts)
    ring, length = np.full((1, 1, slots, 1), np.nan, np.float32), 0
    for accepted in (2, 7, 0, 7):  # 0 -> 3, over the edge to 11, then on
        rows = np.arange(length, length + drafts + 1, dtype=np.float32).reshape(1, 1, drafts + 1, 1)
        rows[:, :, accepted + 1 :] = np.nan
        lengths, kept = np.array([length], np.int32), np.array([accepted], np.int32)
        commit_window(ring, ring.copy(), rows, rows, lengths, kept, ring=True, backend=backend)
        length += accepted + 1
        seen = range(max(0, length - window + 1), length)
        assert [key_at(ring, 0, position, ring=True).item() for position in seen] == list(seen)


@pytest.mark.parametrize(
    "argument, arguments",
    [
        ("window", (1, 2)),
        ("num_draft_tokens", (4, -1)),
        ("mode", (4, 2, "write_last")),
    ],
)
def test_ring_slots_refuses_what_is_no_ring(argument, arguments):
    with pytest.raises(ValueError, match=argument):
        ring_slots(*arguments)


REFUSED = {
    "num_rows": lambda a: a.update(num_rows=8),
    "num_rows: got 0": lambda a: a.update(num_rows=0),
    "seq_lens": lambda a: a["seq_lens"].fill(2**24),
    "seq_lens: got dtype": lambda a: a.update(seq_lens=a["seq_lens"].astype(np.int64)),
    "key_cache": lambda a: a.update(key_cache=a["key_cache"][:, :, :3]),
    "cache_layout": lambda a: a.update(cache_layout=""),
}


@pytest.mark.parametrize("message", REFUSED)
def test_save_ring_refuses_bad_input(message):
    case = make_case(1, slots=7, ring=True)
    arguments = {
        "key_cache": case.key_caches[0],
        "value_cache": case.value_caches[0],
        "seq_lens": case.seq_lens,
        "num_rows": 5,
    }
    REFUSED[message](arguments)
    with pytest.raises(ValueError, match=message):
        save_ring(**arguments)


REFUSED_BACK = {
    "saved_key": lambda a: a.update(saved_key=a["saved_key"].astype(np.float64)),
    "saved_value": lambda a: a.update(saved_value=a["saved_value"][:, :, 1:]),
    "num_accepted": lambda a: a["num_accepted"].fill(5),
    "num_accepted: got dtype": lambda a: a.update(num_accepted=a["num_accepted"].astype(np.int8)),
    "num_rows": lambda a: a.update(saved_key=np.zeros((3, 2, 8, 8), np.float32)),
}


@pytest.mark.parametrize("message", REFUSED_BACK)
def test_restore_ring_refuses_bad_input_before_anything_is_written(message):
    case = make_case(1, slots=7, ring=True)
    caches = case.key_caches[0], case.value_caches[0]
    saved = save_ring(*caches, case.seq_lens, 5)
    arguments = dict(
        zip(("key_cache", "value_cache", "saved_key", "saved_value"), caches + saved),
        seq_lens=case.seq_lens,
        num_accepted=np.zeros(3, np.int32),
    )
    before = case.cache_copies()
    REFUSED_BACK[message](arguments)
    with pytest.raises(ValueError, match=message):
        restore_ring(**arguments)
    assert same_bytes(case.key_caches + case.value_caches, before[0] + before[1])
