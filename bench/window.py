"""Should I turn speculation on, and with what window?

From acceptance rates and the cost of a step: tokens a step, time a token and speedup for K = 0..15 drafts a step, the
best K and how flat the optimum is. Without arguments, the published pairs on Trainium2 beside the model's prediction.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from dataclasses import replace
from pathlib import Path

from draft_verify.acceptance_stats import AcceptanceStats

from .arguments import not_negative, positive, whole
from .presets import PRESETS, Preset
from .speedup import (
    FLAT,
    MAX_DRAFT_TOKENS,
    StepCost,
    Tuning,
    best_tree,
    conditional,
    fit_step_cost,
    tokens_per_hour,
    tune,
)
from .synthetic import synthetic_rates
from .table import Table

RATES = ("acceptance", "rates", "mean_length", "stats")
COSTS = ("v0", "beta", "c", "step_ms", "times", "context")
TREE_ROWS = (2, 4, 8, 16, 32, 64)


def verdict(tuning: Tuning) -> str:
    """The answer in a sentence."""
    if not tuning.pays:
        best = max(tuning.windows[1:], key=lambda window: window.speedup)
        return (
            f"Speculation does not pay: leave it off (K = 0). The best window, K = {best.num_draft_tokens}, "
            f"would run at {best.speedup:.2f}x."
        )
    low, high = tuning.flat
    flat = (
        f"every K from {low} to {high} is within {FLAT:.0%} of it" if low < high else f"no other K is within {FLAT:.0%}"
    )
    return (
        f"Speculation pays: draft K = {tuning.best.num_draft_tokens} tokens a step for {tuning.best.speedup:.2f}x, "
        f"{tuning.best.tokens_per_step:.2f} tokens a step; {flat}."
    )


def windows_table(tuning: Tuning, cost: StepCost, price: float | None = None, batch: int = 1) -> Table:
    """One row a window; the best is starred. Times where the plain step's is known, dollars where a price is."""
    header = ["K", "tokens/step", "cost/step", "speedup"]
    header += ["ms/token", "tokens/h"] if cost.step_ms else []
    header += ["tokens/$"] if cost.step_ms and price else []
    rows = []
    for window in tuning.windows:
        star = " *" if window is tuning.best else ""
        row = [
            f"{window.num_draft_tokens}{star}",
            f"{window.tokens_per_step:.2f}",
            f"{window.cost:.2f}",
            f"{window.speedup:.2f}x",
        ]
        if cost.step_ms:
            hourly = tokens_per_hour(window, cost.step_ms, batch)
            row += [f"{cost.step_ms / window.speedup:.2f}", f"{hourly:,.0f}"]
            row += [f"{hourly / price:,.0f}"] if price else []
        rows.append(row)
    return Table(header, rows)


def presets_table() -> Table:
    """Every published figure beside the prediction, and by how much they differ."""
    rows = []
    for preset in PRESETS.values():
        best = tune(preset.rates, preset.cost).best
        common = [preset.title, preset.tensor_parallel]
        optimum = [best.num_draft_tokens, f"{best.speedup:.2f}x"]
        for published in preset.published:
            predicted = preset.predicted(published.num_draft_tokens)
            needed = preset.acceptance_needed(published)
            rows.append(
                [
                    *common,
                    published.kind,
                    published.num_draft_tokens,
                    f"{predicted:.2f}x",
                    f"{published.speedup:.2f}x",
                    f"{predicted / published.speedup - 1:+.0%}",
                    "none" if needed is None else f"{needed:.2f}",
                    *optimum,
                ]
            )
        if not preset.published:
            rows.append([*common, "no figure", "-", "-", "-", "-", "-", *optimum])
    header = ["pair", "TP", "work", "K", "predicted", "published", "off by", "acceptance needed", "best K", "there"]
    return Table(header, rows)


def baselines_table() -> Table:
    """The modelled time of a plain decode step beside the published one."""
    rows = []
    for preset in PRESETS.values():
        modelled = preset.target.step_ms(preset.tensor_parallel)
        published = preset.published_step_ms
        rows.append(
            [
                preset.target.name,
                preset.tensor_parallel,
                f"{modelled:.1f}",
                f"{published:.1f}",
                f"{modelled / published - 1:+.0%}",
            ]
        )
    return Table(["target", "TP", "modelled ms", "published ms", "off by"], list(dict.fromkeys(map(tuple, rows))))


