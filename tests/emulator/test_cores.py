"""Two cores: what they share, how they meet, and rows 20 and 21 of the reject list (nki-reference.md section 6)."""

import numpy as np
import pytest

from draft_verify.reference import emulator
from tests.emulator.pairs import Rows

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
X = np.arange(2 * 128 * 32, dtype=np.float32).reshape(2, 128, 32)


def shared(shape=(2, 128, 32)):
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm)


def run(kernel, *arrays, strict=True):
    return emulator.simulate(emulator.jit(kernel)[2], strict=strict)(*[array.copy() for array in arrays])


def test_each_core_is_traced_with_its_own_program_id():
    def kernel(x):
        core = nl.program_id(0)
        assert nl.num_programs(0) == 2 and nl.program_ndim() == 1
        out = shared()
        tile = nl.load(x[core])
        nisa.tensor_scalar(tile, tile, nl.multiply, float(core + 2))
        nl.store(out[core], tile)
        return out

    np.testing.assert_array_equal(run(kernel, X), X * np.array([2, 3]).reshape(2, 1, 1))
    assert len(emulator.trace(emulator.jit(kernel)[2], X).cores) == 2


def test_one_core_without_a_grid():
    def kernel(x):
        assert (nl.program_id(0), nl.num_programs(0), nl.program_ndim()) == (0, 1, 0)
        out = shared((128, 32))
        nl.store(out, nl.load(x[0]))
        return out

    emulator.simulate(kernel)(X)


@pytest.mark.parametrize("engine", ["dma", "gpsimd_dma"])
def test_sendrecv_exchanges_tiles(engine):
    def kernel(x):
        core = nl.program_id(0)
        out, mine, theirs = shared(), nl.load(x[core]), nl.ndarray((128, 32), nl.float32)
        nisa.sendrecv(mine, theirs, 1 - core, 1 - core, 0, dma_engine=nisa.dma_engine[engine])
        nl.store(out[core], nl.add(mine, theirs))
        return out

    np.testing.assert_array_equal(run(kernel, X), np.stack([X[0] + X[1]] * 2))


def test_private_tensors_are_each_cores_own():
    def kernel(x):
        core = nl.program_id(0)
        scratch = nl.ndarray((128, 32), nl.float32, buffer=nl.private_hbm)
        out = shared()
        nl.store(scratch, nl.load(x[core]))
        nl.store(out[core], nl.load(scratch))
        return out

    np.testing.assert_array_equal(run(kernel, X), X)


def test_a_core_may_read_back_what_it_wrote_at_a_run_time_address():
    def kernel(x, rows):
        out = shared((4, 32))
        for row in range(4):
            index = nl.load(rows[row : row + 1])
            nl.store(out.ap([[32, 1], [1, 32]], scalar_offset=index, indirect_dim=0), nl.load(x[0, row : row + 1]))
        nl.store(out, nl.load(out))
        return out

    program = emulator.trace(emulator.jit(kernel)[2], X, np.zeros((4, 1), np.int32), strict=False)
    rows = np.array([[2], [0], [3], [1]], np.int32)
    np.testing.assert_array_equal(program.run(X, rows)[rows[:, 0]], X[0, :4])
    with pytest.raises(emulator.Refusal, match="never written"):
        program.run(X, np.zeros((4, 1), np.int32))


def test_a_barrier_inside_a_loop_orders_each_iteration():
    def kernel(x, count):
        core = nl.program_id(0)
        scratch, out = shared(), shared()
        tile, other = nl.load(x[core]), nl.ndarray((128, 32), nl.float32)
        nisa.memset(other, 0.0)
        bound = nisa.register_alloc()
        nisa.register_load(bound, nl.load(count))

        def body(i):
            nl.store(scratch[core], tile)
            nisa.core_barrier(scratch, (0, 1))
            nisa.dma_copy(other, scratch[1 - core])
            nisa.core_barrier(scratch, (0, 1))
            nisa.tensor_tensor(tile, tile, other, nl.add)

        nl.fori_loop(0, bound, body)
        nl.store(out[core], tile)
        return out

    np.testing.assert_array_equal(run(kernel, X, np.array([[3]], np.int32)), np.stack([4 * (X[0] + X[1])] * 2))


