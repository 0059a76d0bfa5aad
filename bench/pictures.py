"""Pictures of the bench, as PNG files: legible at half size, units on every axis, series told apart without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .speedup import Tuning

SIZE = (9.0, 5.4)  # inches
DPI = 150
# From dark to light, so that they keep their order in grey; each with a marker, a line and a hatch of its own.
SERIES = [
    ("#0b2545", "o", "-", ""),
    ("#8c1c13", "s", "--", "//"),
    ("#1f6f8b", "^", "-.", ".."),
    ("#b5651d", "D", ":", "xx"),
    ("#6fb36a", "v", (0, (5, 1, 1, 1, 1, 1)), "\\\\"),
    ("#dcb75c", "P", (0, (8, 3)), "oo"),
]
STYLE = {
    "font.size": 15,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "lines.linewidth": 2.5,
    "lines.markersize": 8,
    "hatch.linewidth": 1.5,
}


def speedup_picture(path: Path, curves: Mapping[str, Tuning]) -> Path:
    """Speedup against the window, each curve's optimum marked."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=SIZE)
        axes.axhline(1.0, color="black", linewidth=1)
        for (name, tuning), (colour, marker, line, _) in zip(curves.items(), SERIES):
            windows = [window.num_draft_tokens for window in tuning.windows]
            best = tuning.best
            label = (
                f"{name}: K = {best.num_draft_tokens}, {best.speedup:.2f}x" if tuning.pays else f"{name}: K = 0, off"
            )
            axes.plot(
                windows,
                [window.speedup for window in tuning.windows],
                color=colour,
                marker=marker,
                linestyle=line,
                markersize=6,
                label=label,
            )
            axes.plot(
                best.num_draft_tokens,
                best.speedup,
                marker="o",
                markersize=18,
                markerfacecolor="none",
                markeredgecolor=colour,
                markeredgewidth=2.5,
            )
        axes.set_xlabel("drafts a step, K (tokens)")
        axes.set_ylabel("speedup over plain decode (x)")
        axes.set_ylim(0, 1.08 * max(tuning.best.speedup for tuning in curves.values()))
        axes.xaxis.get_major_locator().set_params(integer=True)
        return _save(figure, path, legend_columns=2, legend_title="best window, circled")


def acceptance_picture(path: Path, rates: Mapping[str, Sequence[float]]) -> Path:
    """Share of steps whose first i drafts were all accepted, by position."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=SIZE)
        for (name, series), (colour, marker, line, _) in zip(rates.items(), SERIES):
            positions = range(1, len(series) + 1)
            axes.plot(positions, series, color=colour, marker=marker, linestyle=line, label=name)
        axes.set_xlabel("position of the draft in the window (tokens)")
        axes.set_ylabel("accepted with all before it (share of steps)")
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        return _save(figure, path, legend_columns=3)


def tokens_picture(path: Path, tokens: Mapping[str, Mapping[str, float]]) -> Path:
    """Tokens a step by kind of work, one bar for each way to draft."""
    drafts = list(dict.fromkeys(draft for by_draft in tokens.values() for draft in by_draft))
    width = 0.8 / len(drafts)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=SIZE)
        for index, (draft, (colour, _, _, hatch)) in enumerate(zip(drafts, SERIES)):
            places = [kind + (index - (len(drafts) - 1) / 2) * width for kind in range(len(tokens))]
            heights = [by_draft.get(draft, 0.0) for by_draft in tokens.values()]
            axes.bar(places, heights, width, color=colour, edgecolor="white", hatch=hatch, label=draft)
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xticks(range(len(tokens)), tokens)
        axes.tick_params(axis="x", labelsize=13)
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("kind of work")
        axes.set_ylabel("tokens a verify step")
        return _save(figure, path, legend_columns=len(drafts))


def engines_picture(path: Path, busy: Mapping[str, Mapping[str, float]], limits: Mapping[str, float]) -> Path:
    """Busy time of each engine beside the HBM limit, a panel with its own scale for each kernel and shape; µs."""
    columns = 2
    rows = -(-len(busy) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, squeeze=False, figsize=(SIZE[0], 0.9 + 2.4 * rows))
        for axes, (name, times) in zip(grid.flat, busy.items()):
            for engine, (colour, _, _, hatch) in zip(times, SERIES):
                axes.barh(engine, times[engine], color=colour, edgecolor="white", hatch=hatch)
            axes.axvline(limits[name], color="black", linewidth=3, label="HBM limit")
            axes.set_title(name, fontsize=13)
            axes.tick_params(labelsize=13)
            axes.grid(axis="y", visible=False)
            axes.invert_yaxis()
            axes.set_xlim(left=0)
            axes.set_xlabel("modelled busy time a call (µs)", fontsize=13)
        for axes in grid.flat[len(busy) :]:
            axes.remove()
        return _save(figure, path, legend_columns=1)


def schedule_picture(path: Path, spans: Sequence[tuple[str, str, float, float]]) -> Path:
    """When each engine works during one step; spans are (kernel, engine, start, end), microseconds."""
    engines = list(dict.fromkeys(engine for _, engine, _, _ in spans))
    kernels = list(dict.fromkeys(kernel for kernel, _, _, _ in spans))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(SIZE[0], 4.0))
        for kernel, (colour, _, _, _) in zip(kernels, SERIES):
            for row, engine in enumerate(engines):
                bars = [(start, end - start) for k, e, start, end in spans if (k, e) == (kernel, engine)]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, label=kernel if row == 0 else None)
            axes.axvline(
                min(start for k, _, start, _ in spans if k == kernel), color="black", linewidth=1, linestyle=":"
            )
        axes.set_yticks(range(len(engines)), engines)
        axes.grid(axis="y", visible=False)
        axes.set_ylim(len(engines) - 0.4, -0.6)
        axes.set_xlabel("modelled time in the step (µs)")
        return _save(figure, path, legend_columns=len(kernels))


def _save(figure: plt.Figure, path: Path, legend_columns: int, legend_title: str | None = None) -> Path:
    """Draws the legend above the axes, where it hides nothing, and writes the file."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lines = -(-len(labels) // legend_columns) + (legend_title is not None)
    figure.legend(
        handles,
        labels,
        title=legend_title,
        ncols=legend_columns,
        loc="upper center",
        fontsize=13,
        title_fontsize=13,
        frameon=False,
        columnspacing=1.2,
    )
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.15 + 0.28 * lines) / figure.get_figheight()))
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path
