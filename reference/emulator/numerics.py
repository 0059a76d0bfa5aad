"""Conversions between dtypes as the engines make them: float32 inside, rounded to nearest even on the way out.

Sources: nki.isa stubs (per instruction "Data types"), release notes 0.6 (float32 to integer: nearest even, saturating),
nki.isa.range_select (a float32 beyond the range of a narrower float becomes infinite, it does not saturate).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

Array = np.ndarray

FP32_MIN = float(np.finfo(np.float32).min)
_FLOAT8 = {np.dtype(ml_dtypes.float8_e4m3), np.dtype(ml_dtypes.float8_e5m2), np.dtype(ml_dtypes.float8_e4m3fn)}
# ml_dtypes converts float8 one element at a time; a table of the 256 patterns is a hundred times faster.
_FLOAT8_VALUES = {dtype: np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32) for dtype in _FLOAT8}


def f32(value) -> Array:
    """`value` (array of any dtype, or Python number) as float32, without a copy where it already is."""
    if isinstance(value, np.ndarray):
        if value.dtype == np.float32:
            return value
        if value.dtype in _FLOAT8:
            return _FLOAT8_VALUES[value.dtype][value.view(np.uint8)]
        return value.astype(np.float32)
    return np.float32(value)


def column(operand, data: Array) -> Array:
    """A scalar operand for `data` [P, ...]: a number, or a [P, 1] vector shaped to broadcast; None is 0."""
    if isinstance(operand, np.ndarray):
        return f32(operand).reshape(-1, *(1,) * (data.ndim - 1))
    return np.float32(0 if operand is None else operand)


def like(value: Array, other: Array) -> Array:
    """`value` in the shape of `other`: operands may differ in shape where their elements per partition agree."""
    return value if value.shape == other.shape else value.reshape(other.shape)


def store(dst: Array, value: Array) -> None:
    """Write `value` into `dst` (same number of elements), converted to dst's dtype.

    Equal dtypes are copied bit by bit. Others go through float32: to integers it rounds to nearest even and saturates,
    to floats it rounds to nearest even and overflows to infinity. NaN as an integer is 0 (UNVERIFIED).
    """
    if value.ndim:
        value = like(value, dst)
    if value.dtype == dst.dtype or value.dtype == np.bool_:
        dst[...] = value
    elif dst.dtype.kind in "iu":
        dst[...] = _to_integer(f32(value), dst.dtype)
    elif dst.dtype in _FLOAT8:
        dst[...] = _to_float8(f32(value), dst.dtype)
    else:
        dst[...] = f32(value)


def _to_integer(value: Array, dtype: np.dtype) -> Array:
    limits = np.iinfo(dtype)
    # float32 holds every limit but those of 32 bits.
    wide = value.astype(np.float64) if dtype.itemsize == 4 else value
    rounded = np.clip(np.rint(wide), limits.min, limits.max)
    missing = np.isnan(rounded)
    return (np.where(missing, 0, rounded) if missing.any() else rounded).astype(dtype)


def _to_float8(value: Array, dtype: np.dtype) -> Array:
    if value.size < 4096:
        return value.astype(dtype)
    # Round the float32 significand to the narrow one by integer arithmetic on its bits, then look the pattern up.
    # The top 16 bits with a sticky last bit decide the same rounding as all 32: float8 keeps at most 3 of the 7 below.
    bits = value.view(np.uint32)
    top = ((bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)).astype(np.uint16)
    return _float8_by_top_bits(dtype)[top].view(dtype)


_TOP_BITS: dict[np.dtype, Array] = {}


def _float8_by_top_bits(dtype: np.dtype) -> Array:
    """float8 pattern of every float32 whose low half is zero, [65536] uint8."""
    if dtype not in _TOP_BITS:
        values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
        _TOP_BITS[dtype] = values.astype(dtype).view(np.uint8)
    return _TOP_BITS[dtype]
