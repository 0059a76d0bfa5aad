"""Instructions of the GpSimd engine: index patterns, gathers, compaction, top-k."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from . import cycles, rules
from .enums import engine as engines
from .instruction import Call, Refusal, instruction
from .numerics import f32, store
from .operators import OPERATORS

CORE_PARTITIONS = 16  # each of the eight GpSimd cores reaches 16 consecutive partitions
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")


@lru_cache(maxsize=256)
def _affine(pattern: tuple, offset: int, channel_multiplier: int, partitions: int) -> np.ndarray:
    """offset + partition * channel_multiplier + sum of index * step, [P, N] int32."""
    values = np.zeros(1, np.int64)
    for step, count in pattern:
        values = (values[:, None] + step * np.arange(count)).ravel()
    rows = offset + channel_multiplier * np.arange(partitions)
    return (rows[:, None] + values).astype(np.int32)


def _values(pattern, offset: int, channel_multiplier: int, dst: np.ndarray) -> np.ndarray:
    return _affine(tuple(map(tuple, pattern)), offset, channel_multiplier, dst.shape[0]).reshape(dst.shape)


def _check_iota(call: Call) -> None:
    rules.tensor_operand(call, "dst")
    rules.buffer_in(call, "sbuf", "dst")
    rules.iota_pattern(call, "dst")


@instruction(writes="dst", engine=engines.gpsimd, check=_check_iota, cycles=cycles.gpsimd)
def iota(dst, pattern, offset=0, channel_multiplier=0, name=None):
    """dst[p, i...] = offset + p * channel_multiplier + sum of i * step, in int32, converted to dst's dtype."""
    values = _values(pattern, offset, channel_multiplier, dst)
    if dst.dtype == np.uint32:
        values = values.astype(np.uint32)  # the same 32 bits
    store(dst, values)


def _check_affine_select(call: Call) -> None:
    rules.same_shape(call, "dst", "on_true_tile")
    rules.buffer_in(call, "sbuf", "dst", "on_true_tile")
    rules.iota_pattern(call, "dst", "on_true_tile")
    rules.operator_in(call, "cmp_op", _COMPARISONS)
    if not rules.is_number(call.on_false_value):
        raise Refusal("on_false_value must be a compile-time number", given=call.on_false_value)


@instruction(
    writes="dst", reads="on_true_tile", engine=engines.gpsimd, check=_check_affine_select, cycles=cycles.gpsimd
)
def affine_select(
    dst, pattern, channel_multiplier, on_true_tile, on_false_value, cmp_op=OPERATORS["equal"], offset=0, name=None
):
    """dst = on_true_tile where the affine value compares true with 0, on_false_value elsewhere."""
    chosen = cmp_op.apply(_values(pattern, offset, channel_multiplier, dst), np.int32(0)) != 0
    tile = on_true_tile.reshape(dst.shape)
    if tile.dtype != dst.dtype:
        tile = f32(tile)
    other = np.empty(1, tile.dtype)
    store(other, np.float32(on_false_value))
    store(dst, np.where(chosen, tile, other))


def _check_partition_reduce(call: Call) -> None:
    rules.tensor_operand(call, "dst", "data")
    rules.buffer_in(call, "sbuf", "dst", "data")
    op = rules.operator_in(call, "op", ("add", "average", "maximum", "bitwise_or", "bitwise_and"))
    if call.dst.num_partitions != 1 or call.dst.free_size != call.data.free_size:
        raise Refusal("dst must be [1, elements per partition of data]", dst=call.dst.shape, data=call.data.shape)
    if op.bitvec:
        rules.integer_operands(call, "dst", "data")


@instruction(
    writes="dst", reads="data", engine=engines.gpsimd, check=_check_partition_reduce, cycles=cycles.partition_reduce
)
def tensor_partition_reduce(dst, op, data, name=None):
    """dst[1, ...] = the reduction of data over its partitions."""
    if op.bitvec:
        store(dst, op.reduce(data, 0))
    elif op.name == "average":
        store(dst, f32(data).mean(axis=0, keepdims=True, dtype=np.float32))
    else:
        store(dst, op.reduce(f32(data), 0))


