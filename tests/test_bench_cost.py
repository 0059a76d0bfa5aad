"""The tables of `bench cost`: the grid, what must move, the schema, and figures that are those of the programs."""

import csv
import importlib.util
import io
import itertools
import json
import os
from dataclasses import fields

import numpy as np
import pytest

from draft_verify.bench import cost as bench_cost
from draft_verify.bench import peer
from draft_verify.bench.__main__ import COMMANDS, main, usage
from draft_verify.bench.programs import instead_of_running, programs_of
from draft_verify.bench.shapes import BATCHES, HEAD_SIZES, ROWS, SLOTS, VOCABULARIES, cases, zeros
from draft_verify.reference.emulator import Program


def case_of(operation, variant="", **shape):
    return next(
        case
        for case in cases()
        if case.operation == operation and case.variant.startswith(variant) and shape.items() <= case.shape.items()
    )


def test_the_grid_is_whole_and_every_case_once():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    attention = {tuple(c.shape.values()) for c in cases() if c.operation == "verify_attention" and c.variant == "BHDS"}
    assert attention == set(itertools.product(BATCHES, ROWS, SLOTS, HEAD_SIZES))
    greedy = {tuple(c.shape.values()) for c in cases() if c.operation == "greedy_acceptance"}
    assert greedy == set(itertools.product(BATCHES, ROWS, VOCABULARIES))
    assert {case.name for case in cases(quick=True)} <= set(names)
    assert len(cases(quick=True)) < len(names) / 3


def test_what_must_move_is_the_live_cache_the_logits_and_the_rows():
    assert case_of("verify_attention", "BHDS", B=4, T=8, S=8192, D=128).must_move == 4 * 2 * 128 * 2 * (8192 - 8)
    assert case_of("greedy_acceptance", B=4, T=8, V=151_936).must_move == 4 * 8 * 151_936 * 2
    # K = 7: 2K + 3 rows a sequence.
    assert case_of("rejection_sampling", "token", B=16, T=8, V=151_936).must_move == 16 * 17 * 151_936 * 2
    assert case_of("commit_window", "BHSD", B=4, T=8, layers=1).must_move == 2 * 2 * 4 * 4 * 8 * 128 * 2
    assert case_of("select_hidden", B=4).must_move == 2 * 4 * 4096 * 2


def test_what_the_layout_costs_is_the_time_of_the_pieces_that_it_cuts_the_bytes_into():
    for layout in ("BHSD", "BHDS", "NHPD", "NPHD"):
        case = case_of("commit_window", layout, B=4, T=8, layers=1)
        assert sum(size * count for size, count in case.pieces) == case.must_move
    # Keys of 4 rows: 8 bytes for each of 4 * 8 * 128 elements; the rest, three times 1 KiB a head, at 0.7 of the rate.
    transposed = case_of("commit_window", "BHDS", B=4, T=8, layers=1)
    seconds = 4 * 8 * 128 * (256 / (368e9 / 3)) + 3 * 4 * 8 * 1024 / (0.7 * 368e9)
    assert bench_cost.layout_limit(transposed, 2) == pytest.approx(seconds / 2)


@pytest.mark.parametrize("lnc", [1, 2])
def test_a_row_holds_the_figures_of_the_programs(lnc):
    case = case_of("commit_window", "BHSD", B=4, T=8, layers=1)
    row, schedules = bench_cost.measure(case, lnc)
    (program,) = programs_of(case, lnc)
    expected = program.cost()
    assert row.bound_us == pytest.approx(expected.bound * 1e6)
    assert row.bound_by == expected.bound_by
    assert row.makespan_us == pytest.approx(schedules[0].makespan * 1e6)
    assert row.limit_us == pytest.approx(case.must_move / (lnc * 362e3))
    assert row.bound_over_limit == pytest.approx(row.bound_us / row.limit_us)
    assert row.hbm_bytes == sum(core.read_bytes + core.written_bytes for core in expected.cores)
    assert row.bound_us <= row.makespan_us


def test_nothing_runs_while_programs_are_collected():
    run = Program.run
    case = case_of("commit_window", "BHSD", B=1, T=8, layers=1)
    args, _ = case.inputs(zeros)
    args[2][...] = 1.0
    programs = []
    with instead_of_running(programs):
        from draft_verify.commit_window import commit_window

        commit_window(*args, backend="emulator")
    assert len(programs) == 1
    assert Program.run is run
    assert not args[0].any()


