"""verify_attention: the kernel against its reference, the reference against plain examples, and what must hold."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_verify import checks, loader
from draft_verify.bench.programs import instead_of_running
from draft_verify.reference import emulator
from draft_verify.reference.verify_attention import path_to
from draft_verify.verify_attention import verify_attention
from tests.attention_cases import Case, assert_agrees, cases, make_case
from tests.cache_cases import BACKEND, BFLOAT16, FLOAT32

BACKENDS = ["reference", BACKEND]
ARRAYS = ("query", "key", "value", "key_cache", "value_cache")


@given(case=cases())
def test_the_kernel_agrees_with_the_reference_on_any_combination(case):
    assert_agrees(case)


@settings(max_examples=8)
@given(case=cases(), lnc=st.just(2))
def test_two_cores_agree_with_the_reference(case, lnc):
    assert_agrees(case, lnc)


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "slots": 8193, "rows": 8, "group": 8, "head_dim": 128, "dtype": BFLOAT16, "cache_layout": "BHDS"},
        {"batch": 3, "slots": 4200, "group": 8, "rows": 8, "seq_lens": [4192, 700, 2048]},  # long and short sequences
        {
            "batch": 2,
            "slots": 4200,
            "group": 3,
            "rows": 4,
            "sinks": True,
            "sliding_window": 3000,
            "fp8": True,
            "dtype": BFLOAT16,
        },
        {"batch": 9, "slots": 4200, "rows": 2, "head_dim": 16, "sinks": True},  # both in runtime loops
        {"batch": 2, "rows": 64, "group": 8, "tree": True, "draft_lens": [63, 40], "dtype": BFLOAT16},
        {
            "batch": 1,
            "slots": 8200,
            "rows": 64,
            "group": 3,  # 192 rows, on two tiles, in passes over live slots only
            "tree": True,
            "cache_layout": "BHDS",
            "dtype": BFLOAT16,
            "seq_lens": [8136],
            "draft_lens": [63],
        },
        {
            "batch": 1,
            "slots": 8192,
            "rows": 48,
            "group": 8,  # 384 rows: two tiles of 96 on each of two cores
            "tree": True,
            "sinks": True,
            "cache_layout": "BHDS",
            "dtype": BFLOAT16,
            "seq_lens": [8100],
            "draft_lens": [47],
        },
        {"batch": 9, "rows": 9, "slots": 300, "tree": True, "sliding_window": 4, "head_dim": 16},
        {
            "batch": 2,
            "slots": 4500,
            "group": 8,
            "cache_layout": "NHPD",
            "fp8": True,
            "dtype": BFLOAT16,
            "seq_lens": [4490, 17],
        },
        {"batch": 9, "slots": 300, "heads": 3, "cache_layout": "NPHD", "sliding_window": 30, "head_dim": 16},
        {
            "batch": 4,
            "slots": 12_500,
            "group": 8,
            "rows": 2,
            "head_dim": 16,
            "cache_layout": "NPHD",
            "block_size": 48,
            "seq_lens": [12_490, 8200, 6144, 100],  # of three passes, two, one, and less
        },
        {
            "batch": 3,
            "slots": 8500,
            "group": 8,
            "rows": 8,
            "cache_layout": "NHPD",
            "block_size": 16,
            "dtype": BFLOAT16,
            "seq_lens": [8490, 4096, 4095],
        },
        {"batch": 2, "slots": 8192, "rows": 2, "cache_layout": "NPHD", "block_size": 64, "seq_lens": [8190, 5000]},
        {
            "batch": 3,
            "slots": 4096,
            "group": 8,
            "rows": 8,
            "heads": 1,
            "tree": True,
            "sinks": True,
            "cache_layout": "NHPD",
            "block_size": 16,
            "dtype": BFLOAT16,
            "seq_lens": [4080, 2500, 100],
        },
        {
            "batch": 2,
            "heads": 2,
            "slots": 4500,
            "group": 4,
            "head_dim": 192,
            "cache_layout": "NPHD",
            "dtype": BFLOAT16,
            "seq_lens": [4200, 17],
        },
        {"batch": 9, "slots": 4200, "rows": 2, "cache_layout": "NHPD", "dtype": BFLOAT16},
        {"batch": 2, "slots": 700, "cache_layout": "NHPD", "block_size": 131, "seq_lens": [680, 131]},
        {"batch": 2, "slots": 3500, "cache_layout": "NHPD", "block_size": 48, "seq_lens": [3490, 100]},
        {
            "batch": 1,
            "slots": 4200,
            "heads": 5,
            "group": 3,
            "head_dim": 128,
            "seq_lens": [4190],
        },  # 4 heads a tile, and 1
        {
            "batch": 1,
            "slots": 8192,
            "group": 8,
            "rows": 8,
            "head_dim": 128,
            "cache_layout": "BHDS",
            "dtype": BFLOAT16,
            "seq_lens": [5000],
        },  # two streams, two pieces, two passes that share slots
        {
            "batch": 1,
            "slots": 12_500,
            "group": 8,
            "rows": 16,
            "head_dim": 128,
            "cache_layout": "BHDS",
            "dtype": BFLOAT16,
            "seq_lens": [11_000],
        },  # one stream, whose passes are of two parts
        {"batch": 2, "slots": 8200, "group": 8, "rows": 16, "softcap": 5.0, "seq_lens": [8000, 5000]},
        {
            "batch": 3,
            "slots": 8192,
            "group": 8,
            "rows": 12,
            "head_dim": 64,
            "sinks": True,
            "cache_layout": "BHDS",
            "dtype": BFLOAT16,
            "seq_lens": [8100, 5000, 6144],
        },  # one stream, all long
        {
            "batch": 3,
            "slots": 8192,
            "group": 8,
            "rows": 12,
            "head_dim": 64,
            "dtype": BFLOAT16,
            "seq_lens": [4097, 4000, 8000],
        },  # one stream, not all long
        {"batch": 9, "slots": 9000, "rows": 3, "group": 4, "head_dim": 16, "tree": True},
        {"batch": 3, "slots": 9000, "rows": 33, "group": 9, "head_dim": 16, "seq_lens": [8960, 4500, 300]},
        {"batch": 9, "slots": 65, "ring": True, "seq_lens": [0, 1, 64, 65, 66, 100, 129, 130, 131]},
        {"batch": 2, "slots": 3000, "ring": True, "sliding_window": 2500, "seq_lens": [7001, 2999], "group": 4},
        {"batch": 9, "slots": 300, "heads": 3, "group": 2, "rows": 2, "head_dim": 16, "cache_layout": "BHDS"},
        {"batch": 2, "heads": 2, "slots": 700, "rows": 64, "group": 4},  # rows of a head on more than one row tile
        {"batch": 5, "heads": 3, "group": 3, "rows": 8, "slots": 300},  # the demo's model
        {"batch": 3, "heads": 2, "rows": 3, "head_dim": 256, "slots": 140},
        {"batch": 2, "rows": 5, "head_dim": 192, "slots": 140, "cache_layout": "BHDS", "dtype": BFLOAT16},
    ],
    ids=str,
)
@pytest.mark.parametrize("lnc", [1, 2])
def test_the_kernel_agrees_at_sizes_that_need_more_than_one_tile(sizes, lnc):
    assert_agrees(make_case(3, **sizes), lnc)


@settings(max_examples=6)
@given(case=cases(rows=33, group=4, slots=513))
def test_two_cores_that_share_the_rows_of_a_head_agree_with_the_reference(case):
    assert_agrees(case, 2)


@pytest.fixture
def strict():
    """What is risky but legal in a kernel is an error."""
    emulator.set_strict(True)
    yield
    emulator.set_strict(False)


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "slots": 8192, "group": 8, "rows": 8, "seq_lens": [8184], "dtype": BFLOAT16},
        {"batch": 9, "heads": 2, "cache_layout": "BHDS"},
        {"tree": True, "sliding_window": 5, "cache_layout": "NHPD"},
        {"batch": 9, "heads": 2, "ring": True, "tree": True, "cache_layout": "NPHD"},
        {"fp8": True, "dtype": BFLOAT16, "sinks": True, "softcap": 3.0},
        {"cache_only": True},
    ],
    ids=str,
)
def test_the_programs_hold_nothing_risky(sizes, lnc, strict):
    make_case(1, **sizes).run("emulator", lnc)


@pytest.mark.parametrize("lnc", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "heads": 8, "group": 8, "rows": 8, "head_dim": 128, "slots": 131_072, "layout": "BHDS"},
        {"batch": 2, "heads": 8, "group": 1, "rows": 4, "head_dim": 256, "slots": 8192, "dtype": FLOAT32},
        {"batch": 9, "heads": 8, "group": 1, "rows": 4, "head_dim": 256, "slots": 4096, "dtype": FLOAT32, "block": 256},
        {"batch": 64, "heads": 8, "group": 1, "rows": 8, "head_dim": 64, "slots": 4096, "layout": "BHDS"},
        {"batch": 1, "heads": 1, "group": 8, "rows": 64, "head_dim": 128, "slots": 131_072, "layout": "BHDS"},
    ],
    ids=str,
)
def test_the_largest_shapes_fit_on_the_chip(sizes, lnc, strict):
    """Traced only: nothing touches the memory of their caches."""
    size = {"dtype": BFLOAT16, "layout": "BHSD", "block": 0, **sizes}
    window = (size["batch"], size["heads"], size["rows"], size["head_dim"])
    query = np.zeros((window[0], window[1] * size["group"], *window[2:]), size["dtype"])
    key = np.zeros(window, size["dtype"])
    keys = values = np.zeros((*window[:2], size["slots"], window[3]), size["dtype"])
    table = None
    if size["layout"] == "BHDS":
        keys = np.zeros((*window[:2], window[3], size["slots"]), size["dtype"])
    if size["block"]:
        blocks = size["slots"] // size["block"]
        keys = values = np.zeros((window[0] * blocks, window[1], size["block"], window[3]), size["dtype"])
        table, size["layout"] = np.zeros((window[0], blocks), np.int32), "NHPD"
    lengths = (np.zeros(window[0], np.int32),) * 2
    arrays = (query, key, key, keys, values, lengths, None, table, None, None, None)
    kernel = loader.kernel("verify_attention", "emulator")[lnc]
    program = emulator.trace(kernel, *arrays, size["layout"], 0.1, 0, False, 0.0, True)
    assert sum(1 for _ in program.calls(0)) < 10_000


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_sees_no_cached_position_after_its_own(backend):
    """A shard whose slots begin at position 4, for rows at positions 5 and 6."""
    values = np.eye(5, dtype=np.float32)[None, None]
    zeros = np.zeros((1, 1, 2, 5), np.float32)
    case = Case(zeros, None, None, np.zeros_like(values), values, np.array([5], np.int32))
    positions = {"cache_start": np.array([4], np.int32), "query_positions": np.array([5], np.int32)}
    output, _ = case.run(backend, **positions)
    assert [np.flatnonzero(row).tolist() for row in output[0, 0]] == [[0, 1], [0, 1, 2]]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["BHSD", "BHDS"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_the_kernel_agrees_at_32768_slots(layout, dtype):
    case = make_case(batch=2, group=8, rows=8, head_dim=128, slots=32_768, dtype=dtype, cache_layout=layout,
                     seq_lens=[32_760, 5000], draft_lens=[7, 7])  # fmt: skip
    assert_agrees(case)


def one_head(query, key, value, key_cache, value_cache, **options) -> Case:
    """A batch of one with one head, from lists [T][D] and [S][D]."""
    arrays = [np.array(rows, np.float32)[None, None] for rows in (query, key, value, key_cache, value_cache)]
    seq_lens = np.array([options.pop("length", len(key_cache) - len(query))], np.int32)
    return Case(*arrays, seq_lens, options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_weighs_what_it_sees_by_the_exponential_of_its_scores(backend):
    log2, log3 = np.log(2.0), np.log(3.0)
    case = one_head([[1.0]], [[log3]], [[60.0]], [[log2], [0.0], [0.0]], [[6.0], [0.0], [0.0]], scale=1.0, length=2)
    output, lse = case.run(backend)
    assert output.item() == pytest.approx((2 * 6 + 1 * 0 + 3 * 60) / 6, rel=1e-5)
    assert lse.item() == pytest.approx(np.log(6.0), rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_sees_itself_and_the_rows_before_it(backend):
    values = [[1.0, 0, 0], [0, 2.0, 0], [0, 0, 3.0]]
    zeros = [[0.0] * 3] * 3
    output, _ = one_head(zeros, zeros, values, [[0.0] * 3] * 4, [[7.0] * 3] * 4, length=0).run(backend)
    expected = [[1, 0, 0], [1 / 2, 1, 0], [1 / 3, 2 / 3, 1]]
    np.testing.assert_allclose(output[0, 0], expected, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_a_group_share_their_key_value_head(backend):
    case = make_case(5, batch=1, heads=2, group=3, rows=2, slots=20, draft_lens=[1])
    output, _ = case.run(backend)
    for head in range(6):
        own = case.changed(
            query=case.query[:, head : head + 1],
            **{
                name: getattr(case, name)[:, head // 3 : head // 3 + 1]
                for name in ("key", "value", "key_cache", "value_cache")
            },
        )
        np.testing.assert_allclose(own.run(backend)[0][:, 0], output[:, head], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_slot_gives_zero_and_an_lse_of_minus_infinity(backend):
    case = make_case(1, batch=3, rows=3, slots=40, draft_lens=[2, -1, 0], seq_lens=[11, 30, 0])
    output, lse = case.run(backend)
    assert not output[1].any() and np.isneginf(lse[1]).all()
    assert not output[2, :, 1:].any() and np.isneginf(lse[2, :, 1:]).all()
    assert np.isfinite(lse[2, :, 0]).all() and np.isfinite(lse[0]).all()


@given(case=cases(batch=2, cache_only=False, rows=5, draft_lens=[4, 3]), row=st.integers(1, 4))
@settings(max_examples=10)
def test_a_later_draft_changes_no_bit_of_an_earlier_row(case, row):
    later = (slice(None), slice(None), slice(row, None))
    changed = case.changed(query=case.query.copy(), key=case.key.copy(), value=case.value.copy())
    for window in (changed.query, changed.key, changed.value):
        window[later] = (np.nan_to_num(window[later].astype(np.float32)) * 2 + 1).astype(window.dtype)
    before, after = case.run(), changed.run()
    for old, new in zip(before, after):
        assert old[:, :, :row].tobytes() == new[:, :, :row].tobytes()


@given(case=cases(batch=3), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_data_and_lengths_of_other_sequences_change_no_bit(case, seed):
    rng = np.random.default_rng(seed)
    others = [0, 2]
    draft_lens = case.options["draft_lens"].copy()
    changed = case.changed(seq_lens=case.seq_lens.copy(), options={**case.options, "draft_lens": draft_lens})
    table = case.options.get("block_table")
    blocks = others if table is None else [block for block in table[others].ravel() if block >= 0]
    for name in ARRAYS:
        array = getattr(case, name)
        if array is not None:
            array = array.copy()
            where = blocks if name.endswith("cache") else others
            array[where] = rng.standard_normal(array[where].shape).astype(array.dtype)
            setattr(changed, name, array)
    changed.seq_lens[others] = rng.integers(0, case.seq_lens[others] + 1)
    draft_lens[others] = np.minimum(rng.integers(-1, case.query.shape[2], 2), draft_lens[others])
    for old, new in zip(case.run(), changed.run()):
        assert old[1].tobytes() == new[1].tobytes()


def test_whether_other_sequences_are_long_changes_no_bit():
    sizes = {"batch": 2, "group": 8, "rows": 12, "head_dim": 32, "slots": 8192, "cache_layout": "BHDS"}
    case = make_case(1, **sizes, seq_lens=[8100, 5000], draft_lens=[11, 11])
    changed = case.changed(seq_lens=np.array([8100, 500], np.int32))
    for old, new in zip(case.run(lnc=2), changed.run(lnc=2)):
        assert old[0].tobytes() == new[0].tobytes()


@pytest.mark.parametrize(
    "sizes",
    [
        {"slots": 9000, "seq_lens": [8990, 4100, 4096, 3000, 700, 60, 0, 2048, 2049]},
        {"slots": 4200, "seq_lens": [4190, 4100, 4096, 3000, 700, 60, 0, 2048, 2049], "cache_layout": "NHPD"},
        {"slots": 130, "seq_lens": [0, 1, 100, 128, 500, 131, 200, 7, 3], "ring": True},
    ],
    ids=str,
)
def test_a_sequence_is_the_same_bit_for_bit_on_either_core(sizes):
    """Cores share nine sequences: turned round, most are the other core's."""
    case = make_case(4, batch=9, rows=2, head_dim=16, draft_lens=[1, 0, 1, 1, 1, 0, 1, -1, 1], **sizes)
    arrays = ("query", "key", "value", "seq_lens") if "cache_layout" in sizes else (*ARRAYS, "seq_lens")
    turned = case.changed(**{name: getattr(case, name)[::-1].copy() for name in arrays})
    turned.options = {
        name: option[::-1].copy() if isinstance(option, np.ndarray) else option for name, option in case.options.items()
    }
    assert_agrees(case, 2)
    for one, other in zip(case.run(lnc=2), turned.run(lnc=2)):
        assert one.tobytes() == other[::-1].tobytes()


