"""The reject list of nki-reference.md section 6: loops, registers, what Python may look at (see pairs.py)."""

import numpy as np
import pytest

from draft_verify.reference import emulator
from tests.emulator.pairs import Rows, register, stored

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
X = np.arange(128 * 64, dtype=np.float32).reshape(128, 64) / 1024
COUNT = np.array([[2]], np.int32)
ROW_LIST = Rows()
row = ROW_LIST.row


@row("22 nested runtime loops", "runtime loops do not nest", X, COUNT)
def nested(x, count, wrong):
    tile, bound = nl.load(x), register(nl.load(count))

    def inner(i):
        nisa.tensor_tensor(tile, tile, tile, nl.add)

    def outer(i):
        if wrong:
            nl.fori_loop(0, bound, inner)
        else:
            inner(i)

    nl.fori_loop(0, bound, outer)
    return stored(tile)


@row("22 loop in no_reorder", "no runtime loop inside nl.no_reorder", X, COUNT)
def loop_in_no_reorder(x, count, wrong):
    tile, bound = nl.load(x), register(nl.load(count))

    def body(i):
        nisa.tensor_tensor(tile, tile, tile, nl.add)

    if wrong:
        with nl.no_reorder():
            nl.fori_loop(0, bound, body)
    else:
        nl.fori_loop(0, bound, body)
    return stored(tile)


@row("22 arithmetic on the loop register", "not known while the kernel is traced", X, COUNT)
def register_arithmetic(x, count, wrong):
    tile = nl.ndarray((1, 64), nl.float32)
    nisa.memset(tile, 0.0)

    def body(i):
        nisa.dma_copy(tile, x.ap([[64, 1], [1, 64]], scalar_offset=i + 1 if wrong else i, indirect_dim=0))

    nl.fori_loop(0, register(nl.load(count)), body)
    return stored(tile)


@row("22 slicing by the loop register", "slices are trace-time ints", X, COUNT)
def register_slice(x, count, wrong):
    tile = nl.zeros((1, 64), nl.float32)

    def body(i):
        nisa.dma_copy(tile, x[nl.ds(i, 1)] if wrong else x.ap([[64, 1], [1, 64]], scalar_offset=i))

    nl.fori_loop(0, register(nl.load(count)), body)
    return stored(tile)


@row("22 tile of the body used after it", "does not exist after it", X, COUNT)
def escaped_tile(x, count, wrong):
    kept = [nl.load(x)]

    def body(i):
        tile = nl.load(x)
        nisa.tensor_tensor(kept[0], tile, tile, nl.add)
        if wrong:
            kept.append(tile)

    nl.fori_loop(0, register(nl.load(count)), body)
    return stored(kept[-1])


@row("22 body returns a value", "returns nothing", X, COUNT)
def returning_body(x, count, wrong):
    tile = nl.load(x)

    def body(i):
        nisa.tensor_tensor(tile, tile, tile, nl.add)
        return i if wrong else None

    nl.fori_loop(0, register(nl.load(count)), body)
    return stored(tile)


@row("22 while body returns no register", "what the body of while_loop returns is a register", X, COUNT)
def while_body(x, count, wrong):
    tile, condition, counter = nl.load(x), nisa.register_alloc(1), nl.zeros((1, 1), nl.int32)

    def body(r):
        nisa.tensor_tensor(tile, tile, tile, nl.add)
        nisa.register_load(r, counter)
        return None if wrong else r

    nl.while_loop(condition, body)
    return stored(tile)


@row("22 while body returns a register it never wrote", "what the body returns is a register that was never written", X)
def unwritten_condition(x, wrong):
    tile, counter, other = nl.load(x), nl.zeros((1, 1), nl.int32), nisa.register_alloc()

    def body(r):
        nisa.tensor_tensor(tile, tile, tile, nl.add)
        nisa.register_load(r if wrong else other, counter)
        return other

    nl.while_loop(nisa.register_alloc(1), body)
    return stored(tile)


@row("22 fori_loop between two ints", "make one bound a register", X)
def int_bounds(x, wrong):
    tile = nl.load(x)

    def body(i):
        nisa.tensor_tensor(tile, tile, tile, nl.add)

    nl.fori_loop(0 if wrong else nisa.register_alloc(0), 2, body)
    return stored(tile)


@row("22 dynamic_range", "dynamic_range is deprecated, and an error under NKI 0.7", X)
def dynamic_range(x, wrong):
    tile = nl.load(x)
    for _ in nl.dynamic_range(2) if wrong else range(2):
        nisa.tensor_tensor(tile, tile, tile, nl.add)
    return stored(tile)


@row("22 while on a register", "while on a register is deprecated, and an error under NKI 0.7", X)
def bare_while(x, wrong):
    tile, counter, condition = nl.load(x), nl.zeros((1, 1), nl.int32), nisa.register_alloc(1)
    if wrong:
        while condition:
            nisa.register_load(condition, counter)
    return stored(tile)


