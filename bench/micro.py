"""Every kernel over the grid of `bench cost`: modelled times and, where a device is present, measured ones.

JSON: {"schema": "draft_verify.micro/1", "rows": [...]}, a row the columns of `bench cost`, then gb_per_s (the bytes
that must move over the makespan, or over the measured time where there is one), measured_us and against_reference.
CSV: the same columns. --compare exits non-zero when a figure grew.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from draft_verify.backends import logical_cores

from .arguments import not_negative
from .cost import Row, measure
from .device import NeuronDevice, check, missing
from .shapes import Case, cases, operations
from .table import Table

SCHEMA = "draft_verify.micro/1"
COMPARED = ("instructions", "hbm_bytes", "bound_us", "makespan_us", "measured_us")
REPEAT = 20


@dataclass
class MicroRow(Row):
    """A row of `bench cost` with what a device says; measured_us is None where there is none."""

    gb_per_s: float = 0.0
    measured_us: float | None = None
    against_reference: str = ""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.operation, self.variant, self.shape, self.lnc


def run(case: Case, lnc: int, device: NeuronDevice | None) -> MicroRow:
    """Modelled, and measured if there is a device."""
    modelled, _ = measure(case, lnc)
    row = MicroRow(**asdict(modelled))
    if device is not None:
        try:
            row.against_reference, seconds = check(case, device, lnc, REPEAT)
            row.measured_us = seconds * 1e6
        except Exception as error:  # one kernel that does not compile must not hide the others
            row.against_reference = f"{type(error).__name__}: {error}".splitlines()[0]
    time_us = row.measured_us or row.makespan_us
    if time_us:
        row.gb_per_s = case.must_move / time_us / 1e3
    return row


def table(rows: Sequence[MicroRow]) -> Table:
    header = [
        "operation",
        "variant",
        "shape",
        "lnc",
        "bound us",
        "by",
        "makespan us",
        "limit us",
        "measured us",
        "GB/s",
    ]
    lines = []
    for row in rows:
        times = [f"{row.bound_us:.2f}", row.bound_by, f"{row.makespan_us:.2f}", f"{row.limit_us:.2f}"]
        measured = "-" if row.measured_us is None else f"{row.measured_us:.1f}"
        lines.append([*row.key, *(["-"] * 6 if row.refused else [*times, measured, f"{row.gb_per_s:.0f}"])])
    return Table(header, lines)


def to_json(rows: Sequence[MicroRow]) -> str:
    return json.dumps({"schema": SCHEMA, "rows": [asdict(row) for row in rows]}, indent=1)


def from_json(text: str) -> list[MicroRow]:
    """Raises ValueError unless it is a document of this schema."""
    document = json.loads(text)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"schema is {schema!r}, expected {SCHEMA!r}")
    return [MicroRow(**row) for row in document["rows"]]


def to_csv(rows: Sequence[MicroRow]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(MicroRow)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def compare(old: Sequence[MicroRow], new: Sequence[MicroRow], tolerance: float) -> tuple[Table, bool]:
    """What changed by more than `tolerance`, and whether anything grew; rows of one side only are told, not judged."""
    before = {row.key: row for row in old}
    changes, grew = [], False
    for row in new:
        previous = before.pop(row.key, None)
        if previous is None:
            changes.append([*row.key, "new", "-", "-", "-"])
            continue
        if row.refused != previous.refused:
            changes.append([*row.key, "refused", previous.refused or "no", row.refused or "no", "-"])
            grew |= bool(row.refused)
            continue
        for name in COMPARED:
            was, now = getattr(previous, name), getattr(row, name)
            if was and now and abs(now / was - 1) > tolerance:
                changes.append([*row.key, name, f"{was:.4g}", f"{now:.4g}", f"{now / was - 1:+.1%}"])
                grew |= now > was
    changes += [[*key, "gone", "-", "-", "-"] for key in before]
    return Table(["operation", "variant", "shape", "lnc", "figure", "was", "is", "change"], changes), grew


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        "python -m draft_verify.bench micro", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--quick", action="store_true", help="the shapes that the project's targets are stated for")
    result.add_argument(
        "--operation", choices=operations(), action="append", metavar="NAME", help="only this operation (repeatable)"
    )
    result.add_argument("--lnc", type=int, choices=(1, 2), help="default: NEURON_LOGICAL_NC_CONFIG, else 1")
    result.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, schema " + SCHEMA)
    result.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there")
    result.add_argument("--compare", type=Path, metavar="OLD.json", help="what changed since; fails if a figure grew")
    result.add_argument("--tolerance", type=not_negative, default=0.02, help="a change that counts (default 0.02)")
    result.add_argument("--report", type=Path, metavar="DIR", help="write pictures and an HTML page there")
    return result


def main(argv: list[str] | None = None) -> int:
    from tqdm import tqdm

    arguments = parser().parse_args(argv)
    try:
        old = arguments.compare and from_json(arguments.compare.read_text())
    except ValueError as error:
        raise SystemExit(f"{arguments.compare}: {error}") from None
    lnc = logical_cores(arguments.lnc)
    chosen = [c for c in cases(arguments.quick) if not arguments.operation or c.operation in arguments.operation]
    lacking = missing()
    device = None if lacking else NeuronDevice()
    rows = [run(case, lnc, device) for case in tqdm(chosen, unit="case", disable=None)]
    print(table(rows))
    for row in rows:
        if row.refused:
            print(f"- {' '.join(map(str, row.key))}: {row.refused}")
    if lacking:
        print(f"\nModelled only; to measure, this machine lacks: {'; '.join(lacking)}")
    if arguments.json:
        arguments.json.write_text(to_json(rows) + "\n")
    if arguments.csv:
        arguments.csv.write_text(to_csv(rows))
    if arguments.report:
        from . import report

        print(f"\n{report.micro_report(arguments.report, json.loads(to_json(rows)))}")
    if old is not None:
        changes, grew = compare(old, rows, arguments.tolerance)
        print(
            f"\nSince {arguments.compare}:\n\n{changes}"
            if changes.rows
            else f"\nNothing changed since {arguments.compare}."
        )
        return int(grew)
    return 0
