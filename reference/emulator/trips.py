"""What a cost must know of a run, from the few instructions that decide it: trip counts, and rows that DMAs skip."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np

from . import dynamic
from .instruction import Call
from .opaque import VirtualRegister
from .program import Block, Loop, Program

REGISTER_WRITES = ("register_move", "register_load")


def count_trips(program: Program, *arrays: np.ndarray) -> None:
    """Sets `program.trips` and `program.moved` as `program.run(*arrays)` would, running only what they depend on."""
    loops = [loop for block in program.cores for loop in block.loops()]
    skipping = frozenset(call for block in program.cores for call in block.calls() if dynamic.skips_rows(call))
    needed = _needed(program, loops, skipping)
    small = copy.copy(program)
    small.probed = frozenset(call for call in skipping if id(call) not in needed)
    small._linked, small.outputs = None, ()
    twins: dict[Loop, Loop] = {}
    needed |= {id(call) for call in small.probed}
    small.cores = [_reduced(block, needed, twins) for block in program.cores]
    small.run(*arrays)
    program.trips = {loop: small.trips.get(twin, 0) for loop, twin in twins.items()}
    program.moved = small.moved


def _needed(program: Program, loops: list[Loop], skipping: frozenset[Call]) -> set[int]:
    """The calls (by identity) that loop bounds, loop conditions and the indices of skipping DMAs depend on."""
    values: set = set()  # registers and storages whose contents matter
    for loop in loops:
        values.update(register for register in _bounds(loop) if isinstance(register, VirtualRegister))
    values.update(offset.storage for call in skipping for _, offset in call.indices())
    calls = [call for block in program.cores for call in block.calls()]
    needed: set[int] = set()
    while True:
        more = {id(call) for call in calls if not values.isdisjoint(_written(call))} - needed
        if not more:
            return needed
        needed |= more
        for call in calls:
            if id(call) in more:
                values.update(_read(call))


def _bounds(loop: Loop) -> tuple:
    return loop.lower, loop.upper, loop.condition, loop.next_condition


def _written(call: Call) -> set:
    if call.instruction.name in REGISTER_WRITES:
        return {call.dst}
    # A barrier decides nothing by itself, but what it orders is only right with it.
    ordered = {call.data.storage} if call.instruction.name == "core_barrier" else set()
    return ordered | {tensor.storage for _, tensor, access in call.tensors() if access == "write"}


def _read(call: Call) -> set:
    read = set(call.storages())
    read.update(value for value in call.args.values() if isinstance(value, VirtualRegister))
    read.update(t.scalar_offset for _, t, _ in call.tensors() if isinstance(t.scalar_offset, VirtualRegister))
    return read


def _reduced(block: Block, needed: set[int], twins: dict[Loop, Loop]) -> Block:
    items = []
    for item in block.items:
        if isinstance(item, Loop):
            twins[item] = dataclasses.replace(item, body=_reduced(item.body, needed, twins))
            items.append(twins[item])
        elif id(item) in needed:
            items.append(item)
    return Block(items)
