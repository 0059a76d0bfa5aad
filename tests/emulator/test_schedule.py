"""Schedules: what may overlap does, what may not waits, and the critical path accounts for the makespan."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_verify.reference import emulator
from draft_verify.reference.emulator.machine import trn2

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
X = np.zeros((128, 2048), np.float32)


def schedule_of(body, *arrays, lnc=1):
    """Schedule of a kernel `body(x, tile)` whose tile [128, 2048] is loaded and stored around it."""

    def kernel(x, *more):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray(x.shape, dtype=x.dtype)
        nisa.dma_copy(tile, x)
        body(tile, *more)
        nisa.dma_copy(out, tile)
        return out

    return emulator.trace(emulator.jit(kernel)[lnc], X, *arrays).schedule()


def spans_of(schedule, name, core=0):
    return [span for span in schedule.cores[core] if span.call.instruction.name == name]


def test_engines_run_side_by_side_on_independent_columns():
    def body(tile):
        nisa.tensor_scalar(tile[:, :1024], tile[:, :1024], nl.multiply, 2.0)
        nisa.activation(tile[:, 1024:], nl.copy, tile[:, 1024:])

    schedule = schedule_of(body)
    (vector,), (scalar,) = spans_of(schedule, "tensor_scalar"), spans_of(schedule, "activation")
    assert vector.start == scalar.start


def test_a_reader_waits_for_the_writer_and_a_writer_for_the_reader():
    def body(tile):
        other = nl.ndarray((128, 2048), dtype=nl.float32)
        nisa.tensor_scalar(other, tile, nl.multiply, 2.0)  # writes other
        nisa.activation(tile, nl.copy, other)  # reads other, overwrites tile
        nisa.tensor_scalar(other, tile, nl.multiply, 2.0)  # overwrites other
        nisa.tensor_copy(tile, other)

    schedule = schedule_of(body)
    first, second = spans_of(schedule, "tensor_scalar")
    (between,) = spans_of(schedule, "activation")
    access, semaphore = trn2.access_cycles, trn2.semaphore_seconds
    assert between.start == pytest.approx(first.end + access / trn2.vector_clock + semaphore)
    assert second.start == pytest.approx(between.end + access / trn2.scalar_clock + semaphore)


def test_an_engine_is_in_order():
    """A late operand holds back what follows on the same engine, needed or not."""

    def body(tile):
        ready = nl.ndarray((128, 64), dtype=nl.float32)
        nisa.memset(ready, 0.0, engine=nisa.engine.gpsimd)
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)  # waits for the load
        nisa.tensor_scalar(ready, ready, nl.multiply, 2.0)  # could have run long before
        nisa.tensor_tensor(tile[:, :64], tile[:, :64], ready, nl.add)

    slow, quick = spans_of(schedule_of(body), "tensor_scalar")
    assert quick.start == slow.end


def test_no_reorder_puts_every_instruction_after_the_one_before():
    def body(tile):
        with nl.no_reorder():
            nisa.tensor_scalar(tile[:, :1024], tile[:, :1024], nl.multiply, 2.0)
            nisa.activation(tile[:, 1024:], nl.copy, tile[:, 1024:])

    schedule = schedule_of(body)
    (vector,), (scalar,) = spans_of(schedule, "tensor_scalar"), spans_of(schedule, "activation")
    assert scalar.start >= vector.visible


def test_a_small_dma_takes_about_two_microseconds():
    schedule = emulator.trace(lambda x: _copied(x), np.zeros((128, 64), np.float32)).schedule()
    load, _store = spans_of(schedule, "dma_copy")
    assert load.visible == pytest.approx(2e-6, rel=0.15)


def _copied(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(tile, x)
    nisa.dma_copy(out, tile)
    return out


def test_few_partitions_use_few_dma_engines():
    """32 KiB into 4 partitions take one engine 1.4 us (nki-dma-overview.rst), into 128 partitions all of them."""
    narrow = emulator.trace(_copied, np.zeros((4, 2048), np.float32)).schedule()
    wide = emulator.trace(_copied, np.zeros((128, 64), np.float32)).schedule()
    assert narrow.cores[0][0].end - narrow.cores[0][0].start == pytest.approx(1.42e-6, rel=0.02)
    assert wide.cores[0][0].end - wide.cores[0][0].start < 0.4e-6


def test_psum_banks_are_waited_for():
    """The ninth one-bank tile takes the place of the first, whose readers it has to wait for."""

    def body(tile):
        for column in range(9):
            bank = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(bank, tile[:, :128], tile[:, :512], accumulate=False)
            nisa.tensor_copy(tile[:, 1024 + column : 1025 + column], bank[:, :1])

    schedule = schedule_of(body)
    matmuls, copies = spans_of(schedule, "nc_matmul"), spans_of(schedule, "tensor_copy")
    assert matmuls[7].start == matmuls[6].end
    assert matmuls[8].start >= copies[0].visible


def test_changing_the_activation_function_loads_a_table():
    def body(tile):
        nisa.activation(tile, nl.exp, tile)
        nisa.activation(tile, nl.exp, tile)
        nisa.activation(tile, nl.log, tile)

    first, second, third = spans_of(schedule_of(body), "activation")
    assert second.start < first.end + 0.1e-6
    assert third.start == pytest.approx(second.end + trn2.activation_table_seconds, rel=1e-3)


def test_a_gather_keeps_gpsimd_busy():
    def gather(table, rows):
        out = nl.ndarray((16, 512), dtype=table.dtype, buffer=nl.shared_hbm)
        index, tile = nl.ndarray((16, 1), dtype=nl.int32), nl.ndarray((16, 512), dtype=table.dtype)
        nisa.dma_copy(index, rows)
        nisa.dma_copy(tile, table.ap([[512, 16], [1, 512]], vector_offset=index, indirect_dim=0))
        nisa.dma_copy(out, tile)
        return out

    schedule = emulator.trace(gather, np.zeros((1000, 512), np.float32), np.zeros((16, 1), np.int32)).schedule()
    assert schedule.busy()["gpsimd"] == pytest.approx(trn2.swdge_seconds + 16 * trn2.swdge_row_seconds)
    index, _, rows, _ = schedule.cores[0]
    assert rows.start > index.visible + trn2.swdge_seconds


def looped(x, count):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile, limit = nl.ndarray(x.shape, dtype=x.dtype), nl.ndarray((1, 1), dtype=nl.int32)
    nisa.dma_copy(limit, count)
    nisa.dma_copy(tile, x)
    upper, lower = nisa.register_alloc(), nisa.register_alloc(0)
    nisa.register_load(upper, limit)

    def body(i):
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)

    nl.fori_loop(lower, upper, body)
    nisa.dma_copy(out, tile)
    return out


def test_runtime_loops_run_their_trips_after_their_bound_is_known():
    program = emulator.trace(looped, X, np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match="run"):
        program.schedule()
    makespans = []
    for trips in (0, 5, 10):
        program.run(X, np.full((1, 1), trips, np.int32))
        schedule = program.schedule()
        assert len(spans_of(schedule, "tensor_scalar")) == trips
        makespans.append(schedule.makespan)
    (bound,) = spans_of(schedule, "register_load")
    assert spans_of(schedule, "tensor_scalar")[0].start >= bound.visible
    assert makespans[2] - makespans[1] >= 5 * 2048 / trn2.vector_clock


def exchanged(x):
    """Core 0 works long before the barrier, core 1 does not; core 1 reads what core 0 wrote."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    scratch = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(tile, x)
    if nl.program_id(0) == 0:
        for _ in range(10):
            nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
        nisa.dma_copy(scratch, tile)
    nisa.core_barrier(scratch, (0, 1))
    if nl.program_id(0) == 1:
        nisa.dma_copy(tile, scratch)
        nisa.dma_copy(out, tile)
    return out


