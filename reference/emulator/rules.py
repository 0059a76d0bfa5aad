"""Operand rules that several instructions share; each raises Refusal with the rule and the values that break it.

Sources: NKI isa stubs; trainium_inferentia2_arch.rst ("start_partition", access patterns); nki-reference.md 2.2 and 3,
with the verifier's error names (BIRnnn, BVFnnn).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from . import enums
from .enums import engine as engines
from .instruction import Call, Refusal, operand_rule
from .machine import trn2
from .operators import Operator

PARTITIONS = 128
QUADRANT = 32
MAX_FREE_DIMS = 4
MAX_COUNT = 65_535
MAX_STRIDE = 32_767
PSUM_BANK_BYTES = int(trn2.psum_bank_bytes)
PSUM_ALIGN = 4  # UNVERIFIED: nl.tile_size.psum_min_align has no documented value; nki-library pads transposes to this
INT32 = (-(2**31), 2**31 - 1)


def is_tensor(value) -> bool:
    return getattr(value, "storage", None) is not None


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@operand_rule
def compute_operands(call: Call) -> None:
    """What holds for all tensors of an instruction of the Tensor, Vector, Scalar and GpSimd engines."""
    if call.instruction.cycles is None:
        return
    for name, tensor, access in call.tensors():
        where = f"{name}.buffer"
        if tensor.is_hbm:
            raise Refusal("compute engines reach SBUF and PSUM only, HBM through a DMA", **{where: tensor.buffer})
        if tensor.dtype.trn3_only:
            raise Refusal(f"{name}: dtype of NeuronCore-v4 (trn3) only", dtype=tensor.dtype)
        if call.engine == engines.gpsimd and tensor.is_psum:
            raise Refusal("the GpSimd engine does not reach PSUM", **{where: tensor.buffer})
        if access == "write" and tensor.is_psum and tensor.dtype.itemsize < 4 and call.instruction.name not in _NARROW:
            raise Refusal(
                "only a transpose or memset writes a dtype narrower than 4 bytes into PSUM (BIR311)",
                **{f"{name}.dtype": tensor.dtype},
            )
        byte = tensor.offset % tensor.partition_elements * tensor.itemsize
        if access == "write" and tensor.is_psum and byte % PSUM_ALIGN:
            call.note(f"{name} begins at an address in PSUM that is no multiple of {PSUM_ALIGN} bytes (psum_min_align)")
        _partitions(name, tensor)
        _access_pattern(name, tensor)
    _base_partitions(call)
    _overlap(call)


_NARROW = {"nc_matmul", "nc_transpose", "memset"}


def _partitions(name: str, tensor) -> None:
    count, start = tensor.num_partitions, tensor.start_partition
    if count > PARTITIONS:
        raise Refusal(f"{name}: more than 128 partitions", partitions=count)
    step = 128 if count > 64 else 64 if count > 32 else QUADRANT
    if start % step or start >= PARTITIONS:
        allowed = list(range(0, PARTITIONS, step))
        raise Refusal(f"{name}: {count} partitions start at one of {allowed} only", start_partition=start)
    if count > 1 and tensor.strides[0] != tensor.partition_elements:
        raise Refusal(f"{name}: partitions must be consecutive (no partition stride or broadcast)",
                      pattern=tensor.pattern)  # fmt: skip


def merged(pattern: Iterable[list[int]]) -> list[list[int]]:
    """[stride, count] pairs with counts of one dropped and contiguous neighbours merged: what hardware has to walk."""
    pairs: list[list[int]] = []
    for stride, count in pattern:
        if count == 1:
            continue
        if pairs and pairs[-1][0] == stride * count:
            pairs[-1] = [stride, pairs[-1][1] * count]
        else:
            pairs.append([stride, count])
    return pairs


def _access_pattern(name: str, tensor) -> None:
    pairs = merged(tensor.pattern[1:])
    if len(pairs) > MAX_FREE_DIMS:
        raise Refusal(f"{name}: an access pattern has at most 4 free dimensions (BIR049)", pattern=tensor.pattern)
    for stride, count in pairs:
        if count > MAX_COUNT:
            raise Refusal(f"{name}: an access pattern counts in 16 bits", count=count, limit=MAX_COUNT)
        if not 0 <= stride <= MAX_STRIDE:
            raise Refusal(
                f"{name}: an access pattern strides in positive 16-bit steps", stride=stride, limit=MAX_STRIDE
            )


def _base_partitions(call: Call) -> None:
    starts = {name: t.start_partition for name, t, access in call.tensors() if access == "read" and t.is_sbuf}
    if len(set(starts.values())) > 1:
        raise Refusal("SBUF inputs of one instruction start at the same partition (BIR297)", start_partitions=starts)


def _overlap(call: Call) -> None:
    """In place is fine with the very same elements in the same order; a partial overlap is not (BVF029)."""
    tensors = list(call.tensors())
    for write_name, written, access in tensors:
        if access != "write":
            continue
        for name, read, read_access in tensors:
            if read_access == "write" or read.storage is not written.storage:
                continue
            # A [P, 1] operand is loaded before the data streams, a [P, 1] result written after it.
            if read.free_size == 1 or written.free_size == 1:
                continue
            if read.scalar_offset is not None or written.scalar_offset is not None:
                continue
            if _same_elements(read, written) or not _meet(read, written):
                continue
            raise Refusal(
                f"{write_name} overlaps {name} partly: reads and writes must be the same elements or none (BVF029)",
                **{f"{write_name}.pattern": written.pattern, f"{name}.pattern": read.pattern},
            )


def _same_elements(a, b) -> bool:
    """The same walk through each partition: every column is read, from all partitions, before it is written."""
    return (
        a.dtype.itemsize == b.dtype.itemsize
        and a.offset % a.partition_elements == b.offset % b.partition_elements
        and merged(a.pattern[1:]) == merged(b.pattern[1:])
    )


def _meet(a, b) -> bool:
    first = max(a.start_partition, b.start_partition)
    last = min(a.start_partition + a.num_partitions, b.start_partition + b.num_partitions)
    if first >= last:
        return False
    return bool(np.intersect1d(_free_bytes(a), _free_bytes(b)).size)


def _free_bytes(tensor) -> np.ndarray:
    """Byte offsets of the tensor's elements inside a partition."""
    offsets = np.zeros(1, np.int64)
    for stride, count in merged(tensor.pattern[1:]):
        offsets = (offsets[:, None] + stride * np.arange(count)).ravel()
    starts = (offsets + tensor.offset) % tensor.partition_elements * tensor.dtype.itemsize
    return (starts[:, None] + np.arange(tensor.dtype.itemsize)).ravel()