ROW_LIST = Rows()


def row(name, rule, *arrays, run_time=False):
    return ROW_LIST.row(name, rule, *(arrays or (X,)), run_time=run_time)


def exchange(x, scratch, meet):
    """Each core writes its part of scratch, meets the other, and reads the other's part."""
    core = nl.program_id(0)
    out = shared()
    nl.store(scratch[core], nl.load(x[core]))
    meet(core)
    nl.store(out[core], nl.load(scratch[1 - core]))
    return out


@row("20 no barrier", "dma_copy: race: core 1 reads the same bytes without a core_barrier")
def no_barrier(x, wrong):
    scratch = shared()
    return exchange(x, scratch, lambda core: None if wrong else nisa.core_barrier(scratch, (0, 1)))


@row("20 barrier on another tensor", "what lies between them is no core_barrier on that tensor")
def other_barrier(x, wrong):
    scratch, other = shared(), shared()
    out = exchange(x, scratch, lambda core: nisa.core_barrier(other if wrong else scratch, (0, 1)))
    nl.store(other[nl.program_id(0)], nl.load(x[0]))
    return out, other


@row("20 barrier on one core only", "only one core has this barrier")
def lone_barrier(x, wrong):
    scratch = shared()
    tile = nl.load(x[0])
    nl.store(scratch[nl.program_id(0)], tile)
    if nl.program_id(0) == 0 or not wrong:
        nisa.core_barrier(scratch, (0, 1))
    return scratch


@row("20 both cores write the same bytes", "writes the same bytes of out.1 too: harmless only where")
def both_write(x, wrong):
    core = nl.program_id(0)
    out = shared((128, 32))
    rows = slice(0, 128) if wrong else slice(64 * core, 64 * core + 64)
    nl.store(out[rows], nl.load(x[core, rows]))
    return out


@row("20 interleaved halves are disjoint, overlapping columns are not", "core 1 writes the same bytes of out.1 too")
def interleaved(x, wrong):
    core = nl.program_id(0)
    out = shared((128, 64))
    nl.store(out[:, core : core + 63 : 2], nl.load(x[core]))
    if wrong:
        nl.store(out[:, 0:32], nl.load(x[0]))
    return out


@row(
    "20 loop that wraps around past its barrier",
    "race: core 1 (reads|writes) the same bytes",
    X,
    np.array([[3]], np.int32),
)
def wrapped(x, count, wrong):
    core = nl.program_id(0)
    scratch, out = shared(), shared()
    tile = nl.load(x[core])
    bound = nisa.register_alloc()
    nisa.register_load(bound, nl.load(count))
    nl.store(scratch[core], tile)

    def body(i):
        nl.store(scratch[core], tile)
        nisa.core_barrier(scratch, (0, 1))
        nisa.dma_copy(tile, scratch[1 - core])
        if not wrong:
            nisa.core_barrier(scratch, (0, 1))

    nl.fori_loop(0, bound, body)
    nl.store(out[core], tile)
    return out


@row("20 scatters of both cores meet in a row", "race: both cores write the same bytes, and not the same values", X,
     np.arange(8, dtype=np.int32).reshape(2, 4, 1), run_time=True)  # fmt: skip
def scatters(x, rows, wrong):
    core = nl.program_id(0)
    out = shared((8, 32))
    nisa.dma_copy(out.vector_select(0, nl.load(rows[0 if wrong else core])), nl.load(x[core, 0:4]))
    return out


@row("20 pipe_id", "the cores do not meet")
def pipes(x, wrong):
    core = nl.program_id(0)
    out, mine, theirs = shared(), nl.load(x[core]), nl.ndarray((128, 32), nl.float32)
    nisa.sendrecv(mine, theirs, 1 - core, 1 - core, core if wrong else 0)
    nl.store(out[core], theirs)
    return out


