"""commit_window: the kernel against its reference, the reference against plain examples, and what must be refused."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify import loader
from draft_verify.backends import launch
from draft_verify.commit_window import commit_window
from tests.cache_cases import BACKEND, BFLOAT16, FLOAT8, cases, make_case, same_bytes


def commit(case, caches, **options):
    return commit_window(
        *caches, case.keys, case.values, case.seq_lens, case.num_accepted, path=case.path, **case.options, **options
    )


@given(case=cases(), lnc=st.sampled_from([1, 2]))
def test_the_kernel_leaves_every_byte_of_every_cache_as_the_reference_does(case, lnc):
    expected, actual = case.cache_copies(), case.cache_copies()
    commit(case, expected, backend="reference")
    commit(case, actual, backend=BACKEND, lnc=lnc)
    assert same_bytes(actual[0], expected[0]), "keys"
    assert same_bytes(actual[1], expected[1]), "values"


@given(case=cases(tree=False, sizes=((4, 8, 8), (16, 4, 5), (1, 2, 128)), many=True), lnc=st.sampled_from([1, 2]))
def test_many_rows_move_in_runs_that_end_where_a_block_or_the_kept_rows_do(case, lnc):
    expected, actual = case.cache_copies(), case.cache_copies()
    commit(case, expected, backend="reference")
    commit(case, actual, backend=BACKEND, lnc=lnc)
    assert same_bytes(actual[0], expected[0]), "keys"
    assert same_bytes(actual[1], expected[1]), "values"


LARGE = {"head_dim": 128, "layers": 4}  # windows that move in runs
TREE_RING = {"head_dim": 64, "cache_layout": "BHDS", "ring": True, "tree": True}


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 64, "heads": 1, "rows": 8, "slots": 20, "head_dim": 4},  # several tiles of whole sequences
        {"batch": 2, "heads": 8, "rows": 64, "slots": 70, "head_dim": 4, "tree": True},  # tiles of some heads
        {"batch": 1, "heads": 3, "rows": 8, "slots": 300, "head_dim": 64, "layers": 30},  # the demo's model
        {"batch": 2, "heads": 1, "rows": 128, "slots": 129, "head_dim": 4},  # the largest window
        # Runs that end where the ring does, or a block; of eight rows; columns; powers of two, and of four.
        {"batch": 4, "heads": 8, "rows": 8, "slots": 16, "ring": True, **LARGE},
        {"batch": 4, "heads": 8, "rows": 8, "slots": 36, "cache_layout": "NHPD", "block_size": 6, **LARGE},
        {"batch": 4, "heads": 8, "rows": 8, "slots": 36, "cache_layout": "NPHD", "block_size": 5, **LARGE},
        {"batch": 2, "heads": 4, "rows": 19, "slots": 40, "head_dim": 32, "layers": 28},
        {"batch": 16, "heads": 8, "rows": 7, "slots": 9, "head_dim": 64, "cache_layout": "BHDS", "ring": True},
        {"batch": 2, "heads": 8, "rows": 17, "slots": 20, "head_dim": 128, "cache_layout": "BHDS"},
        {"batch": 4, "heads": 8, "rows": 9, "slots": 30, "head_dim": 128, "cache_layout": "BHDS", "tree": True},
        {"batch": 8, "heads": 8, "rows": 5, "slots": 9, "layers": 4, **TREE_RING},
        {"batch": 16, "heads": 8, "rows": 3, "slots": 9, "fp8": True, "layers": 3, **TREE_RING},
        {"batch": 2, "heads": 2, "rows": 23, "slots": 24, "head_dim": 128, "cache_layout": "BHDS", "ring": True},
        # More rows than a ring has slots, in runs and by columns; sequences that fill the partitions.
        {"batch": 4, "heads": 8, "rows": 24, "slots": 16, "ring": True, **LARGE},
        {"batch": 16, "heads": 8, "rows": 7, "slots": 5, "head_dim": 64, "cache_layout": "BHDS", "ring": True},
        {"batch": 100, "heads": 2, "rows": 8, "slots": 9, "ring": True, **LARGE},
        {"batch": 80, "heads": 2, "rows": 8, "slots": 12, "cache_layout": "NPHD", "dtype": BFLOAT16, **LARGE},
        {"batch": 70, "heads": 3, "rows": 5, "slots": 9, "head_dim": 5, "tree": True, "fp8": True, "dtype": BFLOAT16},
        {"batch": 90, "heads": 2, "rows": 8, "slots": 9, "ring": True, "tree": True, **LARGE},
        {"batch": 65, "heads": 2, "rows": 9, "slots": 14, "cache_layout": "NPHD", "tree": True, **LARGE},
    ],
    ids=str,
)
def test_the_kernel_agrees_where_rows_need_more_than_one_tile(sizes):
    case = make_case(7, **sizes)
    expected, actual = case.cache_copies(), case.cache_copies()
    commit(case, expected, backend="reference")
    commit(case, actual, backend=BACKEND)
    assert same_bytes(actual[0] + actual[1], expected[0] + expected[1])


@pytest.mark.parametrize("batch", [4, 70])
@pytest.mark.parametrize("cache_layout", ["BHSD", "BHDS", "NPHD"])
def test_a_path_needs_no_more_columns_than_a_tree_is_deep(cache_layout, batch):
    case = make_case(17, batch=batch, heads=8, rows=20, slots=26, head_dim=64, cache_layout=cache_layout, tree=True)
    case.num_accepted = np.minimum(case.num_accepted, 3)
    expected, actual = case.cache_copies(), case.cache_copies()
    commit(case, expected, backend="reference")
    case.path = np.ascontiguousarray(case.path[:, :4])
    commit(case, actual, backend=BACKEND)
    assert same_bytes(actual[0] + actual[1], expected[0] + expected[1])


@pytest.mark.parametrize("cache_layout", ["BHSD", "BHDS", "NHPD", "NPHD"])
def test_layers_in_one_tensor_are_further_sequences(cache_layout):
    """As the docstring says: one tensor's DMAs then serve all its layers."""
    layers, batch = 3, 4
    case = make_case(13, layers=layers, batch=batch, rows=6, head_dim=64, cache_layout=cache_layout, fp8=True)
    case = dataclasses.replace(case, scales={"key_scale": 0.5})
    expected, stacked = case.cache_copies(), [np.concatenate(caches) for caches in case.cache_copies()]
    commit(case, expected, backend="reference")
    block_table = case.block_table
    if block_table is not None:
        blocks = len(case.key_caches[0])
        shifted = [np.where(block_table < 0, -1, block_table + layer * blocks) for layer in range(layers)]
        block_table = np.concatenate(shifted).astype(np.int32)
    commit_window(
        *stacked, np.concatenate(case.keys), np.concatenate(case.values), np.tile(case.seq_lens, layers),
        np.tile(case.num_accepted, layers), block_table=block_table, cache_layout=cache_layout, key_scale=0.5,
        backend=BACKEND,
    )  # fmt: skip
    assert same_bytes(tuple(stacked), tuple(np.concatenate(caches) for caches in expected))


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_row_zero_and_the_accepted_drafts_are_written_and_nothing_else(backend):
    cache = np.zeros((3, 1, 6, 2), np.float32)
    window = np.arange(1, 25, dtype=np.float32).reshape(3, 1, 4, 2)
    seq_lens, num_accepted = np.array([1, 2, 5], np.int32), np.array([2, -1, 0], np.int32)
    key_cache, value_cache = commit_window(
        cache.copy(), cache.copy(), window, -window, seq_lens, num_accepted, backend=backend
    )
    expected = cache.copy()
    expected[0, 0, 1:4] = [[1, 2], [3, 4], [5, 6]]
    expected[2, 0, 5] = [17, 18]
    np.testing.assert_array_equal(key_cache, expected)
    np.testing.assert_array_equal(value_cache, -expected)


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_a_ring_keeps_the_last_rows_where_the_window_is_longer_than_the_ring(backend):
    cache = np.zeros((1, 1, 3, 1), np.float32)
    window = np.arange(8, dtype=np.float32).reshape(1, 1, 8, 1)
    key_cache, _ = commit_window(
        cache.copy(), cache.copy(), window, window, np.array([10], np.int32), np.array([6], np.int32), ring=True,
        backend=backend,
    )  # fmt: skip
    # Positions 10..16; the last three, 14, 15, 16, live in slots 2, 0, 1.
    np.testing.assert_array_equal(key_cache.ravel(), [5, 6, 4])


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_fp8_rows_are_divided_by_their_heads_scale_and_saturate_at_240(backend):
    cache = np.zeros((1, 2, 2, 2), FLOAT8)
    window = np.array([1.0, -3.0, 1e6, -1e6, 100.0, 241.0, 0.5, -0.0], np.float32).reshape(1, 2, 2, 2)
    key_cache, value_cache = commit_window(
        cache.copy(), cache.copy(), window, window, np.array([0], np.int32), np.array([1], np.int32),
        key_scale=np.array([0.5, 4.0], np.float32), backend=backend,
    )  # fmt: skip
    np.testing.assert_array_equal(
        key_cache.astype(np.float32).ravel(), [2.0, -6.0, 240.0, -240.0, 24.0, 60.0, 0.125, -0.0]
    )
    np.testing.assert_array_equal(
        value_cache.astype(np.float32).ravel(), [1.0, -3.0, 240.0, -240.0, 96.0, 240.0, 0.5, -0.0]
    )


