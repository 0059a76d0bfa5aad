"""Selection by predicate, range, rank and value against plain NumPy."""

import numpy as np
import pytest

from .tiles import bf16, in_psum, nisa, nl, normal, rng, run

FP32_MIN = np.finfo(np.float32).min
RESET = nisa.reduce_cmd.reset_reduce


@pytest.mark.parametrize("dtype", [np.float32, bf16])
@pytest.mark.parametrize("shape", [(5, 9), (70, 2, 8)])
def test_range_select_masks_by_index_and_finds_the_row_maxima(shape, dtype):
    data, elements = normal(*shape, dtype=dtype), int(np.prod(shape[1:]))
    low = rng().integers(90, 100 + elements, (shape[0], 1)).astype(np.float32)
    high = rng(1).integers(90, 100 + elements, (shape[0], 1)).astype(np.float32)

    def emit(dst, maxima, data, low, high):
        nisa.range_select(
            dst=dst,
            on_true_tile=data,
            comp_op0=nl.greater_equal,
            comp_op1=nl.less,
            bound0=low,
            bound1=high,
            reduce_cmd=RESET,
            reduce_res=maxima,
            range_start=100,
        )

    selected, maxima = run(emit, data, low, high, out=[(shape, nl.float32), ((shape[0], 1), nl.float32)])
    index = 100 + np.arange(elements)
    inside = ((index >= low) & (index < high)).reshape(shape)
    expected = np.where(inside, data.astype(np.float32), FP32_MIN)
    np.testing.assert_array_equal(selected, expected)
    np.testing.assert_array_equal(maxima[:, 0], expected.reshape(shape[0], -1).max(axis=1))


def test_an_empty_range_is_minus_infinity_in_bfloat16_and_finite_in_its_maximum():
    data, bound = normal(3, 8), np.zeros((3, 1), np.float32)

    def emit(dst, maxima, data, bound):
        nisa.range_select(dst, data, nl.less, nl.less, bound, bound, reduce_cmd=RESET, reduce_res=maxima)

    selected, maxima = run(emit, data, bound, out=[((3, 8), nl.bfloat16), ((3, 1), nl.float32)])
    assert (selected.astype(np.float32) == -np.inf).all() and (maxima == FP32_MIN).all()


@pytest.mark.parametrize("predicate_dtype", [np.uint8, np.int8, np.int16, np.uint16])
@pytest.mark.parametrize("reverse", [False, True])
def test_select_reduce_chooses_between_a_tile_and_a_vector(predicate_dtype, reverse):
    data, other = normal(11, 3, 4, dtype=bf16), normal(11, 1)
    predicate = rng().integers(0, 2, (11, 3, 4)).astype(predicate_dtype)

    def emit(dst, maxima, predicate, data, other):
        nisa.select_reduce(
            dst=dst,
            predicate=predicate,
            on_true=data,
            on_false=other,
            reduce_res=maxima,
            reduce_cmd=RESET,
            reverse_pred=reverse,
        )

    selected, maxima = run(emit, predicate, data, other, out=[((11, 3, 4), nl.float32), ((11, 1), nl.float32)])
    expected = np.where((predicate != 0) != reverse, data.astype(np.float32), other[:, :, None])
    np.testing.assert_array_equal(selected, expected)
    np.testing.assert_array_equal(maxima[:, 0], expected.max(axis=(1, 2)))


def test_select_reduce_reads_psum():
    data, predicate = normal(4, 8), rng().integers(0, 2, (4, 8)).astype(np.uint8)
    emit = lambda dst, predicate, data: nisa.select_reduce(dst, predicate, in_psum(data), -1.0)  # noqa: E731
    result = run(emit, predicate, data, out=((4, 8), nl.float32))
    np.testing.assert_array_equal(result, np.where(predicate, data, np.float32(-1)))


@pytest.mark.parametrize("elements", [8, 9, 100, 16_384])
def test_max8_is_the_descending_top_of_each_partition(elements):
    data = normal(3, elements, dtype=bf16)
    result = run(lambda dst, x: nisa.max8(dst, x), data, out=((3, 8), nl.float32))
    np.testing.assert_array_equal(result, -np.sort(-data.astype(np.float32), axis=1)[:, :8])


@pytest.mark.parametrize("name", ["uint16", "uint32"])
def test_find_index8_pairs_repeated_values_with_successive_positions(name):
    data = np.array([[5, 1, 7, 7, 5, 0, 7, 2, 9]], np.float32)
    wanted = np.array([[7, 7, 5, 4, 7, 5, 9, 7]], np.float32)
    absent = np.iinfo(name).max
    result = run(lambda dst, x, v: nisa.nc_find_index8(dst, x, v), data, wanted, out=((1, 8), getattr(nl, name)))
    np.testing.assert_array_equal(result, [[2, 3, 0, absent, 6, 4, 8, absent]])


def test_find_index8_finds_what_max8_found():
    data = rng().integers(0, 40, (64, 60)).astype(np.float32)

    def emit(index, data):
        top = nl.ndarray((64, 8), dtype=nl.float32)
        nisa.max8(top, data)
        nisa.nc_find_index8(index, data, top)

    result = run(emit, data, out=((64, 8), nl.uint32))
    np.testing.assert_array_equal(result, np.argsort(-data, axis=1, kind="stable")[:, :8])


def test_match_replace8_follows_the_documented_order_of_repeated_values():
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    wanted = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    emit = lambda dst, index, x, v: nisa.nc_match_replace8(dst, x, v, -9.0, dst_idx=index)  # noqa: E731
    replaced, index = run(emit, data, wanted, out=[((1, 11), nl.float32), ((1, 8), nl.uint32)])
    np.testing.assert_array_equal(replaced, [[1, 2, -9, 4, -9, -9, -9, -9, -9, -9, -9]])
    np.testing.assert_array_equal(index, [[2, 10, 9, 8, 7, 6, 5, 4]])


def test_match_replace8_replaces_one_occurrence_for_each_value():
    data = np.array([[4, 4, 4, 1, 2, 3, 0, 5]], np.float32)
    wanted = np.array([[4, 4, 9, 9, 9, 9, 9, 0]], np.float32)
    emit = lambda dst, x, v: nisa.nc_match_replace8(dst=dst, data=x, vals=v, imm=7.0)  # noqa: E731
    np.testing.assert_array_equal(run(emit, data, wanted, out=((1, 8), nl.float32)), [[7, 7, 4, 1, 2, 3, 7, 5]])


def test_three_rounds_of_max8_sort_the_top_24():
    data = rng().permutation(64).astype(np.float32)[None]

    def emit(dst, data):
        for step in range(3):
            eight = dst[:, 8 * step : 8 * step + 8]
            nisa.max8(eight, data)
            nisa.nc_match_replace8(data, data, eight, float(FP32_MIN))

    np.testing.assert_array_equal(run(emit, data, out=((1, 24), nl.float32)), 63 - np.arange(24.0)[None])
