"""Instructions of the Vector engine: elementwise arithmetic, reductions, scans."""

from __future__ import annotations

import numpy as np

from . import cycles, rules
from .accumulators import accumulate, scan
from .enums import engine as engines
from .enums import reduce_cmd as reduce_cmds
from .instruction import Call, Refusal, instruction
from .numerics import column, f32, like, store
from .operators import OPERATORS, Operator
from .run import machine_state

_INT32 = ("int32", "uint32")
_MAX_SCALAR_TENSOR_DIMS = 3  # BIR133, BIR134
_MAX_BN_STATS = 512
_ON_SCALAR_ENGINE = (("multiply", "add"), ("multiply", None), ("add", None))


def _check_unary(call: Call, op: Operator, operand: str) -> None:
    if op.arity == 1 and (rules.is_tensor(call.args[operand]) or call.args[operand] not in (None, 0)):
        raise Refusal(f"{operand} must be None or 0 with the unary {op!r}", given=call.args[operand])


def _tensor_tensor_engine(call: Call) -> engines:
    """Exact 32-bit integers run on GpSimd, unless an operand is in PSUM or the caller asks for Vector."""
    if call.op is OPERATORS["power"]:
        return engines.gpsimd
    if call.args["engine"] != engines.unknown:
        return call.args["engine"]
    tensors = (call.dst, call.data1, call.data2)
    exact = _integers(tensors) and not getattr(call.op, "bitvec", False)
    return engines.gpsimd if exact and not any(tensor.is_psum for tensor in tensors) else engines.vector


def _integers(tensors) -> bool:
    return all(rules.is_tensor(tensor) and tensor.dtype in _INT32 for tensor in tensors)


def _check_tensor_tensor(call: Call) -> None:
    rules.same_shape(call, "dst", "data1", "data2")
    rules.one_in_psum(call, "data1", "data2")
    rules.engine_in(call, engines.vector, engines.gpsimd)
    op = rules.alu_operator(call, "op")
    if op.name == "power" and call.args["engine"] == engines.vector:
        raise Refusal("nl.power runs on GpSimd only")
    if op.bitvec:
        rules.integer_operands(call, "dst", "data1", "data2")
        if call.args["engine"] == engines.gpsimd:
            raise Refusal(f"{op!r} runs on the Vector engine only")
    elif call.engine == engines.vector and _integers((call.dst, call.data1, call.data2)):
        call.note("32-bit integers on the Vector engine go through float32, exact below 2**24 only")
    call.args["engine"] = call.engine


@instruction(
    writes="dst",
    reads="data1 data2",
    engine=_tensor_tensor_engine,
    check=_check_tensor_tensor,
    cycles=cycles.two_tensors,
)
def tensor_tensor(dst, data1, data2, op, engine=engines.unknown, name=None):
    """dst = data1 op data2, in float32; exact for 32-bit integers on GpSimd; on bits for bitvec operators."""
    data2 = like(data2, data1)
    if op.bitvec:
        store_bits(dst, op.apply(data1, data2.astype(data1.dtype)))
    elif engine == engines.gpsimd and all(x.dtype.kind in "iu" and x.itemsize == 4 for x in (dst, data1, data2)):
        # int64 holds every 32-bit operand; the store keeps the low 32 bits, as native arithmetic does.
        store_bits(dst, op.apply(data1.astype(np.int64), data2.astype(np.int64)))
    else:
        store(dst, op.apply(f32(data1), f32(data2)))


def store_bits(dst: np.ndarray, value: np.ndarray) -> None:
    """Integers into integers, low bits kept."""
    dst[...] = like(value, dst).astype(dst.dtype)


def _tensor_scalar_engine(call: Call) -> engines:
    if call.args["engine"] != engines.unknown:
        return call.args["engine"]
    return engines.gpsimd if call.op0 is OPERATORS["rsqrt"] else engines.vector


def _check_tensor_scalar(call: Call) -> None:
    rules.same_shape(call, "dst", "data")
    rules.engine_in(call, engines.vector, engines.scalar, engines.gpsimd)
    op0 = rules.alu_operator(call, "op0", arity=None)
    op1 = rules.alu_operator(call, "op1", arity=None, optional=True)
    if op1 is None and call.operand1 is not None:
        raise Refusal("operand1 needs op1", operand1=call.operand1)
    if op1 is not None and op0.bitvec != op1.bitvec:
        raise Refusal("op0 and op1 are both bitvec or both arithmetic", op0=op0, op1=op1)
    for op, operand in ((op0, "operand0"), (op1, "operand1")):
        if op is None:
            continue
        if op.name == "power":
            raise Refusal("nl.power runs on GpSimd in tensor_tensor only")
        _check_unary(call, op, operand)
        if op.arity == 1:
            continue
        if op.bitvec:
            rules.scalar_or_vector(call, operand, "data", dtypes=None)
            rules.integer_operands(call, operand)
        else:
            rules.scalar_or_vector(call, operand, "data")
    if op0.bitvec:
        rules.integer_operands(call, "dst", "data")
    _check_tensor_scalar_engine(call, op0, op1)


