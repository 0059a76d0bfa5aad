"""The bench's findings as one HTML page that opens offline: tables, and pictures embedded as data.

    python -m draft_verify.bench report --report DIR [--workload JSON] [--micro JSON]

writes DIR/index.html with everything: published pairs, the given results of `workload --json` and `micro --json`, and
the schedule of one verify step, which also goes to DIR/step.json for ui.perfetto.dev. The other commands' --report
writes the page with their own part alone.
"""

from __future__ import annotations

import argparse
import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import pictures
from .presets import PRESETS
from .speedup import StepCost, Tuning, conditional, tune
from .table import Table
from .window import baselines_table, presets_table, verdict, windows_table

ENGINES = ("tensor", "vector", "scalar", "gpsimd", "hbm")
PICTURED_KERNELS = 24

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #111; }
table { border-collapse: collapse; font-size: 14px; display: block; overflow-x: auto; }
th, td { padding: 0.2rem 0.7rem; border-bottom: 1px solid #ccc; text-align: left; white-space: nowrap; }
.right { text-align: right; }
img { max-width: 100%; }
figcaption { color: #444; font-size: 14px; }
""".strip()


class Section(NamedTuple):
    """A heading, what it says in sentences, and its pictures with a caption each."""

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[Path, str]] = ()


def write(directory: Path, sections: Sequence[Section]) -> Path:
    """DIR/index.html; nothing in it is loaded from anywhere else."""
    parts = []
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(sentence)}</p>" for sentence in section.sentences]
        for picture, caption in section.pictures:
            data = base64.b64encode(picture.read_bytes()).decode()
            text = html.escape(caption)
            parts.append(
                f'<figure><img src="data:image/png;base64,{data}" alt="{text}"><figcaption>{text}</figcaption></figure>'
            )
        parts += [table.html() for table in section.tables]
    page = directory / "index.html"
    page.write_text(
        "<!DOCTYPE html>\n<html lang=en>\n<meta charset=utf-8>\n<title>draft-verify bench</title>\n"
        f"<style>\n{STYLE}\n</style>\n<h1>draft-verify bench</h1>\n" + "\n".join(parts) + "\n</html>\n"
    )
    return page


def window_section(directory: Path, tuning: Tuning, cost: StepCost) -> Section:
    picture = pictures.speedup_picture(directory / "speedup.png", {"this draft": tuning})
    caption = "Speedup against drafts a step, the best circled."
    return Section("Window", [verdict(tuning)], [windows_table(tuning, cost)], [(picture, caption)])


def presets_section(directory: Path) -> Section:
    curves = {preset.title: tune(preset.rates, preset.cost) for preset in PRESETS.values()}
    picture = pictures.speedup_picture(directory / "presets.png", curves)
    sentences = [
        "Predictions beside published figures. Step costs are modelled from public configurations, except those of "
        "gpt-oss-20b, which are fitted to its measured step times. Misses are shown as they are.",
        *(f"{preset.title}: acceptance {preset.rates_source}. {preset.notes}" for preset in PRESETS.values()),
    ]
    return Section(
        "Published pairs on Trainium2",
        sentences,
        [presets_table(), baselines_table()],
        [(picture, "Speedup against drafts a step for each published pair, the best circled.")],
    )


def workload_section(directory: Path, document: dict) -> Section:
    """From the JSON of `workload`, schema draft_verify.workload/1."""
    results = document["results"]
    kinds = list(dict.fromkeys(result["kind"] for result in results))
    chains = [result for result in results if result["parents"] is None and result["stats"]["steps"]]
    tokens = {kind: {r["draft"]: r["stats"]["tokens_per_step"] for r in results if r["kind"] == kind} for kind in kinds}
    shown = [(pictures.tokens_picture(directory / "tokens.png", tokens), "Tokens a verify step, by kind of work.")]
    for number, draft in enumerate(dict.fromkeys(result["draft"] for result in chains)):
        survival = {
            r["kind"]: [a / r["stats"]["steps"] for a in r["stats"]["accepted_by_position"]]
            for r in chains
            if r["draft"] == draft
        }
        cost = next(StepCost(**r["cost"]) for r in chains if r["draft"] == draft)
        picture = pictures.acceptance_picture(directory / f"acceptance-{number}.png", survival)
        shown.append((picture, f"Acceptance by position, {draft}."))
        curves = {kind: tune(conditional(rates), cost, len(rates)) for kind, rates in survival.items()}
        picture = pictures.speedup_picture(directory / f"speedup-{number}.png", curves)
        shown.append((picture, f"Modelled speedup against drafts a step, {draft}; the best circled."))
    rows = [
        [
            result["kind"],
            result["draft"],
            f"{result['stats']['tokens_per_step']:.2f}",
            f"{result['speedup']:.2f}x",
            "-" if result["best_speedup"] is None else result["best_num_draft_tokens"],
            "-" if result["best_speedup"] is None else f"{result['best_speedup']:.2f}x",
        ]
        for result in results
    ]
    return Section(
        "Kinds of work",
        ["Acceptance is measured on SmolLM2-135M-Instruct; speedup is modelled from it and the stated step cost."],
        [Table(["kind", "draft", "tokens/step", "speedup", "best K", "there"], rows)],
        shown,
    )


def micro_section(directory: Path, document: dict) -> Section:
    """From the JSON of `micro`, schema draft_verify.micro/1."""
    rows = [row for row in document["rows"] if not row["refused"]]
    largest = sorted(rows, key=lambda row: -row["hbm_bytes"])
    pictured: dict[tuple[str, str], dict] = {}
    for row in largest:
        pictured.setdefault((row["operation"], row["variant"]), row)
    chosen = list(pictured.values())[:PICTURED_KERNELS]
    names = {id(row): f"{row['operation']} {row['variant']}\n{row['shape']} LNC {row['lnc']}" for row in chosen}
    picture = pictures.engines_picture(
        directory / "engines.png",
        {names[id(row)]: {engine: row[f"{engine}_us"] for engine in ENGINES} for row in chosen},
        {names[id(row)]: row["limit_us"] for row in chosen},
    )
    header = ["operation", "variant", "shape", "lnc", "bound us", "by", "makespan us", "limit us", "bound/limit"]
    table = [
        [
            *(row[name] for name in ("operation", "variant", "shape", "lnc")),
            f"{row['bound_us']:.2f}",
            row["bound_by"],
            f"{row['makespan_us']:.2f}",
            f"{row['limit_us']:.2f}",
            f"{row['bound_over_limit']:.2f}",
        ]
        for row in rows
    ]
    caption = "Modelled busy time of each engine beside the time that HBM needs for the bytes that must move."
    return Section("Kernels", ["Modelled times, not measured."], [Table(header, table)], [(picture, caption)])


def step_section(directory: Path) -> Section:
    """One verify step's launches one after another, also as DIR/step.json for Perfetto."""
    from .step import STEP, step_schedules, step_spans, step_trace

    schedules = step_schedules()
    (directory / "step.json").write_text(json.dumps(step_trace(schedules)))
    picture = pictures.schedule_picture(directory / "step.png", step_spans(schedules))
    return Section(
        "One verify step",
        [f"{STEP}. Modelled; open step.json in ui.perfetto.dev for every instruction."],
        [],
        [(picture, "When each engine works during one verify step.")],
    )


def presets_report(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return write(directory, [presets_section(directory)])


def window_report(directory: Path, tuning: Tuning, cost: StepCost) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return write(directory, [window_section(directory, tuning, cost)])


def workload_report(directory: Path, document: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return write(directory, [workload_section(directory, document)])


def micro_report(directory: Path, document: dict) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return write(directory, [micro_section(directory, document)])


def read_document(path: Path, schema: str) -> dict:
    """A JSON document that another command wrote; raises ValueError naming the file unless it is of this schema."""
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise ValueError(f"{path}: schema is {found!r}, expected {schema!r}")
    return document


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m draft_verify.bench report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, required=True, metavar="DIR", help="where to write the page")
    parser.add_argument("--workload", type=Path, metavar="JSON", help="results of `workload --json`")
    parser.add_argument("--micro", type=Path, metavar="JSON", help="results of `micro --json`")
    arguments = parser.parse_args(argv)
    from .micro import SCHEMA as MICRO_SCHEMA
    from .workload import SCHEMA as WORKLOAD_SCHEMA

    directory = arguments.report
    try:
        workload = arguments.workload and read_document(arguments.workload, WORKLOAD_SCHEMA)
        micro = arguments.micro and read_document(arguments.micro, MICRO_SCHEMA)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    directory.mkdir(parents=True, exist_ok=True)
    sections = [presets_section(directory)]
    if workload:
        sections.append(workload_section(directory, workload))
    if micro:
        sections.append(micro_section(directory, micro))
    sections.append(step_section(directory))
    print(write(directory, sections))
    return 0
