"""Races between the two cores of an LNC pair, found from the program.

The cores meet at core_barrier and sendrecv and nowhere else. A barrier on a tensor orders the accesses to that tensor;
other meetings order them only by chance of the schedule. Addresses known only at run time are compared at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .control import CROSS_CORE, core_barrier
from .instruction import Call, Refusal
from .memory import Place, Written
from .program import Block, Loop, Program
from .tensor import NkiTensor, Storage


def check(program: Program) -> None:
    """Refuses cores that cannot meet and unordered accesses of both cores to the same bytes of shared HBM."""
    if program.lnc == 2:
        _check_meetings(*program.cores)
        _check_shared(program)


def counterparts(first: Call, second: Call) -> bool:
    """Whether two cross-core instructions are the two sides of one meeting."""
    if first.instruction is not second.instruction:
        return False
    if first.instruction is core_barrier:
        return first.data.storage is second.data.storage and first.args["engine"] is second.args["engine"]
    return (
        first.pipe_id == second.pipe_id
        and first.args["dma_engine"] is second.args["dma_engine"]
        and all(_meets(here, there) for here, there in ((first, second), (second, first)))
    )


def _meets(here: Call, there: Call) -> bool:
    """Whether what one core receives is what the core it receives from sends to it."""
    sender = here if here.recv_from_rank == here.core else there
    same = (sender.src.shape, sender.src.dtype) == (here.dst.shape, here.dst.dtype)
    return same and sender.send_to_rank == here.core


def _meetings(block: Block) -> list:
    """Cross-core instructions and runtime loops in order."""
    found = []
    for item in block.items:
        if isinstance(item, Loop) or item.instruction in CROSS_CORE:
            found.append(item)
    return found


def _check_meetings(first: Block, second: Block) -> None:
    """Both cores meet in the same order, and run the same runtime loops."""
    left, right = _meetings(first), _meetings(second)
    for one, other in zip(left, right):
        if isinstance(one, Loop) and isinstance(other, Loop):
            if (one.kind, one.static_trips) != (other.kind, other.static_trips):
                raise _apart(one, other, "the cores run a loop a different number of times")
            _check_meetings(one.body, other.body)
        elif isinstance(one, Loop) or isinstance(other, Loop) or not counterparts(one, other):
            raise _apart(one, other, "the cores do not meet: the same barriers, sendrecvs and runtime loops in the "
                         "same order, with matching tensors, ranks, pipes and engines")  # fmt: skip
    if len(left) != len(right):
        alone = (left if len(left) > len(right) else right)[min(len(left), len(right))]
        raise _apart(alone, None, "only one core has this barrier, sendrecv or runtime loop: the cores deadlock")


def _apart(one, other, rule: str) -> Refusal:
    refusal = Refusal(rule, here=_name(one), **({"other_core": f"{_name(other)} at {other.source}"} if other else {}))
    refusal.where = f"{one.source}: "
    return refusal


def _name(item) -> str:
    return str(item) if isinstance(item, Loop) else item.instruction.name


@dataclass
class _Access:
    """One access to a shared tensor. `barriers`: of this tensor, passed before it; `meetings`: of any kind."""

    call: Call
    tensor: NkiTensor
    write: bool
    barriers: int
    meetings: int


def _walk(block: Block) -> Iterator[Call]:
    """Program order; a loop with a meeting inside twice, so that the end of an iteration meets the next one's start."""
    for item in block.items:
        if isinstance(item, Loop):
            twice = any(call.instruction in CROSS_CORE for call in item.body.calls())
            for _ in range(2 if twice else 1):
                yield from item.body.calls()
        else:
            yield item


def _accesses(block: Block) -> dict[Storage, list[_Access]]:
    found: dict[Storage, list[_Access]] = {}
    barriers: dict[Storage, int] = {}
    meetings = 0
    for call in _walk(block):
        if call.instruction in CROSS_CORE:
            meetings += 1
            if call.instruction is core_barrier:
                barriers[call.data.storage] = barriers.get(call.data.storage, 0) + 1
        for _, tensor, access in call.tensors():
            storage = tensor.storage
            if storage.buffer == "shared_hbm":
                entry = _Access(call, tensor, access == "write", barriers.get(storage, 0), meetings)
                found.setdefault(storage, []).append(entry)
    return found


def _check_shared(program: Program) -> None:
    cores = [_accesses(block) for block in program.cores]
    for storage in [storage for storage in cores[0] if storage in cores[1] and storage.written]:
        for mine, theirs in (cores, reversed(cores)):
            for epoch in {access.barriers for access in mine[storage] if access.write}:
                _check_interval(
                    storage,
                    [access for access in mine[storage] if access.write and access.barriers == epoch],
                    [access for access in theirs[storage] if access.barriers == epoch],
                )


