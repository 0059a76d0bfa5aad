"""How long the emulator takes: tracing a kernel once per shape, and running the traced program.

Seconds of the processor, all threads together: run it with OMP_NUM_THREADS=1 for those of one core.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

from draft_verify.reference.emulator import Kernel, Program

from .shapes import Case, cases, random_data, zeros
from .table import Table

# The shape of the project's target: a trace under 2 s, a run under 1 s, on one core.
TARGET = ("verify_attention", "BHDS", {"B": 4, "T": 8, "S": 8192, "D": 128})


def timed(case: Case, lnc: int) -> tuple[float, float]:
    """Seconds of the processor that tracing takes, and a later run of the traced program."""
    args, kwargs = case.inputs(random_data(0))
    fixed = Case(case.operation, case.variant, case.shape, lambda _: (args, kwargs), case.must_move)
    with clocked(Kernel, "_trace") as traces, clocked(Program, "run") as runs:
        for _ in range(3):
            fixed.call(zeros, backend="emulator", lnc=lnc)
    launches = len(traces)
    return sum(traces), sum(runs[-launches:])


@contextlib.contextmanager
def clocked(owner: type, name: str) -> Iterator[list[float]]:
    """Inside, the processor seconds of every call of a method are collected."""
    seconds: list[float] = []
    method = getattr(owner, name)

    def measured(*args, **kwargs):
        began = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - began)

    setattr(owner, name, measured)
    try:
        yield seconds
    finally:
        setattr(owner, name, method)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m draft_verify.bench emulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="every operation of `bench cost --quick`")
    arguments = parser.parse_args(argv)
    chosen = cases(quick=True)
    if not arguments.all:
        chosen = [case for case in chosen if (case.operation, case.variant, case.shape) == TARGET]
    rows = []
    for case in chosen:
        for lnc in (1, 2):
            try:
                traced, ran = timed(case, lnc)
                rows.append([case.name, lnc, f"{traced:.2f}", f"{ran:.2f}"])
            except (ImportError, ValueError) as error:
                rows.append([case.name, lnc, "-", str(error).splitlines()[0]])
    print(Table(["call", "lnc", "trace s", "run s"], rows))
    return 0