def test_cores_meet_at_a_barrier_and_read_after_it():
    schedule = emulator.trace(emulator.jit(exchanged)[2], X).schedule()
    barriers = [spans_of(schedule, "core_barrier", core)[0] for core in (0, 1)]
    store = spans_of(schedule, "dma_copy", 0)[-1]
    load = spans_of(schedule, "dma_copy", 1)[1]
    assert barriers[0].end == barriers[1].end >= store.visible
    assert load.start >= barriers[1].end


@st.composite
def programs(draw):
    """Instructions on columns of one tile: (engine, read columns, written columns) in pieces of 64."""
    count = draw(st.integers(1, 12))
    piece = st.integers(0, 31)
    return [
        (draw(st.sampled_from(["vector", "scalar", "gpsimd", "dma"])), draw(piece), draw(piece)) for _ in range(count)
    ]


@given(programs())
@settings(max_examples=60)
def test_no_instruction_starts_before_what_it_depends_on(steps):
    steps = [(engine, source, target) for engine, source, target in steps if source != target]

    def body(tile):
        for engine, source, target in steps:
            read, written = (tile[:, 64 * piece : 64 * piece + 64] for piece in (source, target))
            if engine == "dma":
                nisa.dma_copy(written, read)
            else:
                nisa.tensor_copy(written, read, engine=getattr(nisa.engine, engine))

    schedule = schedule_of(body)
    spans = schedule.cores[0]
    inner = spans[1:-1]
    assert len(inner) == len(steps)
    for number, (span, (_, source, target)) in enumerate(zip(inner, steps)):
        for earlier, (_, read, written) in zip(inner[:number], steps[:number]):
            if written in (source, target) or read == target:
                same_lane = earlier.lane == span.lane
                assert span.start >= (earlier.end if same_lane else earlier.visible)
                if written == source:
                    assert span.start >= earlier.visible
    for lane in {span.lane for span in spans}:
        for before, after in pairwise(sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)):
            assert after.start >= before.end - 1e-15
    serial = sum(span.visible - span.start for span in spans) + len(spans) * 3e-6
    assert max(schedule.busy().values()) <= schedule.makespan <= serial