def _check_local_gather(call: Call) -> None:
    rules.tensor_operand(call, "dst", "src_buffer", "index")
    rules.buffer_in(call, "sbuf", "dst", "src_buffer", "index")
    rules.same_dtype(call, "dst", "src_buffer")
    rules.dtype_in(call, "index", ("uint16",))
    partitions = call.src_buffer.num_partitions
    if partitions % CORE_PARTITIONS or {call.args["index"].num_partitions, call.dst.num_partitions} != {partitions}:
        raise Refusal("src_buffer, index and dst have the same partitions, a multiple of 16",
                      src_buffer=call.src_buffer.shape, index=call.args["index"].shape, dst=call.dst.shape)  # fmt: skip
    if call.num_elem_per_idx not in (1, 2, 4, 8, 16, 32):
        raise Refusal("num_elem_per_idx must be 1, 2, 4, 8, 16 or 32", given=call.num_elem_per_idx)
    available = call.args["index"].free_size * CORE_PARTITIONS
    valid = available if call.num_valid_indices is None else call.num_valid_indices
    if not 1 <= valid <= min(available, 4096):
        raise Refusal("a core gathers at most 4096 indices, and no more than it has", num_valid_indices=valid,
                      available=available)  # fmt: skip
    if valid * call.num_elem_per_idx != call.dst.free_size:
        raise Refusal("num_valid_indices * num_elem_per_idx must be the elements per partition of dst"
                      " (known issue of NKI 0.6)", dst=call.dst.shape, valid=valid)  # fmt: skip
    call.args["num_valid_indices"] = valid


@instruction(
    writes="dst",
    reads="src_buffer index",
    engine=engines.gpsimd,
    check=_check_local_gather,
    cycles=cycles.local_gather,
)
def local_gather(dst, src_buffer, index, num_elem_per_idx=1, num_valid_indices=None, name=None):
    """Each 16 partitions gather elements of their free dimension at the indices those 16 partitions list together."""
    source = src_buffer.reshape(src_buffer.shape[0], -1)
    rows = index.reshape(index.shape[0], -1)
    gathered = np.empty((dst.shape[0], num_valid_indices * num_elem_per_idx), dst.dtype)
    for first in range(0, dst.shape[0], CORE_PARTITIONS):
        core = slice(first, first + CORE_PARTITIONS)
        starts = rows[core].ravel(order="F")[:num_valid_indices].astype(np.int64)
        offsets = (starts[:, None] + np.arange(num_elem_per_idx)).ravel()
        if offsets.max() >= source.shape[1]:
            raise Refusal("index outside the free dimension of src_buffer", index=int(offsets.max()),
                          elements=source.shape[1])  # fmt: skip
        gathered[core] = source[core][:, offsets]
    dst[...] = gathered.reshape(dst.shape)


def _check_n_gather(call: Call) -> None:
    rules.same_shape(call, "dst", "indices")
    rules.tensor_operand(call, "data")
    rules.buffer_in(call, "sbuf", "dst", "data", "indices")
    rules.same_dtype(call, "dst", "data")
    rules.dtype_in(call, "indices", ("uint32",))
    if call.data.num_partitions != call.dst.num_partitions:
        raise Refusal("data and dst must have the same number of partitions", data=call.data.shape, dst=call.dst.shape)


@instruction(writes="dst", reads="data indices", engine=engines.gpsimd, check=_check_n_gather, cycles=cycles.n_gather)
def nc_n_gather(dst, data, indices, name=None):
    """dst[p, i] = data[p, indices[p, i]], data's free dimensions flattened."""
    rows = data.shape[0]
    source, positions = data.reshape(rows, -1), indices.reshape(rows, -1)
    if positions.max() >= source.shape[1]:
        raise Refusal("index outside the free dimension of data", index=int(positions.max()),
                      elements=source.shape[1])  # fmt: skip
    dst[...] = np.take_along_axis(source, positions.astype(np.int64), axis=1).reshape(dst.shape)


def _check_nonzero(call: Call) -> None:
    rules.tensor_operand(call, "dst", "src")
    rules.buffer_in(call, "sbuf", "dst", "src")
    rules.dtype_in(call, "src", ("float32", "int32"))
    rules.dtype_in(call, "dst", ("int32",))
    rules.compile_time_int(call, "index_offset")
    rules.compile_time_int(call, "padding_val")
    if call.dst.num_partitions != call.src.num_partitions or call.dst.free_size != call.src.free_size + 1:
        raise Refusal("dst has the partitions of src and one element more", dst=call.dst.shape, src=call.src.shape)


