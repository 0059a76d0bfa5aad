"""Instructions of the Vector engine that select: by predicate, by range, by rank, by value."""

from __future__ import annotations

import numpy as np

from . import cycles, rules
from .accumulators import accumulate
from .enums import engine as engines
from .enums import reduce_cmd as reduce_cmds
from .instruction import Call, Refusal, instruction
from .numerics import FP32_MIN, column, f32, like, store
from .operators import OPERATORS
from .run import machine_state

_FLOAT32_INTEGERS = 1 << 24
_COMPARISONS = ("equal", "less", "less_equal", "greater", "greater_equal")
_MAX_ELEMENTS = 16_384
_MAXIMUM = OPERATORS["maximum"]
_SELECT_COMMANDS = (reduce_cmds.idle, reduce_cmds.reduce, reduce_cmds.reset_reduce)


def _reduce_into(reduce_res, command: reduce_cmds, values: np.ndarray) -> None:
    """The running maximum of a select; idle leaves the accumulators unknown (nki.isa.select_reduce)."""
    registers = machine_state().vector_accumulator
    if command == reduce_cmds.idle:
        registers[:] = np.nan
    total = accumulate(registers, command, _MAXIMUM, values)
    if reduce_res is not None:
        store(reduce_res, total)


def _check_range_select(call: Call) -> None:
    rules.same_shape(call, "dst", "on_true_tile")
    if not call.on_true_tile.dtype.is_float:
        raise Refusal("on_true_tile must be a float dtype", dtype=call.on_true_tile.dtype)
    for name in ("bound0", "bound1"):
        rules.vector(call, name, "on_true_tile")
        rules.dtype_in(call, name, ("float32",))
        rules.buffer_in(call, "sbuf", name)
    rules.operator_in(call, "comp_op0", _COMPARISONS)
    rules.operator_in(call, "comp_op1", _COMPARISONS)
    rules.operator_in(call, "reduce_op", ("maximum",))
    rules.compile_time_int(call, "range_start", -_FLOAT32_INTEGERS, _FLOAT32_INTEGERS)
    if call.range_start + call.on_true_tile.free_size > _FLOAT32_INTEGERS:
        raise Refusal("range_start + index is compared in float32: it must stay within 2**24",
                      range_start=call.range_start, elements=call.on_true_tile.free_size)  # fmt: skip
    if np.float32(call.on_false_value) != np.float32(FP32_MIN):
        raise Refusal("on_false_value is fixed to FP32_MIN in hardware", given=call.on_false_value)
    rules.accumulator(call, _SELECT_COMMANDS)


@instruction(
    writes="dst reduce_res",
    reads="on_true_tile bound0 bound1",
    engine=engines.vector,
    check=_check_range_select,
    cycles=cycles.one_per_element,
)
def range_select(
    dst, on_true_tile, comp_op0, comp_op1, bound0, bound1, reduce_cmd=reduce_cmds.reset_reduce, reduce_res=None,
    reduce_op=_MAXIMUM, range_start=0, on_false_value=FP32_MIN, name=None,
):  # fmt: skip
    """dst = on_true_tile where range_start + index compares true with both bounds, FP32_MIN elsewhere; row maxima."""
    rows = on_true_tile.shape[0]
    index = np.float32(range_start) + np.arange(on_true_tile[0].size, dtype=np.float32)
    inside = (comp_op0.apply(index, f32(bound0).reshape(rows, 1)) != 0) & (
        comp_op1.apply(index, f32(bound1).reshape(rows, 1)) != 0
    )
    selected = np.where(inside.reshape(on_true_tile.shape), f32(on_true_tile), np.float32(FP32_MIN))
    _reduce_into(reduce_res, reduce_cmd, selected)
    store(dst, selected)


def _check_select_reduce(call: Call) -> None:
    rules.same_shape(call, "dst", "predicate", "on_true")
    rules.dtype_in(call, "predicate", ("int8", "uint8", "int16", "uint16"))
    if call.on_true.dtype in ("tfloat32", "int32", "uint32"):
        raise Refusal("on_true can be any dtype but tfloat32, int32 and uint32", dtype=call.on_true.dtype)
    rules.scalar_or_vector(call, "on_false", "on_true", dtypes=None)
    rules.one_in_psum(call, "on_true", "predicate")
    rules.operator_in(call, "reduce_op", ("maximum",))
    rules.accumulator(call, _SELECT_COMMANDS)
    if call.reduce_res is not None:
        if not call.reduce_res.dtype.is_float:
            raise Refusal("reduce_res must be a float dtype", dtype=call.reduce_res.dtype)
        if call.reduce_cmd == reduce_cmds.idle:
            call.note("reduce_cmd=idle (the default) computes no maximum: reduce_res is unknown")


