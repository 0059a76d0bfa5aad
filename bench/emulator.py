"""How long the emulator takes: tracing a kernel once per shape, and running the traced program."""

from __future__ import annotations

import argparse
import time

from draft_verify.reference.emulator import Program

from .shapes import Case, cases, random_data
from .table import text_table

# The shape of the project's target: a trace under 2 s, a run under 1 s, on one core.
TARGET = ("verify_attention", {"B": 4, "T": 8, "S": 8192, "D": 128})


def timed(case: Case, lnc: int) -> tuple[float, float]:
    """Seconds of the first call less a later call (tracing and linking), and of the program's run alone."""
    seconds: list[float] = []
    run = Program.run

    def clocked(program: Program, *arrays):
        began = time.perf_counter()
        try:
            return run(program, *arrays)
        finally:
            seconds.append(time.perf_counter() - began)

    make = random_data(0)
    args, kwargs = case.inputs(make)
    fixed = Case(case.operation, case.variant, case.shape, lambda _: (args, kwargs), case.must_move)
    Program.run = clocked
    try:
        totals = []
        for _ in range(2):
            began = time.perf_counter()
            fixed.call(make, backend="emulator", lnc=lnc)
            totals.append(time.perf_counter() - began)
    finally:
        Program.run = run
    return totals[0] - totals[1], min(seconds)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m draft_verify.bench emulator", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every operation of `bench cost --quick`")
    arguments = parser.parse_args(argv)
    chosen = cases(quick=True)
    if not arguments.all:
        chosen = [case for case in chosen if (case.operation, case.shape) == TARGET]
    rows = []
    for case in chosen:
        for lnc in (1, 2):
            try:
                traced, ran = timed(case, lnc)
                rows.append([case.name, lnc, f"{traced:.2f}", f"{ran:.2f}"])
            except (ImportError, ValueError) as error:
                rows.append([case.name, lnc, "-", str(error).splitlines()[0]])
    print(text_table(["call", "lnc", "trace s", "run s"], rows))
    return 0
