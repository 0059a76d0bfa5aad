"""Two cores on one shared tensor: whatever the emulator accepts has one result, in every order the cores can take."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from draft_verify.reference import emulator

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
nt = emulator.modules()["nki.typing"]
SLOTS, READS = 2, 9

slot = st.integers(0, SLOTS - 1)
write = st.tuples(st.just("write"), slot, st.integers(1, 2))
read = st.tuples(st.just("read"), slot)
interval = st.lists(st.one_of(write, read), max_size=3)
# What each core does between one barrier and the next.
programs = st.lists(st.tuples(interval, interval), min_size=1, max_size=3)


def kernel_of(program, dynamic):
    """A kernel that writes constants to rows of `shared` and stores what it reads, at run-time addresses or not."""

    def row(tensor, rows, index):
        if dynamic:
            return tensor.ap([[4, 1], [1, 4]], scalar_offset=rows[0:1, index : index + 1], indirect_dim=0)
        return tensor[index : index + 1]

    def kernel(shared: nt.mutable_tensor, numbers):
        core = nl.program_id(0)
        seen = nl.ndarray((2, READS, 4), nl.float32, buffer=nl.shared_hbm)
        rows = nl.load(numbers)
        tile = nl.zeros((1, 4), nl.float32)
        for number in range(READS):
            nl.store(seen[core, number : number + 1], tile)
        reads = 0
        nl.store(shared[SLOTS + core : SLOTS + core + 1], tile)
        for number, parts in enumerate(program):
            if number:
                nisa.core_barrier(shared, (0, 1))
            for operation in parts[core]:
                if operation[0] == "write":
                    nisa.dma_copy(row(shared, rows, operation[1]), nl.full((1, 4), operation[2], nl.float32))
                else:
                    nisa.dma_copy(tile, row(shared, rows, operation[1]))
                    nl.store(seen[core, reads : reads + 1], tile)
                    reads += 1
        return shared, seen

    return emulator.jit(kernel)[2]


def outcomes(program):
    """All (slots, reads of core 0, reads of core 1) that some order of the cores leads to."""
    states = {((0,) * SLOTS, (), ())}
    for parts in program:
        reached, frontier = set(), {(state, 0, 0) for state in states}
        while frontier:
            (slots, *seen), *at = frontier.pop()
            if all(at[core] == len(parts[core]) for core in (0, 1)):
                reached.add((slots, *seen))
            for core in (0, 1):
                if at[core] < len(parts[core]):
                    operation = parts[core][at[core]]
                    now, saw, step = list(slots), list(seen), list(at)
                    step[core] += 1
                    if operation[0] == "write":
                        now[operation[1]] = operation[2]
                    else:
                        saw[core] = (*saw[core], slots[operation[1]])
                    frontier.add(((tuple(now), *saw), *step))
        states = reached
    return states


TWICE = [("write", 0, 1), ("write", 0, 2)]


@given(program=programs, dynamic=st.booleans())
@example(program=[([*TWICE, ("read", 0)], TWICE)], dynamic=False)  # the same last value, but not all the time
@example(program=[(TWICE, [*TWICE, ("read", 0)])], dynamic=True)
@example(program=[(TWICE, TWICE), ([("read", 0)], [("read", 0)])], dynamic=True)
def test_what_is_accepted_has_one_outcome_and_that_is_the_emulators(program, dynamic):
    shared = np.zeros((SLOTS + 2, 4), np.float32)
    try:
        shared, seen = emulator.simulate(kernel_of(program, dynamic), strict=False)(
            shared, np.arange(SLOTS, dtype=np.int32).reshape(1, SLOTS)
        )
    except emulator.Refusal as refusal:
        assert "race" in str(refusal)
        return
    (outcome,) = outcomes(program)
    slots, *reads = outcome
    np.testing.assert_array_equal(shared[:SLOTS, 0], slots)
    for core in (0, 1):
        np.testing.assert_array_equal(seen[core, : len(reads[core]), 0], reads[core])


@given(program=programs, dynamic=st.booleans())
def test_cores_that_keep_to_their_own_rows_are_accepted(program, dynamic):
    apart = [tuple([(what[0], core, *what[2:]) for what in parts[core]] for core in (0, 1)) for parts in program]
    shared, _ = emulator.simulate(kernel_of(apart, dynamic), strict=False)(
        np.zeros((SLOTS + 2, 4), np.float32), np.arange(SLOTS, dtype=np.int32).reshape(1, SLOTS)
    )
    (outcome,) = outcomes(apart)
    np.testing.assert_array_equal(shared[:SLOTS, 0], outcome[0])