@instruction(
    writes="dst reduce_res",
    reads="predicate on_true on_false",
    engine=engines.vector,
    check=_check_select_reduce,
    cycles=cycles.predicated,  # UNVERIFIED: not published, taken as tensor_copy_predicated
)
def select_reduce(
    dst, predicate, on_true, on_false, reduce_res=None, reduce_cmd=reduce_cmds.idle, reduce_op=_MAXIMUM,
    reverse_pred=False, name=None,
):  # fmt: skip
    """dst = on_true where predicate, on_false (a number or [P, 1]) elsewhere; with reset_reduce also row maxima."""
    chosen = like((predicate == 0) if reverse_pred else (predicate != 0), on_true)
    selected = np.where(chosen, f32(on_true), column(on_false, on_true))
    _reduce_into(reduce_res, reduce_cmd, selected)
    store(dst, selected)


def _check_eight(call: Call, name: str) -> None:
    tensor = call.args[name]
    if tensor.free_size != 8 or tensor.ndim != 2:
        raise Refusal(f"{name} must have shape [P, 8]", shape=tensor.shape)


def _check_searched(call: Call, name: str) -> None:
    tensor = call.args[name]
    if not 8 <= tensor.free_size <= _MAX_ELEMENTS:
        raise Refusal(f"{name} must have 8 to 16,384 elements per partition", shape=tensor.shape)
    rules.max_free_dims(call, 2, name)


def _same_partitions(call: Call, *names: str) -> None:
    counts = {name: call.args[name].num_partitions for name in names}
    if len(set(counts.values())) > 1:
        raise Refusal(f"{', '.join(names)} must have the same number of partitions", **counts)


def _check_max8(call: Call) -> None:
    rules.tensor_operand(call, "dst", "src")
    _check_eight(call, "dst")
    _check_searched(call, "src")
    _same_partitions(call, "dst", "src")


@instruction(writes="dst", reads="src", engine=engines.vector, check=_check_max8, cycles=cycles.one_per_element)
def max8(dst, src, name=None):
    """dst[P, 8] = the 8 largest of each partition, descending, compared in float32."""
    values = f32(src).reshape(src.shape[0], -1)
    largest = np.partition(values, values.shape[1] - 8, axis=1)[:, -8:]
    store(dst, np.sort(largest, axis=1)[:, ::-1])


def _check_find_index8(call: Call) -> None:
    rules.tensor_operand(call, "dst", "data", "vals")
    _check_eight(call, "dst")
    rules.dtype_in(call, "dst", ("uint16", "uint32"))
    _check_searched(call, "data")
    if call.vals.free_size != 8:
        raise Refusal("vals must have 8 elements per partition", shape=call.vals.shape)
    _same_partitions(call, "dst", "data", "vals")


@instruction(
    writes="dst", reads="data vals", engine=engines.vector, check=_check_find_index8, cycles=cycles.one_per_element
)
def nc_find_index8(dst, data, vals, name=None):
    """dst[P, 8] = index of each value's first occurrence, successive ones for repeated values, all ones if absent."""
    rows = data.shape[0]
    values, wanted = f32(data).reshape(rows, -1), f32(vals).reshape(rows, 8)
    for slot in range(8):
        matches = values == wanted[:, slot : slot + 1]
        earlier = (wanted[:, :slot] == wanted[:, slot : slot + 1]).sum(axis=1)
        if earlier.any():
            matches &= matches.cumsum(axis=1) == earlier[:, None] + 1
        dst[:, slot] = np.where(matches.any(axis=1), matches.argmax(axis=1), np.iinfo(dst.dtype).max)


def _check_match_replace8(call: Call) -> None:
    rules.same_shape(call, "dst", "data")
    _check_searched(call, "data")
    rules.tensor_operand(call, "vals")
    if call.vals.free_size != 8:
        raise Refusal("vals must have 8 elements per partition", shape=call.vals.shape)
    if not rules.is_number(call.imm):
        raise Refusal("imm must be a compile-time number", given=call.imm)
    if call.dst_idx is None:
        _same_partitions(call, "data", "vals")
        return
    _check_eight(call, "dst_idx")
    rules.dtype_in(call, "dst_idx", ("uint16", "uint32"))
    _same_partitions(call, "data", "vals", "dst_idx")


@instruction(
    writes="dst dst_idx",
    reads="data vals",
    engine=engines.vector,
    check=_check_match_replace8,
    cycles=cycles.one_per_element,
)
def nc_match_replace8(dst, data, vals, imm, dst_idx=None, name=None):
    """dst = data with the first remaining occurrence of vals[:, 7], ..., vals[:, 0] replaced by imm; their indices."""
    rows = np.arange(data.shape[0])
    replaced, wanted = f32(data).reshape(len(rows), -1).copy(), f32(vals).reshape(-1, 8)
    for slot in reversed(range(8)):
        matches = replaced == wanted[:, slot : slot + 1]
        found, position = matches.any(axis=1), matches.argmax(axis=1)
        replaced[rows[found], position[found]] = imm
        if dst_idx is not None:
            dst_idx[:, slot] = np.where(found, position, np.iinfo(dst_idx.dtype).max)
    store(dst, replaced)
