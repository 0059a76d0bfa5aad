"""Registers, runtime loops, and what the two cores of an LNC pair say to each other."""

from __future__ import annotations

import contextlib
import re

import numpy as np

from . import context
from .enums import dma_engine as dma_engines
from .enums import engine as engines
from .enums import nc_version
from .instruction import Refusal, instruction
from .opaque import Opaque, VirtualRegister
from .program import Loop
from .tensor import NkiTensor

_WHILE_REGISTER = re.compile(r"\s*while\s+\(?[\w.]+\)?\s*:")
_INT32 = range(-(2**31), 2**31)
_GPSIMD_DMA_BYTES = {4: 1024, 2: 512, 1: 256}  # per partition, by item size


def _register(value, what: str) -> VirtualRegister:
    if not isinstance(value, VirtualRegister):
        raise Refusal(f"{what} is a register (nisa.register_alloc)", given=value)
    return value


def _check_register_move(call):
    if _register(call.dst, "dst").frozen:
        call.note("the loop passes its register by value: writing it has no effect on the loop")
    if not isinstance(call.src, VirtualRegister) and (isinstance(call.src, bool) or call.src not in _INT32):
        raise Refusal("src is a register or a 32-bit int", src=call.src)


def _check_one_element(call, tensor, register):
    _register(register, "the register operand")
    if not isinstance(tensor, NkiTensor) or tensor.is_psum or tensor.shape not in ((1,), (1, 1)):
        raise Refusal("a register is loaded from and stored to a [1] or [1,1] tensor in SBUF or HBM", tensor=tensor)
    if not tensor.dtype.is_integer:
        raise Refusal("registers hold integers", tensor=tensor)


def _new_register(frozen: bool = False) -> VirtualRegister:
    tracer = context.current("register_alloc")
    register = VirtualRegister(tracer.registers, tracer.core, frozen)
    tracer.registers += 1
    return register


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A new register, holding `x` or nothing."""
    register = _new_register()
    if x is not None:
        register_move(register, x)
    return register


@instruction(check=_check_register_move, engine=engines.sync)
def register_move(dst, src):
    """dst = src, an int or a register."""
    dst.value = src.value if isinstance(src, VirtualRegister) else int(src)


@instruction(reads="src", check=lambda call: _check_one_element(call, call.src, call.dst), engine=engines.sync)
def register_load(dst, src):
    """dst = the one element of src."""
    dst.value = int(src.reshape(-1)[0])


@instruction(writes="dst", check=lambda call: _check_one_element(call, call.dst, call.src), engine=engines.sync)
def register_store(dst, src):
    """The one element of dst = src."""
    dst[...] = np.array(src.value).astype(dst.dtype)


def _check_pair(call):
    if context.current("a cross-core instruction").program.lnc != 2:
        raise Refusal("needs LNC 2: launch with kernel[2]")


def _check_core_barrier(call):
    _check_pair(call)
    if tuple(call.cores) != (0, 1):
        raise Refusal("only cores=(0, 1)", cores=call.cores)
    if not isinstance(call.data, NkiTensor) or call.data.storage.buffer != "shared_hbm":
        raise Refusal("data is a tensor in shared HBM", data=call.data)


@instruction(check=_check_core_barrier, engine=lambda call: call.args["engine"])
def core_barrier(data, cores, engine=engines.gpsimd, name=None):
    """Orders both cores' accesses to `data`: neither passes before both have come."""


def _check_sendrecv(call):
    _check_pair(call)
    src, dst = call.src, call.dst
    if not (isinstance(src, NkiTensor) and isinstance(dst, NkiTensor) and src.is_sbuf and dst.is_sbuf):
        raise Refusal("src and dst are tensors in SBUF", src=src, dst=dst)
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise Refusal("src and dst have the same shape and dtype", src=src, dst=dst)
    if src.is_indirect() or dst.is_indirect():
        raise Refusal("no dynamic access patterns in sendrecv", src=src, dst=dst)
    if call.send_to_rank not in (0, 1) or call.recv_from_rank not in (0, 1):
        raise Refusal("ranks are 0 or 1", send_to_rank=call.send_to_rank, recv_from_rank=call.recv_from_rank)
    if call.args["dma_engine"] is dma_engines.gpsimd_dma:
        size, limit = src.free_size * src.itemsize, _GPSIMD_DMA_BYTES[src.itemsize]
        if size > limit:
            raise Refusal("gpsimd_dma moves fewer bytes a partition", bytes=size, limit=limit, src=src)