def presets_text() -> str:
    notes = [
        f"- {preset.title}: acceptance {preset.rates_source}" + (f"; {preset.notes}" if preset.notes else "")
        for preset in PRESETS.values()
    ]
    return "\n".join(
        [
            "Published pairs on Trainium2, nothing tuned to the speculative figures but where a note says measured.",
            '"acceptance needed" is the rate, equal at every position, with which the model would meet the figure.',
            "",
            str(presets_table()),
            "",
            *notes,
            "",
            "Plain decode steps, batch 1:",
            "",
            str(baselines_table()),
        ]
    )


def trees_table(rates: list[list[float]], cost: StepCost) -> Table:
    """The best tree of every size in TREE_ROWS."""
    rows = []
    for num_rows in TREE_ROWS:
        tree = best_tree(rates, num_rows, cost)
        parents = " ".join(map(str, tree.shape.parents[:16])) + (" ..." if len(tree.shape.parents) > 16 else "")
        figures = [f"{tree.tokens_per_step:.2f}", f"{tree.cost:.2f}", f"{tree.speedup:.2f}x"]
        rows.append([f"<= {num_rows}", len(tree.shape.parents), max(tree.shape.depths), *figures, parents])
    return Table(["T", "rows used", "depth", "tokens/step", "cost/step", "speedup", "parents"], rows)


