"""The dtypes of nki.language: strings, as in the documentation, that know their NumPy representation."""

import ml_dtypes
import numpy as np


class DType(str):
    """A dtype of nki.language. Equal to its own name, hashable, and opaque to NumPy."""

    __slots__ = ("bits", "is_float", "is_integer", "itemsize", "np", "trn3_only")

    def __new__(cls, name, storage, *, is_float=False, trn3_only=False):
        self = super().__new__(cls, name)
        self.np = np.dtype(storage)
        self.itemsize = self.np.itemsize
        self.bits = 8 * self.itemsize
        self.is_float = is_float
        self.is_integer = not is_float and not trn3_only
        self.trn3_only = trn3_only
        return self

    def __reduce__(self):
        return resolve, (str(self),)  # copies are the dtype itself

    @property
    def name(self) -> str:
        return str(self)

    def __repr__(self):
        return f"nl.{self!s}"


bool_ = DType("bool", np.uint8)
int8 = DType("int8", np.int8)
int16 = DType("int16", np.int16)
int32 = DType("int32", np.int32)
uint8 = DType("uint8", np.uint8)
uint16 = DType("uint16", np.uint16)
uint32 = DType("uint32", np.uint32)
float16 = DType("float16", np.float16, is_float=True)
bfloat16 = DType("bfloat16", ml_dtypes.bfloat16, is_float=True)
float32 = DType("float32", np.float32, is_float=True)
tfloat32 = DType("tfloat32", np.float32, is_float=True)
float8_e4m3 = DType("float8_e4m3", ml_dtypes.float8_e4m3, is_float=True)
float8_e5m2 = DType("float8_e5m2", ml_dtypes.float8_e5m2, is_float=True)
float8_e4m3fn = DType("float8_e4m3fn", ml_dtypes.float8_e4m3fn, is_float=True, trn3_only=True)
float8_e8m0fnu = DType("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu, is_float=True, trn3_only=True)
float8_e5m2_x4 = DType("float8_e5m2_x4", np.uint32, trn3_only=True)
float8_e4m3fn_x4 = DType("float8_e4m3fn_x4", np.uint32, trn3_only=True)
float4_e2m1fn_x4 = DType("float4_e2m1fn_x4", np.uint16, trn3_only=True)

ALL = {name: value for name, value in list(globals().items()) if isinstance(value, DType)}
_BY_NAME = {str(dtype): dtype for dtype in ALL.values()}
# NumPy's bool array is a byte per element, as nl.bool_ is.
_FROM_NUMPY = {dtype.np: dtype for dtype in reversed(ALL.values()) if dtype not in ("bool", "tfloat32")}
_FROM_NUMPY |= {float32.np: float32, uint8.np: uint8, uint16.np: uint16, uint32.np: uint32, np.dtype(bool): bool_}


def resolve(dtype) -> DType | None:
    """The DType of a DType or of its name, None for anything else."""
    if isinstance(dtype, DType):
        return dtype
    return _BY_NAME.get(dtype) if isinstance(dtype, str) else None


def from_numpy(dtype) -> DType | None:
    """The DType that a NumPy array of `dtype` arrives as, None where trn2 has none (64-bit types)."""
    return _FROM_NUMPY.get(np.dtype(dtype))
