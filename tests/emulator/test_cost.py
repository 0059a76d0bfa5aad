"""The cost of a program against figures worked out by hand from the machine's table."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.reference import emulator
from draft_verify.reference.emulator import dma
from draft_verify.reference.emulator.__main__ import main
from draft_verify.reference.emulator.cost import cost, lines
from draft_verify.reference.emulator.machine import ENGINES, Number, trn2
from draft_verify.reference.emulator.trips import count_trips

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
BF16 = ml_dtypes.bfloat16


def scale_tiles(x, columns):
    """Doubles [128, N] in tiles of `columns`: load, one Vector and one Scalar instruction, store."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for start in range(0, x.shape[1], columns):
        tile = nl.ndarray((128, columns), dtype=x.dtype)
        nisa.dma_copy(tile, x[:, start : start + columns])
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
        nisa.activation(tile, nl.exp, tile)
        nisa.dma_copy(out[:, start : start + columns], tile)
    return out


def scale_cost(columns, width=4096):
    return emulator.trace(scale_tiles, np.zeros((128, width), np.float32), columns).cost()


def test_busy_cycles_are_the_documented_rate_with_a_floor():
    wide, narrow = scale_cost(1024).cores[0], scale_cost(32, width=128).cores[0]
    for name in ("vector", "scalar"):
        assert (wide.engines[name].instructions, wide.engines[name].cycles) == (4, 4096)
        assert wide.engines[name].seconds == 4096 / trn2.clock(name)
        assert (narrow.engines[name].instructions, narrow.engines[name].cycles) == (4, 4 * 64)
    assert wide.engines["tensor"].instructions == wide.engines["gpsimd"].instructions == 0


def test_hbm_bytes_and_the_bound():
    cost = scale_cost(1024)
    core = cost.cores[0]
    assert (core.read_bytes, core.written_bytes) == (2**21, 2**21)
    assert core.hbm_seconds == 2**22 / 362e9
    assert (cost.bound, cost.bound_by) == (core.hbm_seconds, "hbm")
    assert cost.limit == 2**22 / 362e9
    assert cost.must_move == 2**22


def test_short_descriptors_cost_what_the_table_says():
    """The same bytes in rows of 4 KiB and of 256 B: three times the time of the DMA engines."""
    long, short = scale_cost(1024).cores[0], scale_cost(64).cores[0]
    assert long.descriptors == {4096: 2 * 4 * 128}
    assert short.descriptors == {256: 2 * 64 * 128}
    assert long.dma_seconds == pytest.approx(2**22 / 368e9)
    assert short.dma_seconds == pytest.approx(3 * long.dma_seconds)
    assert scale_cost(64).bound_by == "dma"


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_a_longer_descriptor_is_never_less_efficient_nor_faster(a, b):
    a, b = sorted((a, b))
    assert trn2.efficiency(a) <= trn2.efficiency(b) <= 1
    assert a / trn2.efficiency(a) <= b / trn2.efficiency(b) + 1e-9