def _check_tensor_scalar_engine(call: Call, op0: Operator, op1: Operator | None) -> None:
    names = (op0.name, op1.name if op1 is not None else None)
    if op0.bitvec and call.engine != engines.vector:
        raise Refusal("bitvec operators run on the Vector engine only", engine=call.engine.name)
    if call.engine == engines.scalar and names not in _ON_SCALAR_ENGINE:
        raise Refusal("the Scalar engine of trn2 does multiply and add, multiply, or add only", op0=op0, op1=op1)
    if (call.engine == engines.gpsimd) != ("rsqrt" in names):
        raise Refusal("tensor_scalar runs nl.rsqrt on GpSimd, and nothing else there", op0=op0, op1=op1,
                      engine=call.engine.name)  # fmt: skip
    if "reciprocal" in names:
        call.note("nl.reciprocal is listed as an operator, but no engine is named for it")


@instruction(
    writes="dst",
    reads="data operand0 operand1",
    engine=_tensor_scalar_engine,
    check=_check_tensor_scalar,
    cycles=cycles.tensor_scalar,
)
def tensor_scalar(
    dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, engine=engines.unknown, name=None
):
    """dst = (data op0 operand0) op1 operand1 in float32, operands broadcast along the free dimensions."""
    if op0.bitvec:
        value = op0.apply(data, _bits(operand0, data), reverse0)
        if op1 is not None:
            value = op1.apply(value, _bits(operand1, data), reverse1)
        store_bits(dst, value)
        return
    value = op0.apply(f32(data), column(operand0, data), reverse0)
    if op1 is not None:
        value = op1.apply(value, column(operand1, data), reverse1)
    store(dst, value)


def _bits(operand, data: np.ndarray) -> np.ndarray:
    """An integer immediate or a [P, 1] vector in the dtype of `data`."""
    values = np.asarray(0 if operand is None else operand).astype(data.dtype)
    return values.reshape(-1, *(1,) * (data.ndim - 1)) if values.ndim else values


def _check_scalar_tensor_tensor(call: Call) -> None:
    rules.same_shape(call, "dst", "data", "operand1")
    rules.one_in_psum(call, "data", "operand1")
    rules.scalar_or_vector(call, "operand0", "data", dtypes=None)
    rules.arithmetic_operator(call, "op0")
    rules.arithmetic_operator(call, "op1")
    rules.max_free_dims(call, _MAX_SCALAR_TENSOR_DIMS, "dst", "data", "operand1")


@instruction(
    writes="dst",
    reads="data operand0 operand1",
    engine=engines.vector,
    check=_check_scalar_tensor_tensor,
    cycles=cycles.scalar_and_tensor,
)
def scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None):
    """dst = (data op0 operand0) op1 operand1 in float32, operand0 a number or a [P, 1] vector, operand1 a tile."""
    value = op0.apply(f32(data), column(operand0, data), reverse0)
    store(dst, op1.apply(value, f32(like(operand1, data)), reverse1))


def _check_tensor_scalar_reduce(call: Call) -> None:
    rules.same_shape(call, "dst", "data")
    op0 = rules.arithmetic_operator(call, "op0", arity=None)
    _check_unary(call, op0, "operand0")
    if op0.arity == 2:
        rules.scalar_or_vector(call, "operand0", "data")
    if op0.name == "rsqrt":
        raise Refusal("nl.rsqrt runs on GpSimd in tensor_scalar only")
    rules.operator_in(call, "reduce_op", ("add", "multiply", "maximum", "minimum"))
    if call.reverse0:
        raise Refusal("reverse0 is not supported yet, the documentation says")
    rules.max_free_dims(call, _MAX_SCALAR_TENSOR_DIMS, "dst", "data")
    rules.accumulator(call, (reduce_cmds.reset_reduce, reduce_cmds.reduce, reduce_cmds.load_reduce))
    if (call.reduce_init is not None) != (call.reduce_cmd == reduce_cmds.load_reduce):
        raise Refusal("reduce_init goes with reduce_cmd.load_reduce, and only with it", reduce_init=call.reduce_init,
                      reduce_cmd=call.reduce_cmd.name)  # fmt: skip
    rules.scalar_or_vector(call, "reduce_init", "data", optional=True)


