"""What each instruction may rely on having been written: an abstract run of the program in program order.

A read of what was never written is refused (the verifier's BIR182), or noted where the tile is written in part. An
accumulation into what no matmul started is refused (nc_matmul), and `accumulate=None` is resolved. A loop whose trip
count is not known while tracing may run no iteration: what its body writes does not count after it on chip, and is
followed at run time in HBM.
"""

from __future__ import annotations

import numpy as np

from .control import CROSS_CORE
from .instruction import Call, Refusal
from .memory import Written
from .opaque import VirtualRegister
from .program import Block, Loop, Program
from .tensor import NkiTensor, Storage

# Of PSUM elements: ZERO is what memset cleared, a group what nc_matmul wrote.
UNDEFINED, VALUE, ZERO, GROUP, GROUP_READ = range(5)


def check(program: Program) -> None:
    """Refuses reads of what was never written and outputs not written whole; marks storages to follow at run time."""
    shared: dict[Storage, Written] = {}
    for storage in program.storages:
        if storage.kind == "input" or storage.constant is not None:
            shared[storage] = Written(storage, everything=True)
    uncertain = _run_time_writes(program)
    running = [_Pass(shared, uncertain).block(block) for block in program.cores]
    while running:  # both cores from one meeting to the next
        running = [core for core in running if next(core, None)]
    for tensor in program.output_tensors():
        storage = tensor.storage
        state = shared.get(storage, Written(storage))
        storage.tracked |= storage in uncertain and not state.covers(tensor)
        if not storage.tracked:
            check_output(tensor, state)
    for storage in program.inputs:
        if storage.mutable and not storage.written:
            raise Refusal("an argument annotated nt.mutable_tensor is never written", argument=storage.name)
    for block in program.cores:
        _note_unread(program, block)


def check_output(tensor: NkiTensor, state: Written) -> None:
    """Refuses a result of which elements are not written."""
    if not state.covers(tensor):
        refusal = Refusal("an output is not fully written", output=tensor.name, shape=tensor.shape,
                          first_missing=state.first_missing(tensor))  # fmt: skip
        refusal.where = f"{tensor.storage.source}: "
        raise refusal


def _note_unread(program: Program, block: Block) -> None:
    """Notes tiles that are written and never read (BIR293); an instruction may have one result that nobody wants.

    Never an error: nki-library's topk, which runs on hardware, has such tiles.
    """
    read = {storage for call in block.calls() for storage in call.storages("read")}
    for call in block.calls():
        written = set(call.storages("write"))
        if written and all(storage.on_chip and storage not in read for storage in written):
            names = ", ".join(storage.name for storage in written)
            program.notes.append(f"{call.source}: nisa.{call.instruction.name}: nothing reads {names}, which it writes")
            read |= written  # one note a tile


def may_leave_untouched(call: Call, tensor: NkiTensor) -> bool:
    """Whether elements of a destination may stay as they were, or which ones are written depends on data."""
    return tensor.is_indirect() or _skips(call) or bool(call.instruction.may_write and call.instruction.may_write(call))


def _skips(call: Call) -> bool:
    mode = call.args.get("oob_mode")
    return getattr(mode, "name", None) == "skip" and any(tensor.is_indirect() for _, tensor, _ in call.tensors())


def _run_time_writes(program: Program) -> set[Storage]:
    """Storages of which only a run tells what is written: dynamic destinations, HBM written in a runtime loop."""
    uncertain = set()
    for core in range(len(program.cores)):
        for call in program.calls(core):
            for _, tensor, access in call.tensors():
                if access == "write":
                    storage = tensor.storage
                    in_loop = call.loop is not None and not call.loop.static_trips and not storage.on_chip
                    if in_loop or may_leave_untouched(call, tensor):
                        uncertain.add(storage)
    return uncertain


