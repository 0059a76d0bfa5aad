"""The operators an instruction's `op` may name: one table for the language (`nl.add`), the checks and the bodies.

Sources: nki.api.shared.rst, tables of math operators and of activation functions; release notes 0.4 (trn3-only and
unsupported operators).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class Operator:
    """One operator.

    `alu` is its meaning on the Vector and GpSimd engines (float32 arrays, or integer arrays where `bitvec`), taking
    `arity` arrays; `activation` its meaning as a function of the Scalar engine (float32), valid where
    `domain[0] <= x <= domain[1]` (of |x| where `symmetric`). `identity` starts a reduction; None: no reduction allowed.
    `refused` says why trn2 has no such operator.
    """

    name: str
    alu: Callable | None = None
    arity: int = 2
    bitvec: bool = False
    identity: float | None = None
    activation: Callable[[Array], Array] | None = None
    domain: tuple[float, float] | None = None
    symmetric: bool = False
    refused: str | None = None

    # What `nl.add(x, y)` on tiles does; language.py sets it, because it needs the instructions.
    on_tiles: ClassVar[Callable | None] = None

    def __call__(self, *tiles, dtype=None):
        return Operator.on_tiles(self, *tiles, dtype=dtype)

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    @property
    def is_reduction(self) -> bool:
        return self.identity is not None

    def apply(self, left: Array, right: Array | None, reverse: bool = False) -> Array:
        """`left op right`, or `right op left` where `reverse`, in float32; comparisons give 0.0 and 1.0."""
        if self.arity == 1:
            return self.alu(left)
        return self.alu(right, left) if reverse else self.alu(left, right)

    def reduce(self, values: Array, axis: int | tuple[int, ...]) -> Array:
        """Reduction of `values` along `axis`, dimensions kept."""
        axes = axis if isinstance(axis, tuple) else (axis,)
        if self.alu in _UFUNCS:
            return self.alu.reduce(values, axis=axes, keepdims=True, dtype=values.dtype)
        # Logical and non-commutative operators fold element by element along the flattened axes.
        kept = values.shape[: axes[0]]
        ufunc = _LOGICAL.get(self.name, np.subtract)
        folded = ufunc.reduce(values.reshape(*kept, -1), axis=-1)
        return folded.astype(values.dtype).reshape(*kept, *(1,) * len(axes))

    def activate(self, x: Array) -> tuple[Array, bool]:
        """The Scalar engine's function of float32 `x`, NaN outside its domain, and whether any x was outside."""
        if self.domain is None:
            return self.activation(x), False
        low, high = np.float32(self.domain[0]), np.float32(self.domain[1])
        magnitude = np.abs(x) if self.symmetric else x
        outside = (magnitude < low) | (magnitude > high)
        if not outside.any():
            return self.activation(x), False
        return self.activation(np.where(outside, np.float32(np.nan), x)), True


_UFUNCS = {np.add, np.multiply, np.maximum, np.minimum, np.bitwise_and, np.bitwise_or, np.bitwise_xor}
_LOGICAL = {"logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor}

_HALF_SQRT = np.float32(math.sqrt(0.5))
_INVERSE_SQRT_2PI = np.float32(1 / math.sqrt(2 * math.pi))
_GELU_TANH = np.float32(math.sqrt(2 / math.pi))
_erf = np.frompyfunc(math.erf, 1, 1)


def _predicate(ufunc: np.ufunc) -> Callable:
    def compare(left, right):
        truth = ufunc(left, right)
        integer = np.result_type(left, right).kind in "iu"
        return truth.astype(np.result_type(left, right) if integer else np.float32)

    return compare


def _shift(ufunc: np.ufunc) -> Callable:
    def shift(left, right):
        # Logical shifts on the bit pattern; NumPy leaves shifts by the width or more undefined, the hardware gives 0.
        unsigned = np.dtype(f"u{left.dtype.itemsize}")
        bits, amount = left.view(unsigned), np.asarray(right).astype(np.int64) % (1 << 32)
        width = 8 * unsigned.itemsize
        shifted = ufunc(bits, np.minimum(amount, width - 1).astype(unsigned))
        return np.where(amount < width, shifted, unsigned.type(0)).view(left.dtype)

    return shift


def _sigmoid(x: Array) -> Array:
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def _normal_cdf(x: Array) -> Array:
    erf = _erf(x * _HALF_SQRT).astype(np.float32)
    return np.float32(0.5) * (np.float32(1) + erf)


def _gelu_dx(x: Array) -> Array:
    return _normal_cdf(x) + x * _INVERSE_SQRT_2PI * np.exp(np.float32(-0.5) * x * x)


def _gelu_tanh(x: Array) -> Array:
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(_GELU_TANH * (x + np.float32(0.044715) * x * x * x)))


def _swish(x: Array, slope: float = 1.0) -> Array:
    return x * _sigmoid(np.float32(slope) * x)


