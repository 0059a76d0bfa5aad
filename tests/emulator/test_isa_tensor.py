"""Matrix multiplication and transposes of the Tensor engine against plain NumPy."""

import ml_dtypes
import numpy as np
import pytest

from draft_verify.reference import emulator

from .tiles import assert_same_bits, bf16, fp8, kernel_of, nisa, nl, normal, rng, run


def matmul(dst, stationary, moving, **options):
    psum = nl.ndarray(dst.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=psum, stationary=stationary, moving=moving, accumulate=False, **options)
    nisa.tensor_copy(dst=dst, src=psum)


@pytest.mark.parametrize("dtypes", [(bf16, bf16), (fp8, bf16), (ml_dtypes.float8_e5m2, fp8), (np.float32, np.float32)])
@pytest.mark.parametrize("shape", [(128, 128, 512), (1, 3, 5), (77, 31, 200)])
def test_a_matmul_contracts_partitions_with_operands_rounded_to_their_dtype(shape, dtypes):
    contracted, rows, columns = shape
    stationary = normal(contracted, rows, dtype=dtypes[0])
    moving = normal(contracted, columns, dtype=dtypes[1], seed=1)
    result = run(matmul, stationary, moving, out=((rows, columns), nl.float32))
    expected = stationary.astype(np.float64).T @ moving.astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.sqrt(contracted))


def test_free_dimensions_are_flattened():
    stationary, moving = normal(20, 2, 3), normal(20, 4, 5, seed=1)
    result = run(matmul, stationary, moving, out=((6, 4, 5), nl.float32))
    expected = stationary.reshape(20, 6).T @ moving.reshape(20, 20)
    np.testing.assert_allclose(result.reshape(6, 20), expected, rtol=1e-6, atol=1e-5)


def test_accumulation_adds_to_what_the_group_has_so_far():
    stationary, moving = normal(3, 64, 32, dtype=bf16), normal(3, 64, 48, dtype=bf16, seed=1)

    def emit(dst, *tiles):
        psum = nl.ndarray((32, 48), dtype=nl.float32, buffer=nl.psum)
        for step in range(3):
            nisa.nc_matmul(psum, tiles[2 * step], tiles[2 * step + 1], accumulate=step > 0)
        nisa.tensor_copy(dst=dst, src=psum)

    arrays = [array for step in range(3) for array in (stationary[step], moving[step])]
    expected = np.einsum("skm,skn->mn", stationary.astype(np.float64), moving.astype(np.float64))
    np.testing.assert_allclose(run(emit, *arrays, out=((32, 48), nl.float32)), expected, rtol=1e-5, atol=1e-4)


def test_an_omitted_accumulate_overwrites_first_and_adds_afterwards():
    values = np.eye(8, dtype=np.float32)

    def emit(dst, tile):
        psum = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
        for _ in range(3):
            nisa.nc_matmul(psum, tile, tile)
        nisa.tensor_copy(dst=dst, src=psum)

    np.testing.assert_array_equal(run(emit, values, out=((8, 8), nl.float32), strict=False), 3 * values)


def test_an_omitted_accumulate_over_zeros_gives_the_sum_and_over_other_values_is_refused():
    values = np.eye(8, dtype=np.float32)

    def emit(start):
        def body(dst, tile):
            psum = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
            nisa.memset(psum, start)
            for _ in range(3):
                nisa.nc_matmul(psum, tile, tile)
            nisa.tensor_copy(dst=dst, src=psum)

        return body

    out = ((8, 8), nl.float32)
    np.testing.assert_array_equal(run(emit(0.0), values, out=out, strict=False), 3 * values)
    with pytest.raises(emulator.Refusal, match="another instruction than a matmul wrote"):
        run(emit(1.0), values, out=out, strict=False)


def test_double_row_contracts_partitions_and_the_first_free_dimension():
    stationary, moving = normal(64, 2, 24, dtype=fp8), normal(64, 2, 40, dtype=fp8, seed=1)
    result = run(
        lambda *tiles: matmul(*tiles, perf_mode=nisa.matmul_perf_mode.double_row),
        stationary,
        moving,
        out=((24, 40), nl.float32),
    )
    expected = np.einsum("kim,kin->mn", stationary.astype(np.float64), moving.astype(np.float64))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_row_tiles_use_their_part_of_the_array():
    stationary, moving = normal(32, 16, dtype=bf16), normal(32, 20, dtype=bf16, seed=1)
    result = run(
        lambda *tiles: matmul(*tiles, tile_position=(32, 0), tile_size=(32, 128)),
        stationary,
        moving,
        out=((16, 20), nl.float32),
    )
    expected = stationary.astype(np.float64).T @ moving.astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, bf16])
@pytest.mark.parametrize("shape", [(128, 128), (5, 3, 7), (128, 1), (1, 64)])
def test_a_tensor_engine_transpose_keeps_nan_and_infinity_bit_by_bit(shape, dtype):
    values = normal(*shape, dtype=dtype)
    values.reshape(-1)[:3] = [np.nan, np.inf, -np.inf]
    free = int(np.prod(shape[1:]))
    name = nl.bfloat16 if dtype is bf16 else nl.float32

    def emit(dst, data):
        psum = nl.ndarray((free, shape[0]), dtype=name, buffer=nl.psum)
        nisa.nc_transpose(dst=psum, data=data)
        nisa.tensor_copy(dst=dst, src=psum)

    result = run(emit, values, out=((free, shape[0]), name))
    assert_same_bits(result, np.ascontiguousarray(values.reshape(shape[0], free).T))


def test_the_transpose_mode_of_a_matmul_selects_by_the_identity():
    values, identity = normal(40, 9), np.eye(40, dtype=np.float32)
    values[0, 0] = np.nan

    def emit(dst, data, identity):
        psum = nl.ndarray((9, 40), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=psum, stationary=data, moving=identity, is_transpose=True, accumulate=False)
        nisa.tensor_copy(dst=dst, src=psum)

    assert_same_bits(run(emit, values, identity, out=((9, 40), nl.float32)), np.ascontiguousarray(values.T))


def test_the_vector_engine_transposes_up_to_32_by_32():
    values = rng().integers(0, 2**32, (32, 20), np.uint32)
    result = run(lambda dst, data: nisa.nc_transpose(dst=dst, data=data), values, out=((20, 32), nl.uint32))
    np.testing.assert_array_equal(result, values.T)


@pytest.mark.parametrize("rows, noted", [(6, False), (7, True)])
def test_a_transpose_to_an_address_in_psum_off_four_bytes_is_noted(rows, noted):
    """Two transposes of bf16 side by side: the second one begins after 2 * rows bytes."""
    data = normal(rows, 16, dtype=bf16)

    def emit(dst, tile):
        turned = nl.ndarray((16, 2, rows), dtype=nl.bfloat16, buffer=nl.psum)
        for copy in range(2):
            nisa.nc_transpose(dst=turned[:, copy, :], data=tile, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=dst, src=turned[:, 1, :])

    kernel = kernel_of(emit, ((16, rows), nl.bfloat16))
    notes = emulator.trace(kernel, data, strict=False).notes
    assert any("no multiple of 4 bytes" in note for note in notes) == noted
    assert_same_bits(emulator.simulate(kernel, strict=False)(data), data.T)