class PsumStates:
    """The states of one PSUM tensor's elements, by byte address; one byte stands for its element.

    Accumulating matmuls ask for the same regions over and over: `regions` holds disjoint ones of a single state each,
    which `bytes` does not know yet.
    """

    def __init__(self, storage: Storage):
        self.bytes = np.zeros(storage.nbytes, np.uint8)
        self.regions: dict[tuple, tuple[NkiTensor, int]] = {}

    def settled(self) -> np.ndarray:
        for tensor, state in self.regions.values():
            self._view(tensor)[...] = state
        self.regions.clear()
        return self.bytes

    def of(self, tensor: NkiTensor) -> set[int]:
        """The states that elements of a region have."""
        if _place(tensor) in self.regions:
            return {self.regions[_place(tensor)][1]}
        self._settle_around(tensor)
        region = self._view(tensor)
        lowest, highest = int(region.min()), int(region.max())
        return {lowest} if lowest == highest else set(np.unique(region).tolist())

    def put(self, tensor: NkiTensor, state: int) -> None:
        if _place(tensor) not in self.regions:
            self._settle_around(tensor)
        self.regions[_place(tensor)] = tensor, state

    def replace(self, tensor: NkiTensor, old: int, new: int) -> None:
        """Elements of a region in one state get into another."""
        states = self.of(tensor)
        if states == {old}:
            self.put(tensor, new)
        elif old in states:
            region = self._view(tensor)
            region[region == old] = new

    def _settle_around(self, tensor: NkiTensor) -> None:
        if any(_may_overlap(tensor, other) for other, _ in self.regions.values()):
            self.settled()

    def _view(self, tensor: NkiTensor) -> np.ndarray:
        size = tensor.itemsize
        return np.ndarray(tensor.shape, np.uint8, self.bytes, tensor.offset * size, [s * size for s in tensor.strides])


def _place(tensor: NkiTensor) -> tuple:
    return tensor.offset, tensor.shape, tensor.strides, tensor.itemsize


def _may_overlap(one: NkiTensor, other: NkiTensor) -> bool:
    """Whether the partitions and the stretches of them that two views cover meet."""
    (low, high, first, last), (other_low, other_high, other_first, other_last) = _extent(one), _extent(other)
    return low < other_high and other_low < high and first < other_last and other_first < last


def _extent(tensor: NkiTensor) -> tuple[int, int, int, int]:
    partition, start = divmod(tensor.offset, tensor.partition_elements)
    end = start + sum((count - 1) * stride for stride, count in tensor.pattern[1:]) + 1
    return partition, partition + tensor.shape[0], start * tensor.itemsize, end * tensor.itemsize


