"""A traced kernel: instructions and runtime loops per core, and the tensors they work on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .instruction import Call, Instruction, Refusal
from .opaque import VirtualRegister
from .tensor import NkiTensor, Storage


@dataclass(eq=False)
class Block:
    """Instructions and loops in program order."""

    items: list = field(default_factory=list)

    def calls(self) -> Iterator[Call]:
        """Every call, loop bodies once."""
        for item in self.items:
            if isinstance(item, Loop):
                yield from item.body.calls()
            else:
                yield item

    def loops(self) -> Iterator[Loop]:
        for item in self.items:
            if isinstance(item, Loop):
                yield item
                yield from item.body.loops()


@dataclass(eq=False)
class Loop:
    """A runtime loop. `first` and `last` are the indices of its body's first call and the call after its last."""

    kind: str  # "fori" | "while"
    register: VirtualRegister  # the iteration value, or the condition that the body sees
    source: str
    lower: int | VirtualRegister | None = None
    upper: int | VirtualRegister | None = None
    step: int = 1
    condition: VirtualRegister | None = None  # while: tested before the first iteration
    next_condition: VirtualRegister | None = None  # while: what the body returned
    body: Block = field(default_factory=Block)
    first: int = -1
    last: int = -1
    open: bool = True

    @property
    def static_trips(self) -> int | None:
        """The trip count where it is known while tracing."""
        if isinstance(self.lower, int) and isinstance(self.upper, int):
            return len(range(self.lower, self.upper, self.step))
        return None

    def __str__(self):
        if self.kind == "while":
            return f"while {self.condition} != 0: {self.register}"
        return f"for {self.register} in {self.lower}..{self.upper} step {self.step}"


class Program:
    """A kernel traced for one set of shapes, dtypes and constants; runs any number of times.

    cores: one Block per physical core. inputs: storages of the tensor arguments, in order. outputs: what the kernel
    returned, a tensor, a tuple of tensors, or None. notes: risky but legal uses. trips: executed trip counts of each
    loop in the last run. moved: of each DMA that skips rows out of range, how many it moved in the last run, of how
    many.
    """

    def __init__(self, name: str, lnc: int, grid_ndim: int, strict: bool):
        self.name = name
        self.lnc = lnc
        self.grid_ndim = grid_ndim
        self.strict = strict
        self.cores: list[Block] = []
        self.inputs: list[Storage] = []
        self.outputs: NkiTensor | tuple | None = ()
        self.notes: list[str] = []
        self.storages: list[Storage] = []
        self.trips: dict[Loop, int] = {}
        self.moved: dict[Call, tuple[int, int]] = {}
        self.probed: frozenset[Call] = frozenset()  # calls of which a run only looks at the indices
        self._linked = None

    def note(self, text: str, where: str) -> None:
        """Records what is risky but legal at a line of the kernel; an error under strict."""
        if self.strict:
            refusal = Refusal(f"{text} (a note; an error under strict=True)")
            refusal.where = f"{where}: "
            raise refusal
        line = f"{where}: {text}"
        if line not in self.notes:
            self.notes.append(line)

    def calls(self, core: int = 0) -> Iterator[Call]:
        """All calls of a core in program order, loop bodies once."""
        return self.cores[core].calls()

    def output_tensors(self) -> tuple[NkiTensor, ...]:
        if self.outputs is None:
            return ()
        return self.outputs if isinstance(self.outputs, tuple) else (self.outputs,)

    def run(self, *arrays: np.ndarray):
        """Runs on one array per tensor argument; inputs that the kernel writes are changed in place.

        Returns an array, a tuple of arrays or None, as the kernel did. Raises Refusal where a dynamic access leaves its
        tensor, reads what was never written, or scatters twice to one row.
        """
        from .run import Linked

        if self._linked is None:
            self._linked = Linked(self)
        return self._linked.run(arrays)

    def share_moved(self, call: Call) -> float:
        """The share of its rows that a DMA moved in the last run; 1 for one that skips none, or has not run."""
        rows, addressed = self.moved.get(call, (1, 1))
        return rows / addressed

    def counts(self, core: int = 0) -> dict[str, int]:
        """Instructions per engine of a core, loop bodies once."""
        return dict(Counter(call.engine.name for call in self.calls(core)))

    def cost(self, machine=None):
        """Time bound and limit by the documented rates: see cost.py."""
        from . import cost

        return cost.cost(self, machine) if machine is not None else cost.cost(self)

    def schedule(self):
        """Makespan of in-order engines and DMA queues: see schedule.py."""
        from . import schedule

        return schedule.schedule(self)

    def __str__(self):
        lines = [f"{self.name}: lnc {self.lnc}, {len(self.inputs)} inputs, {len(self.output_tensors())} outputs"]
        for core, block in enumerate(self.cores):
            counts = ", ".join(f"{engine} {count}" for engine, count in sorted(self.counts(core).items()))
            lines.append(f"core {core}: {counts}")
            lines += _listing(block, 1)
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _listing(block: Block, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for item in block.items:
        where = os.path.basename(item.source)
        if isinstance(item, Loop):
            yield f"{'':6}{indent}{item}  # {where}"
            yield from _listing(item.body, depth + 1)
        else:
            yield f"{item.index:5} {indent}{item.engine.name:7} {format_call(item)}  # {where}"


def format_call(call: Call) -> str:
    """`name(argument=operand, ...)`, defaults left out."""
    instruction: Instruction = call.instruction
    shown = []
    for name, value in call.args.items():
        if name in instruction.defaults and value is instruction.defaults[name]:
            continue
        shown.append(f"{name}={format_operand(value)}")
    return f"{instruction.name}({', '.join(shown)})"


def format_operand(value) -> str:
    """A tensor as name[shape]@offset:pattern, the pattern only where the view is not the whole tensor in order."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(format_operand, value)) + "]"
    if not isinstance(value, NkiTensor):
        return getattr(value, "name", None) or repr(value)
    text = f"{value.name}[{','.join(map(str, value.shape))}]"
    if value.size != value.storage.size or value.offset or not value.is_contiguous():
        text += f"@{value.offset}:" + "x".join(f"{stride}*{count}" for stride, count in value.pattern)
    for offset in (value.scalar_offset, value.vector_offset):
        if offset is not None:
            text += f"+{format_operand(offset)}*{value.index_stride}"
    return text
