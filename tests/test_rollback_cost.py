"""What rollback costs: the accepted rows' bytes, read once and written once, whatever the cache's size."""

from __future__ import annotations

import numpy as np
import pytest

from draft_verify.bench.cost import layout_limit
from draft_verify.bench.programs import programs_of
from draft_verify.bench.shapes import rollback
from draft_verify.reference.emulator.cost import cost
from draft_verify.reference.emulator.schedule import schedule

INDEX_BYTES = 64 * 1024  # lengths, paths, table entries, on the way to the chip: next to nothing


def moved_bytes(case, lnc: int) -> int:
    return sum(core.read_bytes + core.written_bytes for p in programs_of(case, lnc) for core in cost(p).cores)


CASES = [case for case in rollback(True) if case.shape["B"] == 4]
CONV = [case for case in CASES if case.operation == "shift_conv_window"]


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("case", [case for case in CASES if case not in CONV], ids=lambda case: case.name)
def test_only_accepted_rows_cost_bytes(case, lnc):
    assert case.must_move <= moved_bytes(case, lnc) <= case.must_move + INDEX_BYTES


@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("case", CONV, ids=lambda case: case.name)
def test_a_convolutions_history_is_read_whole_its_columns_being_shorter_than_any_good_descriptor(case, lnc):
    (history, *_), _ = case.inputs(np.zeros)
    assert moved_bytes(case, lnc) <= history.nbytes + case.must_move / 2 + INDEX_BYTES


def over_the_limit(case, lnc: int) -> float:
    """The modelled bound over the time that HBM takes for the bytes that must move."""
    costs = [cost(program, must_move=case.must_move) for program in programs_of(case, lnc)]
    return sum(c.bound for c in costs) / costs[0].limit


@pytest.mark.parametrize("lnc", [1, 2])
def test_states_of_a_mebibyte_move_within_one_and_a_half_times_the_time_of_their_bytes(lnc):
    states = [case for case in rollback(True) if case.operation == "select_state"]
    assert all(over_the_limit(case, lnc) <= 1.5 for case in states) and states


PLAIN = ("BHSD", "NHPD", "NPHD")  # layouts that keep a key together


def large(operation: str, variant: str, rows: int):
    """Sixteen sequences, eight heads; commits of eight layers."""
    sizes = {"B": 16, "T": rows, "D": 128} | ({"layers": 8} if operation == "commit_window" else {})
    (case,) = (c for c in rollback(False) if (c.operation, c.variant, c.shape) == (operation, variant, sizes))
    assert case.must_move >= 2**20
    return case


@pytest.mark.parametrize(
    "case",
    [
        *(large("commit_window", layout, rows) for layout in PLAIN for rows in (8, 16)),
        *(large("commit_window", f"{layout} stacked", rows) for layout in PLAIN for rows in (8, 16)),
        large("save_ring", "BHSD", 16),
    ],
    ids=lambda case: case.name,
)
def test_rows_of_many_heads_and_layers_move_within_one_and_a_half_times_the_time_of_their_bytes(case):
    assert over_the_limit(case, 1) <= 1.5


@pytest.mark.parametrize("variant", ["BHDS", "BHDS tree", "BHSD tree stacked"])
@pytest.mark.parametrize("rows", [8, 16])
def test_rows_that_layouts_cut_short_move_within_a_tenth_of_the_time_of_their_descriptors(rows, variant):
    case = large("commit_window", variant, rows)
    assert sum(cost(program).bound for program in programs_of(case, 1)) <= 1.1 * layout_limit(case, 1)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("cache_layout", PLAIN)
def test_layers_stacked_in_one_tensor_are_committed_by_fewer_dmas(cache_layout, rows):
    variants = cache_layout, f"{cache_layout} stacked"
    apart, stacked = (programs_of(large("commit_window", variant, rows), 1) for variant in variants)
    assert schedule(*stacked).makespan <= 0.7 * schedule(*apart).makespan


@pytest.mark.parametrize("cache_layout", PLAIN)
def test_gpsimd_issues_one_dma_after_the_other_and_waits_for_none(cache_layout):
    (program,) = programs_of(large("commit_window", cache_layout, 8), 1)
    planned = schedule(program)
    issuing = sum(span.end - span.start for span in planned.cores[0] if span.lane == "gpsimd")
    prologue, last_dma = 15e-6, 5e-6
    assert planned.makespan <= issuing + prologue + last_dma


def test_a_cost_after_a_whole_run_counts_the_same_rows_as_one_from_the_indices_alone():
    case = next(c for c in rollback(True) if c.operation == "commit_window" and c.shape["layers"] == 1)
    (program,) = programs_of(case, 1)
    from_indices = dict(program.moved)
    arrays, options = case.inputs(np.zeros)
    assert options == {"cache_layout": "BHSD"}
    program.run(*arrays)
    assert program.moved == from_indices and from_indices
