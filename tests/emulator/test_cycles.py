"""Busy cycles of each instruction against the documented rates (nki-reference.md section 3), worked out by hand.

Tiles are [128, 512] unless said otherwise; one instruction a case.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from draft_verify.reference import emulator

from .tiles import nisa, nl

RESET = nisa.reduce_cmd.reset_reduce
VECTOR, SCALAR = nisa.engine.vector, nisa.engine.scalar

CASES = {
    "matmul of bf16": ("tensor", 512, lambda t: nisa.nc_matmul(t.psum, t.half[:, :128], t.half, accumulate=False)),
    "matmul of few columns": ("tensor", 64, lambda t: nisa.nc_matmul(
        t.psum[:, :8], t.half[:, :128], t.half[:, :8], accumulate=False)),
    "matmul of fp32, four passes": ("tensor", 2048, lambda t: nisa.nc_matmul(
        t.psum, t.full[:, :128], t.full, accumulate=False)),
    "matmul of fp32 with zeros and ones": ("tensor", 1024, lambda t: nisa.nc_matmul(
        t.psum, t.full[:, :128], t.full, is_stationary_onezero=True, accumulate=False)),
    "transpose of bf16": ("tensor", 128, lambda t: nisa.nc_transpose(t.half_psum, t.half[:, :128])),
    "transpose of fp32": ("tensor", 256, lambda t: nisa.nc_transpose(t.psum[:, :128], t.full[:, :128])),
    "transpose of 32 x 32": ("vector", 64, lambda t: nisa.nc_transpose(t.full[:32, :32], t.other[:32, :32])),
    "copy of fp32": ("vector", 512, lambda t: nisa.tensor_copy(t.full, t.other)),
    "copy of bf16, four a cycle": ("vector", 128, lambda t: nisa.tensor_copy(t.half, t.half)),
    "copy of strided bf16, two a cycle": ("vector", 128, lambda t: nisa.tensor_copy(t.half[:, ::2], t.half[:, ::2])),
    "copy on the Scalar engine": ("scalar", 512, lambda t: nisa.tensor_copy(t.half, t.half, engine=SCALAR)),
    "copy at a run-time address": ("vector", 600, lambda t: nisa.tensor_copy(
        t.full[:, :8], t.other.ap([[512, 128], [1, 8]], scalar_offset=t.index, indirect_dim=1))),
    "fill of unassigned engine": ("gpsimd", 512, lambda t: nisa.memset(t.full, 1.0)),
    "fill of bf16 with zero": ("gpsimd", 256, lambda t: nisa.memset(t.half, 0.0)),
    "predicated copy": ("vector", 1024, lambda t: nisa.tensor_copy_predicated(t.full, t.other, t.byte)),
    "shuffle": ("vector", 512, lambda t: nisa.nc_stream_shuffle(t.full, t.full, [0] * 32)),
    "sum of fp32": ("vector", 1024, lambda t: nisa.tensor_tensor(t.full, t.full, t.other, nl.add)),
    "sum of fp32 with PSUM": ("vector", 512, lambda t: nisa.tensor_tensor(t.full, t.psum, t.other, nl.add)),
    "sum of bf16": ("vector", 256, lambda t: nisa.tensor_tensor(t.half, t.half, t.half, nl.add)),
    "maximum of bf16": ("vector", 512, lambda t: nisa.tensor_tensor(t.half, t.half, t.half, nl.maximum)),
    "sum of int32": ("gpsimd", 512, lambda t: nisa.tensor_tensor(t.word, t.word, t.word, nl.add)),
    "scalar of fp32": ("vector", 512, lambda t: nisa.tensor_scalar(t.full, t.full, nl.add, 1.0)),
    "scalar of bf16": ("vector", 128, lambda t: nisa.tensor_scalar(t.half, t.half, nl.add, 1.0)),
    "scalar into bytes": ("vector", 512, lambda t: nisa.tensor_scalar(t.byte, t.half, nl.less, 1.0)),
    "scalar of few": ("vector", 64, lambda t: nisa.tensor_scalar(t.full[:, :3], t.full[:, :3], nl.add, 1.0)),
    "scalar and tensor": ("vector", 1024, lambda t: nisa.scalar_tensor_tensor(
        t.full, t.full, nl.multiply, 2.0, nl.add, t.other)),
    "scalar with a reduction": ("vector", 576, lambda t: nisa.tensor_scalar_reduce(
        t.full, t.full, nl.add, 0.0, nl.add, t.column, reduce_cmd=RESET)),
    "maximum of rows": ("vector", 512, lambda t: nisa.tensor_reduce(t.column, nl.maximum, t.full, axis=1)),
    "maximum of rows in bf16": ("vector", 256, lambda t: nisa.tensor_reduce(
        t.half_column, nl.maximum, t.half, axis=1)),
    "scan": ("vector", 1024, lambda t: nisa.tensor_tensor_scan(
        t.full, t.full, t.other, 0.0, nl.multiply, nl.add)),
    "reciprocal": ("vector", 4096, lambda t: nisa.reciprocal(t.full, t.other)),
    "eight largest": ("vector", 512, lambda t: nisa.max8(t.eight, t.full)),
    "activation": ("scalar", 512, lambda t: nisa.activation(t.full, nl.exp, t.full)),
    "activation with a sum": ("scalar", 576, lambda t: nisa.activation(
        t.full, nl.exp, t.full, reduce_op=nl.add, reduce_res=t.column, reduce_cmd=RESET)),
    "iota": ("gpsimd", 662, lambda t: nisa.iota(t.word, [[1, 512]])),
    "affine select": ("gpsimd", 662, lambda t: nisa.affine_select(t.full, [[1, 512]], 1, t.other, 0.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_instruction_keeps_its_engine_busy_as_documented(name):
    engine, cycles, emit = CASES[name]

    def kernel(x):
        t = SimpleNamespace(full=nl.load(x), other=nl.load(x))
        for field, shape, dtype in (
            ("half", (128, 512), nl.bfloat16),
            ("byte", (128, 512), nl.uint8),
            ("word", (128, 512), nl.int32),
            ("column", (128, 1), nl.float32),
            ("half_column", (128, 1), nl.bfloat16),
            ("eight", (128, 8), nl.float32),
            ("index", (1, 1), nl.int32),
        ):
            setattr(t, field, nl.zeros(shape, dtype))
        t.psum = nl.zeros((128, 512), nl.float32, buffer=nl.psum)
        t.half_psum = nl.ndarray((128, 128), nl.bfloat16, buffer=nl.psum)
        emitted.append(emit(t).call)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nl.store(out, t.full)
        return out

    emitted = []
    emulator.trace(kernel, np.ones((128, 512), np.float32))
    assert (emitted[0].engine.name, emitted[0].cycles) == (engine, cycles)