@instruction(
    writes="dst",
    reads="src",
    engine=engines.gpsimd,
    check=_check_nonzero,
    cycles=cycles.gpsimd_serial,
)
def nonzero_with_count(dst, src, index_offset=0, padding_val=-1, name=None):
    """On partitions 0, 16, ..., 112: indices of the nonzero elements, padding, and their count in the last element."""
    for row in range(0, src.shape[0], CORE_PARTITIONS):
        found = np.flatnonzero(src[row].ravel() != 0)
        line = np.full(src[row].size + 1, padding_val, np.int32)
        line[: found.size] = found + index_offset
        line[-1] = found.size
        dst[row] = line.reshape(dst.shape[1:])


def _check_topk(call: Call) -> None:
    rules.tensor_operand(call, "val_dst", "idx_dst", "src")
    rules.buffer_in(call, "sbuf", "val_dst", "idx_dst", "src")
    rules.dtype_in(call, "src", ("bfloat16",))
    rules.dtype_in(call, "val_dst", ("bfloat16",))
    rules.dtype_in(call, "idx_dst", ("uint32",))
    partitions, k = call.src.num_partitions, call.val_dst.free_size
    if partitions % CORE_PARTITIONS:
        raise Refusal("the partitions of src must be a multiple of 16", src=call.src.shape)
    for name in ("val_dst", "idx_dst"):
        if (call.args[name].num_partitions, call.args[name].free_size) != (partitions, k):
            raise Refusal("val_dst and idx_dst must be [partitions of src, K]", **{name: call.args[name].shape})
    rules.compile_time_int(call, "n", 8, 65_535)
    if not k <= min(call.n, 32_767):
        raise Refusal("K must be below 32,768 and at most n", K=k, n=call.n)
    if call.src.free_size * CORE_PARTITIONS < call.n:
        raise Refusal("src must hold n elements in each 16 partitions", src=call.src.shape, n=call.n)
    call.note("sources disagree on where the K results of 16 partitions lie; here in the snake of the input")


@instruction(writes="val_dst idx_dst", reads="src", engine=engines.gpsimd, check=_check_topk, cycles=cycles.topk)
def topk(val_dst, idx_dst, src, n, name=None):
    """The K largest of each 16 partitions, ascending, and their indices; element j: partition j % 16, column j // 16.

    UNVERIFIED: the placement of the results (see the note). Columns past ceil(K / 16) hold NaN and all ones.
    """
    k = val_dst[0].size
    used = -(-k // CORE_PARTITIONS) * CORE_PARTITIONS
    for first in range(0, src.shape[0], CORE_PARTITIONS):
        core = slice(first, first + CORE_PARTITIONS)
        snake = src[core].reshape(CORE_PARTITIONS, -1).T.ravel()[:n]
        order = np.argsort(f32(snake), kind="stable")[-k:]
        for dst, results, filler in ((val_dst, snake[order], np.nan), (idx_dst, order, 0xFFFFFFFF)):
            lines = np.full((CORE_PARTITIONS, k), filler, dst.dtype)
            padded = np.full(used, filler, dst.dtype)
            padded[:k] = results
            lines[:, : used // CORE_PARTITIONS] = padded.reshape(-1, CORE_PARTITIONS).T
            dst[core] = lines.reshape(dst[core].shape)


def _check_sequence_bounds(call: Call) -> None:
    rules.tensor_operand(call, "dst", "segment_ids")
    rules.buffer_in(call, "sbuf", "dst", "segment_ids")
    for name in ("dst", "segment_ids"):
        rules.dtype_in(call, name, ("float32", "int32"))
    elements = call.segment_ids.free_size
    if call.segment_ids.num_partitions != 1 or call.dst.shape != (1, 2, elements):
        raise Refusal("segment_ids must be [1, n] and dst [1, 2, n]", segment_ids=call.segment_ids.shape,
                      dst=call.dst.shape)  # fmt: skip


@instruction(
    writes="dst",
    reads="segment_ids",
    engine=engines.gpsimd,
    check=_check_sequence_bounds,
    cycles=cycles.gpsimd_serial,
)
def sequence_bounds(dst, segment_ids, name=None):
    """dst[0, :, i] = first index of element i's segment and one past its last; (n, -1) where its id is 0."""
    ids = segment_ids.ravel()
    count = ids.size
    edges = np.flatnonzero(np.diff(ids)) + 1
    starts, ends = np.concatenate([[0], edges]), np.concatenate([edges, [count]])
    segment = np.searchsorted(edges, np.arange(count), side="right")
    bounds = np.stack([np.where(ids == 0, count, starts[segment]), np.where(ids == 0, -1, ends[segment])])
    dst[...] = bounds.reshape(dst.shape).astype(dst.dtype)
