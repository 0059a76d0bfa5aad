"""The frame around every instruction test: arrays into SBUF tiles, a few instructions, tiles back into arrays."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from draft_verify.reference import emulator

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
bf16 = ml_dtypes.bfloat16
fp8 = ml_dtypes.float8_e4m3


def kernel_of(emit, out):
    """A kernel that loads its arguments into SBUF, calls emit(*results, *tiles) and stores the results.

    out: (shape, nl dtype), or a list of them, in SBUF.
    """
    outputs = out if isinstance(out, list) else [out]

    def kernel(*tensors):
        tiles = [nl.ndarray(tensor.shape, dtype=tensor.dtype, buffer=nl.sbuf) for tensor in tensors]
        for tile, tensor in zip(tiles, tensors):
            nisa.dma_copy(dst=tile, src=tensor)
        results = [nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf) for shape, dtype in outputs]
        emit(*results, *tiles)
        stored = [nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm) for shape, dtype in outputs]
        for hbm, result in zip(stored, results):
            nisa.dma_copy(dst=hbm, src=result)
        return tuple(stored) if isinstance(out, list) else stored[0]

    return kernel


def run(emit, *arrays, out, strict=True):
    """The result(s) of `emit` on `arrays`, see kernel_of."""
    return emulator.simulate(kernel_of(emit, out), strict=strict)(*arrays)


def in_psum(tile):
    """A copy of an SBUF tile in PSUM."""
    copy = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.psum)
    nisa.tensor_copy(dst=copy, src=tile)
    return copy


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape, dtype=np.float32, seed=0) -> np.ndarray:
    return rng(seed).standard_normal(shape, dtype=np.float32).astype(dtype)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal dtype, shape and bits, NaN payloads included."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(unsigned), np.ascontiguousarray(expected).view(unsigned)
    )
