"""Time bound of a traced program by the documented rates: what each engine, the DMA engines and HBM are busy for.

The bound is what remains if everything overlaps; fixed overheads, waiting and overlap are the schedule's
(schedule.py). A program with runtime loops costs what its last run executed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from . import capacity
from .dma import transfer
from .instruction import Call
from .machine import ENGINES, Machine, trn2
from .program import Block, Loop, Program


@dataclass
class EngineCost:
    """One compute engine of one core."""

    instructions: int = 0
    cycles: float = 0.0
    seconds: float = 0.0
    unverified: set[str] = field(default_factory=set)  # instructions whose rate no source states


@dataclass
class CoreCost:
    """One physical core: its engines, its DMA, its memories."""

    engines: dict[str, EngineCost] = field(default_factory=lambda: {name: EngineCost() for name in ENGINES})
    control: int = 0  # register and synchronisation instructions
    transfers: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    descriptors: Counter = field(default_factory=Counter)  # bytes of a descriptor -> how many
    dma_seconds: float = 0.0
    hbm_seconds: float = 0.0
    sbuf_bytes: int = 0
    psum_banks: int = 0

    def times(self) -> dict[str, float]:
        """Busy seconds of everything that can bound the core."""
        busy = {name: engine.seconds for name, engine in self.engines.items()}
        return busy | {"dma": self.dma_seconds, "hbm": self.hbm_seconds}


@dataclass
class Cost:
    """Cost of one run of a program. All times are modelled."""

    kernel: str
    machine: Machine
    cores: list[CoreCost]
    must_move: int  # bytes that any implementation reads from or writes to HBM

    @property
    def bound(self) -> float:
        """Seconds that the busiest resource of the busier core takes."""
        return max(max(core.times().values()) for core in self.cores)

    @property
    def bound_by(self) -> str:
        times = max((core.times() for core in self.cores), key=lambda times: max(times.values()))
        return max(times, key=times.get)

    @property
    def limit(self) -> float:
        """Seconds in which HBM moves `must_move` bytes to and from all cores."""
        return self.must_move / (self.machine.hbm_bandwidth * len(self.cores))

    def rests_on(self, resource: str) -> list[str]:
        """What the busy time of an engine or of the DMA rests on that no source states for this machine."""
        if resource == "dma":
            smallest = min((min(core.descriptors) for core in self.cores if core.descriptors), default=math.inf)
            short = smallest < self.machine.descriptor_efficiency[-1][0]
            return ["efficiency of descriptors below 4 KiB"] if short else []
        engines = [core.engines[resource] for core in self.cores if resource in core.engines]
        return [f"rate of {name}" for name in sorted(set().union(*(engine.unverified for engine in engines)))]

    @property
    def unverified(self) -> list[str]:
        """The same for all figures."""
        return [reason for resource in (*ENGINES, "dma") for reason in self.rests_on(resource)]

    def as_dict(self) -> dict:
        """Everything above in plain types: microseconds, bytes, counts."""
        return {
            "kernel": self.kernel,
            "machine": self.machine.name,
            "lnc": len(self.cores),
            "bound_us": self.bound * 1e6,
            "bound_by": self.bound_by,
            "limit_us": self.limit * 1e6,
            "must_move_bytes": self.must_move,
            "unverified": self.unverified,
            "cores": [_core_dict(core) for core in self.cores],
        }

    def json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def text(self) -> str:
        """The same as a table."""
        mark = "*" if self.rests_on(self.bound_by) else ""
        ratio = f", ratio {self.bound / self.limit:.2f}" if self.limit else ""
        lines = [
            f"{self.kernel}, lnc {len(self.cores)}, {self.machine.name}: modelled, not measured",
            f"bound {self.bound * 1e6:.2f} us{mark} ({self.bound_by}), "
            f"limit {self.limit * 1e6:.2f} us ({self.must_move:,} bytes must move){ratio}",
        ]
        for number, core in enumerate(self.cores):
            lines += _core_lines(number, core, self.machine)
        if self.unverified:
            lines.append(f"* UNVERIFIED: {'; '.join(self.unverified)}")
        return "\n".join(lines)

    __str__ = text


def _core_dict(core: CoreCost) -> dict:
    engines = {
        name: {"instructions": engine.instructions, "cycles": engine.cycles, "us": engine.seconds * 1e6}
        for name, engine in core.engines.items()
    }
    return {
        "engines": engines,
        "control_instructions": core.control,
        "dma_instructions": core.transfers,
        "dma_us": core.dma_seconds * 1e6,
        "hbm_us": core.hbm_seconds * 1e6,
        "hbm_read_bytes": core.read_bytes,
        "hbm_written_bytes": core.written_bytes,
        "descriptors": {str(size): count for size, count in sorted(core.descriptors.items())},
        "sbuf_peak_bytes": core.sbuf_bytes,
        "psum_peak_banks": core.psum_banks,
    }


def _core_lines(number: int, core: CoreCost, machine: Machine) -> Iterator[str]:
    yield f"core {number}    instructions      cycles        us"
    for name, engine in core.engines.items():
        mark = "*" if engine.unverified else ""
        yield f"  {name:7} {engine.instructions:13,} {engine.cycles:11,.0f} {engine.seconds * 1e6:9.2f}{mark}"
    saturated = machine.descriptor_efficiency[-1][0]
    mark = "*" if core.descriptors and min(core.descriptors) < saturated else ""
    yield f"  {'dma':7} {core.transfers:13,} {'':11} {core.dma_seconds * 1e6:9.2f}{mark}"
    moved = f"{core.read_bytes:,} bytes read, {core.written_bytes:,} written"
    yield f"  {'hbm':7} {'':13} {'':11} {core.hbm_seconds * 1e6:9.2f}  {moved}"
    if core.descriptors:
        count = sum(core.descriptors.values())
        small = sum(n for size, n in core.descriptors.items() if size < saturated)
        sizes = f"{min(core.descriptors):,} to {max(core.descriptors):,} bytes"
        yield f"  {count:,} descriptors of {sizes}, {small:,} below {saturated:,}"
    sbuf, banks = f"{core.sbuf_bytes:,} of {int(machine.sbuf_bytes):,} bytes a partition", int(machine.psum_banks)
    yield f"  peak SBUF {sbuf}, PSUM {core.psum_banks} of {banks} banks"


def trip_count(program: Program, loop: Loop) -> int:
    """How often a runtime loop's body ran in the last run.

    Raises ValueError if the program has not run and the loop's bounds are registers.
    """
    trips = program.trips.get(loop, loop.static_trips)
    if trips is None:
        raise ValueError(f"{loop.source}: the cost of a runtime loop is that of a run: call program.run(...) first")
    return trips


def executed(program: Program, block: Block) -> Iterator[tuple[Call, int]]:
    """Every call of a block with the number of times the last run executed it."""
    for item in block.items:
        if isinstance(item, Loop):
            trips = trip_count(program, item)
            yield from ((call, trips) for call in item.body.calls())
        else:
            yield item, 1


class Line(NamedTuple):
    """What one instruction of a kernel's source costs in a run, all its executions together."""

    engine: str
    instruction: str
    source: str
    executions: int
    seconds: float