def _check_interval(storage: Storage, writes: list[_Access], others: list[_Access]) -> None:
    """Writes of one core against all accesses of the other, between two barriers on the storage.

    Both cores may write the same bytes where they write the same values, which a run checks: it is noted. What a core
    has written itself it may then also read.
    """
    if others and any(access.tensor.is_indirect() for access in (*writes, *others)):
        storage.contended = True
    written, own = Written(storage), Written(storage)
    own_at_run_time = False
    for access in writes:
        if not access.tensor.is_indirect():
            written.region(access.tensor)[...] = True
    for access in others:
        if access.tensor.is_indirect():
            own_at_run_time |= access.write
            continue
        if written.mask is None:
            continue
        common = written.region(access.tensor)
        if access.write:
            own.region(access.tensor)[...] = True
        if not common.any():
            continue
        culprit = next(w for w in writes if not w.tensor.is_indirect() and _overlap(w.tensor, access.tensor))
        if access.write or not (common & ~own.region(access.tensor)).any():
            storage.contended = True
            culprit.call.note(f"core {access.call.core} writes the same bytes of {storage.name} too: harmless only "
                              "where both write the same values")  # fmt: skip
        elif not own_at_run_time:
            _report(culprit, access)


def _overlap(one: NkiTensor, other: NkiTensor) -> bool:
    mask = Written(one.storage)
    mask.region(one)[...] = True
    return bool(mask.region(other).any())


def _report(write: _Access, read: _Access) -> None:
    storage = write.tensor.storage
    if write.meetings != read.meetings:
        write.call.note(f"core {read.call.core} reads the same bytes of {storage.name} ({read.call.source}); what lies "
                        "between them is no core_barrier on that tensor")  # fmt: skip
        return
    raise Refusal(
        f"race: core {read.call.core} reads the same bytes without a core_barrier on the tensor between",
        tensor=storage.name,
        here=write.tensor,
        there=f"{read.tensor} at {read.call.source}",
    ).at(write.call)


class Contention:
    """What each core did to each byte of a shared tensor since the last barrier on it, where only a run can tell.

    Both may write a byte if both leave the same value, and may read it back if nobody wrote another one in between.
    """

    def __init__(self, storage: Storage):
        self.storage = storage
        self.reset()

    def reset(self) -> None:
        size = self.storage.nbytes
        self.values = np.zeros((2, size), np.uint8)
        self.written, self.changed, self.read, self.read_back = np.zeros((4, 2, size), bool)
        self.writers: tuple[dict, dict] = ({}, {})

    def record(self, call: Call, write: bool, place: Place, memory: np.ndarray) -> None:
        """An access of call's core; a write after it happened."""
        core = call.core
        written = place.get(self.written[core])
        if write:
            values = place.get(memory)
            changed = written & (place.get(self.values[core]) != values)
            place.put(self.changed[core], place.get(self.changed[core]) | changed)
            place.put(self.values[core], values)
            place.put(self.written[core], True)
            self.writers[core][call.source] = None
        else:
            place.put(self.read[core], place.get(self.read[core]) | ~written)
            place.put(self.read_back[core], place.get(self.read_back[core]) | written)

    def check(self) -> None:
        """Refuses accesses whose result depends on the order of the cores; starts a new interval."""
        both = self.written[0] & self.written[1]
        if (self.written & self.read[::-1]).any():
            self._refuse("one core wrote and the other read the same bytes")
        if (both & (self.values[0] != self.values[1])).any():
            self._refuse("both cores write the same bytes, and not the same values")
        if (both & self.read_back.any(axis=0) & self.changed.any(axis=0)).any():
            self._refuse("a core reads bytes back that both cores write more than once")
        self.reset()

    def _refuse(self, what: str):
        core0, core1 = (list(sources) for sources in self.writers)
        raise Refusal(f"race: {what}, with no core_barrier on the tensor between", tensor=self.storage,
                      written_by_core0=core0, written_by_core1=core1)  # fmt: skip


def check_trips(program: Program) -> None:
    """After a run: both cores went through their loops equally often."""
    if program.lnc == 2:
        for one, other in zip(program.cores[0].loops(), program.cores[1].loops()):
            if program.trips.get(one) != program.trips.get(other):
                raise _apart(one, other, f"the cores ran a runtime loop {program.trips.get(one)} and "
                             f"{program.trips.get(other)} times: they must run it equally often")  # fmt: skip
