"""The pictures and the page: what they say, that the page needs nothing from outside, and that a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from draft_verify.bench import pictures, report, step, window
from draft_verify.bench.micro import MicroRow, to_json
from draft_verify.bench.presets import PRESETS
from draft_verify.bench.speedup import StepCost, tune

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TUNING = tune([0.8], StepCost(1.0, 0.02, 0.05, step_ms=20.0))


def micro_document():
    rows = [
        MicroRow("verify_attention", "BHDS", "B=1 T=8 S=8192 D=128", 1, bound_us=13.2, makespan_us=40.0, limit_us=11.6,
                 bound_by="dma", bound_over_limit=1.14, tensor_us=9.3, vector_us=10.1, scalar_us=6.0, gpsimd_us=1.0,
                 hbm_us=11.6, hbm_bytes=4_194_304),
        MicroRow("greedy_acceptance", "", "B=1 T=8 V=151936", 1, bound_us=12.5, makespan_us=30.0, limit_us=6.7,
                 bound_by="vector", bound_over_limit=1.87, vector_us=12.5, scalar_us=8.0, gpsimd_us=2.0, hbm_us=6.7,
                 hbm_bytes=2_430_976),
        MicroRow("commit_window", "NHPD", "B=1", 1, refused="this one was refused"),
    ]  # fmt: skip
    return json.loads(to_json(rows))


def workload_document():
    def result(kind, draft, accepted, parents=None):
        stats = {"steps": 10, "accepted_by_position": accepted, "tokens_per_step": 1 + sum(accepted) / 10}
        return {
            "kind": kind,
            "draft": draft,
            "parents": parents,
            "stats": stats,
            "cost": {"v0": 1.0, "beta": 0.02, "c": 0.1},
            "speedup": 1.5,
            "best_num_draft_tokens": None if parents else 3,
            "best_speedup": None if parents else 1.6,
        }

    return {
        "schema": "draft_verify.workload/1",
        "results": [
            result(kind, draft, accepted, parents)
            for kind, accepted in (("code", [9, 8, 6]), ("story", [5, 2, 0]))
            for draft, parents in (("a chain", None), ("a tree", [-1, 0, 0]))
        ],
    }


def drawn(monkeypatch, draw):
    """The first axes of the one figure that `draw` makes."""
    figures = []
    monkeypatch.setattr(pictures.plt, "close", figures.append)
    draw()
    monkeypatch.undo()
    (figure,) = figures
    return figure.axes[0]


EVERY_PICTURE = {
    "speedup": lambda path: pictures.speedup_picture(
        path, {"one": TUNING, "two": tune([0.2], StepCost(1.2, 0.1, 0.3))}
    ),
    "acceptance": lambda path: pictures.acceptance_picture(path, {"code": [0.9, 0.7], "story": [0.5, 0.1]}),
    "tokens": lambda path: pictures.tokens_picture(
        path, {"code": {"chain": 3.0, "tree": 3.5}, "story": {"chain": 1.2}}
    ),
    "engines": lambda path: pictures.engines_picture(path, {"a": {"tensor": 3.0, "hbm": 5.0}}, {"a": 4.0}),
    "schedule": lambda path: pictures.schedule_picture(
        path, [("attend", "tensor", 0.0, 2.0), ("attend", "dma", 0.0, 3.0), ("accept", "tensor", 3.0, 5.0)]
    ),
}
QUANTITY_WITH_UNIT = re.compile(r"\((tokens|x|share of steps|µs)\)|tokens a verify step|kind of work")


@pytest.mark.parametrize("name", EVERY_PICTURE)
def test_every_axis_says_what_it_shows_and_in_what_unit(name, tmp_path, monkeypatch):
    axes = drawn(monkeypatch, lambda: EVERY_PICTURE[name](tmp_path / "p.png"))
    assert QUANTITY_WITH_UNIT.search(axes.get_xlabel())
    named_rows = [label.get_text() for label in axes.get_yticklabels()]
    assert QUANTITY_WITH_UNIT.search(axes.get_ylabel()) or (name in ("engines", "schedule") and all(named_rows))


@pytest.mark.parametrize("name", EVERY_PICTURE)
def test_letters_are_large_enough_at_half_size(name, tmp_path, monkeypatch):
    axes = drawn(monkeypatch, lambda: EVERY_PICTURE[name](tmp_path / "p.png"))
    texts = [axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    texts += axes.figure.legends[0].get_texts()
    smallest = min(text.get_fontsize() for text in texts)
    assert smallest * pictures.DPI / 72 / 2 >= 12  # pixels
    assert Image.open(tmp_path / "p.png").size[0] == pictures.SIZE[0] * pictures.DPI


def test_series_differ_without_colour():
    def grey(colour):
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    greys = [grey(colour) for colour, _, _, _ in pictures.SERIES]
    assert greys == sorted(greys) and min(np.diff(greys)) >= 20
    for form in (1, 2, 3):
        assert len({str(series[form]) for series in pictures.SERIES}) == len(pictures.SERIES)


def test_the_optimum_is_marked_where_the_tuner_puts_it(tmp_path, monkeypatch):
    axes = drawn(monkeypatch, lambda: EVERY_PICTURE["speedup"](tmp_path / "p.png"))
    rings = [line for line in axes.lines if line.get_markerfacecolor() == "none"]
    assert [tuple(np.ravel(ring.get_data())) for ring in rings] == [
        (TUNING.best.num_draft_tokens, TUNING.best.speedup),
        (0, 1.0),
    ]
    labels = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert labels == [f"one: K = 7, {TUNING.best.speedup:.2f}x", "two: K = 0, off"]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    sections = [
        report.window_section(directory, TUNING, StepCost(1.0, 0.02, 0.05, 20.0)),
        report.presets_section(directory),
        report.workload_section(directory, workload_document()),
        report.micro_section(directory, micro_document()),
    ]
    return report.write(directory, sections)


def test_the_page_holds_its_tables_and_pictures_and_nothing_from_outside(page):
    text = page.read_text()
    assert text.count('src="data:image/png;base64,') == text.count("<img ") == 6
    loaded = re.findall(r"""(?:src|href)\s*=\s*["']?([^\s"'>]{0,30})""", text)
    assert all(source.startswith("data:") for source in loaded) and "url(" not in text and "<script" not in text
    for said in ("draft K = 7", "Qwen3-32B + Qwen3-1.7B", "story", "verify_attention", "not measured"):
        assert said in text
    assert "refused" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")
def test_a_browser_shows_every_picture_and_the_text(page, tmp_path):
    probe = (
        "<script>document.title = [...document.images].map(i => i.naturalWidth + 'x' + i.naturalHeight).join(' ')"
        " + ' ' + document.querySelectorAll('tr').length + ' wide ' + document.documentElement.scrollWidth</script>"
    )
    probed = tmp_path / "probed.html"
    probed.write_text(page.read_text().replace("</html>", probe + "</html>"))
    picture = tmp_path / "page.png"
    run = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,2400",
        "--virtual-time-budget=5000",
    ]
    dom = subprocess.run([*run, "--dump-dom", probed.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    title = re.search("<title>(.*?)</title>", dom.stdout).group(1)
    sizes = re.findall(r"(\d+)x(\d+)", title)
    assert len(sizes) == 6 and all(int(width) == 1350 and int(height) > 400 for width, height in sizes)
    assert int(title.split()[-3]) > 40  # table rows
    assert int(title.split()[-1]) <= 1200  # no wider than the window
    subprocess.run([*run, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=120, check=True)
    shown = np.asarray(Image.open(picture).convert("L"))
    assert shown.shape == (2400, 1200)
    assert 0.01 < np.mean(shown < 128) < 0.5  # dark on light, and not blank


def test_one_verify_step_is_a_trace_of_its_launches_one_after_another(tmp_path):
    schedules = step.step_schedules()
    assert list(schedules) == ["verify_attention", "rejection_sampling", "commit_window"]
    events = json.loads(json.dumps(step.step_trace(schedules)))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == list(schedules)
    spans = {pid: [e for e in events if e["ph"] == "X" and e["pid"] == pid] for pid in names}
    ends = {pid: max(event["ts"] + event["dur"] for event in spans[pid]) for pid in names}
    for pid in (1, 2):
        assert min(event["ts"] for event in spans[pid]) >= ends[pid - 1] - 1e-6
    total = sum(launch.makespan for launches in schedules.values() for launch in launches) * 1e6
    assert max(ends.values()) == pytest.approx(total, rel=0.05)
    flat = step.step_spans(schedules)
    assert len(flat) == sum(map(len, spans.values()))
    assert {kernel for kernel, _, _, _ in flat} == set(schedules)


def test_every_command_writes_its_page(tmp_path, capsys):
    assert window.main(["--report", str(tmp_path / "presets")]) == 0
    assert window.main(["--acceptance", "0.7", "--beta", "0", "--c", "0.1", "--report", str(tmp_path / "window")]) == 0
    for name in ("presets", "window"):
        assert (
            str(tmp_path / name / "index.html") in capsys.readouterr().out or (tmp_path / name / "index.html").exists()
        )
    assert all(preset.title in (tmp_path / "presets" / "index.html").read_text() for preset in PRESETS.values())
