"""The accumulator registers of the Vector and Scalar engines, one float32 per partition, and running reductions."""

from __future__ import annotations

import numpy as np

from .enums import reduce_cmd as reduce_cmds
from .numerics import f32
from .operators import Operator

Array = np.ndarray


def accumulate(registers: Array, command: reduce_cmds, operator: Operator, values: Array, initial=None) -> Array:
    """Reduces float32 `values` [P, ...] over the free dimensions into registers[:P], as `command` says: [P, 1]."""
    lanes = registers[: values.shape[0]]
    if command in (reduce_cmds.reset, reduce_cmds.reset_reduce):
        lanes[:] = operator.identity
    elif command == reduce_cmds.load_reduce:
        lanes[:] = np.ravel(f32(initial))
    if command in (reduce_cmds.reduce, reduce_cmds.reset_reduce, reduce_cmds.load_reduce):
        total = operator.reduce(values, tuple(range(1, values.ndim))).ravel()
        lanes[:] = operator.apply(lanes, total)
    return lanes.reshape(-1, 1)


def scan(operator: Operator, values: Array, state: Array) -> Array:
    """r[:, i] = values[:, i] op r[:, i - 1] in float32, r[:, -1] = state [P]; values are [P, N]."""
    if operator.name == "subtract":
        running = np.empty_like(values)
        for step in range(values.shape[1]):
            running[:, step] = state = values[:, step] - state
        return running
    chain = np.concatenate([state[:, None].astype(np.float32), values], axis=1)
    return operator.alu.accumulate(chain, axis=1, dtype=np.float32)[:, 1:]