def _sendrecv_engine(call):
    return engines.gpsimd if call.args["dma_engine"] is dma_engines.gpsimd_dma else engines.dma


@instruction(writes="dst", reads="src", check=_check_sendrecv, engine=_sendrecv_engine)
def sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engines.dma, name=None):
    """Sends src to one core while receiving dst from the other; meets the peer's sendrecv of the same pipe_id."""


CROSS_CORE = (core_barrier, sendrecv)


def _open(loop: Loop) -> None:
    """What is traced from here on is the loop's body."""
    tracer = context.current("a runtime loop")
    if tracer.loops:
        raise Refusal("runtime loops do not nest", outer=tracer.loops[-1].source)
    if tracer.region is not None:
        raise Refusal("no runtime loop inside nl.no_reorder")
    tracer.block.items.append(loop)
    tracer.block = loop.body
    tracer.loops.append(loop)
    loop.first = tracer.calls


def _close(loop: Loop) -> None:
    tracer = context.current("a runtime loop")
    loop.open = False
    loop.last = tracer.calls
    tracer.loops.pop()
    tracer.block = tracer.program.cores[tracer.core]


def _counted(what: str, lower, upper, step) -> Loop:
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise Refusal(f"{what}: step is a positive int known while tracing", step=step)
    for bound in (lower, upper):
        if not isinstance(bound, VirtualRegister) and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise Refusal(f"{what}: bounds are ints or registers", lower=lower, upper=upper)
    return Loop("fori", _new_register(frozen=True), context.kernel_line(), lower, upper, step)


def fori_loop(lower, upper, body_fun, step=1) -> None:
    """Runs body_fun(i) for i from lower to upper (exclusive) by step; the body is traced once, with a register."""
    loop = _counted("fori_loop", lower, upper, step)
    if isinstance(lower, int) and isinstance(upper, int):
        context.note("fori_loop between two ints: NKI 0.7 passes no register then; make one bound a register")
    _open(loop)
    if body_fun(loop.register) is not None:
        raise Refusal("the body of fori_loop returns nothing")
    _close(loop)


def while_loop(init, body_fun) -> None:
    """Runs body_fun(register) while the condition register is not zero; the body returns the next condition."""
    loop = Loop("while", _new_register(), context.kernel_line(), condition=_register(init, "while_loop: init"))
    _open(loop)
    loop.next_condition = _register(body_fun(loop.register), "what the body of while_loop returns")
    _close(loop)


def dynamic_range(start, stop=None, step=1):
    """Iterates once, over the register of a runtime loop: what the kernel traces meanwhile is the loop's body."""
    loop = _counted("dynamic_range", *((0, start) if stop is None else (start, stop)), step)
    context.note("nl.dynamic_range is deprecated, and an error under NKI 0.7: use nl.fori_loop")
    _open(loop)
    yield loop.register
    _close(loop)


def _is_tested(register: VirtualRegister) -> bool:
    """`while register:` is a runtime loop, its body what is traced between the first test and the second."""
    source = context.kernel_line()
    if not _WHILE_REGISTER.match(context.source_line(source)):
        return Opaque.__bool__(register)
    loops = context.current("a runtime loop").loops
    if loops and loops[-1].source == source:
        _close(loops[-1])
        return False
    context.note("while on a register is deprecated, and an error under NKI 0.7: use nl.while_loop")
    _open(Loop("while", _new_register(), source, condition=register, next_condition=register))
    return True


VirtualRegister.__bool__ = _is_tested  # here, because it needs the tracer


@contextlib.contextmanager
def no_reorder():
    """Instructions inside keep program order."""
    tracer = context.current("no_reorder")
    outer, tracer.region = tracer.region, object()
    try:
        yield
    finally:
        tracer.region = outer


def program_id(axis=0) -> int:
    """The physical core this program is traced for."""
    _check_axis(axis)
    return context.current("program_id").core


def num_programs(axes=0) -> int:
    _check_axis(axes)
    return context.current("num_programs").program.lnc


def program_ndim() -> int:
    """Dimensions of the launch grid: 1 for kernel[2], 0 without a grid."""
    return context.current("program_ndim").program.grid_ndim


def _check_axis(axis):
    if axis not in (0, None):
        raise Refusal("the launch grid has one axis", axis=axis)


def get_nc_version() -> nc_version:
    """trn2."""
    return nc_version.gen3


def get_nc_sub_version() -> int:
    return 0
