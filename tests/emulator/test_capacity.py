"""Peak use of SBUF and PSUM against what a program has live, worked out by hand."""

import numpy as np

from draft_verify.reference import emulator
from draft_verify.reference.emulator import capacity

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
X = np.ones((128, 1000), np.float32)


def peaks(kernel, *arrays):
    block = emulator.trace(kernel, X, *arrays).cores[0]
    return capacity.peak(block, "sbuf").amount, capacity.peak(block, "psum").amount


def test_a_tensor_lives_from_its_first_to_its_last_use():
    def kernel(x):
        out = nl.ndarray((128, 1000), nl.float32, buffer=nl.shared_hbm)
        first = nl.load(x)
        second = nl.add(first, first)
        third = nl.add(second, second)
        nl.store(out, third)
        return out

    assert peaks(kernel) == (2 * 4000, 0)


def test_rows_are_padded_to_32_bytes_and_psum_is_charged_in_banks():
    def kernel(x):
        out = nl.ndarray((16, 10), nl.float32, buffer=nl.shared_hbm)
        tile = nl.load(x[:, 0:17])
        product = nl.ndarray((16, 10), nl.float32, buffer=nl.psum)
        wide = nl.ndarray((16, 600), nl.float32, buffer=nl.psum)
        nisa.nc_matmul(product, tile[:, 0:16], tile[:, 0:10], accumulate=False)
        nisa.nc_matmul(wide[:, 0:10], tile[:, 0:16], tile[:, 0:10], accumulate=False)
        total = nl.ndarray((16, 10), nl.float32)
        nisa.tensor_copy(total, product)
        nisa.tensor_tensor(total, total, wide[:, 0:10], nl.add)
        nl.store(out, total)
        return out

    assert peaks(kernel) == (96 + 0, 1 + 2)


def test_what_a_loop_uses_from_outside_lives_through_all_of_it():
    def kernel(x, count):
        out = nl.ndarray((128, 1000), nl.float32, buffer=nl.shared_hbm)
        total, once = nl.load(x), nl.load(x)
        bound = nisa.register_alloc()
        nisa.register_load(bound, nl.load(count))

        def body(i):
            nisa.tensor_tensor(total, total, once, nl.add)
            first = nl.add(total, total)
            second = nl.add(first, first)
            nisa.tensor_tensor(total, total, second, nl.add)

        nl.fori_loop(0, bound, body)
        nl.store(out, total)
        return out

    # `total` and `once` throughout, `first` and `second` at the peak of the body.
    assert peaks(kernel, np.ones((1, 1), np.int32)) == (4 * 4000, 0)


def test_a_long_unrolled_kernel_runs_in_the_memory_of_what_is_live():
    def kernel(x):
        out = nl.ndarray((128, 1000), nl.float32, buffer=nl.shared_hbm)
        total = nl.load(x)
        for _ in range(200):
            tile = nl.load(x)
            nisa.tensor_tensor(total, total, tile, nl.add)
        nl.store(out, total)
        return out

    program = emulator.trace(kernel, X)
    assert (program.run(X) == 201).all()
    on_chip = {id(array) for storage, array in program._linked.memory.bytes.items() if storage.on_chip}
    assert len(on_chip) <= 3


def looped(counts):
    """A kernel with one loop for each entry of `counts` [1, n], all bounds loaded before the first loop."""
    many = counts.shape[1]

    def kernel(x, counts):
        out = nl.ndarray((128, 1000), nl.float32, buffer=nl.shared_hbm)
        total, loaded = nl.load(x), nl.load(counts)
        bounds = []
        for i in range(many):
            bounds.append(nisa.register_alloc())
            nisa.register_load(bounds[i], loaded[:, i : i + 1])

        def body(i):
            nisa.tensor_tensor(total, total, total, nl.add)

        for i in range(many):
            nl.fori_loop(0, bounds[i], body)
        nl.store(out, total)
        return out

    return emulator.trace(kernel, X, counts)


def test_a_register_lives_from_its_first_use_to_its_last():
    program = looped(np.ones((1, 5), np.int32))
    # All bounds, and the first loop's own counter.
    assert capacity.peak_registers(program.cores[0]) == 5 + 1


def test_more_live_registers_than_an_engine_has_are_noted():
    assert not any("registers" in note for note in looped(np.ones((1, 63), np.int32)).notes)
    assert any("65 registers are live" in note for note in looped(np.ones((1, 64), np.int32)).notes)
