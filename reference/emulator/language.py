"""nki.language: allocation and the tile helpers, each a few instructions on fresh tiles (nki-reference.md 3.8)."""

from __future__ import annotations

from math import prod

import numpy as np

from . import capacity, context, control, dtypes, isa
from .enums import MemoryRegion, engine
from .instruction import Refusal, instruction
from .objects import NKIObject
from .opaque import Opaque
from .operators import OPERATORS, Operator
from .rules import PSUM_ALIGN, QUADRANT
from .tensor import PARTITIONS, NkiTensor
from .views import DynamicSlice

SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum


class _TileSize:
    """Hardware limits, under the documented names."""

    pmax = PARTITIONS
    psum_fmax = psum_bank_fmax = capacity.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = capacity.PSUM_BANK_BYTES
    psum_num_banks = capacity.PSUM_BANKS
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_min_align = PSUM_ALIGN
    sbuf_min_align = capacity.SBUF_ALIGN
    sbuf_fmax_bytes = total_available_sbuf_size = capacity.SBUF_BYTES
    sbuf_fmax = capacity.SBUF_BYTES // 4
    sbuf_size_bytes = capacity.SBUF_BYTES * PARTITIONS


tile_size = _TileSize()


def ndarray(shape, dtype, buffer=SBUF, name="", address=None) -> NkiTensor:
    """A new tensor; its contents are undefined until written."""
    return NkiTensor.whole(context.current("nl.ndarray").storage(shape, dtype, buffer, name, address))


def full(shape, fill_value, dtype, buffer=SBUF, name="") -> NkiTensor:
    dtype = dtypes.resolve(dtype) or dtype
    tile = ndarray(shape, dtype, buffer, name)
    if not tile.is_onchip:
        raise Refusal("only on-chip tensors are filled; store a tile instead", buffer=buffer)
    isa.memset(tile, int(fill_value) if dtype.is_integer else float(fill_value))
    return tile


def zeros(shape, dtype, buffer=SBUF, name="") -> NkiTensor:
    return full(shape, 0, dtype, buffer, name)


def ones(shape, dtype, buffer=SBUF, name="") -> NkiTensor:
    return full(shape, 1, dtype, buffer, name)