def test_csv_and_json_keep_the_schema():
    rows = list(bench_cost.rows_of([case_of("select_hidden", B=1, T=8)], [1, 2]))
    names = [field.name for field in fields(bench_cost.Row)]
    assert [bench_cost.Row(**entry) for entry in json.loads(bench_cost.json_text(rows))] == rows
    read = list(csv.DictReader(io.StringIO(bench_cost.csv_text(rows))))
    assert list(read[0]) == names
    assert [float(entry["bound_us"]) for entry in read] == [row.bound_us for row in rows]


def test_the_table_says_modelled_marks_what_is_unverified_and_why_a_row_is_empty():
    row, _ = bench_cost.measure(case_of("commit_window", "BHDS", B=4, T=8, layers=1), 1)
    assert (row.bound_by, row.unverified) == ("dma", "efficiency of descriptors below 4 KiB")
    sure, _ = bench_cost.measure(case_of("select_hidden", B=1, T=8), 1)
    assert (sure.bound_by, sure.unverified) == ("vector", "")
    refused = bench_cost.Row("verify_attention", "BHDS", "B=1", 1, refused="no such layout")
    text = bench_cost.table([row, sure, refused])
    assert text.startswith("Modelled times in microseconds, not measured.")
    assert f"{row.bound_us:.2f} *" in text
    assert f"{sure.bound_us:.2f} *" not in text
    assert f"* UNVERIFIED: {row.unverified}" in text
    assert "- verify_attention BHDS B=1 lnc 1: no such layout" in text


def test_the_command_writes_rows_and_traces(tmp_path):
    output, traces = tmp_path / "cost.json", tmp_path / "traces"
    options = ["--quick", "--operation", "select_hidden", "--lnc", "1", "--format", "json"]
    assert main(["cost", *options, "--output", str(output), "--trace", str(traces)]) == 0
    rows = json.loads(output.read_text())
    assert [row["operation"] for row in rows] == ["select_hidden"] * len(rows)
    written = sorted(traces.iterdir())
    assert len(written) == len(rows)
    assert json.loads(written[0].read_text())["traceEvents"]


def test_the_costliest_lines_are_named(capsys):
    options = ["--operation", "select_hidden", "--only", "B=1 T=8", "--lnc", "1", "--lines", "1"]
    assert main(["cost", *options]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("select_hidden B=1 T=8")
    assert any("dma_copy" in line and ".py:" in line for line in out)


def test_the_first_screen_answers_which_command_answers_what(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.strip() == usage()
    assert "Should I turn speculation on, and with what window?" in out
    assert len(out.splitlines()) < 24
    for module, _ in COMMANDS.values():
        assert importlib.util.find_spec(f"draft_verify.bench.{module}") is not None
    assert main(["no-such-command"]) == 2


def test_a_folder_without_nki_library_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkout"):
        peer.attention_tkg(tmp_path, 1, 8, 8, 8192, 128)


@pytest.mark.skipif(not os.environ.get("NKI_LIBRARY"), reason="NKI_LIBRARY names no checkout of nki-library")
def test_the_peers_cost_is_what_an_independent_count_gave():
    """Vector 22.5, Scalar 10.3, GpSimd 7, Tensor 5.2, HBM 11.7 us at documented rates, counted by another program."""
    case = case_of("verify_attention", "BHDS", B=1, T=8, S=8192, D=128)
    row, _ = bench_cost.measure_peer(os.environ["NKI_LIBRARY"], case, 1)
    figures = [row.vector_us, row.scalar_us, row.gpsimd_us, row.tensor_us, row.hbm_us]
    assert np.allclose(figures, [22.5, 10.3, 7.1, 5.25, 11.7], rtol=0.02)


def test_a_file_that_is_not_there_is_named_by_every_command(tmp_path, capsys):
    missing = str(tmp_path / "none.json")
    for command in (
        ["report", "--report", str(tmp_path / "page"), "--workload", missing],
        ["window", "--stats", missing],
    ):
        try:
            code = main(command)
        except SystemExit as refused:
            code, message = 1, str(refused)
        else:
            message = capsys.readouterr().err
        assert code != 0 and missing in message


@pytest.mark.parametrize("command", ["cost", "micro", "device"])
def test_an_operation_that_does_not_exist_is_no_empty_table(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--operation", "greedy"])
    assert "invalid choice: 'greedy'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "another/1"}'])
@pytest.mark.parametrize("command", [["report", "--workload"], ["report", "--micro"], ["micro", "--compare"]])
def test_a_file_of_another_kind_is_refused_before_anything_runs(command, text, tmp_path):
    path = tmp_path / "document.json"
    path.write_text(text)
    page = ["--report", str(tmp_path / "page")]
    with pytest.raises(SystemExit, match=r"document\.json: "):
        main([*command, str(path), *page])
    assert not (tmp_path / "page").exists()
