"""What each kernel costs on trn2, what bounds it, and how far it is from what HBM allows. Modelled, never measured.

bound: the busiest engine or HBM by documented rates. makespan: the schedule with fixed overheads. limit: the bytes that
must move / HBM bandwidth. layout: what the DMA engines take for them where the layouts cut them into short pieces.
Times in microseconds, per launch; with two cores those of the busier one.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from draft_verify.reference.emulator import Program, Refusal
from draft_verify.reference.emulator.cost import Cost, cost, lines
from draft_verify.reference.emulator.machine import ENGINES, trn2
from draft_verify.reference.emulator.schedule import Schedule, schedule

from . import peer
from .programs import programs_of
from .shapes import QUERY_HEADS, Case, cases, operations
from .table import Table

PEER = "attention_tkg"


@dataclass
class Row:
    """One call on one logical core, or why it has no figures. The JSON and CSV schema; microseconds and bytes."""

    operation: str
    variant: str
    shape: str
    lnc: int
    instructions: int = 0
    bound_us: float = 0.0
    bound_by: str = ""
    makespan_us: float = 0.0
    limit_us: float = 0.0
    bound_over_limit: float = 0.0
    layout_us: float = 0.0  # 0 where the layouts cut nothing into short pieces
    tensor_us: float = 0.0
    vector_us: float = 0.0
    scalar_us: float = 0.0
    gpsimd_us: float = 0.0
    dma_us: float = 0.0
    hbm_us: float = 0.0
    hbm_bytes: int = 0
    bound_over_peer: float = 0.0  # share of the time bound of AWS's kernel on the same shape, 0 where there is none
    unverified: str = ""  # what the bound rests on that no source states
    refused: str = ""


def measure(case: Case, lnc: int) -> tuple[Row, list[Schedule]]:
    """The modelled figures of a case, and the schedules of its launches."""
    row = Row(case.operation, case.variant, shape_text(case), lnc)
    try:
        programs = programs_of(case, lnc)
    except Exception as error:  # one operation that fails must not hide the others
        row.refused = f"{type(error).__name__}: {error}".splitlines()[0]
        return row, []
    if not programs:
        row.refused = "launches no kernel"
        return row, []
    row.layout_us = layout_limit(case, lnc) * 1e6
    return row, _fill(row, programs, case.must_move)


def layout_limit(case: Case, lnc: int) -> float:
    """Seconds that the DMA engines of all cores take for the pieces that the layouts cut a case's bytes into."""
    seconds = (size * count / (trn2.dma_bandwidth * trn2.efficiency(size)) for size, count in case.pieces)
    return sum(seconds) / lnc


def measure_peer(checkout: str, case: Case, lnc: int) -> tuple[Row, list[Schedule]]:
    """AWS's attention_tkg on the shape of an attention case."""
    row = Row(PEER, case.variant, shape_text(case), lnc)
    shape = case.shape
    try:
        program = peer.attention_tkg(checkout, shape["B"], QUERY_HEADS, shape["T"], shape["S"], shape["D"], lnc=lnc)
    except (AssertionError, Refusal) as error:
        row.refused = f"{type(error).__name__}: {error}".splitlines()[0]
        return row, []
    return row, _fill(row, [program], case.must_move)


def shape_text(case: Case) -> str:
    return " ".join(f"{name}={size}" for name, size in case.shape.items())


def _fill(row: Row, programs: list[Program], must_move: int) -> list[Schedule]:
    """Adds up the launches of one call: they run one after another."""
    costs = [cost(program) for program in programs]
    schedules = [schedule(program) for program in programs]
    row.instructions = sum(_busier(c, lambda core: sum(e.instructions for e in core.engines.values())) for c in costs)
    row.bound_us = sum(c.bound for c in costs) * 1e6
    row.bound_by = max(costs, key=lambda c: c.bound).bound_by
    row.makespan_us = sum(s.makespan for s in schedules) * 1e6
    row.limit_us = must_move / (costs[0].machine.hbm_bandwidth * row.lnc) * 1e6
    row.bound_over_limit = row.bound_us / row.limit_us
    for name in (*ENGINES, "dma", "hbm"):
        busy = sum(_busier(c, lambda core, name=name: core.times()[name]) for c in costs)
        setattr(row, f"{name}_us", busy * 1e6)
    row.hbm_bytes = sum(core.read_bytes + core.written_bytes for c in costs for core in c.cores)
    row.unverified = "; ".join(sorted({reason for c in costs for reason in c.rests_on(c.bound_by)}))
    return schedules


def _busier(priced: Cost, figure) -> float:
    return max(figure(core) for core in priced.cores)


