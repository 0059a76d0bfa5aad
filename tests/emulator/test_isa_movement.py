"""Copies, casts, gathers, scatters, transposes and shuffles against plain NumPy."""

import numpy as np
import pytest

from draft_verify.reference import emulator

from .tiles import assert_same_bits, bf16, fp8, in_psum, nisa, nl, normal, rng, run

FP32_MIN = np.finfo(np.float32).min


def copy(dst, src):
    nisa.tensor_copy(dst=dst, src=src)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.float32, bf16, fp8, np.uint8])
def test_a_copy_between_equal_dtypes_keeps_every_bit(dtype):
    bits = rng().integers(0, 256, (33, 7, np.dtype(dtype).itemsize), np.uint8)
    values = bits.view(dtype)[..., 0]
    assert_same_bits(run(copy, values, out=((33, 7), nl_dtype(dtype))), values)


def nl_dtype(dtype):
    name = np.dtype(dtype).name
    return getattr(nl, name)


def test_an_integer_above_two_to_the_24_is_damaged_on_its_way_to_another_dtype():
    values = np.array([[2**24 + 1, -(2**24) - 1, 2**31 - 1, 5]], np.int32)
    floats = run(copy, values, out=((1, 4), nl.float32))
    np.testing.assert_array_equal(floats, [[2**24, -(2**24), 2**31, 5]])


def test_float_to_integer_rounds_half_to_even_and_saturates():
    values = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 300.0, -300.0, np.inf, -np.inf, np.nan]], np.float32)
    result = run(copy, values, out=((1, 12), nl.int8))
    np.testing.assert_array_equal(result, [[0, 2, 2, 0, -2, 126, 127, 127, -128, 127, -128, 0]])
    wide = run(copy, np.float32([[2**31, -(2.0**40), -7.5]]), out=((1, 3), nl.int32))
    np.testing.assert_array_equal(wide, [[2**31 - 1, -(2**31), -8]])
    unsigned = run(copy, np.float32([[-3, 2**32, 255.5]]), out=((1, 3), nl.uint32))
    np.testing.assert_array_equal(unsigned, [[0, 2**32 - 1, 256]])


def test_the_lowest_float32_becomes_minus_infinity_in_bfloat16_and_float8():
    values = np.array([[FP32_MIN, 241.0, 500.0]], np.float32)
    assert run(copy, values, out=((1, 3), nl.bfloat16))[0, 0] == -np.inf
    narrow = run(copy, values, out=((1, 3), nl.float8_e4m3)).astype(np.float32)
    np.testing.assert_array_equal(narrow, [[-np.inf, 240.0, np.inf]])


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e5m2", "bfloat16", "float16"])
def test_narrow_floats_round_to_nearest_even_over_their_whole_range(name):
    bits = rng().integers(0, 2**32, (128, 64), np.uint32)
    values = bits.view(np.float32)
    values = np.where(np.isnan(values), np.float32(1), values)
    values[:, :32] = normal(128, 32) * 2.0 ** rng(1).integers(-12, 10, (128, 32))
    dtype = getattr(nl, name).np
    with np.errstate(over="ignore"):
        expected = values.astype(dtype)
    assert_same_bits(run(copy, values, out=((128, 64), getattr(nl, name))), expected)


def test_a_dma_moves_between_shapes_of_equal_size_and_converts_through_float32():
    values = normal(6, 35)
    np.testing.assert_array_equal(
        run(lambda dst, src: nisa.dma_copy(dst=dst, src=src.reshape((6, 5, 7))), values, out=((6, 35), nl.bfloat16)),
        values.astype(bf16),
    )