def read_times(path: Path) -> StepCost:
    """Fit a CSV of measured times: num_draft_tokens,step_ms[,draft_ms], its row for 0 the plain step.

    With draft_ms, step_ms is the verify alone; without, the whole step.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        if not {"num_draft_tokens", "step_ms"} <= set(header):
            raise ValueError(f"{path}: header {','.join(header)}, expected num_draft_tokens,step_ms[,draft_ms]")
        try:
            rows = [{name: float(row[name]) for name in header} for row in reader]
        except (TypeError, ValueError):
            raise ValueError(f"{path}:{reader.line_num}: expected {len(header)} numbers") from None
    plain = [row["step_ms"] for row in rows if row["num_draft_tokens"] == 0]
    rows = [row for row in rows if row["num_draft_tokens"] > 0]
    if len(plain) != 1 or not plain[0] > 0 or not rows:
        raise ValueError(f"{path}: expected one row of num_draft_tokens 0, the plain step, and at least one above")
    draft_ms = [row["draft_ms"] for row in rows] if "draft_ms" in rows[0] else None
    return fit_step_cost(
        [int(row["num_draft_tokens"]) for row in rows], [row["step_ms"] for row in rows], plain[0], draft_ms
    )


def read_rank_rates(path: Path) -> list[list[float]]:
    """Rates [depth][rank] from a JSON file: the bare list, or what `workload --json` wrote."""
    document = json.loads(path.read_text())
    rates = document.get("rank_rates") if isinstance(document, dict) else document
    is_table = isinstance(rates, list) and all(isinstance(by_rank, list) for by_rank in rates)
    if not is_table or not all(isinstance(rate, int | float) for by_rank in rates for rate in by_rank):
        raise ValueError(f"{path}: expected rates [depth][rank], or `rank_rates` as `workload --json` writes them")
    return rates


def measured_rates(stats: AcceptanceStats) -> list[float]:
    """Conditional rates of the positions that were ever reached."""
    rates = [rate for rate in stats.conditional_rates if not math.isnan(rate)]
    if not rates:
        raise ValueError("the acceptance statistics hold no verified draft")
    return rates


def _rates(arguments: argparse.Namespace, preset: Preset | None) -> list[float]:
    if arguments.acceptance is not None:
        return [arguments.acceptance]
    if arguments.rates is not None:
        try:
            return conditional([float(rate) for rate in arguments.rates.split(",")])
        except ValueError as error:
            raise ValueError(f"--rates {arguments.rates}: {error}") from None
    if arguments.mean_length is not None:
        mean_length, num_draft_tokens = arguments.mean_length
        return conditional(synthetic_rates(mean_length, int(num_draft_tokens)))
    if arguments.stats is not None:
        try:
            return measured_rates(AcceptanceStats.from_json(arguments.stats.read_text()))
        except ValueError as error:
            raise ValueError(f"{arguments.stats}: {error}") from None
    if preset is None:
        raise SystemExit("how many drafts are accepted? --acceptance, --rates, --mean-length, --stats or --preset")
    return preset.rates


def _cost(arguments: argparse.Namespace, preset: Preset | None) -> StepCost:
    if arguments.context is not None and (preset is None or arguments.times is not None):
        raise SystemExit("--context models the attention of a published pair: it goes with --preset, without --times")
    if arguments.times is not None:
        cost = read_times(arguments.times)
    elif arguments.context is not None:
        cost = preset.cost_at(arguments.context, arguments.batch)
    else:
        cost = preset.cost if preset is not None else StepCost()
    if preset is None and arguments.times is None and None in (arguments.beta, arguments.c):
        raise SystemExit(
            "what does a step cost? --beta and --c (0 where rows or drafts are free), --times or --preset; without a "
            "cost every window pays, and the longest most"
        )
    given = {name: value for name in COSTS[:4] if (value := getattr(arguments, name)) is not None}
    return replace(cost, **given)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m draft_verify.bench window", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, help="a published pair, its rates and costs the defaults below")
    rates = parser.add_argument_group("how many drafts are accepted").add_mutually_exclusive_group()
    rates.add_argument("--acceptance", type=float, metavar="A", help="one rate for every position")
    rates.add_argument("--rates", metavar="P1,P2,...", help="P(drafts 1..i all accepted), as vLLM logs it")
    rates.add_argument("--mean-length", type=float, nargs=2, metavar=("L", "K"), help="mean emitted tokens at K drafts")
    rates.add_argument("--stats", type=Path, metavar="JSON", help="an export of draft_verify.AcceptanceStats")
    cost = parser.add_argument_group("what a step costs, in plain target steps: v0 + beta K + c K")
    cost.add_argument("--v0", type=positive, help="verifying, fixed part (default 1)")
    cost.add_argument("--beta", type=not_negative, help="verifying, each further row")
    cost.add_argument("--c", type=not_negative, help="drafting one token")
    cost.add_argument("--times", type=Path, metavar="CSV", help="fit them: num_draft_tokens,step_ms[,draft_ms]")
    cost.add_argument("--step-ms", type=positive, metavar="MS", help="time of a plain target step")
    cost.add_argument(
        "--context",
        type=whole,
        metavar="L",
        help="with --preset: model attention over L tokens too, for --batch sequences",
    )
    parser.add_argument("--max", type=whole, default=MAX_DRAFT_TOKENS, metavar="K", help="largest window (default 15)")
    parser.add_argument(
        "--trees", type=Path, metavar="JSON", help="rates [depth][rank], or `workload --json`: the best trees too"
    )
    parser.add_argument("--price", type=positive, metavar="DOLLARS", help="of an hour, for tokens a dollar")
    parser.add_argument("--batch", type=whole, default=1, help="sequences decoded together (default 1)")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write pictures and an HTML page there")
    return parser


def _print_published(preset: Preset) -> None:
    for published in preset.published:
        predicted = preset.predicted(published.num_draft_tokens)
        print(
            f"published at K = {published.num_draft_tokens}, {published.kind}: {published.speedup:.2f}x "
            f"({published.source}); predicted {predicted:.2f}x, {predicted / published.speedup - 1:+.0%}"
        )
    print(f"acceptance: {preset.rates_source}" + (f"\nnote: {preset.notes}" if preset.notes else ""))


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return answer(arguments)
    except (OSError, ValueError) as error:  # a file or a rate that no answer can be made of
        raise SystemExit(str(error)) from None


def answer(arguments: argparse.Namespace) -> int:
    rates_given = any(getattr(arguments, name) is not None for name in RATES)
    if not rates_given and all(getattr(arguments, name) is None for name in ("preset", "trees", *COSTS)):
        print(presets_text())
        if arguments.report:
            from . import report

            print(f"\n{report.presets_report(arguments.report)}")
        return 0

    preset = PRESETS.get(arguments.preset)
    rates = _rates(arguments, preset) if rates_given or arguments.trees is None or preset is not None else None
    cost = _cost(arguments, preset)
    if arguments.price is not None and cost.step_ms is None:
        raise SystemExit("tokens a dollar need the time of a plain step: --step-ms, --times or --preset")
    plain_step = f", a plain step {cost.step_ms:.2f} ms" if cost.step_ms else ""
    print(f"step cost: {cost.v0:.3f} + {cost.beta:.4f} K + {cost.c:.4f} K plain steps{plain_step}")
    if arguments.trees is not None:
        print(f"\nBest trees, T rows with the root:\n\n{trees_table(read_rank_rates(arguments.trees), cost)}")
    if rates is None:
        return 0
    tuning = tune(rates, cost, arguments.max)
    print("acceptance, conditional, by position:", ", ".join(f"{rate:.3f}" for rate in rates), "(the last goes on)")
    print(f"\n{verdict(tuning)}\n\n{windows_table(tuning, cost, arguments.price, arguments.batch)}\n")
    if preset is not None:
        _print_published(preset)
    if arguments.report:
        from . import report

        print(f"\n{report.window_report(arguments.report, tuning, cost)}")
    return 0
