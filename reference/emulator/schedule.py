"""When the instructions of a program would run: a makespan, what it waited for, and a picture of the overlap.

Every engine runs its own instructions in program order; an instruction starts when its engine is free, the tiles it
reads are written, and the tiles it overwrites have been read. DMAs run beside them on 16 engines, in queues. Fixed
overheads are those of machine.py; most are unverified, so the makespan says how well a kernel overlaps, not how long
it takes. The launch of the kernel itself is not counted.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from .control import CROSS_CORE
from .cost import trip_count
from .dma import Transfer, transfer
from .instruction import Call
from .machine import ENGINES, Machine, trn2
from .opaque import VirtualRegister
from .placement import Placement
from .program import Block, Loop, Program, format_call
from .rules import merged
from .tensor import NkiTensor, Storage

QUEUES = 16
# Functions that every activation table holds, so that they force no reload (UNVERIFIED).
TABLE_FREE = {"copy", "identity", "square", "abs", "relu", "sign"}


@dataclass
class Span:
    """One executed instruction. Times in seconds; `visible` is when others may use its result."""

    call: Call
    lane: str
    start: float
    end: float
    visible: float
    cause: int  # index of the span that decided the start, -1 for none


@dataclass
class Schedule:
    """Spans of each core in program order."""

    kernel: str
    machine: Machine
    cores: list[list[Span]]
    numbers: set[str] = field(default_factory=set)  # unverified numbers of the machine that it used

    @property
    def makespan(self) -> float:
        """Seconds from the first instruction to the last result, over all cores."""
        return max((span.visible for spans in self.cores for span in spans), default=0.0)

    def busy(self, core: int = 0) -> dict[str, float]:
        """Seconds that each engine and DMA queue of a core works."""
        seconds: dict[str, float] = defaultdict(float)
        for span in self.cores[core]:
            seconds[span.lane] += span.end - span.start
        return dict(seconds)

    def critical_path(self) -> list[Span]:
        """The chain of instructions that ends last, each having waited for the one before."""
        spans = max(self.cores, key=lambda spans: max((span.visible for span in spans), default=0.0))
        if not spans:
            return []
        index = max(range(len(spans)), key=lambda number: spans[number].visible)
        path = []
        while index >= 0:
            path.append(spans[index])
            index = spans[index].cause
        return path[::-1]

    def critical_time(self) -> dict[str, float]:
        """Seconds of the critical path by what they went into: an engine's name, `dma`, or `waiting` for latencies."""
        seconds: Counter = Counter()
        previous = 0.0
        for span in self.critical_path():
            lane = _where(span)[0]
            seconds["waiting"] += max(0.0, span.start - previous)
            seconds[lane] += span.end - max(span.start, previous) if span.end > previous else 0.0
            previous = max(previous, span.end)
        seconds["waiting"] += self.makespan - previous
        return dict(seconds)

    def path_text(self) -> str:
        """The critical path, one line for each stretch of one source line: what to make shorter, or start earlier."""
        lines = ["      start    waited      busy   times  where"]
        previous = 0.0
        for (lane, source, name), group in itertools.groupby(self.critical_path(), _where):
            spans = list(group)
            busy = sum(span.end - span.start for span in spans)
            waited = max(0.0, spans[-1].end - previous - busy)
            figures = f"{spans[0].start * 1e6:11.2f}{waited * 1e6:10.2f}{busy * 1e6:10.2f}{len(spans):8}"
            lines.append(f"{figures}  {lane} {name} {source}")
            previous = spans[-1].end
        return "\n".join(lines)

    def text(self) -> str:
        """Makespan, use of each engine, and what the critical path consists of."""
        lines = [f"{self.kernel}, lnc {len(self.cores)}, {self.machine.name}: modelled, not measured"]
        lines.append(f"makespan {self.makespan * 1e6:.2f} us")
        for core in range(len(self.cores)):
            busy: Counter = Counter()
            for lane, seconds in self.busy(core).items():
                busy["dma queues" if lane.startswith("dma") else lane] += seconds
            uses = ", ".join(f"{lane} {seconds * 1e6:.2f}" for lane, seconds in sorted(busy.items()))
            lines.append(f"core {core} busy us: {uses}")
        path = ", ".join(f"{name} {seconds * 1e6:.2f}" for name, seconds in sorted(self.critical_time().items()))
        lines.append(f"critical path of {len(self.critical_path())} instructions, us: {path}")
        if self.numbers:
            lines.append(f"* UNVERIFIED: {', '.join(sorted(self.numbers))}")
        return "\n".join(lines)

    __str__ = text

    def trace(self) -> dict:
        """The schedule in the trace event format of Chrome and Perfetto (times in microseconds)."""
        critical = {id(span) for span in self.critical_path()}
        events = []
        for core, spans in enumerate(self.cores):
            events.append({"ph": "M", "pid": core, "name": "process_name", "args": {"name": f"core {core}"}})
            for lane, name in enumerate(sorted({span.lane for span in spans}, key=_lane_order)):
                events.append({"ph": "M", "pid": core, "tid": lane, "name": "thread_name", "args": {"name": name}})
            lanes = {name: lane for lane, name in enumerate(sorted({span.lane for span in spans}, key=_lane_order))}
            for span in spans:
                event = {
                    "name": span.call.instruction.name, "ph": "X", "pid": core, "tid": lanes[span.lane],
                    "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6,
                    "args": {"instruction": format_call(span.call), "source": span.call.source},
                }  # fmt: skip
                if id(span) in critical:
                    event["cname"] = "terrible"
                    event["args"]["critical"] = True
                events.append(event)
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def save(self, path: str) -> None:
        """Writes `trace()` as JSON, to be opened in https://ui.perfetto.dev or chrome://tracing."""
        with open(path, "w") as file:
            json.dump(self.trace(), file)


