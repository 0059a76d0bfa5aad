"""The microbenchmarks: schemas that round-trip, and a comparison that notices what grew."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest

from draft_verify.bench import __main__ as bench
from draft_verify.bench import micro
from draft_verify.bench.micro import MicroRow
from draft_verify.bench.shapes import cases

ROWS = [
    MicroRow("verify_attention", "BHDS", "B=1 T=8", 1, instructions=400, bound_us=13.0, makespan_us=40.0, hbm_bytes=10),
    MicroRow("commit_window", "NHPD", "B=4 T=8", 2, refused="not there"),
    MicroRow("greedy_acceptance", "", "B=1 V=9", 1, bound_us=2.0, measured_us=7.0, against_reference="agrees"),
]


def test_json_and_csv_give_the_rows_back():
    assert micro.from_json(micro.to_json(ROWS)) == ROWS
    read = list(csv.DictReader(io.StringIO(micro.to_csv(ROWS))))
    assert [row["operation"] for row in read] == ["verify_attention", "commit_window", "greedy_acceptance"]
    assert list(read[0]) == [field.name for field in dataclasses.fields(MicroRow)]
    assert read[0]["measured_us"] == "" and float(read[2]["measured_us"]) == 7.0
    with pytest.raises(ValueError, match="schema is 'other'"):
        micro.from_json(json.dumps({"schema": "other", "rows": []}))


def test_nothing_changed_is_no_change():
    changes, grew = micro.compare(ROWS, ROWS, 0.02)
    assert changes.rows == [] and not grew


def test_a_figure_that_grew_fails_and_one_that_shrank_does_not():
    slower = dataclasses.replace(ROWS[0], makespan_us=44.0)
    changes, grew = micro.compare(ROWS, [slower, *ROWS[1:]], 0.02)
    assert grew and changes.rows == [["verify_attention", "BHDS", "B=1 T=8", 1, "makespan_us", "40", "44", "+10.0%"]]
    assert not micro.compare(ROWS, [slower, *ROWS[1:]], 0.2)[1]
    changes, grew = micro.compare([slower, *ROWS[1:]], ROWS, 0.02)
    assert not grew and len(changes.rows) == 1


def test_rows_that_came_went_or_are_refused_now_are_told():
    refused = dataclasses.replace(ROWS[0], refused="no room")
    changes, grew = micro.compare(ROWS[:1], [refused], 0.02)
    assert grew and changes.rows[0][4:7] == ["refused", "no", "no room"]
    changes, grew = micro.compare(ROWS[:2], ROWS[1:], 0.02)
    assert not grew and [row[4] for row in changes.rows] == ["new", "gone"]


def test_the_command_measures_compares_and_writes(tmp_path, capsys):
    new, again = tmp_path / "new.json", tmp_path / "rows.csv"
    arguments = ["--quick", "--operation", "greedy_acceptance"]
    assert micro.main([*arguments, "--json", str(new), "--csv", str(again)]) == 0
    rows = micro.from_json(new.read_text())
    assert rows and all(row.operation == "greedy_acceptance" and row.bound_us > 0 for row in rows)
    assert all(row.gb_per_s > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "Modelled only" in printed and "V=151936" in printed
    assert micro.main([*arguments, "--compare", str(new)]) == 0
    assert "Nothing changed" in capsys.readouterr().out
    faster = [dataclasses.replace(row, bound_us=row.bound_us / 2) for row in rows]
    new.write_text(micro.to_json(faster))
    assert micro.main([*arguments, "--compare", str(new)]) == 1
    assert "+100.0%" in capsys.readouterr().out


def test_where_there_is_a_device_its_time_stands_beside_the_modelled_one(monkeypatch):
    case = next(case for case in cases(quick=True) if case.operation == "select_hidden")
    monkeypatch.setattr(micro, "check", lambda case, device, lnc, repeat: ("agrees", 2e-4))
    row = micro.run(case, 1, device=object())
    assert (row.measured_us, row.against_reference) == (pytest.approx(200.0), "agrees")
    assert row.gb_per_s == pytest.approx(case.must_move / 200e-6 / 1e9)
    assert 0 < row.bound_us < row.makespan_us

    def does_not_compile(case, device, lnc, repeat):
        raise RuntimeError("no such instruction\nsecond line")

    monkeypatch.setattr(micro, "check", does_not_compile)
    row = micro.run(case, 1, device=object())
    assert (row.measured_us, row.against_reference) == (None, "RuntimeError: no such instruction")
    assert row.gb_per_s == pytest.approx(case.must_move / row.makespan_us / 1e3)


def test_the_first_screen_of_help_says_which_command_answers_the_question(capsys):
    assert bench.main(["--help"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if "Should I turn speculation on, and with what window?" in line)
    assert line.split()[0] == "window"
    assert len(printed.splitlines()) <= 24
    assert bench.main(["nonsense"]) == 2