@given(case=cases(tree=False))
@settings(max_examples=10)
def test_a_chain_given_as_a_tree_is_the_chain_bit_for_bit(case):
    chain = np.arange(-1, case.query.shape[2] - 1, dtype=np.int32)
    for plain, shared, own in zip(case.run(), case.run(tree=chain), case.run(tree=np.stack([chain] * len(case.query)))):
        assert plain.tobytes() == shared.tobytes() == own.tobytes()


@given(case=cases(batch=1, tree=True, cache_only=False, rows=16, draft_lens=[15]), row=st.integers(1, 15))
@settings(max_examples=10)
def test_a_sibling_changes_no_bit_of_rows_that_do_not_descend_from_it(case, row):
    changed = case.changed(query=case.query.copy(), key=case.key.copy(), value=case.value.copy())
    for window in (changed.query, changed.key, changed.value):
        window[:, :, row] = window[:, :, row] * 2 + 1
    parents = case.options["tree"][0]
    others = [t for t in range(16) if row not in path_to(parents, t)]
    for old, new in zip(case.run(), changed.run()):
        assert old[:, :, others].tobytes() == new[:, :, others].tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_siblings_do_not_see_each_other_t42(backend):
    """FastDeploy#3514: a tree mask applied outside the lower triangle only let siblings attend to each other."""
    values = np.eye(5, dtype=np.float32)[None, None]
    zeros = np.zeros_like(values)
    tree = np.array([-1, 0, 0, 1, 2], np.int32)
    case = Case(zeros, zeros, values, zeros, zeros, np.array([0], np.int32), {"tree": tree})
    output, _ = case.run(backend)
    assert [np.flatnonzero(row).tolist() for row in output[0, 0]] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]


