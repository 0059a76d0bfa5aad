"""Instructions of the Scalar engine: activation functions."""

from __future__ import annotations

import numpy as np

from . import cycles, rules
from .accumulators import accumulate
from .enums import engine as engines
from .enums import reduce_cmd as reduce_cmds
from .instruction import Call, Refusal, instruction
from .numerics import column, f32, store
from .operators import OPERATORS
from .run import machine_state

_ADD = OPERATORS["add"]
_COMMANDS = (reduce_cmds.idle, reduce_cmds.reset, reduce_cmds.reduce, reduce_cmds.reset_reduce)
_BIAS = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8", "int16", "int32", "uint8", "uint16",
         "uint32", "bool")  # fmt: skip


def _check_function(call: Call) -> None:
    rules.same_shape(call, "dst", "data")
    op = rules.operator(call, "op")
    if op.activation is None:
        raise Refusal(f"op={op!r} is no activation function of the Scalar engine")
    rules.scalar_or_vector(call, "scale", "data")
    rules.scalar_or_vector(call, "bias", "data", dtypes=_BIAS, optional=True)


def _check_activation(call: Call) -> None:
    _check_function(call)
    rules.accumulator(call, _COMMANDS)
    if call.reduce_op is not None:
        rules.operator_in(call, "reduce_op", ("add",))
    elif call.reduce_cmd in (reduce_cmds.reduce, reduce_cmds.reset_reduce):
        raise Refusal("reduce_cmd needs reduce_op=nl.add", reduce_cmd=call.reduce_cmd.name)
    if call.reduce_res is not None and call.reduce_cmd == reduce_cmds.idle:
        call.note("reduce_cmd=idle (the default) reduces nothing: reduce_res holds what earlier calls left")


@instruction(
    writes="dst reduce_res",
    reads="data bias scale",
    engine=engines.scalar,
    check=_check_activation,
    cycles=cycles.with_accumulator,
)
def activation(
    dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmds.idle, name=None
):
    """dst = op(data * scale + bias) in float32; with reset_reduce, reduce_res[P, 1] is its sum over the free axes."""
    x = f32(data)
    if isinstance(scale, np.ndarray) or scale != 1.0:
        x = x * column(scale, data)
    if isinstance(bias, np.ndarray) or bias:
        x = x + column(bias, data)
    value, outside = op.activate(x)
    if outside:
        machine_state().note(f"an argument of {op!r} lies outside its valid range {op.domain}: the result is NaN")
    total = accumulate(machine_state().scalar_accumulator, reduce_cmd, _ADD, value)
    store(dst, value)
    if reduce_res is not None:
        store(reduce_res, total)


def _check_activation_reduce(call: Call) -> None:
    _check_function(call)
    rules.operator_in(call, "reduce_op", ("add",))
    if call.reduce_res is not None:
        rules.vector(call, "reduce_res", "data")


@instruction(
    writes="dst reduce_res",
    reads="data bias scale",
    engine=engines.scalar,
    check=_check_activation_reduce,
    cycles=cycles.with_accumulator,
)
def activation_reduce(dst, op, data, reduce_op, reduce_res, bias=None, scale=1.0, name=None):
    """activation with reduce_cmd=reset_reduce."""
    activation.body(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmds.reset_reduce)
