"""The traced programs behind a call of a public function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from draft_verify.reference.emulator import Program
from draft_verify.reference.emulator.dynamic import skips_rows
from draft_verify.reference.emulator.trips import count_trips

from .shapes import Case


@contextlib.contextmanager
def instead_of_running(programs: list[Program]) -> Iterator[None]:
    """Inside, programs are collected with what a cost needs of a run, and return zeros instead of running."""
    run = Program.run

    def collect(program: Program, *arrays: np.ndarray):
        loops = [loop for block in program.cores for loop in block.loops()]
        skipping = any(skips_rows(call) for block in program.cores for call in block.calls())
        if skipping or any(loop.static_trips is None for loop in loops):
            Program.run = run
            try:
                count_trips(program, *arrays)
            finally:
                Program.run = collect
        programs.append(program)
        written = dict(zip(program.inputs, arrays))
        outputs = tuple(
            written.get(tensor.storage, np.zeros(tensor.shape, tensor.dtype.np)) for tensor in program.output_tensors()
        )
        return outputs if isinstance(program.outputs, tuple) else outputs[0]

    Program.run = collect
    try:
        yield
    finally:
        Program.run = run


def programs_of(case: Case, lnc: int) -> list[Program]:
    """The programs that a case launches on the emulator, with the trip counts its inputs give."""
    programs: list[Program] = []
    with instead_of_running(programs):
        case.call(case.data, backend="emulator", lnc=lnc)
    return programs