@instruction(
    writes="dst reduce_res",
    reads="data operand0 reduce_init",
    engine=engines.vector,
    check=_check_tensor_scalar_reduce,
    cycles=cycles.with_accumulator,
)
def tensor_scalar_reduce(
    dst, data, op0, operand0, reduce_op, reduce_res=None, reverse0=False, reduce_cmd=reduce_cmds.reset_reduce,
    reduce_init=None, reduce_res_negate=False, name=None,
):  # fmt: skip
    """dst = data op0 operand0; reduce_res[P, 1] its float32 reduction over all free dimensions."""
    value = op0.apply(f32(data), column(operand0, data))
    total = accumulate(machine_state().vector_accumulator, reduce_cmd, reduce_op, value, reduce_init)
    store(dst, value)
    if reduce_res is not None:
        store(reduce_res, -total if reduce_res_negate else total)


def _axes(call: Call) -> tuple[int, ...]:
    axis = call.axis if isinstance(call.axis, (list, tuple)) else (call.axis,)
    ndim = call.data.ndim
    if not axis or any(not isinstance(a, int) or isinstance(a, bool) or not -ndim <= a < ndim for a in axis):
        raise Refusal("axis must name dimensions of data", axis=call.axis, data=call.data.shape)
    return tuple(sorted(a % ndim for a in axis))


def _check_tensor_reduce(call: Call) -> None:
    rules.tensor_operand(call, "dst", "data")
    op = rules.alu_operator(call, "op")
    if not op.is_reduction:
        raise Refusal(f"op={op!r} is no reduction operator")
    dst, data = call.dst, call.data
    axes = _axes(call)
    if axes[0] == 0:
        raise Refusal("axis 0 is the partition dimension: transpose, or multiply by ones", axis=call.axis)
    if axes != tuple(range(axes[0], data.ndim)):
        raise Refusal("axis must be the last contiguous free dimensions, to the final one", axis=call.axis,
                      data=data.shape)  # fmt: skip
    kept = int(np.prod(data.shape[1 : axes[0]], dtype=int))
    if dst.num_partitions != data.num_partitions or dst.free_size != kept:
        raise Refusal("dst must have the partitions of data and one element for each reduced row", dst=dst.shape,
                      expected=(data.num_partitions, kept))  # fmt: skip
    if op.bitvec:
        rules.integer_operands(call, "dst", "data")
        if call.negate:
            raise Refusal("negate needs an arithmetic operator", op=op)
    call.args["axis"] = axes


@instruction(writes="dst", reads="data", engine=engines.vector, check=_check_tensor_reduce, cycles=cycles.reduce)
def tensor_reduce(dst, op, data, axis, negate=False, keepdims=False, name=None):
    """dst = the reduction of data over its trailing axes, float32 (bits for bitvec operators); times -1 with negate."""
    if op.bitvec:
        store_bits(dst, op.reduce(data, axis))
        return
    total = op.reduce(f32(data), axis)
    store(dst, -total if negate else total)


def _check_cumulative(call: Call) -> None:
    rules.same_shape(call, "dst", "src")
    for name in ("dst", "src"):
        if call.args[name].dtype in _INT32:
            raise Refusal(f"{name}: 32-bit integers are not supported", dtype=call.args[name].dtype)
    rules.arithmetic_operator(call, "op0")
    rules.operator_in(call, "op1", ("add", "subtract", "multiply", "maximum", "minimum"))
    rules.scalar_or_vector(call, "imm0", "src")
    rules.scalar_or_vector(call, "imm1", "src", optional=True)
    rules.accumulator(call, (reduce_cmds.reset_reduce, reduce_cmds.reduce, reduce_cmds.load_reduce))
    if (call.imm1 is not None) != (call.reduce_cmd == reduce_cmds.load_reduce):
        raise Refusal("imm1 goes with reduce_cmd.load_reduce, and only with it", imm1=call.imm1,
                      reduce_cmd=call.reduce_cmd.name)  # fmt: skip