def test_a_gather_reads_the_rows_that_its_indices_name():
    def kernel(table, index):
        rows = nl.ndarray(index.shape, dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=index)
        tile = nl.ndarray((5, 3), dtype=table.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=table.ap(pattern=[[3, 5], [1, 3]], vector_offset=rows, indirect_dim=0))
        out = nl.ndarray((5, 3), dtype=table.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    table, index = normal(11, 3), np.array([[10], [0], [3], [3], [7]], np.uint32)
    np.testing.assert_array_equal(emulator.simulate(kernel)(table, index), table[index[:, 0]])


def test_a_scatter_skips_indices_out_of_bounds_where_asked():
    def kernel(table, index, values):
        rows = nl.ndarray(index.shape, dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=index)
        tile = nl.ndarray((3, 4), dtype=table.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=values)
        nisa.dma_copy(
            dst=table.ap(pattern=[[4, 3], [1, 4]], vector_offset=rows, indirect_dim=0),
            src=tile,
            oob_mode=nisa.oob_mode.skip,
        )
        return table

    table, values = normal(6, 4), normal(3, 4, seed=1)
    expected = table.copy()
    expected[4], expected[1] = values[0], values[2]
    emulator.simulate(kernel)(table, np.array([[4], [2**32 - 1], [1]], np.uint32), values)
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("shape", [(16, 96), (3, 5, 7), (2, 5, 3, 24)])
def test_a_dma_transpose_exchanges_the_first_and_last_dimensions(shape):
    axes = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(shape)]
    values = normal(*shape, dtype=bf16)

    def kernel(src):
        tile = nl.ndarray(tuple(shape[axis] for axis in axes), dtype=src.dtype, buffer=nl.sbuf)
        nisa.dma_transpose(dst=tile, src=src, axes=axes)
        out = nl.ndarray(tile.shape, dtype=src.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    assert_same_bits(emulator.simulate(kernel)(values), np.ascontiguousarray(values.transpose(axes)))


@pytest.mark.parametrize("columns", [1, 2])
def test_an_indirect_transpose_reads_its_indices_column_by_column(columns):
    def kernel(table, index):
        rows = nl.ndarray(index.shape, dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=index)
        count = 128 * columns
        tile = nl.ndarray((64, count), dtype=table.dtype, buffer=nl.sbuf)
        gathered = table.ap(pattern=[[64, count], [1, 64]], vector_offset=rows, indirect_dim=0)
        nisa.dma_transpose(dst=tile, src=gathered, axes=(1, 0))
        out = nl.ndarray(tile.shape, dtype=table.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    table, index = normal(300, 64, dtype=bf16), rng().integers(0, 300, (128, columns)).astype(np.uint32)
    expected = table[index.T.ravel()].T
    assert_same_bits(emulator.simulate(kernel)(table, index), np.ascontiguousarray(expected))


def test_dma_compute_adds_its_sources_in_float32():
    values = [normal(9, 5, seed=seed, dtype=bf16) for seed in range(3)]
    total = sum(value.astype(np.float32) for value in values)
    result = run(
        lambda dst, *srcs: nisa.dma_compute(dst=dst, srcs=list(srcs), reduce_op=nl.add, scales=[1.0] * 3),
        *values,
        out=((9, 5), nl.bfloat16),
    )
    assert_same_bits(result, total.astype(bf16))


def test_dma_compute_adds_rows_into_the_rows_that_indices_name():
    def kernel(table, index, values):
        rows = nl.ndarray(index.shape, dtype=nl.uint32, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=index)
        tile = nl.ndarray(values.shape, dtype=values.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=values)
        target = table.ap(pattern=[[4, 3], [1, 4]], vector_offset=rows, indirect_dim=0)
        nisa.dma_compute(dst=target, srcs=[target, tile], reduce_op=nl.add)
        return table

    table, values, index = normal(6, 4), normal(3, 4, seed=1), np.array([[5], [0], [2]], np.uint32)
    expected = table.copy()
    expected[index[:, 0]] += values
    emulator.simulate(kernel)(table, index, values)
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("predicate_dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("shape", [(5, 6), (40, 3, 2)])
def test_a_predicated_copy_leaves_the_rest_of_dst(shape, predicate_dtype):
    base, values = normal(*shape, dtype=bf16), normal(*shape, dtype=bf16, seed=1)
    predicate = rng().integers(0, 3, shape).astype(predicate_dtype)

    def emit(dst, base, values, predicate):
        nisa.tensor_copy(dst=dst, src=base)
        nisa.tensor_copy_predicated(dst=dst, src=values, predicate=predicate)

    result = run(emit, base, values, predicate, out=(shape, nl.bfloat16))
    assert_same_bits(result, np.where(predicate != 0, values, base))


def test_a_predicated_copy_takes_a_number_and_a_reversed_predicate():
    base, predicate = normal(4, 6), rng().integers(0, 2, (4, 6)).astype(np.uint8)

    def emit(dst, base, predicate):
        nisa.tensor_copy(dst=dst, src=base)
        nisa.tensor_copy_predicated(dst=dst, src=-2.5, predicate=predicate, reverse_pred=True)

    np.testing.assert_array_equal(
        run(emit, base, predicate, out=((4, 6), nl.float32)), np.where(predicate == 0, np.float32(-2.5), base)
    )


@pytest.mark.parametrize("name, value", [("float32", -3.5), ("bfloat16", FP32_MIN), ("int32", 2**31 - 1), ("uint8", 7)])
def test_memset_fills_with_the_value_in_dst_dtype(name, value):
    value = float(value) if "float" in name else value
    dtype = getattr(nl, name)
    result = run(lambda dst: nisa.memset(dst=dst, value=value), out=((3, 5), dtype))
    np.testing.assert_array_equal(
        result, np.full((3, 5), np.float32(value) if dtype.is_float else value).astype(dtype.np)
    )


def test_a_shuffle_permutes_within_each_quadrant_and_keeps_where_the_mask_is_255():
    base, values = normal(96, 5), normal(96, 5, seed=1)
    mask = [(i + 3) % 32 if i % 4 else 255 for i in range(32)]

    def emit(dst, base, values):
        nisa.tensor_copy(dst=dst, src=base)
        nisa.nc_stream_shuffle(dst=dst, src=values, shuffle_mask=mask)

    expected = base.copy()
    for row in range(96):
        if mask[row % 32] != 255:
            expected[row] = values[row // 32 * 32 + mask[row % 32]]
    np.testing.assert_array_equal(run(emit, base, values, out=((96, 5), nl.float32)), expected)


def test_a_shuffle_broadcasts_one_partition_over_a_quadrant():
    values = normal(1, 9)
    result = run(
        lambda dst, src: nisa.nc_stream_shuffle(dst=dst, src=src, shuffle_mask=[0] * 32),
        values,
        out=((32, 9), nl.float32),
    )
    np.testing.assert_array_equal(result, np.repeat(values, 32, axis=0))


def test_psum_is_read_and_written_by_copies():
    values = normal(7, 11)
    result = run(lambda dst, src: nisa.tensor_copy(dst=dst, src=in_psum(src)), values, out=((7, 11), nl.float32))
    np.testing.assert_array_equal(result, values)