def lines(program: Program, core: int = 0, machine: Machine = trn2) -> list[Line]:
    """The source lines of a core's program, costliest first; a DMA's seconds are those of all 16 engines together."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for call, times in executed(program, program.cores[core]):
        if call.engine.name == "dma":
            seconds = transfer(call, machine, program.share_moved(call)).engine_seconds / machine.dma_engines
        elif call.instruction.cycles is None:
            continue
        else:
            seconds = call.instruction.cycles(call) / machine.clock(call.engine.name)
        entry = found.setdefault((call.engine.name, call.instruction.name, call.source), [0, 0.0])
        entry[0] += times
        entry[1] += times * seconds
    return sorted((Line(*key, *figures) for key, figures in found.items()), key=lambda line: -line.seconds)


def cost(program: Program, machine: Machine = trn2, must_move: int | None = None) -> Cost:
    """Cost of `program` on `machine`.

    must_move: bytes that any implementation must move to or from HBM; by default every tensor argument and output
    once, as far as the program touches it.
    """
    touched: Counter = Counter()
    cores = [_core_cost(program, block, machine, touched) for block in program.cores]
    if must_move is None:
        must_move = sum(min(moved, storage.nbytes) for (storage, _), moved in touched.items())
    return Cost(program.name, machine, cores, must_move)


def _core_cost(program: Program, block: Block, machine: Machine, touched: Counter) -> CoreCost:
    core = CoreCost()
    for call, times in executed(program, block):
        if call.engine.name == "dma":
            _add_transfer(core, call, times, machine, touched, program.share_moved(call))
        elif call.instruction.cycles is None:
            core.control += times
        else:
            engine = core.engines[call.engine.name]
            cycles = call.instruction.cycles(call)
            engine.instructions += times
            engine.cycles += times * cycles
            if "UNVERIFIED" in (call.instruction.cycles.__doc__ or ""):
                engine.unverified.add(call.instruction.name)
    for name, engine in core.engines.items():
        engine.seconds = engine.cycles / machine.clock(name)
    core.hbm_seconds = (core.read_bytes + core.written_bytes) / machine.hbm_bandwidth
    core.sbuf_bytes = capacity.peak(block, "sbuf").amount
    core.psum_banks = capacity.peak(block, "psum").amount
    return core


def _add_transfer(core: CoreCost, call: Call, times: int, machine: Machine, touched: Counter, share: float) -> None:
    moved = transfer(call, machine, share)
    core.transfers += times
    core.read_bytes += times * moved.read_bytes
    core.written_bytes += times * moved.written_bytes
    core.descriptors[round(moved.descriptor_bytes)] += times * moved.descriptors
    core.dma_seconds += times * moved.engine_seconds / machine.dma_engines
    for _, tensor, access in call.tensors():
        if tensor.is_hbm and tensor.storage.kind in ("input", "output"):
            touched[tensor.storage, access] += round(times * share * tensor.size * tensor.itemsize)
