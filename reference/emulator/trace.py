"""Tracing: Python runs once with opaque tensors and leaves a program."""

from __future__ import annotations

import contextlib

from . import dtypes
from .context import assigned_name, kernel_line, raising_kernel_line, tracers
from .enums import MemoryRegion
from .instruction import Call, NkiInstruction, Refusal, operand_rules
from .program import Block, Program
from .tensor import PARTITIONS, Storage, past_storage

_MAX_INSTRUCTIONS = 20_000  # ours; the compiler's own (NCC_EVRF007) is not published
MAX_HBM_BYTES = 2**32


class Tracer:
    """Appends the instructions of one core to a program."""

    def __init__(self, program: Program, core: int):
        self.program = program
        self.core = core
        self.block = Block()
        self.loops: list = []
        self.registers = 0
        self.calls = 0
        self.region = None  # the no_reorder block we are in
        self.shared = 0  # shared tensors allocated so far: both cores allocate the same ones in the same order
        program.cores.append(self.block)

    @contextlib.contextmanager
    def active(self):
        """Makes this the tracer that instructions append to, and gives refusals their place in the kernel."""
        tracers.append(self)
        try:
            yield self
            if self.loops:
                refusal = Refusal("no break or return out of a runtime loop")
                refusal.where = f"{self.loops[-1].source}: "
                raise refusal
        except Refusal as refusal:
            if not refusal.where:
                refusal.where = f"{raising_kernel_line(refusal)}: "
            raise
        finally:
            tracers.pop()

    def note(self, text: str, where: str | None = None) -> None:
        self.program.note(text, where or kernel_line())

    def emit(self, instruction, args, kwargs):
        """Checks one instruction and appends it; returns its opaque handle."""
        source = kernel_line()
        try:
            call = Call(instruction, instruction.bind(args, kwargs), self, source)
            self._check_scope(call)
            call.engine = instruction.engine(call) if callable(instruction.engine) else instruction.engine
            for rule in operand_rules:
                rule(call)
            if instruction.check is not None:
                instruction.check(call)
        except Refusal as refusal:
            refusal.where = refusal.where or f"{source}: nisa.{instruction.name}: "
            raise
        self.append(call)
        return NkiInstruction(call)

    def append(self, call) -> None:
        call.index = self.calls
        self.calls += 1
        if self.calls > _MAX_INSTRUCTIONS:
            raise Refusal("too many instructions: static loops are unrolled", limit=_MAX_INSTRUCTIONS)
        self.block.items.append(call)
        for _, tensor, access in call.tensors():
            tensor.storage.written |= access == "write"

    def _check_scope(self, call) -> None:
        tensors = [(name, tensor) for name, tensor, _ in call.tensors()] + list(call.indices())
        for name, tensor in tensors:
            refusal = past_storage(tensor) if tensor.outside else None
            if refusal is not None:
                raise refusal
            storage = tensor.storage
            if storage.loop is not None and not storage.loop.open:
                raise Refusal(f"{name} was allocated in the body of a runtime loop and does not exist after it",
                              tensor=tensor, allocated=storage.source)  # fmt: skip
            index = tensor.vector_offset
            if (
                index is not None
                and (index.num_partitions, index.size) != (tensor.shape[0],) * 2
                and call.instruction.name != "dma_transpose"
            ):
                raise Refusal("a vector offset is an SBUF tensor [P, 1], one row index per partition",
                              vector_offset=index, P=tensor.shape[0])  # fmt: skip

    def add_edges(self, consumer, producers) -> None:
        for producer in producers:
            if producer.loop not in (None, consumer.loop):
                raise Refusal("a scheduling edge must not cross the boundary of a runtime loop")
        consumer.depends.extend(producers)

    def add_schedule(self, schedule) -> None:
        """Edges of `Kernel.with_schedule`, between instructions by name."""
        named = {call.args["name"]: call for call in self.block.calls() if call.args.get("name")}
        for consumer, producers in schedule:
            producers = [producers] if isinstance(producers, str) else producers
            for name in (consumer, *producers):
                if name not in named:
                    raise Refusal("with_schedule names an instruction that the kernel does not have", name=name)
            for producer in map(named.get, producers):
                if producer.index > named[consumer].index:
                    self.note("with_schedule against program order: here instructions run in program order")
                else:
                    self.add_edges(named[consumer], [producer])

    def storage(self, shape, dtype, buffer, name="", address=None, constant=None):
        """Allocates memory; both cores of an LNC pair get the same shared tensor."""
        dtype = dtypes.resolve(dtype)
        if dtype is None:
            raise Refusal("not an nl dtype")
        if dtype.trn3_only and dtype not in ("float8_e4m3fn",):
            raise Refusal("this dtype needs NeuronCore-v4 (trn3)", dtype=dtype)
        if not isinstance(buffer, MemoryRegion):
            raise Refusal("buffer is nl.sbuf, nl.psum, nl.private_hbm or nl.shared_hbm", buffer=buffer)
        shape = tuple(shape)
        if not shape or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in shape):
            raise Refusal("a shape is a tuple of positive ints", shape=shape)
        on_chip = buffer in (MemoryRegion.sbuf, MemoryRegion.psum)
        if on_chip and len(shape) < 2:
            raise Refusal("an on-chip tensor has a partition and a free dimension", shape=shape)
        if on_chip and shape[0] > PARTITIONS:
            raise Refusal("more partitions than there are", partitions=shape[0], limit=PARTITIONS, shape=shape)
        if address is not None and not on_chip:
            raise Refusal("address places on-chip tensors only", buffer=buffer.value)
        name = name or f"{assigned_name() or 't'}.{len(self.program.storages)}"
        storage = Storage(
            shape, dtype, buffer.value, name, address=address, core=self.core,
            source=kernel_line(), loop=self.loops[-1] if self.loops else None, constant=constant,
        )  # fmt: skip
        if not on_chip and storage.nbytes >= MAX_HBM_BYTES:
            raise Refusal("an HBM tensor must be smaller than 4 GB", bytes=storage.nbytes, shape=shape)
        if buffer is MemoryRegion.shared_hbm:
            return self._shared(storage)
        self.program.storages.append(storage)
        return storage

    def _shared(self, storage):
        shared = [s for s in self.program.storages if s.buffer == "shared_hbm" and s.kind != "input"]
        self.shared += 1
        if self.core == 0 or self.shared > len(shared):
            self.program.storages.append(storage)
            return storage
        twin = shared[self.shared - 1]
        if (twin.shape, twin.dtype) != (storage.shape, storage.dtype):
            raise Refusal("both cores allocate the same shared_hbm tensors in the same order",
                          core0=twin, core1=storage)  # fmt: skip
        return twin