@pytest.mark.skipif(BACKEND != "emulator", reason="counts the emulator's programs")
def test_one_program_serves_every_length_outcome_and_table():
    programs = loader.kernel("commit_window", BACKEND).programs
    counts = set()
    for seed in range(5):
        case = make_case(seed, cache_layout="NHPD")
        commit(case, case.cache_copies(), backend=BACKEND, lnc=1)
        counts.add(len(programs))
    assert len(counts) == 1


def bad_values():
    """(what is wrong with sequence 1, how to make it so)"""

    def change(name, index, value):
        def apply(case):
            getattr(case, name)[index] = value

        return apply

    yield "num_accepted past the window", change("num_accepted", 1, 5)
    yield "num_accepted far past the window", change("num_accepted", 1, 2**31 - 1)
    yield "negative length", change("seq_lens", 1, -1)
    yield "the most negative length", change("seq_lens", 1, -(2**31))
    yield "length past the end", change("seq_lens", 1, 2**31 - 1)
    yield "no room for the last row", change("seq_lens", 1, 38)
    yield "path that does not start at row 0", change("path", (1, 0), 1)
    yield "path that falls", change("path", (1, slice(0, 3)), [0, 3, 2])
    yield "path that repeats a row", change("path", (1, slice(0, 3)), [0, 1, 1])
    yield "path past the window", change("path", (1, 2), 5)
    yield "path with a hole", change("path", (1, 1), -1)


