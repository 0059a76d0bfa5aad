"""Instructions of the Tensor engine: matrix multiplication and transpose."""

from __future__ import annotations

import numpy as np

from . import cycles, rules
from .enums import engine as engines
from .enums import matmul_perf_mode as perf_modes
from .instruction import Call, Refusal, instruction
from .numerics import f32

_FLOAT8 = ("float8_e4m3", "float8_e5m2")
_FULL = ("float32", "tfloat32")
_OPERANDS = (*_FLOAT8, "bfloat16", "float16", *_FULL)
_MAX_ROWS = 128
_MAX_COLUMNS = 512


def _check_matmul(call: Call) -> None:
    rules.tensor_operand(call, "dst", "stationary", "moving")
    rules.buffer_in(call, "sbuf", "stationary", "moving")
    rules.buffer_in(call, "psum", "dst")
    rules.member(call, "perf_mode", perf_modes)
    _check_matmul_dtypes(call)
    dst, stationary, moving = call.dst, call.stationary, call.moving
    double = call.perf_mode == perf_modes.double_row
    if double:
        _check_double_row(call)
    if stationary.num_partitions != moving.num_partitions:
        raise Refusal("stationary and moving contract over the same partitions", stationary=stationary.shape,
                      moving=moving.shape)  # fmt: skip
    rows, columns = stationary.free_size // (1 + double), moving.free_size // (1 + double)
    if rows > _MAX_ROWS:
        raise Refusal("stationary has at most 128 columns (BIR039)", stationary=stationary.shape)
    if columns > _MAX_COLUMNS:
        raise Refusal("moving has at most 512 columns (BIR040)", moving=moving.shape)
    if (dst.num_partitions, dst.free_size) != (rows, columns):
        raise Refusal("dst must be [columns of stationary, columns of moving]", dst=dst.shape, expected=(rows, columns))
    _check_bank(dst)
    _check_tiling(call)
    if call.accumulate not in (None, True, False):
        raise Refusal("accumulate must be True, False or None", given=call.accumulate)


def _check_matmul_dtypes(call: Call) -> None:
    for name in ("stationary", "moving"):
        rules.dtype_in(call, name, _OPERANDS)
    dtypes = (call.stationary.dtype, call.moving.dtype)
    if (dtypes[0] in _FULL) != (dtypes[1] in _FULL):
        raise Refusal("float32 multiplies float32 only, narrower floats each other", stationary=dtypes[0],
                      moving=dtypes[1])  # fmt: skip
    if call.is_transpose:
        rules.same_dtype(call, "dst", "stationary")
    elif call.dst.dtype != "float32":
        raise Refusal("dst of a matmul is float32 on trn2", dtype=call.dst.dtype)


def _check_double_row(call: Call) -> None:
    for name in ("stationary", "moving"):
        rules.dtype_in(call, name, _FLOAT8)
        tensor = call.args[name]
        if tensor.ndim < 3 or tensor.shape[1] != 2:
            raise Refusal("double_row: the first free dimension of the operands has size 2", **{name: tensor.shape})
    if call.is_transpose:
        raise Refusal("double_row excludes the transpose mode")