@given(case=cases(cache_layout="NHPD", batch=2), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_permuting_blocks_and_table_together_changes_no_bit(case, seed):
    order = np.random.default_rng(seed).permutation(len(case.value_cache))
    place = np.argsort(order)
    table = case.options["block_table"]
    moved = case.changed(key_cache=case.key_cache[order], value_cache=case.value_cache[order])
    moved_table = np.where(table < 0, table, place[table]).astype(np.int32)
    for old, new in zip(case.run(), moved.run(block_table=moved_table)):
        assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("slots", [4096, 4200, 6144])  # at most two passes; three; three of whole segments
@settings(max_examples=4)
@given(seq_lens=st.lists(st.sampled_from([0, 16, 2047, 2048, 2049, 2064, 4095, 4096, 4160]), min_size=2, max_size=2))
def test_passes_over_blocks_take_every_live_slot_once_wherever_a_sequence_ends(lnc, slots, dtype, seq_lens):
    sizes = {"slots": slots, "rows": 3, "head_dim": 16, "cache_layout": "NHPD", "block_size": 16, "dtype": dtype}
    assert_agrees(make_case(5, batch=2, seq_lens=[min(length, slots - 3) for length in seq_lens], **sizes), lnc)


@pytest.mark.parametrize("lnc", [1, 2])
def test_runs_of_a_cache_of_more_than_fp32_counts_are_counted_in_int32(lnc, monkeypatch):
    sizes = {"batch": 2, "rows": 2, "head_dim": 16, "cache_layout": "NHPD", "block_size": 64}
    make_case(5, **sizes, slots=128).run(lnc=lnc)  # has the kernels loaded
    for name in [name for name in sys.modules if name.endswith(".attention_blocks")]:
        monkeypatch.setattr(sys.modules[name], "EXACT_IN_FP32", 0)
    assert_agrees(make_case(5, **sizes, slots=4352, seq_lens=[4300, 90]), lnc)  # as no other test has


@pytest.mark.parametrize("layout", ["NHPD", "NPHD"])
def test_sequences_may_share_the_blocks_of_a_common_prefix(layout):
    case = make_case(8, batch=2, heads=2, slots=64, seq_lens=[40, 50], draft_lens=[2, 3], cache_layout=layout)
    case.options["block_table"][1, :2] = case.options["block_table"][0, :2]
    assert_agrees(case)


# Defects that others had; the right results are in shared/traps.md, section d.


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_row_has_its_own_sliding_window_t38(backend):
    """flashinfer#4137: the last row's window start used for all left row 0 with position 10 only."""
    slots = np.eye(14, dtype=np.float32)
    case = Case(
        query=np.zeros((1, 1, 4, 14), np.float32),
        key=np.zeros((1, 1, 4, 14), np.float32),
        value=slots[None, None, 10:14],
        key_cache=np.zeros((1, 1, 14, 14), np.float32),
        value_cache=slots[None, None],
        seq_lens=np.array([10], np.int32),
        options={"sliding_window": 4},
    )
    output, _ = case.run(backend)
    for row in range(4):
        assert np.flatnonzero(output[0, 0, row]).tolist() == list(range(7 + row, 11 + row))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_very_negative_score_still_beats_a_masked_slot_t39(backend):
    """flashinfer#4401, lattice#361: a finite sentinel of -1e4 let the masked slot win, 100 instead of 1."""
    case = one_head([[-20000.0]], [[1.0]], [[1.0]], [[0.0], [0.0]], [[100.0], [100.0]], scale=1.0, length=0)
    output, lse = case.run(backend)
    assert output.item() == 1.0 and lse.item() == -20000.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_sees_nothing_is_zero_not_the_mean_of_values_t40(backend):
    """burn#4697, iree#24175, Automodel#2658: NaN, -inf or mean(V) for a fully masked row."""
    case = make_case(2, batch=2, rows=3, slots=20, seq_lens=[0, 9], draft_lens=[2, 2], cache_only=True)
    output, lse = case.run(backend)
    assert not output[0].any() and np.isneginf(lse[0]).all()
    assert output[1].all() and np.isfinite(lse[1]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_advance_a_sequence_at_a_time_t41(backend):
    """mlxcel#211: after accepting [3, 1] the batch's offset moved uniformly; each row must see its own slots only."""
    values = np.arange(1, 9, dtype=np.float32).reshape(1, 1, 8, 1)
    case = Case(
        query=np.zeros((2, 1, 1, 1), np.float32),
        key=np.zeros((2, 1, 1, 1), np.float32),
        value=np.zeros((2, 1, 1, 1), np.float32),
        key_cache=np.zeros((2, 1, 8, 1), np.float32),
        value_cache=np.concatenate([values, values]),
        seq_lens=np.array([2 + 4, 2 + 2], np.int32),
    )
    output, _ = case.run(backend)
    np.testing.assert_allclose(output.ravel(), [21 / 7, 10 / 5], rtol=1e-6)


def test_a_cache_of_another_shape_is_refused_before_anything_reads_past_it_t43():
    """vllm#51848, #51065, ascend#3024: tables and masks shorter than the rows they were used for."""
    case = make_case(7, batch=1, rows=2, slots=20, seq_lens=[9], draft_lens=[1])
    with pytest.raises(ValueError, match="key_cache"):
        case.changed(key_cache=case.key_cache[:, :, :10].copy()).run()
    paged = make_case(7, batch=1, rows=2, slots=64, seq_lens=[40], draft_lens=[1], cache_layout="NHPD")
    with pytest.raises(ValueError, match="seq_lens"):
        paged.run(block_table=paged.options["block_table"][:, :2].copy())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_slots_never_written_does_not_spread_t54(backend):
    """vllm#56734: a dummy batch left NaN in the cache, and 0 * NaN carried it through masked columns."""
    case = make_case(4, batch=1, rows=2, slots=300, seq_lens=[7], draft_lens=[0])
    assert np.isnan(case.value_cache).any() and np.isnan(case.key).any()
    output, lse = case.run(backend)
    assert np.isfinite(output).all() and np.isfinite(lse[:, :, 0]).all()


# Bad input.


GOOD = {"batch": 2, "heads": 2, "group": 2, "rows": 3, "slots": 20, "draft_lens": [2, 1], "seq_lens": [4, 17]}


@pytest.mark.parametrize(
    "argument, value",
    [
        ("query", np.zeros((2, 4, 3), np.float32)),
        ("query", np.zeros((2, 3, 3, 64), np.float32)),
        ("query", np.zeros((2, 4, 3, 64), np.float64)),
        ("query", np.zeros((2, 4, 65, 64), np.float32)),
        ("key", np.zeros((2, 2, 4, 64), np.float32)),
        ("value", np.zeros((2, 2, 3, 64), BFLOAT16)),
        ("value", None),
        ("key_cache", np.zeros((2, 2, 21, 64), np.float32)),
        ("key_cache", np.zeros((2, 2, 20, 64), BFLOAT16)),
        ("value_cache", np.zeros((2, 2, 20, 32), np.float32)),
        ("seq_lens", np.zeros(3, np.int32)),
        ("seq_lens", np.zeros(2, np.int64)),
        ("seq_lens", np.array([0, 19], np.int32)),
        ("seq_lens", np.array([-1, 0], np.int32)),
    ],
)  # fmt: skip
def test_a_bad_array_is_refused_by_name(argument, value):
    case = make_case(**GOOD).changed(**{argument: value})
    with pytest.raises(ValueError, match=argument):
        case.run("reference")


@pytest.mark.parametrize(
    "argument, value",
    [
        ("draft_lens", np.array([3, 0], np.int32)),
        ("draft_lens", np.array([-2, 0], np.int32)),
        ("draft_lens", np.array([1, 0], np.int64)),
        ("tree", np.array([0, 0, 0], np.int32)),
        ("tree", np.array([-1, 2, 0], np.int32)),
        ("tree", np.array([-1, -2, 0], np.int32)),
        ("tree", np.array([-1, 0], np.int32)),
        ("block_table", np.zeros((2, 4), np.int32)),
        ("cache_layout", "BSHD"),
        ("scale", 0.0),
        ("scale", float("nan")),
        ("softcap", -1.0),
        ("sliding_window", 0),
        ("sliding_window", 2.5),
        ("sinks", np.zeros(2, np.float32)),
        ("key_scale", 2.0),
        ("value_scale", np.ones(2, np.float32)),
        ("cache_start", np.array([-1, 0], np.int32)),
        ("query_positions", np.zeros(1, np.int32)),
    ],
)
def test_a_bad_option_is_refused_by_name(argument, value):
    case = make_case(**GOOD)
    with pytest.raises(ValueError, match=argument):
        case.run("reference", **{argument: value})


@pytest.mark.parametrize("dtype, slots, limit", [(FLOAT32, 2**22, "4 GB"), (BFLOAT16, 2**23, "int32")])
def test_a_cache_too_large_to_be_indexed_is_refused(dtype, slots, limit):
    case = make_case(**GOOD, dtype=dtype)
    cache = np.broadcast_to(np.zeros((), dtype), (2, 2, slots, 64))
    with pytest.raises(ValueError, match=f"key_cache: .*{limit}"):
        case.changed(key_cache=cache, value_cache=cache).run("reference")


def test_blocks_whose_runs_no_chip_lists_are_refused_by_the_kernel_alone():
    case = make_case(**GOOD, cache_layout="NHPD", block_size=17)
    few = case.options["block_table"]
    many = np.concatenate([few, np.full((2, 809 - few.shape[1]), -1, np.int32)], 1)  # 809 is a prime
    with pytest.raises(ValueError, match="block_table: got 809 blocks of 17 tokens"):
        case.run("emulator", block_table=many)
    output, _ = case.run("reference", block_table=many)
    np.testing.assert_array_equal(output, case.run("reference")[0])


def test_more_blocks_of_a_sequence_than_are_counted_are_refused():
    case = make_case(**GOOD, cache_layout="NHPD")
    with pytest.raises(ValueError, match="block_table: got 65536 blocks a sequence"):
        case.run("reference", block_table=np.zeros((2, 65_536), np.int32))


@pytest.mark.parametrize("entry", [-1, 99])
def test_a_block_that_does_not_exist_is_refused(entry):
    case = make_case(**GOOD, cache_layout="NHPD")
    case.options["block_table"][1, 1] = entry
    with pytest.raises(ValueError, match="block_table"):
        case.run("reference")


@pytest.mark.parametrize("block", [-1, None, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(
    "slots, seq_lens, bad", [(300, [20, 37, 300], 1), (4200, [4100, 4150, 60], 1), (6144, [6100, 4150, 60], 0)]
)
def test_on_the_device_a_sequence_with_a_bad_block_is_an_empty_slot(slots, seq_lens, bad, block, monkeypatch):
    sizes = {"batch": 3, "slots": slots, "head_dim": 16, "cache_layout": "NHPD", "block_size": 16, "dtype": BFLOAT16}
    case = make_case(8, **sizes, seq_lens=seq_lens, draft_lens=[3, 3, -1])
    monkeypatch.setattr(checks.attention, "verify_attention", lambda *args, **options: None)
    case.options["block_table"][bad, seq_lens[bad] // 16 - 1] = len(case.key_cache) if block is None else block
    output, lse = case.run()
    case.options["draft_lens"][bad] = -1
    expected, expected_lse = case.run()
    np.testing.assert_array_equal(output, expected)
    np.testing.assert_array_equal(lse, expected_lse)
    assert np.isneginf(lse[bad]).all() and np.isfinite(lse[1 - bad]).all()


def test_without_lse_the_output_alone_comes_back():
    case = make_case(6, batch=1, rows=2, slots=20)
    arrays = (case.query, case.key, case.value, case.key_cache, case.value_cache, case.seq_lens)
    output = verify_attention(*arrays, backend=BACKEND, **case.options)
    np.testing.assert_array_equal(output, case.run()[0])


@pytest.mark.parametrize("sinks, lnc", [(False, 1), (True, 2)])
def test_query_heads_in_several_launches_agree_with_the_reference(sinks, lnc, monkeypatch):
    binding = importlib.import_module("draft_verify.verify_attention")
    case = make_case(2, batch=2, heads=3, group=5, rows=33, tree=True, slots=300, sinks=sinks)
    launched = []
    launch = binding.launch
    monkeypatch.setattr(binding, "MOST_ROW_TILES", 3)  # a tile of three windows for each of three heads
    monkeypatch.setattr(binding, "launch", lambda *args, **where: launched.append(args[1]) or launch(*args, **where))
    assert_agrees(case, lnc)
    assert [query.shape[1] for query in launched] == [9, 6]


@pytest.mark.parametrize(
    "sizes, launches",
    [
        ({"batch": 64, "heads": 1, "query_heads": 8, "rows": 64, "slots": 4096}, 1),
        ({"batch": 64, "heads": 8, "query_heads": 64, "rows": 8, "slots": 2048}, 1),
        ({"batch": 4, "heads": 8, "query_heads": 64, "rows": 64, "slots": 8192}, 1),
        ({"batch": 1, "heads": 1, "query_heads": 8, "rows": 8, "slots": 131_072}, 1),
        ({"batch": 2, "heads": 8, "query_heads": 128, "rows": 64, "slots": 8192}, 2),
        ({"batch": 2, "heads": 1, "query_heads": 128, "rows": 64, "slots": 8192}, 2),
        ({"batch": 1, "heads": 7, "query_heads": 28, "rows": 33, "slots": 4097, "head_dim": 256, "dtype": FLOAT32}, 2),
        ({"batch": 2, "heads": 8, "query_heads": 64, "rows": 64, "slots": 8192, "head_dim": 256}, 2),
    ],
    ids=str,
)
@pytest.mark.skipif(BACKEND != "emulator", reason="traces without running")
def test_the_largest_shapes_make_programs_within_the_limits(sizes, launches):
    """Tracing refuses what needs more instructions, SBUF or PSUM than there are."""
    size = {"head_dim": 128, "dtype": BFLOAT16, **sizes}
    batch, heads, rows, slots, head_dim = (size[name] for name in ("batch", "heads", "rows", "slots", "head_dim"))

    def zeros(*shape):
        return np.broadcast_to(np.zeros((), size["dtype"]), shape)

    programs = []
    with instead_of_running(programs):
        verify_attention(
            zeros(batch, size["query_heads"], rows, head_dim),
            zeros(batch, heads, rows, head_dim),
            zeros(batch, heads, rows, head_dim),
            zeros(batch, heads, head_dim, slots),
            zeros(batch, heads, slots, head_dim),
            np.full(batch, slots - rows, np.int32),
            cache_layout="BHDS",
            backend="emulator",
            lnc=1,
        )
    assert len(programs) == launches