@given(programs())
@settings(max_examples=30)
def test_the_critical_path_accounts_for_the_makespan(steps):
    def body(tile):
        for _, source, target in steps:
            if source != target:
                nisa.tensor_copy(tile[:, 64 * target : 64 * target + 64], tile[:, 64 * source : 64 * source + 64])

    schedule = schedule_of(body)
    path = schedule.critical_path()
    assert path[0].cause == -1
    assert path[-1].visible == schedule.makespan
    assert all(after.start >= before.start for before, after in pairwise(path))
    assert sum(schedule.critical_time().values()) == pytest.approx(schedule.makespan)


def test_the_path_is_listed_by_source_line():
    def body(tile):
        for _ in range(3):
            nisa.activation(tile, nl.exp, tile)

    schedule = schedule_of(body)
    lines = schedule.path_text().splitlines()[1:]
    assert [line.split()[4:6] for line in lines] == [["dma", "dma_copy"], ["scalar", "activation"], ["dma", "dma_copy"]]
    _, _, busy, times = map(float, lines[1].split()[:4])
    assert (busy, times) == (pytest.approx(3 * 2048 / 1.2e3, abs=0.01), 3)
    total = sum(float(figure) for line in lines for figure in line.split()[1:3])
    assert total * 1e-6 == pytest.approx(schedule.critical_path()[-1].end, abs=0.05e-6)


def test_the_trace_opens_in_perfetto(tmp_path):
    schedule = schedule_of(lambda tile: nisa.activation(tile, nl.exp, tile))
    schedule.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    complete = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in complete] == ["dma_copy", "activation", "dma_copy"]
    assert lanes[complete[1]["tid"]] == "scalar"
    assert complete[1]["ts"] + complete[1]["dur"] <= complete[2]["ts"]
    assert all("test_schedule.py" in event["args"]["source"] for event in complete)
    assert max(event["ts"] + event["dur"] for event in complete) <= schedule.makespan * 1e6


def test_the_text_says_what_it_rests_on():
    text = schedule_of(lambda tile: nisa.activation(tile, nl.exp, tile)).text()
    assert "modelled, not measured" in text
    assert "UNVERIFIED: activation_table_seconds, dma_completion_seconds, semaphore_seconds" in text
