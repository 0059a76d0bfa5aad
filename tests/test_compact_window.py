"""compact_window: overlapping moves inside the cache, scrubbing, and what must be refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify import loader
from draft_verify.backends import launch
from draft_verify.commit_window import commit_window
from draft_verify.compact_window import compact_window
from draft_verify.reference import emulator
from tests.cache_cases import BACKEND, cases, make_case, same_bytes


def written_first(case):
    """The case with its whole window in the cache, as far as there are slots and blocks; the last row written."""
    rows = case.keys[0].shape[2]
    slots = case.num_slots
    if case.path is None:
        case.path = np.tile(np.arange(rows, dtype=np.int32), (len(case.seq_lens), 1))
    if case.block_table is not None:
        case.block_table[:] = case.whole_block_table
    draft_lens = np.full_like(case.seq_lens, rows - 1)
    if not case.ring:
        draft_lens = np.minimum(draft_lens, slots - 1 - case.seq_lens)
    for b, (accepted, last) in enumerate(zip(case.num_accepted, draft_lens)):
        kept = min(accepted, np.count_nonzero(case.path[b, : accepted + 1] <= last) - 1) if accepted >= 0 else -1
        case.num_accepted[b] = kept
        case.path[b, kept + 1 :] = -1
    whole = np.where(case.num_accepted >= 0, draft_lens, -1).astype(np.int32)
    for window in case.keys + case.values:
        np.nan_to_num(window, copy=False)
    commit_window(
        case.key_caches, case.value_caches, case.keys, case.values, case.seq_lens, whole, **case.options,
        backend="reference",
    )  # fmt: skip
    return draft_lens


def fits(case) -> bool:
    """Whether a whole window has slots of its own: in a ring it must not meet itself."""
    return not case.ring or case.keys[0].shape[2] <= case.num_slots


def compact(case, caches, **options):
    place = {"block_table": case.block_table, "cache_layout": case.cache_layout, "ring": case.ring}
    return compact_window(*caches, case.seq_lens, case.path, case.num_accepted, **place, **options)


@given(case=cases().filter(fits), scrub=st.booleans(), lnc=st.sampled_from([1, 2]), past_the_end=st.booleans())
def test_the_kernel_leaves_every_byte_of_every_cache_as_the_reference_does(case, scrub, lnc, past_the_end):
    draft_lens = written_first(case)
    options = {"scrub": scrub, "draft_lens": None if past_the_end else draft_lens}
    expected, actual = case.cache_copies(), case.cache_copies()
    compact(case, expected, **options, backend="reference")
    compact(case, actual, **options, backend=BACKEND, lnc=lnc)
    assert same_bytes(actual[0], expected[0]), "keys"
    assert same_bytes(actual[1], expected[1]), "values"


@given(case=cases().filter(fits))
def test_writing_first_and_compacting_reaches_what_committing_the_path_reaches(case):
    before = case.cache_copies()
    written_first(case)
    compact(case, (case.key_caches, case.value_caches), backend="reference")
    commit_window(
        *before, case.keys, case.values, case.seq_lens, case.num_accepted, path=case.path, **case.options,
        backend="reference",
    )  # fmt: skip
    rows = case.keys[0].shape[2]
    for b in np.flatnonzero(case.num_accepted >= 0):
        # In a ring the window has pushed out the positions S before its own.
        oldest = max(0, case.seq_lens[b] + rows - case.num_slots) if case.ring else 0
        for position in range(oldest, case.seq_lens[b] + case.num_accepted[b] + 1):
            assert case.token(case.key_caches, b, position) == case.token(before[0], b, position)


@pytest.mark.parametrize("scrub", [False, True])
@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_overlapping_rows_move_down_and_rejected_ones_are_scrubbed_on_request(backend, scrub):
    cache = np.arange(10, dtype=np.float32).reshape(1, 1, 10, 1)
    path = np.array([[0, 2, 3, 5, -1, -1]], np.int32)
    key_cache, value_cache = compact_window(
        cache.copy(), cache.copy(), np.array([3], np.int32), path, np.array([3], np.int32), scrub=scrub, backend=backend
    )
    # Positions 3 + (0, 2, 3, 5) become 3, 4, 5, 6; with scrub, 7 and 8 of the window 3..8 become 0.
    expected = [0, 1, 2, 3, 5, 6, 8, 0, 0, 9] if scrub else [0, 1, 2, 3, 5, 6, 8, 7, 8, 9]
    assert key_cache.ravel().tolist() == value_cache.ravel().tolist() == expected


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_a_tree_that_wraps_around_its_ring_is_compacted_across_the_end(backend):
    cache = np.arange(10, dtype=np.float32).reshape(1, 1, 10, 1)
    path = np.array([[0, 2, 3, 5, -1, -1]], np.int32)
    key_cache, _ = compact_window(
        cache, cache.copy(), np.array([27], np.int32), path, np.array([3], np.int32), ring=True, scrub=True,
        backend=backend,
    )  # fmt: skip
    # Positions 27 + (0, 2, 3, 5) are in slots 7, 9, 0, 2 and become 27, 28, 29, 30: slots 7, 8, 9, 0; 31 and 32 are 0.
    assert key_cache.ravel().tolist() == [2, 0, 0, 3, 4, 5, 6, 7, 9, 0]


@pytest.mark.parametrize("argument, seq_len, rows", [("path", 3, 11), ("seq_lens", 2**24 - 3, 6)])
def test_a_window_that_meets_itself_in_the_ring_or_a_position_past_fp32_is_refused(argument, seq_len, rows):
    cache, path = np.zeros((1, 1, 10, 1), np.float32), np.full((1, rows), -1, np.int32)
    path[0, :4] = [0, 2, 3, 5]
    for backend in ("reference", BACKEND):
        with pytest.raises(ValueError, match=argument):
            compact_window(
                cache, cache.copy(), np.array([seq_len], np.int32), path, np.array([3], np.int32), ring=True,
                backend=backend,
            )  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_scrubbing_a_chain_needs_no_move_and_stops_at_what_was_written(backend):
    cache = np.arange(1, 11, dtype=np.float32).reshape(1, 1, 10, 1)
    path = np.array([[0, 1, -1, -1, -1]], np.int32)
    key_cache, _ = compact_window(
        cache, cache.copy(), np.array([2], np.int32), path, np.array([1], np.int32), scrub=True,
        draft_lens=np.array([3], np.int32), backend=backend,
    )  # fmt: skip
    assert key_cache.ravel().tolist() == [1, 2, 3, 4, 0, 0, 7, 8, 9, 10]


@pytest.mark.parametrize("backend", ["reference", BACKEND])
@pytest.mark.parametrize("cache_layout", ["NHPD", "NPHD"])
def test_t44_a_tree_is_compacted_by_block_and_offset(cache_layout, backend):
    """sglang#31218, #31215: a page-indexed buffer moved with token indices once the tree was wider than one."""
    shape = (4, 1, 64, 1) if cache_layout == "NHPD" else (4, 64, 1, 1)
    cache = np.arange(256, dtype=np.float32).reshape(shape)
    path = np.array([[0, 2, 5, 6, -1, -1, -1]], np.int32)
    key_cache, _ = compact_window(
        cache, cache.copy(), np.array([61], np.int32), path, np.array([3], np.int32),
        block_table=np.array([[3, 1]], np.int32), cache_layout=cache_layout, backend=backend,
    )  # fmt: skip
    # Positions 61, 63 lie in block 3, positions 66, 67 in block 1 at offsets 2, 3.
    expected = np.arange(256)
    expected[[192 + 61, 192 + 62, 192 + 63, 64 + 0]] = [192 + 61, 192 + 63, 64 + 2, 64 + 3]
    assert key_cache.ravel().tolist() == expected.tolist()


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_t46_scrubbing_touches_no_block_that_the_sequence_does_not_own(backend):
    """ROCm/ATOM#250, RBLN#1128: rows past the drafts reached a stale table entry, someone else's block."""
    cache = np.ones((3, 1, 16, 1), np.float32)
    compact_window(
        cache, cache.copy(), np.array([13], np.int32), np.array([[0, -1, -1, -1, -1]], np.int32),
        np.array([0], np.int32), draft_lens=np.array([2], np.int32), scrub=True,
        block_table=np.array([[1, 2]], np.int32), cache_layout="NHPD", backend=backend,
    )  # fmt: skip
    assert cache[1, 0, :14].all() and not cache[1, 0, 14:].any()
    assert cache[[0, 2]].all()