class _Pass:
    """The state at one point of one core's program. `written` of shared tensors is common to both cores."""

    def __init__(self, shared: dict[Storage, Written], uncertain: set[Storage]):
        self.shared = shared
        self.uncertain = uncertain
        self.written: dict[Storage, Written] = {}
        self.psum: dict[Storage, PsumStates] = {}
        self.registers: set[VirtualRegister] = set()

    def state(self, storage: Storage) -> Written:
        states = self.shared if storage.buffer == "shared_hbm" else self.written
        if storage not in states:
            states[storage] = Written(storage)
        return states[storage]

    def block(self, block: Block):
        """Walks a block; yields where the core waits for the other one."""
        for item in block.items:
            if isinstance(item, Loop):
                yield from self.loop(item)
                continue
            if item.instruction in CROSS_CORE:
                yield item
            try:
                self.call(item)
            except Refusal as refusal:
                raise refusal.at(item) from None

    def loop(self, loop: Loop):
        for bound in (loop.lower, loop.upper, loop.condition):
            if isinstance(bound, VirtualRegister) and bound not in self.registers:
                refusal = Refusal("a loop bound or condition is a register that was never written", register=bound)
                refusal.where = f"{loop.source}: "
                raise refusal
        self.registers.add(loop.register)
        if loop.static_trips == 0:
            return
        targets = {t.storage for call in loop.body.calls() for _, t, access in call.tensors() if access == "write"}
        before = {storage: self.state(storage).copy() for storage in targets}
        psum_before = {
            storage: self.psum_states(storage).settled().copy() for storage in targets if storage.buffer == "psum"
        }
        yield from self.block(loop.body)
        if loop.next_condition is not None and loop.next_condition not in self.registers:
            refusal = Refusal(
                "what the body returns is a register that was never written", register=loop.next_condition
            )
            refusal.where = f"{loop.source}: "
            raise refusal
        if loop.static_trips != 1 and psum_before:
            # A later iteration starts from what the first one left: accumulation must be as valid there.
            for storage in psum_before:
                if storage.loop is loop:  # born anew in each iteration
                    self.psum[storage].settled()[:] = psum_before[storage]
            yield from self.block(loop.body)
        if not loop.static_trips:
            for storage, state in before.items():
                states = self.shared if storage.buffer == "shared_hbm" else self.written
                states[storage] = state
            for storage, before_loop in psum_before.items():
                after = self.psum[storage].settled()
                np.minimum(after, before_loop, out=after)

    def call(self, call: Call) -> None:
        for name, value in call.args.items():
            if isinstance(value, VirtualRegister):
                self._register(call, name, value)
        for name, offset in call.indices():
            self._read(call, f"the offset of {name}", offset)
        for name, tensor, access in call.tensors():
            offset = tensor.scalar_offset
            if isinstance(offset, VirtualRegister) and offset not in self.registers:
                raise Refusal(f"the offset of {name} is a register that was never written", register=offset)
            if access == "read":
                self._read(call, name, tensor)
        for _, tensor, access in call.tensors():
            if access == "write":
                if tensor.is_psum:
                    self._write_psum(call, tensor)
                if not may_leave_untouched(call, tensor):
                    self.state(tensor.storage).add(tensor)

    def _register(self, call: Call, name: str, register: VirtualRegister) -> None:
        if name == "dst":
            self.registers.add(register)
        elif register not in self.registers:
            raise Refusal(f"{name} is a register that was never written", register=register)

    def _read(self, call: Call, name: str, tensor: NkiTensor) -> None:
        storage = tensor.storage
        state = self.state(storage)
        if tensor.is_psum:
            self.psum_states(storage).replace(tensor, GROUP, GROUP_READ)
        if state.everything or (state.covers(tensor) and not tensor.is_indirect()):
            return
        if storage in self.uncertain:
            storage.tracked = True
        elif tensor.is_indirect():
            raise Refusal(f"{name} is read at a run-time offset before all of it is written", tensor=tensor)
        else:
            refusal = Refusal(f"{name} reads what was never written", tensor=tensor,
                              first_missing=state.first_missing(tensor), allocated=storage.source)  # fmt: skip
            if storage.kind != "internal" or state.mask is None or not state.mask.any():
                raise refusal
            # Kernels that run on hardware (nki-library's find_nonzero_indices) carry unwritten elements of a tensor
            # that is partly written, and drop them later: the verifier does not look at single elements.
            storage.poisoned = True
            call.note(str(refusal))

    def psum_states(self, storage: Storage) -> PsumStates:
        if storage not in self.psum:
            self.psum[storage] = PsumStates(storage)
        return self.psum[storage]

    def _write_psum(self, call: Call, tensor: NkiTensor) -> None:
        psum = self.psum_states(tensor.storage)
        if call.instruction.name != "nc_matmul":
            psum.put(tensor, ZERO if call.instruction.name == "memset" and call.value == 0 else VALUE)
            return
        states = psum.of(tensor)
        accumulate = call.args["accumulate"]
        if accumulate is None:
            call.note("accumulate is inferred: pass it explicitly")
            # UNVERIFIED whether the first write that overwrites may be a memset; over zeros both readings agree.
            blank = states & {UNDEFINED, ZERO}
            if blank and states - blank:
                raise Refusal("accumulate=None where part of dst was written before and part was not", dst=tensor)
            accumulate = call.args["accumulate"] = not blank
        if accumulate and UNDEFINED in states:
            raise Refusal("accumulate=True into PSUM that no matmul has started with accumulate=False", dst=tensor)
        if accumulate and states & {VALUE, ZERO}:
            raise Refusal("accumulate=True into PSUM that another instruction than a matmul wrote: undefined on trn2",
                          dst=tensor)  # fmt: skip
        if not accumulate and GROUP in states:
            call.note("a new accumulation group starts where the previous one was never read")
        psum.put(tensor, GROUP)