def tensor_operand(call: Call, *names: str) -> None:
    for name in names:
        if not is_tensor(call.args[name]):
            raise Refusal(f"{name} must be a tensor", given=call.args[name])


def same_shape(call: Call, *names: str) -> None:
    """Equal partitions and equal elements per partition; shapes may differ otherwise."""
    tensor_operand(call, *names)
    first = call.args[names[0]]
    for name in names[1:]:
        other = call.args[name]
        if other.num_partitions != first.num_partitions:
            raise Refusal(
                f"{names[0]} and {name} must have the same number of partitions",
                **{names[0]: first.shape, name: other.shape},
            )
        if other.free_size != first.free_size:
            raise Refusal(
                f"{names[0]} and {name} must have the same number of elements per partition",
                **{names[0]: first.shape, name: other.shape},
            )


def same_dtype(call: Call, *names: str) -> None:
    dtypes = {name: call.args[name].dtype for name in names}
    if len(set(dtypes.values())) > 1:
        raise Refusal(f"{' and '.join(names)} must have the same dtype", **dtypes)


def dtype_in(call: Call, name: str, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if call.args[name].dtype not in allowed:
        raise Refusal(f"{name} must be one of {', '.join(allowed)}", dtype=call.args[name].dtype)


def buffer_in(call: Call, buffer: str, *names: str) -> None:
    for name in names:
        tensor = call.args[name]
        if is_tensor(tensor) and not getattr(tensor, f"is_{buffer}"):
            raise Refusal(f"{name} must be in {buffer.upper()}", buffer=tensor.buffer)


def one_in_psum(call: Call, *names: str) -> None:
    tensors = [call.args[name] for name in names if is_tensor(call.args[name])]
    if len(tensors) > 1 and all(tensor.is_psum for tensor in tensors):
        raise Refusal(f"{' and '.join(names)} cannot both be in PSUM (BVF027)")


def scalar_or_vector(call: Call, name: str, data: str, dtypes: Iterable[str] = ("float32",), optional=False) -> None:
    """A compile-time number, or a [P, 1] tensor with P that of `data`."""
    value = call.args[name]
    if value is None and optional:
        return
    if is_number(value):
        return
    if not is_tensor(value):
        raise Refusal(f"{name} must be a number or a [P, 1] tensor", given=value)
    partitions = call.args[data].num_partitions
    if value.num_partitions != partitions or value.free_size != 1:
        raise Refusal(f"{name} must be a number or a [{partitions}, 1] tensor", shape=value.shape)
    if dtypes is not None:
        dtype_in(call, name, dtypes)


def vector(call: Call, name: str, data: str) -> None:
    tensor_operand(call, name)
    partitions = call.args[data].num_partitions
    if call.args[name].num_partitions != partitions or call.args[name].free_size != 1:
        raise Refusal(f"{name} must have shape [{partitions}, 1]", shape=call.args[name].shape)


def max_free_dims(call: Call, limit: int, *names: str) -> None:
    for name in names:
        pairs = merged(call.args[name].pattern[1:])
        if len(pairs) > limit:
            raise Refusal(f"{name}: this instruction walks at most {limit} free dimensions", pattern=pairs)


def operator(call: Call, name: str, optional=False) -> Operator | None:
    op = call.args[name]
    if op is None and optional:
        return None
    if not isinstance(op, Operator):
        raise Refusal(f"{name} must be an operator of nki.language", given=op)
    if op.refused:
        raise Refusal(f"{name}={op!r}: {op.refused}")
    return op


def alu_operator(call: Call, name: str, arity: int | None = 2, optional=False) -> Operator | None:
    """An operator of the Vector engine's arithmetic units."""
    op = operator(call, name, optional)
    if op is None:
        return None
    if op.alu is None:
        trn3 = " on trn2 (tensor_scalar has it on NeuronCore-v4 only)" if op.name in ("square", "relu") else ""
        raise Refusal(f"{name}={op!r} is an activation function, not an operator of this instruction{trn3}")
    if arity is not None and op.arity != arity:
        raise Refusal(f"{name}={op!r} takes {op.arity} operand(s), this instruction needs a binary operator")
    return op


def arithmetic_operator(call: Call, name: str, arity: int | None = 2, optional=False) -> Operator | None:
    op = alu_operator(call, name, arity, optional)
    if op is not None and op.bitvec:
        raise Refusal(f"{name}={op!r}: this instruction takes arithmetic operators only")
    if op is not None and op.name == "power":
        raise Refusal(f"{name}={op!r} runs on GpSimd in tensor_tensor only")
    return op


def operator_in(call: Call, name: str, allowed: Iterable[str]) -> Operator:
    op = operator(call, name)
    allowed = tuple(allowed)
    if op.name not in allowed:
        raise Refusal(f"{name} must be one of {', '.join(f'nl.{a}' for a in allowed)}", given=op)
    return op


def integer_operands(call: Call, *names: str) -> None:
    """What bitvec operators need: integer tensors and integer immediates, nothing is converted."""
    for name in names:
        value = call.args[name]
        if is_tensor(value):
            if not value.dtype.is_integer:
                raise Refusal(f"{name}: bitvec operators take integer dtypes", dtype=value.dtype)
        elif value is not None and not isinstance(value, int):
            raise Refusal(f"{name}: bitvec operators take integer immediates", given=value)


def member(call: Call, name: str, enum: type, allowed: Iterable | None = None) -> None:
    value = call.args[name]
    if not isinstance(value, enum):
        raise Refusal(f"{name} must be a member of nisa.{enum.__name__}", given=value)
    if allowed is not None and value not in allowed:
        raise Refusal(f"{name} must be one of {', '.join(m.name for m in allowed)}", given=value.name)


def engine_in(call: Call, *allowed: engines) -> None:
    member(call, "engine", engines, (*allowed, engines.unknown))


def compile_time_int(call: Call, name: str, low: int = INT32[0], high: int = INT32[1]) -> None:
    value = call.args[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refusal(f"{name} must be a compile-time integer", given=value)
    if not low <= value <= high:
        raise Refusal(f"{name} must lie in [{low}, {high}]", given=value)


def accumulator(call: Call, commands: Iterable[enums.reduce_cmd]) -> None:
    """Rules on reduce_cmd and reduce_res, and a note on chains, which another user of the accumulators may break."""
    member(call, "reduce_cmd", enums.reduce_cmd, tuple(commands))
    if call.args.get("reduce_res") is not None:
        vector(call, "reduce_res", "dst")
    if call.reduce_cmd == enums.reduce_cmd.reduce:
        call.note(
            "reduce_cmd=reduce continues accumulators that any other accumulating instruction"
            " clobbers; the scheduler may move one in between outside nl.no_reorder()"
        )


def iota_pattern(call: Call, *names: str) -> None:
    """[[step, count], ...] of up to 4 dimensions that covers the elements per partition of each named tensor."""
    pattern = call.pattern
    if not isinstance(pattern, (list, tuple)) or not 1 <= len(pattern) <= MAX_FREE_DIMS:
        raise Refusal("pattern must be a list of 1 to 4 [step, count] pairs", given=pattern)
    for pair in pattern:
        if len(pair) != 2 or not all(isinstance(v, int) for v in pair) or pair[1] < 1:
            raise Refusal("pattern must hold [step, count] pairs of integers", given=pair)
    elements = math.prod(count for _, count in pattern)
    for name in names:
        if call.args[name].free_size != elements:
            raise Refusal(
                f"the counts of pattern must cover the elements per partition of {name}",
                pattern=pattern,
                **{name: call.args[name].shape},
            )
    compile_time_int(call, "channel_multiplier")
    compile_time_int(call, "offset")
    # UNVERIFIED which way 32-bit arithmetic overflows; nothing sensible depends on it.
    reach = [call.offset, call.channel_multiplier * (call.dst.num_partitions - 1)]
    reach += [step * (count - 1) for step, count in pattern]
    if sum(v for v in reach if v > 0) > INT32[1] or sum(v for v in reach if v < 0) < INT32[0]:
        raise Refusal("the values of pattern, offset and channel_multiplier must fit int32", pattern=pattern)