def transposed_load(x, out_shape):
    out = nl.ndarray(out_shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(out_shape, dtype=x.dtype)
    nisa.dma_copy(tile, x.permute((1, 0)))
    nisa.dma_copy(out, tile)
    return out


def test_a_load_across_rows_is_one_descriptor_an_element():
    cost = emulator.trace(transposed_load, np.zeros((32, 64), np.float32), (64, 32)).cost()
    assert cost.cores[0].descriptors == {4: 64 * 32, 128: 64}


def dma_transpose(x):
    out = nl.ndarray(x.shape[::-1], dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape[::-1], dtype=x.dtype)
    nisa.dma_transpose(tile, x)
    nisa.dma_copy(out, tile)
    return out


def test_a_dma_transpose_runs_at_its_published_share():
    program = emulator.trace(dma_transpose, np.zeros((128, 128), BF16))
    moved = dma.transfer(next(program.calls()), trn2)
    assert moved.engine_seconds == pytest.approx(128 * 128 * 2 / (0.9 * 23e9))


def gather(table, rows):
    out = nl.ndarray((16, 512), dtype=table.dtype, buffer=nl.shared_hbm)
    index = nl.ndarray((16, 1), dtype=nl.int32)
    tile = nl.ndarray((16, 512), dtype=table.dtype)
    nisa.dma_copy(index, rows)
    nisa.dma_copy(tile, table.ap([[512, 16], [1, 512]], vector_offset=index, indirect_dim=0))
    nisa.dma_copy(out, tile)
    return out


def test_a_gather_reads_its_rows_only():
    program = emulator.trace(gather, np.zeros((1000, 512), np.float32), np.zeros((16, 1), np.int32))
    cost = program.cost()
    assert cost.cores[0].read_bytes == 16 * 4 + 16 * 2048
    assert cost.must_move == 16 * 4 + 2 * 16 * 2048
    moved = dma.transfer(list(program.calls())[1], trn2)
    assert (moved.descriptor_source, moved.rows, moved.descriptor_bytes) == ("swdge", 16, 2048)


def repeated(x, count):
    out = nl.ndarray((128, 256), dtype=x.dtype, buffer=nl.shared_hbm)
    total = nl.ndarray((128, 256), dtype=x.dtype)
    limit = nl.ndarray((1, 1), dtype=nl.int32)
    nisa.dma_copy(limit, count)
    nisa.dma_copy(total, x)
    upper, lower = nisa.register_alloc(), nisa.register_alloc(0)
    nisa.register_load(upper, limit)

    def body(i):
        nisa.tensor_scalar(total, total, nl.add, 1.0)

    nl.fori_loop(lower, upper, body)
    nisa.dma_copy(out, total)
    return out


def test_a_runtime_loop_costs_what_the_run_executed():
    x = np.zeros((128, 256), np.float32)
    program = emulator.trace(repeated, x, np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match="run"):
        program.cost()
    for trips in (0, 3, 7):
        program.run(x, np.full((1, 1), trips, np.int32))
        vector = program.cost().cores[0].engines["vector"]
        assert (vector.instructions, vector.cycles) == (trips, trips * 256)


def halves(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    size = x.shape[1] // nl.num_programs(0)
    start = size * nl.program_id(0)
    tile = nl.ndarray((128, size), dtype=x.dtype)
    nisa.dma_copy(tile, x[:, start : start + size])
    nisa.dma_copy(out[:, start : start + size], tile)
    return out


def test_two_cores_halve_bound_and_limit():
    x = np.zeros((128, 8192), np.float32)
    one, two = (emulator.trace(emulator.jit(halves)[lnc], x).cost() for lnc in (1, 2))
    assert len(two.cores) == 2
    assert two.bound == pytest.approx(one.bound / 2)
    assert two.limit == pytest.approx(one.limit / 2)
    assert two.must_move == one.must_move == 2 * 128 * 8192 * 4


def test_what_must_move_can_be_given():
    program = emulator.trace(scale_tiles, np.zeros((128, 1024), np.float32), 1024)
    assert program.cost(trn2).must_move == 2**20
    assert cost(program, must_move=362_000).limit == pytest.approx(1e-6)


def test_peaks_count_what_is_live_at_once():
    core = scale_cost(1024).cores[0]
    assert (core.sbuf_bytes, core.psum_banks) == (4096, 0)


def unpublished(x):
    out = nl.ndarray((1, 512), dtype=x.dtype, buffer=nl.shared_hbm)
    tile, total = nl.ndarray((128, 512), dtype=x.dtype), nl.ndarray((1, 512), dtype=x.dtype)
    nisa.dma_copy(tile, x)
    nisa.tensor_partition_reduce(total, nl.add, tile)
    nisa.dma_copy(out, total)
    return out


def test_unverified_figures_are_marked_where_they_are_printed():
    cost = emulator.trace(unpublished, np.zeros((128, 512), np.float32)).cost()
    assert cost.unverified == ["rate of tensor_partition_reduce", "efficiency of descriptors below 4 KiB"]
    lines = cost.text().splitlines()
    assert lines[-1].startswith("* UNVERIFIED: rate of tensor_partition_reduce")
    assert [line.split()[0] for line in lines if line.endswith("*")] == ["gpsimd", "dma"]
    verified = scale_cost(1024)
    assert verified.unverified == []
    assert "*" not in verified.text()


def test_json_and_text_say_the_same():
    cost = scale_cost(1024)
    plain = json.loads(cost.json())
    assert plain == cost.as_dict()
    assert plain["bound_us"] == pytest.approx(2**22 / 362e3)
    assert f"bound {plain['bound_us']:.2f} us (hbm)" in cost.text()
    for name in ENGINES:
        assert f"{plain['cores'][0]['engines'][name]['us']:.2f}" in cost.text()


def test_every_number_of_the_machine_has_a_source():
    numbers = trn2.numbers()
    assert len(numbers) > 30
    for name, number in numbers.items():
        assert isinstance(number, Number) and number.source, name
        assert number > 0, name
    assert any(number.unverified for number in numbers.values())
    with pytest.raises(AttributeError):
        trn2.hbm_bandwidth = 1


def test_trip_counts_need_no_whole_run():
    """The loop's bound runs, the loop's work does not: an argument full of NaN would show in the output only."""
    count = np.full((1, 1), 6, np.int32)
    x = np.zeros((128, 256), np.float32)
    whole, reduced = (emulator.trace(repeated, x, count) for _ in range(2))
    whole.run(x, count)
    count_trips(reduced, x, count)
    assert list(reduced.trips.values()) == list(whole.trips.values()) == [6]
    assert reduced.cost().as_dict() == whole.cost().as_dict()


def test_the_lines_of_a_kernel_add_up_to_its_engines():
    program = emulator.trace(scale_tiles, np.zeros((128, 4096), np.float32), 1024)
    core = program.cost().cores[0]
    found = lines(program)
    assert [line.seconds for line in found] == sorted((line.seconds for line in found), reverse=True)
    for engine in ("vector", "scalar"):
        (line,) = [line for line in found if line.engine == engine]
        assert line.executions == core.engines[engine].instructions
        assert line.seconds == pytest.approx(core.engines[engine].seconds)
        assert "test_cost.py" in line.source
    dmas = [line for line in found if line.engine == "dma"]
    assert [line.executions for line in dmas] == [4, 4]
    assert sum(line.seconds for line in dmas) == pytest.approx(core.dma_seconds)


def test_the_command_line_shows_a_kernels_program_cost_and_schedule(tmp_path, capsys, monkeypatch):
    for name, module in emulator.modules().items():
        monkeypatch.setitem(sys.modules, name, module)  # what the command installs goes again after the test
    kernel, trace = tmp_path / "kernel.py", tmp_path / "trace.json"
    kernel.write_text(
        "import nki, nki.language as nl, nki.isa as nisa\n\n\n@nki.jit\ndef scaled(x, factor):\n"
        "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    tile = nl.ndarray(x.shape, dtype=x.dtype)\n    nisa.dma_copy(tile, x)\n"
        "    nisa.tensor_scalar(tile, tile, nl.multiply, factor)\n    nisa.dma_copy(out, tile)\n    return out\n"
    )
    arguments = [f"{kernel}:scaled", "bfloat16[128,512]", "2.0"]
    assert main(["trace", *arguments]) == 0
    assert "tensor_scalar(dst=" in capsys.readouterr().out
    assert main(["trace", *arguments, "--cost", "--schedule", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "bound 1.02 us* (dma)" in out  # 2 x 128 KiB in rows of 1 KiB, at 0.7 of 368 GB/s
    assert "makespan" in out
    assert json.loads(trace.read_text())["traceEvents"]