def _where(span: Span) -> tuple[str, str, str]:
    lane = "dma" if span.lane.startswith("dma") else span.lane
    return lane, os.path.basename(span.call.source), span.call.instruction.name


def _lane_order(lane: str) -> tuple:
    order = (*ENGINES, "sync")
    return (order.index(lane), 0) if lane in order else (len(order), int(lane.rpartition(" ")[2]))


def schedule(program: Program, machine: Machine = trn2) -> Schedule:
    """The schedule of one run of `program`; a program with runtime loops must have run.

    Raises ValueError where a trip count is not known.
    """
    cores = [_Core(program, block, machine) for block in program.cores]
    runs = [core.run(core.block) for core in cores]
    arrivals = [next(run, None) for run in runs]
    while any(arrival is not None for arrival in arrivals):
        meeting = max(arrival for arrival in arrivals if arrival is not None)
        arrivals = [_resume(run, meeting) for run in runs]
    numbers = set().union(*(core.numbers for core in cores))
    unverified = {name for name, number in machine.numbers().items() if number.unverified}
    return Schedule(program.name, machine, [core.spans for core in cores], numbers & unverified)


def _resume(run: Generator, meeting: float):
    try:
        return run.send(meeting)
    except StopIteration:
        return None


class _Cells:
    """A tensor's memory in the largest pieces that no view of it splits: who wrote and who last read each."""

    def __init__(self, tensors: list[NkiTensor]):
        storage = tensors[0].storage
        self.bytes, self.partitions = storage.partition_bytes, storage.shape[0]
        for tensor in tensors:
            start, outer, piece = _row_pattern(tensor)
            self.partitions = math.gcd(self.partitions, _first_row(tensor), tensor.shape[0])
            self.bytes = math.gcd(self.bytes, start, piece, *(stride for stride, _ in outer))
        shape = (storage.shape[0] // self.partitions, storage.partition_bytes // self.bytes)
        self.writer = np.full(shape, -1, np.int32)
        self.reader = np.full(shape, -1, np.int32)

    def views(self, tensor: NkiTensor) -> tuple[np.ndarray, np.ndarray]:
        """Writers and readers of the pieces that a view touches."""
        start, outer, piece = _row_pattern(tensor)
        row, size = self.writer.strides
        shape = (tensor.shape[0] // self.partitions, *(count for _, count in outer), piece // self.bytes)
        strides = (row, *(stride // self.bytes * size for stride, _ in outer), size)
        offset = _first_row(tensor) // self.partitions * row + start // self.bytes * size
        return tuple(np.ndarray(shape, np.int32, cells, offset, strides) for cells in (self.writer, self.reader))


def _first_row(tensor: NkiTensor) -> int:
    """Partition at which a view begins, counted from its storage's first."""
    return tensor.offset // tensor.partition_elements


def _row_pattern(tensor: NkiTensor) -> tuple[int, list[tuple[int, int]], int]:
    """What a view touches of a partition: first byte, (stride, count) pairs in bytes, contiguous bytes at each."""
    if tensor.is_indirect():  # known only to the run: anywhere
        return 0, [], tensor.storage.partition_bytes
    size = tensor.itemsize
    outer = [(stride * size, count) for stride, count in merged(tensor.pattern[1:]) if stride]
    piece = outer.pop()[1] * size if outer and outer[-1][0] == size else size
    return tensor.offset % tensor.partition_elements * size, outer, piece


class _Core:
    """One core's clocks while its instructions are placed in program order."""

    def __init__(self, program: Program, block: Block, machine: Machine):
        self.program, self.block, self.machine = program, block, machine
        self.spans: list[Span] = []
        self.free: dict[str, tuple[float, int]] = {name: (0.0, -1) for name in (*ENGINES, "sync")}
        self.registers: dict[VirtualRegister, int] = {}
        self.latest: dict[Storage, int] = {}  # the access of each tensor that ends last
        self.placement = Placement(block)
        self.dma_engines = [_Calendar() for _ in range(int(machine.dma_engines))]
        self.hwdge = [0.0] * int(machine.hwdge_units)
        self.queues = [(0.0, -1)] * QUEUES
        self.table = ""
        self.numbers: set[str] = {"semaphore_seconds"}
        tensors = defaultdict(list)
        for call in block.calls():
            for _, tensor in _operands(call):
                tensors[tensor.storage].append(tensor)
        self.cells = {storage: _Cells(views) for storage, views in tensors.items() if storage.on_chip}
        moved = {
            access: {t.storage for call in block.calls() for a, t in _operands(call) if a == access}
            for access in ("read", "write")
        }
        self.ordered = {storage: _Ranges() for storage in moved["read"] & moved["write"] if not storage.on_chip}
        self.regions: dict[object, int] = {}  # the last span of each no_reorder block
        self.plans: dict[int, tuple] = {}
        self.transfers: dict[int, Transfer] = {}
        self.durations: dict[int, tuple[float, float]] = {}

    # The program, in order ---------------------------------------------------------------------------------------

    def run(self, block: Block) -> Generator[float, float, None]:
        """Places every instruction; yields its arrival at each meeting with the other core, gets the meeting's time."""
        for item in block.items:
            if isinstance(item, Loop):
                yield from self._loop(item)
            elif item.instruction in CROSS_CORE:
                ready, cause = self._ready(item)
                meeting = yield ready
                self._meet(item, max(ready, meeting), cause)
            elif item.engine.name == "dma":
                self._dma(item)
            else:
                self._compute(item)

    def _loop(self, loop: Loop) -> Generator[float, float, None]:
        for register in (loop.lower, loop.upper, loop.condition):
            self._all_wait_for(register)
        for _ in range(trip_count(self.program, loop)):
            self.numbers.add("loop_seconds")
            for name, (time, cause) in self.free.items():
                self.free[name] = (time + self.machine.loop_seconds, cause)
            yield from self.run(loop.body)
            self._all_wait_for(loop.next_condition)

    def _all_wait_for(self, register) -> None:
        writer = self.registers.get(register, -1) if isinstance(register, VirtualRegister) else -1
        if writer >= 0:
            time = self.spans[writer].visible
            for name, (free, cause) in self.free.items():
                self.free[name] = (time, writer) if time > free else (free, cause)

    # Dependencies ------------------------------------------------------------------------------------------------

    def _plan(self, call: Call) -> tuple:
        """What stays the same each time a call is placed: its operands' cells, storages and registers."""
        plan = self.plans.get(id(call))
        if plan is None:
            operands = list(_operands(call))
            cells = [(a, t.storage, *self.cells[t.storage].views(t)) for a, t in operands if t.storage in self.cells]
            ranges = [(a, t) for a, t in operands if t.storage in self.ordered]
            registers = list(_registers(call))
            plan = self.plans[id(call)] = (cells, ranges, registers)
        return plan

    def _ready(self, call: Call) -> tuple[float, int]:
        """When everything that `call` depends on is done, and which span that is."""
        lane = call.engine.name
        cells, ranges, registers = self._plan(call)
        causes: set[int] = {self.registers[register] for register in registers if register in self.registers}
        waits: set[int] = set()  # for the order only, not for data
        for access, storage, writer, reader in cells:
            (causes if access == "read" else waits).update(self._distinct(writer))
            if access == "write":
                waits.update(self._distinct(reader))
                for before in self.placement.takes(storage):
                    waits.add(self.latest.get(before, -1))
        for access, tensor in ranges:
            causes.update(self.ordered[tensor.storage].conflicts(tensor, access))
        causes.update(span for producer in call.depends for span in [self._last_span(producer)])
        if call.region is not None:  # no_reorder puts an edge between every two instructions
            causes.add(self.regions.get(call.region, -1))
        time, cause = 0.0, -1
        for span in (causes | waits) - {-1}:
            other = self.spans[span]
            if other.lane == lane and span not in causes:
                continue  # an engine keeps its own order
            at = other.visible + (self.machine.semaphore_seconds if other.lane != lane else 0.0)
            if at > time:
                time, cause = at, span
        return time, cause

    @staticmethod
    def _distinct(cells: np.ndarray) -> set[int]:
        return set(cells.ravel().tolist()) if cells.size < 64 else set(np.unique(cells).tolist())

    def _last_span(self, call: Call) -> int:
        return next((n for n in range(len(self.spans) - 1, -1, -1) if self.spans[n].call is call), -1)

    def _record(self, call: Call, lane: str, start: float, end: float, visible: float, cause: int) -> int:
        """Adds a span and makes it the writer and reader of what it touches."""
        number = len(self.spans)
        self.spans.append(Span(call, lane, start, end, visible, cause))
        cells, ranges, _ = self._plan(call)
        for access, storage, writer, reader in cells:
            if access == "write":
                writer[...] = number
                reader[...] = -1
            else:
                self._read(reader, number, visible)
            latest = self.latest.get(storage, -1)
            if latest < 0 or self.spans[latest].visible <= visible:
                self.latest[storage] = number
        for access, tensor in ranges:
            self.ordered[tensor.storage].add(tensor, access, number)
        if call.region is not None:
            self.regions[call.region] = number
        if call.instruction.name in ("register_move", "register_load"):
            self.registers[call.args["dst"]] = number
        return number

    def _read(self, reader: np.ndarray, number: int, visible: float) -> None:
        """The reader that ends last is the one to wait for."""
        for before in self._distinct(reader):
            if before < 0 or self.spans[before].visible <= visible:
                reader[reader == before] = number

    # Engines -----------------------------------------------------------------------------------------------------

    def _compute(self, call: Call) -> None:
        lane = call.engine.name if call.engine.name in self.free else "sync"
        free, before = self.free[lane]
        if lane == "scalar":
            free += self._table_load(call)
        ready, cause = self._ready(call)
        start = max(free, ready)
        if id(call) not in self.durations:
            self.durations[id(call)] = self._duration(call)
        busy, latency = self.durations[id(call)]
        number = self._record(
            call, lane, start, start + busy, start + busy + latency, cause if ready > free else before
        )
        self.free[lane] = (start + busy, number)

    def _duration(self, call: Call) -> tuple[float, float]:
        machine = self.machine
        if call.instruction.cycles is None:
            issue = machine.issue_cycles / machine.gpsimd_clock
            memory = call.instruction.name in ("register_load", "register_store")
            if memory:
                self.numbers.add("register_load_seconds")
            return issue, float(machine.register_load_seconds) if memory else 0.0
        clock = machine.clock(call.engine.name)
        return call.instruction.cycles(call) / clock, machine.access_cycles / clock

    def _table_load(self, call: Call) -> float:
        """Seconds to load another activation table, which needs no data and so runs before the operands arrive."""
        operator = getattr(call.args.get("op"), "name", "")
        if not call.instruction.name.startswith("activation") or operator in TABLE_FREE | {self.table}:
            return 0.0
        self.table = operator
        self.numbers.add("activation_table_seconds")
        return float(self.machine.activation_table_seconds)

    def _meet(self, call: Call, meeting: float, cause: int) -> None:
        machine, name = self.machine, call.instruction.name
        if name == "core_barrier":
            number, moved = "barrier_seconds", 0.0
        else:
            number = "gpsimd_sendrecv_seconds" if call.engine.name == "gpsimd" else "sendrecv_seconds"
            moved = call.src.size * call.src.itemsize / machine.dma_bandwidth
        self.numbers.add(number)
        end = meeting + getattr(machine, number) + moved
        lane = call.engine.name if call.engine.name in self.free else "sync"
        free, before = self.free[lane]
        start = max(free, meeting)
        end = max(end, start)
        index = self._record(call, lane, start, end, end, cause if meeting > free else before)
        if call.engine.name != "dma":
            self.free[lane] = (end, index)

    # DMA ---------------------------------------------------------------------------------------------------------

    def _dma(self, call: Call) -> None:
        moved = self.transfers.get(id(call))
        if moved is None:
            moved = transfer(call, self.machine, self.program.share_moved(call))
            self.transfers[id(call)] = moved
        trigger, cause = self._ready(call)
        begin, before = self.free["sync"]
        if call.loop is not None and begin > trigger:
            trigger, cause = begin, before
        trigger, cause = self._descriptors(call, moved, trigger, cause)
        self.numbers.add("dma_completion_seconds")
        ready = trigger + self.machine.dma_start_seconds
        queue = self._queue(ready)
        idle, before = self.queues[queue]
        if idle > ready:
            ready, cause = idle, before
        hbm = (moved.read_bytes + moved.written_bytes) / self.machine.hbm_bandwidth * self.machine.dma_engines
        work = max(moved.engine_seconds, hbm)
        number = len(self.spans)
        slots = [
            engine.take(ready, work * share, number) for engine, share in zip(self.dma_engines, moved.shares) if share
        ]
        start = min(slot[0] for slot in slots)
        _, end, before = max(slots, key=lambda slot: slot[1])
        self.queues[queue] = (end, number)
        visible = end + self.machine.dma_completion_seconds
        self._record(call, f"dma queue {queue}", start, end, visible, before if before >= 0 else cause)

    def _descriptors(self, call: Call, moved: Transfer, trigger: float, cause: int) -> tuple[float, int]:
        """When the descriptors are written, where the run has to write them."""
        machine = self.machine
        if moved.descriptor_source == "swdge":
            self.numbers.update(("swdge_seconds", "swdge_row_seconds"))
            free, before = self.free["gpsimd"]
            start = max(free, trigger)
            end = start + machine.swdge_seconds + moved.rows * machine.swdge_row_seconds
            number = len(self.spans)
            self.spans.append(Span(call, "gpsimd", start, end, end, before if free > trigger else cause))
            self.free["gpsimd"] = (end, number)
            return end, number
        if moved.descriptor_source == "hwdge":
            unit = min(range(len(self.hwdge)), key=self.hwdge.__getitem__)
            trigger = max(trigger, self.hwdge[unit])
            self.hwdge[unit] = trigger + machine.hwdge_seconds
        return trigger, cause

    def _queue(self, ready: float) -> int:
        """The queue that was last idle before `ready`, else the one that is idle first."""
        idle = [number for number, (end, _) in enumerate(self.queues) if end <= ready]
        if idle:
            return max(idle, key=self.queues.__getitem__)
        return min(range(QUEUES), key=self.queues.__getitem__)


def _operands(call: Call) -> Iterator[tuple[str, NkiTensor]]:
    """("read" | "write", tensor) for operands and the index tensors they are addressed by."""
    for _, tensor, access in call.tensors():
        yield access, tensor
    for _, index in call.indices():
        yield "read", index
    if call.instruction.name == "core_barrier":  # orders what comes before and after it on the tensor
        yield "read", call.data
        yield "write", call.data


def _registers(call: Call) -> Iterator[VirtualRegister]:
    """The registers that a call reads."""
    source = call.args.get("src")
    if isinstance(source, VirtualRegister):
        yield source
    for _, tensor, _ in call.tensors():
        if isinstance(tensor.scalar_offset, VirtualRegister):
            yield tensor.scalar_offset


class _Calendar:
    """Busy times of one DMA engine, and whose they are; a transfer takes the first gap that holds it."""

    def __init__(self):
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.spans: list[int] = []

    def take(self, ready: float, length: float, span: int) -> tuple[float, float, int]:
        """Start and end of the transfer, and the span it had to wait for (-1 for none)."""
        index = bisect.bisect_right(self.ends, ready)
        start, before = ready, -1
        while index < len(self.starts) and self.starts[index] < start + length:
            start, before = self.ends[index], self.spans[index]
            index += 1
        end = start + length
        if index and self.ends[index - 1] == start:
            self.ends[index - 1], self.spans[index - 1] = end, span
        else:
            self.starts.insert(index, start)
            self.ends.insert(index, end)
            self.spans.insert(index, span)
        return start, end, before


class _Ranges:
    """Accesses to a tensor in HBM that is both read and written, by the range of bytes they may touch."""

    def __init__(self):
        self.accesses: dict[str, list[tuple[int, int, int]]] = {"read": [], "write": []}

    def conflicts(self, tensor: NkiTensor, access: str) -> Iterator[int]:
        low, high = _extent(tensor)
        for other in ("write",) if access == "read" else ("read", "write"):
            for begin, end, span in self.accesses[other]:
                if begin < high and low < end and not (other == access and tensor.is_indirect()):
                    yield span  # scattered rows are distinct, or the program is wrong

    def add(self, tensor: NkiTensor, access: str, span: int) -> None:
        self.accesses[access].append((*_extent(tensor), span))


def _extent(tensor: NkiTensor) -> tuple[int, int]:
    if tensor.is_indirect():
        return 0, tensor.storage.nbytes
    last = sum(stride * (count - 1) for stride, count in tensor.pattern)
    return tensor.offset * tensor.itemsize, (tensor.offset + last + 1) * tensor.itemsize