@pytest.mark.parametrize("change", [c for _, c in bad_values()], ids=[name for name, _ in bad_values()])
@pytest.mark.parametrize("layout", ["BHSD", "BHDS", "BHDS by columns", "NPHD"])
def test_on_the_device_a_sequence_with_bad_values_is_an_empty_slot(layout, change):
    sizes = {"heads": 11, "head_dim": 128} if layout == "BHDS by columns" else {}
    case = make_case(11, rows=5, slots=40, block_size=4, cache_layout=layout[:4], **sizes)
    case.seq_lens[:], case.num_accepted[:] = [3, 5, 7], [2, 2, 1]
    case.path = np.tile(np.arange(5, dtype=np.int32), (3, 1))
    if case.block_table is not None:
        case.block_table[:] = np.arange(30, dtype=np.int32).reshape(3, 10)
    expected, actual = case.cache_copies(), case.cache_copies()
    change(case)
    launch_commit(case, actual)
    case.seq_lens[1], case.num_accepted[1], case.path = 5, -1, None
    commit(case, expected, backend="reference")
    assert same_bytes(actual[0] + actual[1], expected[0] + expected[1])


@pytest.mark.parametrize("block", [-1, 31, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("cache_layout", ["NHPD", "NPHD"])
def test_on_the_device_a_sequence_with_a_bad_block_is_an_empty_slot(cache_layout, block):
    case = make_case(12, rows=5, slots=40, block_size=4, cache_layout=cache_layout)
    case.seq_lens[:], case.num_accepted[:] = [3, 5, 38], [2, 4, 1]
    case.path = np.tile(np.arange(5, dtype=np.int32), (3, 1))
    case.block_table[:] = np.arange(30, dtype=np.int32).reshape(3, 10)
    case.block_table[1, 2] = block
    expected, actual = case.cache_copies(), case.cache_copies()
    launch_commit(case, actual)
    case.num_accepted[1], case.path = -1, None
    commit(case, expected, backend="reference")
    assert same_bytes(actual[0] + actual[1], expected[0] + expected[1])


def launch_commit(case, caches):
    """Past the checks, as a device calls it: values are not known there."""
    outputs = launch(
        "commit_window", *caches, case.keys, case.values, case.seq_lens, case.num_accepted, case.path,
        case.block_table, None, None, case.cache_layout, case.path is None, case.ring, backend=BACKEND, lnc=1,
    )  # fmt: skip
    for array, output in zip(caches[0] + caches[1], outputs):
        array[...] = output


REFUSED = [
    ("cache_layout", "", lambda a: a.update(cache_layout="SBHD")),
    ("block_table", "", lambda a: a.update(block_table=np.zeros((2, 3), np.int32))),
    ("block_table", "NHPD", lambda a: a.update(block_table=None)),
    ("block_table", "NHPD", lambda a: a.update(block_table=a["block_table"].astype(np.int64))),
    ("block_table", "NHPD", lambda a: a.update(block_table=a["block_table"][:1])),
    ("block_table", "NHPD", lambda a: a["block_table"].fill(-1)),
    ("block_table", "NHPD", lambda a: a["block_table"].fill(99)),
    ("block_table", "NHPD", lambda a: a["block_table"].fill(1)),
    ("key", "", lambda a: a.update(key=a["key"].astype(np.float64))),
    ("key", "", lambda a: a.update(key=a["key"][0])),
    ("key", "", lambda a: a.update(key=a["key"][:, :, :0])),
    ("value", "", lambda a: a.update(value=a["value"][:, :, :2])),
    ("value", "", lambda a: a.update(value=a["value"].astype(BFLOAT16))),
    ("value", "", lambda a: a.update(value=(a["value"], a["value"]))),
    ("key_cache", "", lambda a: a.update(key_cache=a["key_cache"][:, :, :3])),
    ("key_cache", "BHDS", lambda a: a.update(key_cache=np.swapaxes(a["key_cache"], 2, 3))),
    ("key_cache", "", lambda a: a["key_cache"].setflags(write=False)),
    ("value_cache", "", lambda a: a.update(value_cache=a["value_cache"].astype(np.float16))),
    ("value_cache", "", lambda a: a.update(value_cache=a["value_cache"][:1])),
    ("seq_lens", "", lambda a: a.update(seq_lens=a["seq_lens"].astype(np.int64))),
    ("seq_lens", "", lambda a: a.update(seq_lens=a["seq_lens"][:1])),
    ("seq_lens", "", lambda a: a["seq_lens"].fill(-1)),
    ("seq_lens", "", lambda a: a["seq_lens"].fill(10)),
    ("seq_lens", "ring", lambda a: a["seq_lens"].fill(2**24)),
    ("num_accepted", "", lambda a: a["num_accepted"].fill(4)),
    ("num_accepted", "", lambda a: a["num_accepted"].fill(-2)),
    ("num_accepted", "", lambda a: a.update(num_accepted=a["num_accepted"].astype(np.float32))),
    ("path", "", lambda a: a.update(path=np.zeros((2, 3), np.int32))),
    ("path", "", lambda a: a.update(path=np.tile(np.arange(5, dtype=np.int32), (2, 1)))),
    ("num_accepted", "", lambda a: a.update(path=np.tile(np.arange(2, dtype=np.int32), (2, 1)))),
    ("path", "", lambda a: a.update(path=np.array([[0, 1, 2, -1], [1, 2, 3, -1]], np.int32))),
    ("path", "", lambda a: a.update(path=np.array([[0, 1, 2, -1], [0, 2, 1, -1]], np.int32))),
    ("path", "", lambda a: a.update(path=np.array([[0, 1, 2, -1], [0, 2, 4, -1]], np.int32))),
    ("path", "", lambda a: a.update(path=np.array([[0, 1, 2, -1], [0, 1, -1, -1]], np.int32))),
    ("key_scale", "", lambda a: a.update(key_scale=1.0)),
    ("key_scale", "fp8", lambda a: a.update(key_scale=0.0)),
    ("value_scale", "fp8", lambda a: a.update(value_scale=np.ones(3, np.float32))),
    ("value_scale", "fp8", lambda a: a.update(value_scale=np.float64(1) * np.ones(2))),
    ("value_scale", "fp8", lambda a: a.update(value_scale=float("nan"))),
]  # fmt: skip


@pytest.mark.parametrize("argument, kind, spoil", REFUSED)
def test_bad_input_is_refused_before_anything_is_written(argument, kind, spoil):
    layout = kind if kind in ("BHDS", "NHPD") else "BHSD"
    case = make_case(
        3, batch=2, rows=4, slots=12, cache_layout=layout, block_size=4, ring=kind == "ring", fp8=kind == "fp8"
    )
    case.seq_lens[:], case.num_accepted[:] = [1, 5], [2, 2]
    if case.block_table is not None:
        case.block_table[:] = [[0, 1, 2], [3, 4, 5]]
    arguments = {
        "key_cache": case.key_caches[0],
        "value_cache": case.value_caches[0],
        "key": case.keys[0],
        "value": case.values[0],
        "seq_lens": case.seq_lens,
        "num_accepted": case.num_accepted,
        **case.options,
    }
    before = case.cache_copies()
    spoil(arguments)
    for backend in ("reference", BACKEND):
        with pytest.raises(ValueError, match=argument):
            commit_window(**arguments, backend=backend)
    assert same_bytes(case.key_caches + case.value_caches, before[0] + before[1])


def test_torch_caches_are_written_in_place_bf16_and_fp8_by_their_bits():
    torch = pytest.importorskip("torch")
    window = torch.tensor([[[[1.5, -300.0], [7.0, 8.0]]]])
    lengths = torch.tensor([2], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    for dtype, window_dtype, second in (
        (torch.bfloat16, torch.bfloat16, -300.0),
        (torch.float8_e4m3fn, torch.bfloat16, -240.0),
    ):
        cache = torch.zeros(1, 1, 4, 2).to(dtype)
        rows = window.to(window_dtype)
        key_cache, _ = commit_window(cache, cache.clone(), rows, rows, *lengths)
        assert cache.float().flatten().tolist() == [0, 0, 0, 0, 1.5, second, 0, 0]
        assert key_cache.dtype == dtype and key_cache.data_ptr() == cache.data_ptr()


def test_caches_that_are_views_of_a_larger_array_are_written_in_place():
    case = make_case(5, batch=2, rows=3, slots=9)
    case.seq_lens[:], case.num_accepted[:] = [1, 4], [2, 0]
    whole = np.zeros((2, 2, 9, 16), np.float32)
    view = whole[..., ::2]
    for backend in ("reference", BACKEND):
        whole[:] = 0
        commit_window(
            view, case.value_caches[0], case.keys[0], case.values[0], case.seq_lens, case.num_accepted, backend=backend
        )
        np.testing.assert_array_equal(whole[0, :, 1:4, ::2], case.keys[0][0])
        assert not whole[..., 1::2].any()


# Public defects of other systems (traps.md, e): the input that triggers each, with its right result.


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_t41_each_sequence_advances_by_its_own_accepted_rows(backend):
    """lablup/mlxcel#211, mlx-vlm#1155: B=2 accepts [3, 1], the offset was advanced uniformly: a hole in row 1."""
    cache = np.full((2, 1, 12, 1), np.nan, np.float32)
    seq_lens = np.array([2, 2], np.int32)
    for step, accepted in enumerate(([3, 1], [0, 2])):
        num_accepted = np.array(accepted, np.int32)
        window = 100 * step + np.arange(8, dtype=np.float32).reshape(2, 1, 4, 1)
        commit_window(cache, cache.copy(), window, window, seq_lens, num_accepted, backend=backend)
        seq_lens += num_accepted + 1
    assert cache[0, 0, 2:7, 0].tolist() == [0, 1, 2, 3, 100]
    assert cache[1, 0, 2:7, 0].tolist() == [4, 5, 104, 105, 106]
    assert np.isnan(cache[:, :, 7:]).all() and np.isnan(cache[:, :, :2]).all()


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_t46_padded_rows_touch_no_block_that_the_sequence_does_not_own(backend):
    """ROCm/ATOM#250, RBLN#1128: L=13, P=16, two drafts padded to a window of 5, one block owned, the table's next entry
    stale: positions 16 and 17 went to someone else's block."""
    cache = np.zeros((3, 1, 16, 1), np.float32)
    window = np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5, 1)
    table = np.array([[1, 2]], np.int32)  # 2 is stale
    commit_window(
        cache, cache.copy(), window, window, np.array([13], np.int32), np.array([2], np.int32), block_table=table,
        cache_layout="NHPD", backend=backend,
    )  # fmt: skip
    assert cache[1, 0, 12:].ravel().tolist() == [0, 1, 2, 3]
    assert not cache[[0, 2]].any()


@pytest.mark.parametrize("backend", ["reference", BACKEND])
@pytest.mark.parametrize("num_layers", [1, 4])
def test_t52_every_layer_is_rolled_back(num_layers, backend):
    """mlx-swift#173: only layer 0 was trimmed."""
    case = make_case(9, layers=num_layers, batch=1, rows=4)
    case.seq_lens[:], case.num_accepted[:] = 3, 1
    actual = case.cache_copies()
    commit(case, actual, backend=backend)
    for layer in range(num_layers):
        np.testing.assert_array_equal(actual[0][layer][:, :, 3:5], case.keys[layer][:, :, :2])
        np.testing.assert_array_equal(actual[0][layer][:, :, 5:], case.key_caches[layer][:, :, 5:])


@pytest.mark.parametrize("backend", ["reference", BACKEND])
@pytest.mark.parametrize("cache_layout", ["NHPD", "NPHD"])
def test_t53_whole_committed_blocks_never_change_so_that_they_may_be_shared(cache_layout, backend):
    """vllm#12333, #12415, #18668: a prefix cache held blocks with unverified drafts in them."""
    shape = (5, 1, 4, 1) if cache_layout == "NHPD" else (5, 4, 1, 1)
    cache = np.full(shape, np.nan, np.float32)
    table = np.array([[0, 1, 3, -1], [0, 1, 4, -1]], np.int32)  # two sequences share their first 8 tokens
    cache[:2] = np.arange(8, dtype=np.float32).reshape(2, *shape[1:])
    seq_lens = np.array([8, 8], np.int32)
    for step in range(2):
        shared = cache[:2].copy()
        window = (100 * step + np.arange(8, dtype=np.float32)).reshape(2, 1, 4, 1)
        window[:, :, 2:] = np.nan  # drafts that were rejected
        num_accepted = np.array([1, 0], np.int32)
        commit_window(
            cache, cache.copy(), window, window, seq_lens, num_accepted, block_table=table, cache_layout=cache_layout,
            backend=backend,
        )  # fmt: skip
        seq_lens += num_accepted + 1
        np.testing.assert_array_equal(cache[:2], shared)
    # Sequence 0 has filled its third block with committed tokens alone: only now may it be hashed.
    assert cache[3].ravel().tolist() == [0, 1, 100, 101]
    assert cache[4].ravel()[:2].tolist() == [4, 104] and np.isnan(cache[4].ravel()[2:]).all()


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_t54_padding_rows_of_an_fp8_window_never_reach_the_cache(backend):
    """vllm#56734: a dummy batch wrote uninitialised rows, NaN in fp8, which then spread through masked columns."""
    cache = np.zeros((2, 1, 8, 4), FLOAT8)
    window = np.full((2, 1, 4, 4), np.nan, ml_dtypes.bfloat16)
    window[0, :, :2] = 1
    commit_window(
        cache, cache.copy(), window, window, np.array([3, 0], np.int32), np.array([1, -1], np.int32), backend=backend
    )
    assert (cache[0, 0, 3:5] == 1).all()
    assert np.count_nonzero(cache.astype(np.float32)) == 8


def test_t55_a_window_that_would_run_past_the_end_is_refused():
    """exllamav2#274, vllm#16087: L + K + 1 > the longest context: written past the end."""
    cache, window = np.zeros((1, 1, 8, 2), np.float32), np.ones((1, 1, 4, 2), np.float32)
    seq_lens = np.array([6], np.int32)
    with pytest.raises(ValueError, match="seq_lens"):
        commit_window(cache, cache.copy(), window, window, seq_lens, np.array([2], np.int32))
    assert not cache.any()
    # The window itself may reach past the end: only accepted rows need room.
    commit_window(cache, cache.copy(), window, window, seq_lens, np.array([1], np.int32))
    assert cache[0, 0, 6:].all()