def table(rows: list[Row]) -> str:
    """Rows as text; a star marks bounds that rest on unverified numbers, names them below."""
    header = ["operation", "variant", "shape", "lnc", "instr", "bound us", "by", "makespan", "limit"]
    header += ["bound/limit", "layout", "bound/peer"]
    header += [*ENGINES, "dma", "hbm", "KiB moved"]
    lines = []
    for row in rows:
        start = [row.operation, row.variant, row.shape, row.lnc]
        if row.refused:
            lines.append([*start, *["-"] * (len(header) - len(start))])
            continue
        star = " *" if row.unverified else ""
        times = [f"{getattr(row, f'{name}_us'):.2f}" for name in (*ENGINES, "dma", "hbm")]
        lines.append(
            [*start, row.instructions, f"{row.bound_us:.2f}{star}", row.bound_by, f"{row.makespan_us:.2f}",
             f"{row.limit_us:.2f}", f"{row.bound_over_limit:.2f}", _or_dash(row.layout_us),
             _or_dash(row.bound_over_peer), *times, f"{row.hbm_bytes / 1024:.1f}"]
        )  # fmt: skip
    notes = [f"- {row.operation} {row.variant} {row.shape} lnc {row.lnc}: {row.refused}" for row in rows if row.refused]
    unverified = sorted({name for row in rows for name in row.unverified.split("; ") if name})
    if unverified:
        notes.append(f"* UNVERIFIED: {'; '.join(unverified)}.")
    notes.append("Makespans, and dma where descriptors are short, rest on unverified numbers throughout.")
    return "\n".join(["Modelled times in microseconds, not measured.", "", str(Table(header, lines)), "", *notes])


def _or_dash(figure: float) -> str:
    return f"{figure:.2f}" if figure else "-"


def csv_text(rows: list[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Row)])
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    return out.getvalue()


def json_text(rows: list[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1)


def rows_of(
    chosen: Iterable[Case], lncs: Iterable[int], checkout: str | None = None, traces: Path | None = None
) -> Iterator[Row]:
    """Every case at every lnc, AWS's kernel after each attention case it could be compared with."""
    for case in chosen:
        for lnc in lncs:
            results = [measure(case, lnc)]
            if checkout and case.operation == "verify_attention" and case.variant == "BHDS":
                results.append(measure_peer(checkout, case, lnc))
                ours, theirs = results[0][0], results[1][0]
                if theirs.bound_us:
                    ours.bound_over_peer = ours.bound_us / theirs.bound_us
            for row, schedules in results:
                if traces:
                    for number, planned in enumerate(schedules):
                        name = f"{row.operation}-{row.variant}-{row.shape}-lnc{lnc}-{number}".replace(" ", "_")
                        planned.save(str(traces / f"{name}.json"))
                yield row


def lines_text(case: Case, lnc: int, count: int) -> str:
    """The source lines on which each engine of core 0 spends most."""
    found = [line for program in programs_of(case, lnc) for line in lines(program)]
    rows = []
    for engine in (*ENGINES, "dma"):
        rows += [
            [engine, line.instruction, Path(line.source).name, line.executions, f"{line.seconds * 1e6:.2f}"]
            for line in [line for line in found if line.engine == engine][:count]
        ]
    return f"{case.name} lnc {lnc}\n{Table(['engine', 'instruction', 'line', 'executed', 'us'], rows)}"


def path_text(case: Case, lnc: int) -> str:
    """The schedule of a case and what its makespan consists of."""
    texts = []
    for program in programs_of(case, lnc):
        planned = schedule(program)
        texts.append(f"{case.name}\n{planned.text()}\n{planned.path_text()}")
    return "\n".join(texts)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        "python -m draft_verify.bench cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--quick", action="store_true", help="the shapes that the project's targets are stated for")
    result.add_argument(
        "--operation", choices=operations(), action="append", metavar="NAME", help="only this operation (repeatable)"
    )
    result.add_argument(
        "--only", metavar="TEXT", help='only cases whose name holds this, such as "B=1 T=8 S=8192 D=128"'
    )
    result.add_argument("--lnc", type=int, choices=(1, 2), action="append", help="only this many cores")
    result.add_argument("--peer", metavar="NKI_LIBRARY=DIR", help="a checkout of nki-library, for AWS's attention_tkg")
    result.add_argument("--format", choices=("text", "csv", "json"), default="text")
    result.add_argument("--output", type=Path, help="write there instead of to the terminal")
    result.add_argument(
        "--lines", type=int, metavar="N", help="show the N costliest source lines of each engine instead"
    )
    result.add_argument("--path", action="store_true", help="show the critical path of each schedule instead")
    result.add_argument("--trace", type=Path, metavar="DIR", help="write each schedule there, for ui.perfetto.dev")
    return result


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    chosen = [c for c in cases(arguments.quick) if not arguments.operation or c.operation in arguments.operation]
    chosen = [case for case in chosen if not arguments.only or arguments.only in case.name]
    lncs = arguments.lnc or [1, 2]
    if arguments.path:
        print("\n\n".join(path_text(case, lnc) for case in chosen for lnc in lncs))
        return 0
    if arguments.lines:
        print("\n\n".join(lines_text(case, lnc, arguments.lines) for case in chosen for lnc in lncs))
        return 0
    if arguments.trace:
        arguments.trace.mkdir(parents=True, exist_ok=True)
    checkout = arguments.peer.removeprefix("NKI_LIBRARY=") if arguments.peer else None
    rows: list[Row] = []
    began = time.monotonic()
    for row in rows_of(chosen, lncs, checkout, arguments.trace):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r{len(rows)} rows, {time.monotonic() - began:.0f} s", end="", file=sys.stderr, flush=True)
    text = {"text": table, "csv": csv_text, "json": json_text}[arguments.format](rows)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    else:
        print(text)
    return 0
