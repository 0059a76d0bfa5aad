"""Busy cycles of an instruction on its engine, by the documented rates.

Sources: the cost tables of the NKI beta's instruction pages, trainium2_arch.rst ("Vector Engine Performance Mode").
N is the number of elements per partition of the widest operand. Every engine needs `issue_cycles` between instructions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from .enums import engine as engines
from .instruction import Call
from .machine import trn2

_HALF = ("bfloat16", "float16")
_DENSE = ("add", "subtract", "multiply")


def _engine_cycles(rate: Callable[[Call], float]) -> Callable[[Call], float]:
    """Never below the issue interval, nor below what a run-time address costs."""

    @functools.wraps(rate)  # cost.py marks the rates whose docstring says UNVERIFIED
    def cycles(call: Call) -> float:
        dynamic = any(tensor.scalar_offset is not None for _, tensor, _ in call.tensors())
        return max(float(trn2.issue_cycles), float(trn2.dynamic_address_cycles) * dynamic, float(rate(call)))

    return cycles


def elements(call: Call) -> int:
    return max(tensor.free_size for _, tensor, _ in call.tensors())


def _half(tensor) -> bool:
    return tensor.dtype in _HALF


def _any_psum(*tensors) -> bool:
    return any(getattr(tensor, "is_psum", False) for tensor in tensors)


def _fast_copy(dst, src) -> int:
    """Elements per lane and cycle of tensor_copy and tensor_scalar on the Vector engine."""
    if not (_half(dst) and _half(src)) or (dst.is_psum and src.is_psum):
        return 1
    dense = dst.strides[-1] == 1 and src.strides[-1] == 1
    on_sbuf = dst.is_sbuf and src.is_sbuf
    if on_sbuf:
        return 4 if dense else 2
    return 2 if dense else 1


@_engine_cycles
def one_per_element(call: Call) -> float:
    return elements(call)


@_engine_cycles
def copy(call: Call) -> float:
    return elements(call) / (_fast_copy(call.dst, call.src) if call.engine == engines.vector else 1)


@_engine_cycles
def tensor_scalar(call: Call) -> float:
    return elements(call) / (_fast_copy(call.dst, call.data) if call.engine == engines.vector else 1)


@_engine_cycles
def memset(call: Call) -> float:
    return elements(call) / (2 if call.value == 0 and call.dst.dtype.itemsize == 2 else 1)


@_engine_cycles
def predicated(call: Call) -> float:
    source = call.args.get("src", call.args.get("on_true"))
    return elements(call) * (1 if _any_psum(source, call.predicate) else 2)


@_engine_cycles
def two_tensors(call: Call) -> float:
    """tensor_tensor: two cycles an element, one where an input comes from PSUM or all is a dense 16-bit sum or product
    (OLD); trn2 halves that where all tensors are 16-bit and both inputs in SBUF (T2)."""
    if call.engine == engines.gpsimd:  # UNVERIFIED: one element a lane and cycle at best
        return elements(call)
    tensors = (call.dst, call.data1, call.data2)
    halves = all(_half(tensor) for tensor in tensors)
    dense = halves and all(tensor.strides[-1] == 1 for tensor in tensors) and call.op.name in _DENSE
    rate = 1 if dense or _any_psum(call.data1, call.data2) else 2
    return elements(call) * rate / (2 if halves and call.data1.is_sbuf and call.data2.is_sbuf else 1)


@_engine_cycles
def scalar_and_tensor(call: Call) -> float:
    fast = (
        all(tensor.dtype == "bfloat16" for tensor in (call.dst, call.data, call.operand1))
        and (call.op0.name, call.op1.name) == ("subtract", "multiply")
        and elements(call) % 2 == 0
    )
    return elements(call) * (1 if fast else 2)


@_engine_cycles
def two_per_element(call: Call) -> float:
    return 2 * elements(call)


@_engine_cycles
def with_accumulator(call: Call) -> float:
    return elements(call) + trn2.accumulator_read_cycles * (call.reduce_res is not None)


@_engine_cycles
def reduce(call: Call) -> float:
    fast = _half(call.dst) and _half(call.data) and call.op.name in ("add", "maximum")
    return elements(call) / (2 if fast else 1)


@_engine_cycles
def reciprocal(call: Call) -> float:
    return 8 * elements(call)


@_engine_cycles
def bn_aggregate(call: Call) -> float:
    return 13 * elements(call) / 3


@_engine_cycles
def gpsimd(call: Call) -> float:
    return trn2.gpsimd_cycles + elements(call)


@_engine_cycles
def gpsimd_serial(call: Call) -> float:
    """UNVERIFIED: no published cost; four cycles an element, as topk has."""
    return trn2.gpsimd_cycles + 4 * elements(call)


@_engine_cycles
def n_gather(call: Call) -> float:
    """UNVERIFIED: no published cost; four cycles an index, however long the data it points into."""
    return trn2.gpsimd_cycles + 4 * call.dst.free_size


@_engine_cycles
def partition_reduce(call: Call) -> float:
    """UNVERIFIED: no published cost beyond "slow"; a GpSimd core walks its 16 partitions."""
    return trn2.gpsimd_cycles + 16 * elements(call)


@_engine_cycles
def local_gather(call: Call) -> float:
    """As published, divided by C. UNVERIFIED: more elements an index would then be slower, and 8 indices a cycle are
    more than a core's 16 lanes move. If C multiplies, an index takes 7 cycles and one for each 4-byte element.
    """
    count = call.num_elem_per_idx
    per_cycle = (28 + 4 * count) / (4 * count) / min(4 / call.dst.dtype.itemsize, count)
    return trn2.gpsimd_cycles + call.dst.free_size / per_cycle


@_engine_cycles
def topk(call: Call) -> float:
    return 4 * call.n + call.val_dst.free_size


@_engine_cycles
def transpose(call: Call) -> float:
    if call.engine == engines.vector:
        return elements(call)
    passes = 2 if call.data.dtype.itemsize == 4 else 1
    return max(call.data.num_partitions, min(trn2.issue_cycles, call.data.free_size)) * passes


@_engine_cycles
def matmul(call: Call) -> float:
    """One column of `moving` a cycle; the load of `stationary` hides behind it. float32 takes four passes."""
    columns = call.dst.free_size
    if call.stationary.dtype not in ("float32", "tfloat32"):
        return columns
    if call.stationary.dtype == "tfloat32" and call.moving.dtype == "tfloat32":
        return columns  # T2: tf32 has the rate of bf16
    if call.is_transpose or call.is_stationary_onezero or call.is_moving_onezero:
        return 2 * columns
    return 4 * columns
