"""Running a program: operands become NumPy views once, a run is then a flat loop over bound instructions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from . import capacity, context, control, dtypes, dynamic, hazards, races
from .instruction import Call, Refusal
from .memory import Memory
from .opaque import VirtualRegister
from .program import Block, Loop, Program
from .tensor import PARTITIONS, NkiTensor


@dataclass
class MachineState:
    """What instructions leave behind besides their destinations, one per core."""

    vector_accumulator: np.ndarray = field(default_factory=lambda: np.full(PARTITIONS, np.nan, np.float32))
    scalar_accumulator: np.ndarray = field(default_factory=lambda: np.full(PARTITIONS, np.nan, np.float32))
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    gpsimd_random: np.ndarray = field(default_factory=lambda: np.arange(PARTITIONS * 6, dtype=np.uint32).reshape(-1, 6))
    notes: set[str] = field(default_factory=set)

    def note(self, text: str) -> None:
        """Records something that the data of this run made risky."""
        self.notes.add(text)


_machine = MachineState()


def machine_state() -> MachineState:
    """The accumulators and random generator of the core that is running."""
    return _machine


class Linked:
    """A program bound to memory."""

    def __init__(self, program: Program):
        self.program = program
        self.memory = Memory()
        self.memory.unordered = hazards.find(program)
        self.watched = set(self.memory.unordered).union(*self.memory.unordered.values())
        self.io = [storage for storage in program.storages if storage.kind in ("input", "output")]
        for storage in self.io:
            self.memory.bindings[storage] = []
        for storage in program.storages:
            if storage.buffer in ("shared_hbm", "private_hbm") and storage.kind == "internal":
                self.memory.bytes[storage] = np.empty(storage.nbytes, np.uint8)
            if storage.constant is not None:
                self.memory.bytes[storage][:] = storage.constant.reshape(-1).view(np.uint8)
        self.cores = [self._link_core(block) for block in program.cores]

    def _link_core(self, block: Block) -> list:
        """On-chip memory is reused once its tensor is dead, so that a long unrolled kernel stays small."""
        spans = capacity.lifetimes(block)
        free: dict[int, list] = {}
        born: dict[int, list] = {}
        dying: dict[int, list] = {}
        for storage, (first, last) in spans.items():
            born.setdefault(first, []).append(storage)
            dying.setdefault(last, []).append(storage)

        def allocate(call: Call):
            for storage in born.get(call.index, ()):
                if storage.on_chip:
                    spare = free.get(storage.nbytes) if not storage.shows_unwritten else None
                    self.memory.bytes[storage] = spare.pop() if spare else np.empty(storage.nbytes, np.uint8)

        def release(call: Call):
            for storage in dying.get(call.index, ()):
                if storage.on_chip and not storage.shows_unwritten:
                    free.setdefault(storage.nbytes, []).append(self.memory.bytes[storage])

        return self._link_block(block, allocate, release)

    def _link_block(self, block: Block, allocate, release) -> list:
        items = []
        for item in block.items:
            if isinstance(item, Loop):
                items.append((item, self._link_block(item.body, allocate, release)))
                continue
            allocate(item)
            step = self._link(item)
            release(item)
            if item.instruction in control.CROSS_CORE:
                items.append((item, step))
            elif items and isinstance(items[-1], list):
                items[-1].append((*step, item))
            else:
                items.append([(*step, item)])
        return items

    def _link(self, call: Call) -> tuple:
        """(function, arguments): tensors replaced by views, dynamic ones resolved when the step runs."""
        if call in self.program.probed:
            return dynamic.probe, (call, self.memory)
        args = list(call.args.values())
        moving = []
        for position, value in enumerate(args):
            if isinstance(value, (list, tuple)) and any(isinstance(item, NkiTensor) for item in value):
                args[position] = list(value)
                operands = [(args[position], number, item) for number, item in enumerate(value)]
            else:
                operands = [(args, position, value)]
            for holder, number, tensor in operands:
                if isinstance(tensor, NkiTensor):
                    if tensor.is_indirect():
                        moving.append((holder, number, tensor))
                    else:
                        self.memory.place(holder, number, tensor)
        body = call.instruction.body
        if call.instruction not in control.CROSS_CORE and (
            moving or call in self.watched or any(storage.tracked or storage.contended for storage in call.storages())
        ):
            return dynamic.Step(call, args, moving, self.memory), ()
        return body, args

    def run(self, arrays):
        program, memory = self.program, self.memory
        if len(arrays) != len(program.inputs):
            raise Refusal("one array per tensor argument", given=len(arrays), expected=len(program.inputs))
        copies, results = [], {}
        for storage, array in zip(program.inputs, arrays):
            if (array.shape or (1,)) != storage.shape or dtypes.from_numpy(array.dtype) != storage.dtype:
                raise Refusal("array does not fit the traced argument", argument=storage.name, shape=array.shape,
                              dtype=array.dtype, traced=f"{storage.shape} {storage.dtype}")  # fmt: skip
            flat = np.ascontiguousarray(array)
            if not np.shares_memory(flat, array) and storage.written:
                copies.append((array, flat))
            results[storage] = array
            memory.bind(storage, flat)
        for storage in self.io:
            if storage.kind == "output":
                results[storage] = np.empty(storage.shape, storage.dtype.np)
                memory.bind(storage, results[storage])
        dynamic.reset(self.program, memory)
        program.trips, program.moved = {}, {}
        context.running.append(program)
        try:
            # Engines raise no flags: overflow is infinity, 0/0 is NaN.
            with np.errstate(all="ignore"):
                states = self._execute()
        finally:
            context.running.pop()
        races.check_trips(program)
        dynamic.check_end(program, memory)
        risks = sorted({note for state in states for note in state.notes})
        program.notes += [note for note in risks if note not in program.notes]
        for array, flat in copies:
            array[...] = flat.reshape(array.shape)
        outputs = tuple(self._result(tensor, results[tensor.storage]) for tensor in program.output_tensors())
        if program.outputs is None:
            return None
        return outputs if isinstance(program.outputs, tuple) else outputs[0]

    def _result(self, tensor: NkiTensor, array: np.ndarray) -> np.ndarray:
        whole = tensor.size == tensor.storage.size and tensor.is_contiguous() and tensor.dtype == tensor.storage.dtype
        if whole and tensor.shape == array.shape:
            return array
        return self.memory.view(tensor)

    def _execute(self) -> list[MachineState]:
        states = [MachineState() for _ in self.cores]
        if len(self.cores) == 1:
            _enter(states[0])
            for _ in self._steps(self.cores[0]):
                raise AssertionError("a cross-core instruction with one core")
            return states
        cores = [self._steps(items) for items in self.cores]
        while True:
            waiting = []
            for state, core in zip(states, cores):
                _enter(state)
                waiting.append(next(core, None))
            if all(sync is None for sync in waiting):
                return states
            self._meet(*waiting)

    def _steps(self, items: list):
        """Runs until the next cross-core instruction, which is yielded as (call, step)."""
        for item in items:
            if isinstance(item, list):
                try:
                    for function, args, call in item:  # noqa: B007 - the call says where a refusal comes from
                        function(*args)
                except Refusal as refusal:
                    raise refusal.at(call) from None
            elif isinstance(item[0], Loop):
                yield from self._loop(*item)
            else:
                yield item

    def _loop(self, loop: Loop, items: list):
        trips = 0
        register = loop.register
        for register.value in _values(loop):
            trips += 1
            yield from self._steps(items)
        self.program.trips[loop] = self.program.trips.get(loop, 0) + trips

    def _meet(self, first, second) -> None:
        """Two cores at their next cross-core instruction, which must be each other's counterpart."""
        if first is None or second is None:
            call = (first or second)[0]
            raise _deadlock(call, "the other core has ended")
        if not races.counterparts(first[0], second[0]):
            raise _deadlock(first[0], f"the other core waits at {second[0].instruction.name}, {second[0].source}")
        if first[0].instruction is control.sendrecv:
            data = {call.core: step[1][0].copy() for call, step in (first, second)}
            for call, step in (first, second):
                step[1][1][...] = data[call.args["recv_from_rank"]]
                if call.dst.storage.tracked:
                    dynamic.mark(self.memory.written[call.dst.storage], call.dst)
        elif first[0].data.storage.contended:
            self.memory.contention[first[0].data.storage].check()


def _deadlock(call: Call, why: str) -> Refusal:
    return Refusal(f"deadlock: {why}").at(call)


def _values(loop: Loop):
    """The values of a loop's register, one per iteration."""
    if loop.kind == "fori":
        yield from range(_number(loop.lower), _number(loop.upper), loop.step)
        return
    condition = loop.condition.value
    while condition:
        yield condition
        condition = loop.next_condition.value


def _number(bound) -> int:
    return bound.value if isinstance(bound, VirtualRegister) else bound


def _enter(state: MachineState) -> None:
    global _machine
    _machine = state