@pytest.mark.skipif(BACKEND != "emulator", reason="the emulator's own check")
@pytest.mark.parametrize("cache_layout", ["BHSD", "BHDS", "NHPD", "NPHD"])
def test_the_moves_need_no_order_but_that_of_their_data(cache_layout):
    """Overlapping moves through several tiles and shared buffers: nothing relies on DMAs running in program order."""
    case = make_case(4, batch=4, heads=8, rows=9, slots=40, layers=9, tree=True, cache_layout=cache_layout)
    draft_lens = written_first(case)
    kernel = loader.kernel("compact_window", BACKEND)[1]
    arguments = (case.key_caches, case.value_caches, case.seq_lens, case.path, case.num_accepted, draft_lens)
    emulator.simulate(kernel, strict=True)(*arguments, case.block_table, cache_layout, True, False)


BAD = {
    "num_accepted past the window": ("num_accepted", 1, 5),
    "negative length": ("seq_lens", 1, -1),
    "length past the end": ("seq_lens", 1, 2**31 - 1),
    "path past the end": ("seq_lens", 1, 36),
    "path that does not start at row 0": ("path", (1, 0), 1),
    "path that falls": ("path", (1, 2), 1),
    "path past the window": ("path", (1, 2), 5),
    "path past what was written": ("draft_lens", 1, 3),
    "bad block": ("block_table", (1, 2), 31),
    "missing block": ("block_table", (1, 1), -1),
}