@row("22 prebuilt descriptors in a loop", "dma_copy: src is an argument or result of the kernel", X, COUNT)
def static_dma(x, count, wrong):
    tile = nl.zeros((128, 64), nl.float32)

    def body(i):
        nisa.dma_copy(tile, x, dge_mode=nisa.dge_mode.none if wrong else nisa.dge_mode.hwdge)

    nl.fori_loop(0, register(nl.load(count)), body)
    return stored(tile)


@row("22 scheduling edge into a loop", "must not cross the boundary", X, COUNT)
def crossing_edge(x, count, wrong):
    tile = nl.load(x)
    inside = []

    def body(i):
        inside.append(nisa.tensor_tensor(tile, tile, tile, nl.add))

    nl.fori_loop(0, register(nl.load(count)), body)
    before = nisa.tensor_tensor(tile, tile, tile, nl.add)
    after = nisa.tensor_tensor(tile, tile, tile, nl.add)
    after.depends_on(inside[0] if wrong else before)
    return stored(tile)


@row("24 if on a tensor", "Python `if`", X)
def tensor_if(x, wrong):
    tile = nl.load(x)
    if tile if wrong else True:
        nisa.tensor_tensor(tile, tile, tile, nl.add)
    return stored(tile)


@row("24 iteration over a tensor", "iteration", X)
def tensor_iteration(x, wrong):
    total = nl.zeros((1, 64), nl.float32)
    for line in x if wrong else [x[i : i + 1] for i in range(2)]:
        nisa.tensor_tensor(total, total, nl.load(line), nl.add)
    return stored(total)


@row("24 assignment to a tile", "assignment to a slice", X)
def assignment(x, wrong):
    tile = nl.load(x)
    if wrong:
        tile[:, 0:1] = 0.0
    nisa.memset(tile[:, 0:1], 0.0)
    return stored(tile)


@row("24 range over a register", "conversion to a Python number", X, COUNT)
def register_range(x, count, wrong):
    tile, bound = nl.load(x), register(nl.load(count))
    for _ in range(bound if wrong else 2):
        nisa.tensor_tensor(tile, tile, tile, nl.add)
    return stored(tile)


@pytest.mark.parametrize("name", ROW_LIST)
def test_the_wrong_kernel_is_refused_and_its_twin_runs(name):
    ROW_LIST.check(name)


def test_a_loop_body_is_traced_once_whatever_it_does_to_python():
    """Row 23: a Python counter in the body counts traces, not iterations."""
    seen = []

    def kernel(x, count):
        tile = nl.load(x)

        def body(i):
            seen.append(i)
            nisa.tensor_scalar(tile, tile, nl.add, float(len(seen)))

        nl.fori_loop(0, register(nl.load(count)), body)
        return stored(tile)

    result = emulator.simulate(kernel)(np.zeros((128, 64), np.float32), np.array([[5]], np.int32))
    assert len(seen) == 1 and (result == 5).all()


def test_the_loops_of_nki_0_6_run_as_many_times_as_their_registers_say():
    def kernel(x, count):
        counter, one = nl.load(count), nl.full((1, 1), 1, nl.int32)
        times, condition = register(counter), register(counter)
        tile = nl.load(x)
        for _ in nl.dynamic_range(times):
            nisa.tensor_scalar(tile, tile, nl.add, 1.0)
        for _ in nl.dynamic_range(1, times, 2):
            nisa.tensor_scalar(tile, tile, nl.add, 100.0)
        while condition:
            nisa.tensor_scalar(tile, tile, nl.add, 10000.0)
            nisa.tensor_tensor(counter, counter, one, nl.subtract)
            nisa.register_load(condition, counter)
        return stored(tile)

    simulate = emulator.simulate(kernel, strict=False)
    for times in (0, 1, 5):
        result = simulate(np.zeros((128, 64), np.float32), np.array([[times]], np.int32))
        assert (result == times + 100 * (times // 2) + 10000 * times).all()


@pytest.mark.parametrize("construct", ["dynamic_range", "while"])
def test_a_runtime_loop_is_not_left_early(construct):
    def kernel(x):
        tile, condition = nl.load(x), nisa.register_alloc(1)
        if construct == "while":
            while condition:
                break
        else:
            for _ in nl.dynamic_range(2):
                break
        return stored(tile)

    with pytest.raises(emulator.Refusal, match="no break or return out of a runtime loop"):
        emulator.trace(kernel, X, strict=False)


def test_an_optional_argument_may_be_asked_for_by_its_truth():
    def kernel(x, bias=None):
        tile = nl.load(x)
        if bias:
            nisa.tensor_tensor(tile, tile, nl.load(bias), nl.add)
        return stored(tile)

    simulate = emulator.simulate(kernel, strict=False)
    np.testing.assert_array_equal(simulate(X), X)
    np.testing.assert_array_equal(simulate(X, X), X + X)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("what", ["tile", "element of an argument"])
def test_a_tile_or_an_element_is_not_asked_for_its_truth(what, strict):
    def kernel(x):
        tile = nl.load(x)
        if tile if what == "tile" else x[0, 0]:
            nisa.memset(tile, 0.0)
        return stored(tile)

    with pytest.raises(emulator.Refusal, match="not known while the kernel is traced"):
        emulator.trace(kernel, X, strict=strict)