def zeros_like(x, dtype=None, buffer=None, name="") -> NkiTensor:
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def empty_like(x, dtype=None, buffer=None, name="") -> NkiTensor:
    return ndarray(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def shared_constant(constant) -> NkiTensor:
    """A tensor in shared HBM that holds a NumPy array, or what a .npy file holds, from the start."""
    array = np.ascontiguousarray(np.load(constant) if isinstance(constant, str) else constant)
    dtype = dtypes.from_numpy(array.dtype)
    if dtype is None:
        raise Refusal("shared_constant: trn2 has no such dtype", dtype=array.dtype)
    storage = context.current("nl.shared_constant").storage(array.shape, dtype, MemoryRegion.shared_hbm, constant=array)
    if storage.constant.tobytes() != array.tobytes():
        raise Refusal("shared_constant: both cores share one constant, so theirs must be equal")
    return NkiTensor.whole(storage)


def shared_identity_matrix(n, dtype=dtypes.uint8, dst=None) -> NkiTensor:
    """The n x n identity in SBUF."""
    dtype = dtypes.resolve(dtype) or dtype
    dst = ndarray((n, n), dtype) if dst is None else dst
    isa.dma_copy(dst, shared_constant(np.eye(n).astype(dtype.np)))
    return dst


def load(src, dtype=None) -> NkiTensor:
    tile = ndarray(src.shape, dtype or src.dtype)
    isa.dma_copy(tile, src)
    return tile


def load_transpose2d(src, dtype=None) -> NkiTensor:
    tile = ndarray(src.shape[::-1], src.dtype)
    isa.dma_transpose(tile, src)
    return tile if dtype in (None, src.dtype) else copy(tile, dtype)


def store(dst, value) -> None:
    isa.dma_copy(dst, value)


def copy(x, dtype=None) -> NkiTensor:
    tile = ndarray(x.shape, dtype or x.dtype)
    isa.tensor_copy(tile, x)
    return tile


def _on_tiles(operator: Operator, x, y=None, dtype=None) -> NkiTensor:
    """`nl.add(x, y)` and its like: one instruction into a new tile."""
    if operator.refused:
        raise Refusal(f"{operator!r}: {operator.refused}")
    if operator.name == "copy":
        return copy(x, dtype or y)
    if y is None and operator.arity == 2:
        raise Refusal(f"{operator!r} takes two tiles or a tile and a scalar")
    if not isinstance(x, NkiTensor) and not isinstance(y, NkiTensor):
        raise Refusal(f"{operator!r} works on tiles", x=x, y=y)
    tile = ndarray((x if isinstance(x, NkiTensor) else y).shape, dtype or (x if isinstance(x, NkiTensor) else y).dtype)
    if operator.arity == 1:
        if operator.bitvec:
            isa.tensor_scalar(tile, x, operator, 0)
        else:
            isa.activation(tile, operator, x)
    elif isinstance(x, NkiTensor) and isinstance(y, NkiTensor):
        if x.shape != y.shape:
            raise Refusal(f"{operator!r} does not broadcast: use nl.broadcast_to or nisa.tensor_scalar", x=x, y=y)
        isa.tensor_tensor(tile, x, y, operator)
    elif isinstance(x, NkiTensor):
        isa.tensor_scalar(tile, x, operator, y)
    else:
        isa.tensor_scalar(tile, y, operator, x, reverse0=True)
    return tile


Operator.on_tiles = _on_tiles


def _axes(x, axis) -> tuple[int, ...]:
    return tuple(sorted(a % x.ndim for a in (axis if isinstance(axis, (tuple, list)) else (axis,))))


def _reduced_shape(x, axes, keepdims) -> tuple[int, ...]:
    shape = tuple(1 if dim in axes else size for dim, size in enumerate(x.shape) if keepdims or dim not in axes)
    return shape if len(shape) > 1 else (*shape, 1)


def _reduce(operator: Operator, x, axis, dtype=None, keepdims=False) -> NkiTensor:
    axes = _axes(x, axis)
    tile = ndarray(_reduced_shape(x, axes, True), dtype or x.dtype)
    isa.tensor_reduce(tile, operator, x, axes if len(axes) > 1 else axes[0], keepdims=True)
    return tile if keepdims else tile.reshape(_reduced_shape(x, axes, False))


def reduction(name: str):
    """`nl.sum` and its like."""

    def reduce(x, axis, dtype=None, keepdims=False):
        return _reduce(OPERATORS[name], x, axis, dtype, keepdims)

    return reduce


def mean(x, axis, dtype=None, keepdims=False) -> NkiTensor:
    total = _reduce(OPERATORS["add"], x, axis, dtypes.float32, keepdims)
    return OPERATORS["multiply"](total, 1.0 / prod(x.shape[a] for a in _axes(x, axis)), dtype=dtype or x.dtype)


def softmax(x, axis=-1, dtype=None) -> NkiTensor:
    """exp(x - max) / sum over the trailing free axes."""
    axes = _axes(x, axis)
    if axes != tuple(range(1, x.ndim)):
        raise Refusal("softmax reduces all free axes", axis=axis, shape=x.shape)
    negative_max = ndarray((x.shape[0], 1), dtypes.float32)
    isa.tensor_reduce(negative_max, OPERATORS["maximum"], x, axes if len(axes) > 1 else axes[0], negate=True)
    exponentials, total = ndarray(x.shape, dtypes.float32), ndarray((x.shape[0], 1), dtypes.float32)
    isa.activation_reduce(exponentials, OPERATORS["exp"], x, OPERATORS["add"], total, bias=negative_max)
    inverse, tile = ndarray(total.shape, dtypes.float32), ndarray(x.shape, dtype or x.dtype)
    isa.reciprocal(inverse, total)
    isa.tensor_scalar(tile, exponentials, OPERATORS["multiply"], inverse)
    return tile


def negative(x, dtype=None) -> NkiTensor:
    return OPERATORS["multiply"](x, -1.0, dtype=dtype)


def where(condition, x, y, dtype=None) -> NkiTensor:
    """x where the condition is 1.0, y where it is 0.0."""
    dtype = dtype or next(value.dtype for value in (x, y) if isinstance(value, NkiTensor))
    tile = copy(y, dtype) if isinstance(y, NkiTensor) else full(condition.shape, y, dtype)
    x = copy(x, dtype) if isinstance(x, NkiTensor) and x.dtype != dtype else x
    isa.tensor_copy_predicated(tile, x, copy(condition, dtypes.uint8))
    return tile


def transpose(x, dtype=None) -> NkiTensor:
    """The transposed tile, in PSUM."""
    tile = ndarray(x.shape[::-1], x.dtype, PSUM)
    isa.nc_transpose(tile, x)
    return tile if dtype in (None, x.dtype) else copy(tile, dtype)


def matmul(x, y, transpose_x=False) -> NkiTensor:
    """x @ y, or x.T @ y, in PSUM."""
    stationary = x if transpose_x else copy(transpose(x))
    tile = ndarray((stationary.shape[1], y.shape[1]), dtypes.float32, PSUM)
    isa.nc_matmul(tile, stationary, y, accumulate=False)
    return tile


def expand_dims(x, axis) -> NkiTensor:
    return x.expand_dim(axis % (x.ndim + 1))


def broadcast_to(x, shape, dtype=None) -> NkiTensor:
    """x repeated along dimensions of size 1."""
    if len(shape) != x.ndim:
        raise Refusal("broadcast_to keeps the rank", shape=x.shape, new_shape=shape)
    view = _over_partitions(x, shape[0]) if shape[0] != x.shape[0] else x
    for dim, size in enumerate(shape):
        if view.shape[dim] != size:
            view = view.broadcast(dim, size)
    if view is x and dtype in (None, x.dtype):
        return x
    return copy(view, dtype)


def _over_partitions(x, partitions: int) -> NkiTensor:
    """Partition 0 copied to all others, a quadrant at a time. UNVERIFIED which instructions the SDK takes for it."""
    if x.shape[0] != 1:
        raise Refusal("broadcast_to repeats dimensions of size 1 only", shape=x.shape, partitions=partitions)
    tile = ndarray((partitions, *x.shape[1:]), x.dtype)
    for start in range(0, partitions, QUADRANT):
        isa.nc_stream_shuffle(tile[start : min(start + QUADRANT, partitions)], x, [0] * QUADRANT)
    return tile


def gather_flattened(data, indices, axis=0, dtype=None) -> NkiTensor:
    tile = ndarray(indices.shape, dtype or data.dtype)
    isa.nc_n_gather(tile, data, indices)
    return tile


def rand(shape, dtype, buffer=SBUF, name="") -> NkiTensor:
    """Uniform in [0, 1), 24 bits of the engine's generator."""
    bits = ndarray(shape, dtypes.uint32)
    isa.rng(bits)
    isa.tensor_scalar(bits, bits, OPERATORS["right_shift"], 8)
    tile = ndarray(shape, dtype, buffer, name)
    isa.tensor_scalar(tile, bits, OPERATORS["multiply"], 2.0**-24)
    return tile


def random_seed(seed) -> None:
    if not isinstance(seed, NkiTensor):
        seed = full((1, 1), seed, dtypes.int32)
    isa.set_rng_seed(seed)


def dropout(x, rate, dtype=None) -> NkiTensor:
    tile = ndarray(x.shape, dtype or x.dtype)
    isa.dropout(tile, x, rate)
    return tile


def _unrolled(start, stop=None, step=1):
    if any(isinstance(bound, Opaque) for bound in (start, stop, step)):
        raise Refusal("static loops take ints; for a run-time bound use nl.fori_loop")
    return range(start) if stop is None else range(start, stop, step)


def _refused(name: str):
    def refuse(*args, **kwargs):
        raise Refusal(f"nl.{name}: no engine instruction is documented for it; build it from nisa calls")

    return refuse


@instruction(reads="tensor", engine=engine.sync)
def device_print(print_prefix, tensor):
    """Prints a tile while the program runs."""
    print(print_prefix, tensor)


def is_hbm(buffer) -> bool:
    return buffer in (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def is_sbuf(buffer) -> bool:
    return buffer is SBUF


def is_psum(buffer) -> bool:
    return buffer is PSUM


def is_on_chip(buffer) -> bool:
    return buffer in (SBUF, PSUM)


_FUNCTIONS = (
    ndarray, full, zeros, ones, zeros_like, empty_like, shared_constant, shared_identity_matrix, load, load_transpose2d,
    store, mean, softmax, negative, where, transpose, matmul, expand_dims, broadcast_to, gather_flattened, rand,
    random_seed, dropout, is_hbm, is_sbuf, is_psum, is_on_chip, NkiTensor, NKIObject, MemoryRegion, control.fori_loop,
    control.while_loop, control.dynamic_range, control.no_reorder, control.program_id, control.num_programs,
    control.program_ndim,
)  # fmt: skip
_WITHOUT_INSTRUCTION = ("cos", "tan", "ceil", "floor", "trunc", "var", "all", "rms_norm", "logical_not")

EXPORTS = {
    **dtypes.ALL,
    **OPERATORS,
    **{function.__name__: function for function in _FUNCTIONS},
    **{region.name: region for region in MemoryRegion},
    **{name: _refused(name) for name in _WITHOUT_INSTRUCTION},
    "hbm": MemoryRegion.private_hbm,
    "device_print": device_print,
    "DType": dtypes.DType,
    "ds": DynamicSlice,
    "tile_size": tile_size,
    "sum": reduction("add"),
    "max": reduction("maximum"),
    "min": reduction("minimum"),
    "prod": reduction("multiply"),
    "affine_range": _unrolled,
    "sequential_range": _unrolled,
    "static_range": _unrolled,
}