@pytest.mark.parametrize("scrub", [False, True])
@pytest.mark.parametrize("cache_layout", ["BHSD", "BHDS", "NHPD"])
@pytest.mark.parametrize("what", BAD)
def test_on_the_device_a_sequence_with_bad_values_is_an_empty_slot(what, cache_layout, scrub):
    name, index, value = BAD[what]
    case = make_case(21, rows=5, slots=40, block_size=4, cache_layout=cache_layout)
    if name == "block_table" and case.block_table is None:
        pytest.skip("no blocks")
    case.seq_lens[:], case.num_accepted[:] = [3, 5, 7], [2, 2, 1]
    case.path = np.array([[0, 2, 4, -1, -1], [0, 2, 4, -1, -1], [0, 3, -1, -1, -1]], np.int32)
    if case.block_table is not None:
        case.block_table[:] = np.arange(30, dtype=np.int32).reshape(3, 10)
    expected, actual = case.cache_copies(), case.cache_copies()
    draft_lens = np.full(3, 4, np.int32)
    (draft_lens if name == "draft_lens" else getattr(case, name))[index] = value
    outputs = launch(
        "compact_window", *actual, case.seq_lens, case.path, case.num_accepted, draft_lens, case.block_table,
        cache_layout, scrub, False, backend=BACKEND, lnc=1,
    )  # fmt: skip
    for array, output in zip(actual[0] + actual[1], outputs):
        array[...] = output
    case.seq_lens[1], case.num_accepted[1] = 5, -1
    compact(case, expected, scrub=scrub, backend="reference")
    assert same_bytes(actual[0] + actual[1], expected[0] + expected[1])


REFUSED = {
    "cache_layout": lambda a: a.update(cache_layout="BSHD"),
    "block_table": lambda a: a.update(block_table=np.zeros((2, 3), np.int32)),
    "value_cache": lambda a: a.update(value_cache=a["value_cache"].astype(np.float64)),
    "key_cache": lambda a: a.update(key_cache=a["key_cache"][:, :1]),
    "seq_lens": lambda a: a["seq_lens"].fill(10),
    "num_accepted": lambda a: a["num_accepted"].fill(4),
    "path": lambda a: a["path"].fill(0),
    "path: got row": lambda a: a["seq_lens"].fill(9),
    "path: got dtype": lambda a: a.update(path=a["path"].astype(np.int64)),
    "draft_lens": lambda a: a.update(draft_lens=np.array([4, 3], np.int32)),
    "path: got row 3 at .1. with draft_lens 2": lambda a: a.update(draft_lens=np.array([3, 2], np.int32)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_before_anything_is_written(message):
    case = make_case(3, batch=2, rows=4, slots=12)
    arguments = {
        "key_cache": case.key_caches[0],
        "value_cache": case.value_caches[0],
        "seq_lens": np.array([1, 5], np.int32),
        "path": np.array([[0, 2, 3, -1], [0, 1, 3, -1]], np.int32),
        "num_accepted": np.array([2, 2], np.int32),
        "block_table": None,
        "cache_layout": "BHSD",
        "scrub": True,
    }
    before = case.cache_copies()
    REFUSED[message](arguments)
    for backend in ("reference", BACKEND):
        with pytest.raises(ValueError, match=message):
            compact_window(**arguments, backend=backend)
    assert same_bytes(case.key_caches + case.value_caches, before[0] + before[1])