def _check_bank(dst) -> None:
    first = dst.offset % dst.partition_elements
    last = first + sum(stride * (count - 1) for stride, count in dst.pattern[1:])
    base = dst.storage.address[1] if dst.storage.address else 0
    banks = {(base + position * dst.dtype.itemsize) // rules.PSUM_BANK_BYTES for position in (first, last)}
    if len(banks) > 1:
        raise Refusal("dst must lie inside one PSUM bank of 2 KiB (BIR110)", banks=sorted(banks), dst=dst.shape)


def _check_tiling(call: Call) -> None:
    position, size = tuple(call.tile_position or ()), tuple(call.tile_size or ())
    if not position and not size:
        return
    if len(position) != 2 or len(size) != 2:
        raise Refusal("tile_position and tile_size must both be set", tile_position=position, tile_size=size)
    (row, column), (rows, columns) = position, size
    if rows not in (32, 64, 128) or columns not in (32, 64, 128):
        raise Refusal("tile_size is made of 32, 64 and 128", tile_size=size)
    if row % rows or column % columns or row + rows > 128 or column + columns > 128:
        raise Refusal("tile_position is a multiple of tile_size inside the 128 x 128 array", tile_position=position,
                      tile_size=size)  # fmt: skip
    if columns != 128:
        if call.perf_mode == perf_modes.double_row:
            raise Refusal("double_row excludes column tiling", tile_size=size)
        call.note("the documentation disagrees with itself on column tiling (tile_size[1] other than 128)")
    contracted, produced = call.stationary.num_partitions, call.dst.num_partitions
    if contracted > rows or produced > columns:
        raise Refusal("the stationary tile must fit tile_size", stationary=call.stationary.shape, tile_size=size)


@instruction(writes="dst", reads="stationary moving", engine=engines.tensor, check=_check_matmul, cycles=cycles.matmul)
def nc_matmul(
    dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, is_transpose=False, accumulate=None,
    tile_position=(), tile_size=(), perf_mode=perf_modes.none, name=None,
):  # fmt: skip
    """dst[M, N] = stationary[K, M].T @ moving[K, N], float32 sums; added to dst where accumulate."""
    if perf_mode == perf_modes.double_row:
        # The contraction runs over partitions and the first free dimension.
        left = f32(stationary).reshape(2 * stationary.shape[0], -1)
        right = f32(moving).reshape(2 * moving.shape[0], -1)
    else:
        left = f32(stationary).reshape(stationary.shape[0], -1)
        right = f32(moving).reshape(moving.shape[0], -1)
    if is_transpose:
        dst[...] = _select_rows(stationary, right).reshape(dst.shape)
        return
    product = np.matmul(left.T, right).reshape(dst.shape)
    if accumulate:
        dst += product
    else:
        dst[...] = product


def _select_rows(stationary: np.ndarray, identity: np.ndarray) -> np.ndarray:
    """Transpose mode, bit by bit: column j of the result is the row of `stationary` that column j of identity marks."""
    rows = stationary.reshape(stationary.shape[0], -1)
    if not ((identity == 0) | (identity == 1)).all() or not (identity.sum(axis=0) == 1).all():
        raise Refusal("transpose mode multiplies by an identity: each column of moving holds a single 1")
    return rows[identity.argmax(axis=0)].T


def _transpose_engine(call: Call) -> engines:
    if call.args["engine"] != engines.unknown:
        return call.args["engine"]
    return engines.tensor if getattr(call.dst, "is_psum", False) else engines.vector


def _check_transpose(call: Call) -> None:
    rules.tensor_operand(call, "dst", "data")
    rules.engine_in(call, engines.tensor, engines.vector)
    rules.same_dtype(call, "dst", "data")
    dst, data = call.dst, call.data
    if (dst.num_partitions, dst.free_size) != (data.free_size, data.num_partitions):
        raise Refusal("dst must be [elements per partition of data, partitions of data]", dst=dst.shape,
                      data=data.shape)  # fmt: skip
    if call.engine == engines.tensor:
        limit = 128
        rules.buffer_in(call, "sbuf", "data")
        rules.buffer_in(call, "psum", "dst")
        _check_bank(dst)
        if data.dtype.is_integer:
            call.note("integers on the Tensor engine are unverified; view them as a float of that size")
        elif data.dtype.itemsize == 1:
            call.note("float8 leaves 16-bit elements in PSUM on trn2")
    else:
        limit = 32
    if data.num_partitions > limit or data.free_size > limit:
        raise Refusal(f"the {call.engine.name} engine transposes tiles up to {limit} x {limit}",
                      data=data.shape)  # fmt: skip


@instruction(writes="dst", reads="data", engine=_transpose_engine, check=_check_transpose, cycles=cycles.transpose)
def nc_transpose(dst, data, engine=engines.unknown, name=None):
    """dst[F, P] = data[P, F].T, bit by bit."""
    dst[...] = data.reshape(data.shape[0], -1).T.reshape(dst.shape)