def _swish_dx(x: Array, slope: float = 1.0) -> Array:
    gate = _sigmoid(np.float32(slope) * x)
    return gate + np.float32(slope) * x * gate * (np.float32(1) - gate)


def _softplus(x: Array) -> Array:
    return np.logaddexp(np.float32(0), x)


def _rsqrt(x: Array) -> Array:
    return np.float32(1) / np.sqrt(x)


def _reciprocal(x: Array) -> Array:
    return np.float32(1) / x


def _identity(x: Array) -> Array:
    return x


_TRN3 = "NeuronCore-v4 (trn3) only"
_NOT_IN_HARDWARE = "not a hardware instruction: the compiler refuses it (multiply by a reciprocal instead)"

_TABLE = [
    Operator("add", np.add, identity=0.0),
    Operator("subtract", np.subtract, identity=0.0),
    Operator("multiply", np.multiply, identity=1.0),
    Operator("maximum", np.maximum, identity=-math.inf),
    Operator("minimum", np.minimum, identity=math.inf),
    Operator("equal", _predicate(np.equal)),
    Operator("not_equal", _predicate(np.not_equal)),
    Operator("greater", _predicate(np.greater)),
    Operator("greater_equal", _predicate(np.greater_equal)),
    Operator("less", _predicate(np.less)),
    Operator("less_equal", _predicate(np.less_equal)),
    Operator("logical_and", _predicate(np.logical_and), identity=1.0),
    Operator("logical_or", _predicate(np.logical_or), identity=0.0),
    Operator("logical_xor", _predicate(np.logical_xor), identity=0.0),
    Operator("power", np.power),
    Operator("invert", np.invert, arity=1, bitvec=True),
    Operator("bitwise_and", np.bitwise_and, bitvec=True, identity=-1),
    Operator("bitwise_or", np.bitwise_or, bitvec=True, identity=0),
    Operator("bitwise_xor", np.bitwise_xor, bitvec=True, identity=0),
    Operator("left_shift", _shift(np.left_shift), bitvec=True),
    Operator("right_shift", _shift(np.right_shift), bitvec=True),
    Operator("abs_max", refused=_TRN3),
    Operator("abs_min", refused=_TRN3),
    Operator("bypass", refused=_TRN3),
    Operator("prelu", refused=_TRN3),
    Operator("divide", refused=_NOT_IN_HARDWARE),
    Operator("mod", refused=_NOT_IN_HARDWARE),
    Operator("fmod", refused=_NOT_IN_HARDWARE),
    # tensor_partition_reduce alone takes it.
    Operator("average"),
    Operator("abs", np.abs, arity=1, activation=np.abs),
    # square and relu are activation functions here; as ALU operators they are trn3 only.
    Operator("square", arity=1, activation=np.square),
    Operator("relu", arity=1, activation=lambda x: np.maximum(x, np.float32(0))),
    Operator("rsqrt", _rsqrt, arity=1, activation=_rsqrt, domain=(2.0**-87, 2.0**97)),
    Operator("reciprocal", _reciprocal, arity=1, activation=_reciprocal, domain=(2.0**-42, 2.0**42), symmetric=True),
    Operator("copy", arity=1, activation=_identity),
    Operator("sigmoid", arity=1, activation=_sigmoid),
    Operator("gelu", arity=1, activation=lambda x: x * _normal_cdf(x)),
    Operator("gelu_dx", arity=1, activation=_gelu_dx),
    Operator("gelu_apprx_tanh", arity=1, activation=_gelu_tanh),
    Operator("gelu_apprx_sigmoid", arity=1, activation=lambda x: _swish(x, 1.702)),
    Operator("gelu_apprx_sigmoid_dx", arity=1, activation=lambda x: _swish_dx(x, 1.702)),
    Operator("silu", arity=1, activation=_swish),
    Operator("silu_dx", arity=1, activation=_swish_dx),
    Operator("tanh", arity=1, activation=np.tanh),
    Operator("softplus", arity=1, activation=_softplus),
    Operator("mish", arity=1, activation=lambda x: x * np.tanh(_softplus(x))),
    Operator("erf", arity=1, activation=lambda x: _erf(x).astype(np.float32)),
    Operator("erf_dx", arity=1, activation=lambda x: np.float32(2 / math.sqrt(math.pi)) * np.exp(-x * x)),
    Operator("exp", arity=1, activation=np.exp),
    Operator("log", arity=1, activation=np.log, domain=(2.0**-64, 2.0**64)),
    Operator("sin", arity=1, activation=np.sin, domain=(-math.pi, math.pi)),
    Operator("arctan", arity=1, activation=np.arctan, domain=(-math.pi / 2, math.pi / 2)),
    Operator("sqrt", arity=1, activation=np.sqrt, domain=(2.0**-116, 2.0**118)),
    Operator("sign", arity=1, activation=np.sign),
]

OPERATORS: dict[str, Operator] = {operator.name: operator for operator in _TABLE}
