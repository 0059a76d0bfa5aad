"""Instructions that draw random bits. The generators stand in for the hardware's: same interface, other numbers."""

from __future__ import annotations

import numpy as np

from . import cycles, rules
from .enums import engine as engines
from .instruction import Call, Refusal, instruction
from .numerics import column, store
from .run import machine_state

_XORWOW_WORDS = 6
_XORWOW_STEP = 362_437


def _named_engine(call: Call) -> engines:
    return call.args["engine"]


def _check_rng(call: Call) -> None:
    rules.tensor_operand(call, "dst")
    rules.member(call, "engine", engines, (engines.vector, engines.gpsimd))
    if not call.dst.dtype.is_integer or call.dst.dtype == "bool":
        raise Refusal("dst must be an integer dtype", dtype=call.dst.dtype)


@instruction(writes="dst", engine=_named_engine, check=_check_rng, cycles=cycles.one_per_element)
def rng(dst, engine=engines.vector, name=None):
    """dst = 32 random bits an element, the low ones where dst is narrower."""
    if engine == engines.gpsimd:
        rows = dst.shape[0]
        bits = np.stack([_xorwow(machine_state().gpsimd_random[:rows]) for _ in range(dst[0].size)], axis=1)
    else:
        bits = machine_state().rng.integers(0, 1 << 32, dst.shape, np.uint32)
    dst[...] = bits.reshape(dst.shape).astype(dst.dtype)


def _xorwow(state: np.ndarray) -> np.ndarray:
    """Next word of every lane; state [P, 6] is x, y, z, w, v, d (Marsaglia, Xorshift RNGs, 2003, section 3.1)."""
    x, v = state[:, 0], state[:, 4]
    mixed = x ^ (x >> np.uint32(2))
    following = (v ^ (v << np.uint32(4))) ^ (mixed ^ (mixed << np.uint32(1)))
    state[:, :4] = state[:, 1:5].copy()
    state[:, 4] = following
    state[:, 5] += np.uint32(_XORWOW_STEP)
    return state[:, 5] + following


def _check_dropout(call: Call) -> None:
    rules.same_shape(call, "dst", "data")
    rules.same_dtype(call, "dst", "data")
    floats = ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "tfloat32")
    rules.scalar_or_vector(call, "prob", "data", floats if call.data.dtype.is_float else ("float32",))


@instruction(
    writes="dst", reads="data prob", engine=engines.vector, check=_check_dropout, cycles=cycles.one_per_element
)
def dropout(dst, data, prob, name=None):
    """dst = data, or 0 with probability prob (a number or [P, 1])."""
    dropped = machine_state().rng.random(data.shape, np.float32) < column(prob, data)
    store(dst, np.where(dropped, data.dtype.type(0), data))


def _check_seed(call: Call) -> None:
    rules.tensor_operand(call, "src_seeds")
    if call.src_seeds.shape != (1, 1) or call.src_seeds.dtype.itemsize != 4:
        raise Refusal("src_seeds must be a [1, 1] tensor of 32 bits", shape=call.src_seeds.shape,
                      dtype=call.src_seeds.dtype)  # fmt: skip


@instruction(reads="src_seeds", engine=engines.vector, check=_check_seed, cycles=cycles.one_per_element)
def set_rng_seed(src_seeds, name=None):
    """Seeds the Vector engine's generator."""
    machine_state().rng = np.random.default_rng(int(src_seeds.view(np.uint32)[0, 0]))


def _check_state(call: Call) -> None:
    name = "src_seeds" if "src_seeds" in call.args else "dst"
    rules.tensor_operand(call, name)
    rules.buffer_in(call, "sbuf", name)
    rules.dtype_in(call, name, ("uint32",))
    if call.args["engine"] != engines.gpsimd:
        raise Refusal("engine must be gpsimd on trn2", engine=call.args["engine"])
    if call.args[name].free_size != _XORWOW_WORDS or call.args[name].ndim != 2:
        raise Refusal(f"{name} must be [P, 6]: the state of XORWOW on GpSimd", shape=call.args[name].shape)


@instruction(reads="src_seeds", engine=_named_engine, check=_check_state, cycles=cycles.one_per_element)
def rand_set_state(src_seeds, engine=engines.gpsimd, name=None):
    """Sets each lane's generator of the GpSimd engine."""
    machine_state().gpsimd_random[: src_seeds.shape[0]] = src_seeds


@instruction(writes="dst", engine=_named_engine, check=_check_state, cycles=cycles.one_per_element)
def rand_get_state(dst, engine=engines.gpsimd, name=None):
    """dst[P, 6] = each lane's generator of the GpSimd engine."""
    dst[...] = machine_state().gpsimd_random[: dst.shape[0]]