@instruction(
    writes="dst",
    reads="src imm0 imm1",
    engine=engines.vector,
    check=_check_cumulative,
    cycles=cycles.two_per_element,  # UNVERIFIED: not published, N to 2 N
)
def tensor_scalar_cumulative(dst, src, op0, op1, imm0, imm1=None, reduce_cmd=reduce_cmds.reset_reduce, name=None):
    """reg = (src op0 imm0) op1 reg along the free dimension, every step written to dst."""
    value = op0.apply(f32(src), column(imm0, src)).reshape(src.shape[0], -1)
    registers = machine_state().vector_accumulator[: src.shape[0]]
    if reduce_cmd == reduce_cmds.reset_reduce:
        start = np.float32(op1.identity)
    else:
        start = registers if reduce_cmd == reduce_cmds.reduce else np.ravel(f32(imm1))
    running = scan(op1, value, np.broadcast_to(start, registers.shape))
    registers[:] = running[:, -1]
    store(dst, running)


def _check_scan(call: Call) -> None:
    rules.same_shape(call, "dst", "data0", "data1")
    rules.one_in_psum(call, "data0", "data1")
    rules.scalar_or_vector(call, "initial", "data0", dtypes=None)
    rules.arithmetic_operator(call, "op0")
    rules.arithmetic_operator(call, "op1")


@instruction(
    writes="dst",
    reads="data0 data1 initial",
    engine=engines.vector,
    check=_check_scan,
    cycles=cycles.two_per_element,
)
def tensor_tensor_scan(dst, data0, data1, initial, op0, op1, reverse0=False, reverse1=False, name=None):
    """r[i] = (data0[i] op0 r[i-1]) op1 data1[i] along the free dimension, r[-1] = initial; the state stays float32."""
    rows = data0.shape[0]
    left, right = f32(data0).reshape(rows, -1), f32(data1).reshape(rows, -1)
    state = np.broadcast_to(np.ravel(f32(initial)), (rows,))
    if op0.name == "multiply" and op1.name == "add" and (left == 1).all():
        running = scan(op1, right, state)
    elif op1.name == "add" and op0.name in ("add", "multiply", "maximum", "minimum") and (right == 0).all():
        running = scan(op0, left, state)
    else:
        running = np.empty_like(left)
        for step in range(left.shape[1]):
            state = op1.apply(op0.apply(left[:, step], state, reverse0), right[:, step], reverse1)
            running[:, step] = state
    store(dst, running)


def _check_reciprocal(call: Call) -> None:
    rules.same_shape(call, "dst", "data")


@instruction(writes="dst", reads="data", engine=engines.vector, check=_check_reciprocal, cycles=cycles.reciprocal)
def reciprocal(dst, data, name=None):
    """dst = 1 / data in float32."""
    store(dst, np.float32(1) / f32(data))


def _check_bn_stats(call: Call) -> None:
    rules.tensor_operand(call, "dst", "data")
    if call.data.free_size > _MAX_BN_STATS:
        raise Refusal("data has at most 512 elements per partition", data=call.data.shape)
    if call.dst.num_partitions != call.data.num_partitions or call.dst.free_size != 6:
        raise Refusal("dst must be [partitions of data, 6]", dst=call.dst.shape)


@instruction(writes="dst", reads="data", engine=engines.vector, check=_check_bn_stats, cycles=cycles.one_per_element)
def bn_stats(dst, data, name=None):
    """dst[P, 6] = count, mean, variance * count of the even elements of each partition, then of the odd ones."""
    values = f32(data).reshape(data.shape[0], -1)
    columns = []
    for half in (values[:, 0::2], values[:, 1::2]):
        count = half.shape[1]
        mean = half.mean(axis=1, dtype=np.float32) if count else np.zeros(len(values), np.float32)
        columns += [np.full(len(values), count, np.float32), mean, ((half - mean[:, None]) ** 2).sum(axis=1)]
    store(dst, np.stack(columns, axis=1))


def _check_bn_aggr(call: Call) -> None:
    rules.tensor_operand(call, "dst", "data")
    if call.data.free_size % 3:
        raise Refusal("data holds (count, mean, variance * count) triples", data=call.data.shape)
    if call.dst.num_partitions != call.data.num_partitions or call.dst.free_size != 2:
        raise Refusal("dst must be [partitions of data, 2]", dst=call.dst.shape)


@instruction(writes="dst", reads="data", engine=engines.vector, check=_check_bn_aggr, cycles=cycles.bn_aggregate)
def bn_aggr(dst, data, name=None):
    """dst[P, 2] = mean and variance of everything that the bn_stats outputs in data count."""
    count, mean, spread = np.moveaxis(f32(data).reshape(data.shape[0], -1, 3), 2, 0)
    total = count.sum(axis=1)
    overall = (count * mean).sum(axis=1) / total
    variance = (spread + count * (mean - overall[:, None]) ** 2).sum(axis=1) / total
    store(dst, np.stack([overall, variance], axis=1))