@row("20 shapes of a sendrecv", "the cores do not meet")
def shapes(x, wrong):
    core = nl.program_id(0)
    out, mine, theirs = shared(), nl.load(x[core]), nl.ndarray((128, 32), nl.float32)
    nisa.memset(theirs, 0.0)
    width = 16 if wrong and core else 32
    nisa.sendrecv(mine[:, :width], theirs[:, :width], 1 - core, 1 - core, 0)
    nl.store(out[core], theirs)
    return out


@row("20 order of meetings", "the cores do not meet")
def order(x, wrong):
    core = nl.program_id(0)
    out, mine, theirs = shared(), nl.load(x[core]), nl.ndarray((128, 32), nl.float32)
    swapped = wrong and core == 1
    if swapped:
        nisa.core_barrier(out, (0, 1))
    nisa.sendrecv(mine, theirs, 1 - core, 1 - core, 0)
    if not swapped:
        nisa.core_barrier(out, (0, 1))
    nl.store(out[core], theirs)
    return out


@row("20 gpsimd_dma too large", r"sendrecv: gpsimd_dma moves fewer bytes a partition.*bytes=1280, limit=1024",
     np.zeros((2, 128, 320), np.float32))  # fmt: skip
def large(x, wrong):
    core = nl.program_id(0)
    out, mine, theirs = shared(x.shape), nl.load(x[core]), nl.ndarray((128, 320), nl.float32)
    nisa.sendrecv(mine, theirs, 1 - core, 1 - core, 0,
                  dma_engine=nisa.dma_engine.gpsimd_dma if wrong else nisa.dma_engine.dma)  # fmt: skip
    nl.store(out[core], theirs)
    return out


@row("20 shared tensors differ", "both cores allocate the same shared_hbm tensors")
def different_shared(x, wrong):
    core = nl.program_id(0)
    out = shared((2, 128, 32 + (core if wrong else 0)))
    nl.store(out[core, :, 0:32], nl.load(x[core]))
    return out


@row("21 trip counts", "the cores ran a runtime loop 1 and 3 times", X, np.array([[1], [3]], np.int32), run_time=True)
def trips(x, counts, wrong):
    core = nl.program_id(0)
    out, tile, bound = shared(), nl.load(x[core]), nisa.register_alloc()
    nisa.register_load(bound, nl.load(counts[core : core + 1] if wrong else counts[0:1]))

    def body(i):
        nisa.tensor_tensor(tile, tile, tile, nl.add)

    nl.fori_loop(0, bound, body)
    nl.store(out[core], tile)
    return out


@row("21 loop on one core only", "only one core has this barrier, sendrecv or runtime loop")
def lone_loop(x, wrong):
    core = nl.program_id(0)
    out, tile = shared(), nl.load(x[core])

    def body(i):
        nisa.tensor_tensor(tile, tile, tile, nl.add)

    if core == 0 or not wrong:
        nl.fori_loop(nisa.register_alloc(0), 2, body)
    nl.store(out[core], tile)
    return out


@pytest.mark.parametrize("name", ROW_LIST)
def test_the_wrong_kernel_is_refused_and_its_twin_runs(name):
    ROW_LIST.check(name, lnc=2)


def test_both_cores_may_write_the_same_values_and_read_them_back():
    def kernel(x, wrong):
        scratch, out = shared((128, 32)), shared((128, 32))
        nl.store(scratch, nl.load(x[nl.program_id(0) if wrong else 0]))
        nl.store(out, nl.load(scratch))
        return out

    np.testing.assert_array_equal(run(lambda x: kernel(x, False), X, strict=False), X[0])
    with pytest.raises(emulator.Refusal, match="both cores write the same bytes, and not the same values"):
        run(lambda x: kernel(x, True), X, strict=False)


def test_cross_core_instructions_need_two_cores():
    def kernel(x):
        out = shared((128, 32))
        nl.store(out, nl.load(x[0]))
        nisa.core_barrier(out, (0, 1))
        return out

    with pytest.raises(emulator.Refusal, match="needs LNC 2"):
        emulator.trace(kernel, X)
