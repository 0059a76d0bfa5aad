"""A kernel is traced once per shapes, dtypes and constants, and its program runs on any arrays of that kind."""

import sys
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import pytest
import torch

from draft_verify.reference import emulator

nki = emulator.modules()["nki"]
nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
nt = emulator.modules()["nki.typing"]


def counted():
    """A kernel that adds a constant, and the list of its traces."""
    traces = []

    @nki.jit
    def add_constant(x, constant, pair=(0, 1)):
        traces.append((x.shape, x.dtype, constant, pair))
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        nisa.tensor_scalar(tile, tile, nl.add, constant)
        nl.store(out, tile)
        return out

    return add_constant, traces


def test_a_kernel_is_traced_once_per_shape_dtype_and_constant():
    kernel, traces = counted()
    x = np.ones((4, 8), np.float32)
    for scale in (1, 2, 3):
        np.testing.assert_array_equal(emulator.simulate(kernel)(scale * x, 1.5), scale * x + 1.5)
    assert len(traces) == 1
    emulator.simulate(kernel)(x, 2.5)
    emulator.simulate(kernel)(x, 2)
    emulator.simulate(kernel)(x, 2.0)
    emulator.simulate(kernel)(x[:, :4], 2.0)
    emulator.simulate(kernel)(x.astype(ml_dtypes.bfloat16), 2.0)
    emulator.simulate(kernel)(x, 2.0, pair=(0, 2))
    assert len(traces) == 7


def test_the_programs_least_recently_used_are_let_go():
    kernel, traces = counted()
    for width in (1, *range(1, 33), 1, 33):
        emulator.simulate(kernel)(np.ones((4, width), np.float32), 1.0)
    assert len(traces) == 33 and len(kernel.programs) == 32
    emulator.simulate(kernel)(np.ones((4, 1), np.float32), 1.0)
    assert len(traces) == 33
    emulator.simulate(kernel)(np.ones((4, 2), np.float32), 1.0)
    assert len(traces) == 34


def test_a_later_run_sees_later_data_and_leaves_earlier_results_alone():
    kernel, _ = counted()
    program = emulator.trace(kernel, np.zeros((4, 8), np.float32), 1.0)
    first = program.run(np.zeros((4, 8), np.float32))
    second = program.run(np.full((4, 8), 5, np.float32))
    assert (first == 1).all() and (second == 6).all()


@pytest.mark.parametrize(
    "array", [np.zeros((8, 4), np.float32), np.zeros((4, 8), np.int32), np.zeros((4, 9), np.float32)], ids=repr
)
def test_a_program_refuses_arrays_of_another_kind(array):
    kernel, _ = counted()
    program = emulator.trace(kernel, np.zeros((4, 8), np.float32), 1.0)
    with pytest.raises(emulator.Refusal, match="does not fit the traced argument"):
        program.run(array)
    with pytest.raises(emulator.Refusal, match="one array per tensor argument"):
        program.run()


def test_strided_arrays_are_read_and_written_in_place():
    @nki.jit
    def double(x: nt.mutable_tensor):
        tile = nl.load(x)
        nisa.tensor_scalar(tile, tile, nl.multiply, 2.0)
        nl.store(x, tile)
        return x

    memory = np.arange(64, dtype=np.float32).reshape(4, 16)
    view = memory[:, ::2]
    result = emulator.simulate(double)(view)
    assert result is view
    np.testing.assert_array_equal(
        memory, np.where(np.arange(64) % 2 == 0, 2, 1).reshape(4, 16) * np.arange(64).reshape(4, 16)
    )


def test_an_argument_declared_mutable_must_be_written():
    def read_only(x: nt.mutable_tensor):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    with pytest.raises(emulator.Refusal, match="never written"):
        emulator.trace(read_only, np.zeros((4, 8), np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float8_e5m2])
def test_torch_tensors_come_in_and_go_out_with_their_bits(dtype):
    @nki.jit
    def copy(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.load(x))
        return out

    x = torch.arange(32).reshape(4, 8).to(dtype)
    result = emulator.simulate(copy)(x)
    assert result.dtype == dtype and torch.equal(result.view(torch.uint8), x.view(torch.uint8))


def test_tuples_and_configuration_objects_carry_tensors():
    class Config(emulator.NKIObject):
        def __init__(self, scale, bias):
            self.scale, self.bias = scale, bias

    @nki.jit
    def weighted(pair, config):
        out = nl.ndarray(pair[0].shape, dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.add(nl.load(pair[0]), nl.load(pair[1]))
        nisa.tensor_scalar(tile, tile, nl.multiply, config.scale)
        nl.store(out, nl.add(tile, nl.load(config.bias)))
        return out

    x = np.ones((4, 8), np.float32)
    result = emulator.simulate(weighted)((x, 2 * x), Config(3.0, 5 * x))
    np.testing.assert_array_equal(result, 14 * x)


def test_the_initialiser_of_a_class_takes_its_fields_whatever_declares_them():
    class Plain(emulator.NKIObject):
        rows: int
        columns = 4

        def __post_init__(self):
            self.size = self.rows * self.columns

    @dataclass
    class Decorated(emulator.NKIObject):
        rows: int
        columns = 4
        names: list = None

    class Derived(Decorated):
        depth: int = 2

    class Own(emulator.NKIObject):
        rows: int = 0

        def __init__(self, given):
            self.rows = given + 1

    class Own2(Own):
        columns: int = 3

    @dataclass
    class WithFactory(emulator.NKIObject):
        names: list = field(default_factory=list)

    assert (Plain(3).size, Plain(rows=3, columns=2).size) == (12, 6)
    assert vars(Decorated(columns=1)) == {"rows": None, "names": None, "columns": 1}
    assert Derived(1, depth=5).depth == 5 and Decorated(1) == Decorated(1)
    assert Own(1).rows == Own2(1).rows == 2
    assert WithFactory().names == [] and WithFactory().names is not WithFactory().names
    assert emulator.NKIObject(anything=1).anything == 1
    with pytest.raises(TypeError):
        Plain(depth=1)


def test_kernels_call_kernels_and_a_launch_runs_like_a_simulation():
    @nki.jit
    def doubled(tile):
        return nl.add(tile, tile)

    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, doubled(nl.load(x)))
        return out

    x = np.ones((4, 8), np.float32)
    np.testing.assert_array_equal(kernel(x), 2 * x)


def test_installing_makes_import_nki_the_emulator_with_its_marker():
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "nki"}
    try:
        emulator.install()
        import nki as installed
        import nki.isa
        import nki.language

        assert installed.__draft_verify_emulator__ and nki.isa.__draft_verify_emulator__
        assert installed.language is nki.language is emulator.modules()["nki.language"]
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "nki"]:
            del sys.modules[name]
        sys.modules.update(before)


BAD_ARGUMENTS = {
    "list": [1, 2],
    "numpy dtype": np.float32,
    "numpy scalar": np.float32(1),
    "float64 array": np.zeros((4, 8)),
    "64-bit int": 2**31,
    "int64 array": np.zeros((4, 8), np.int64),
}


@pytest.mark.parametrize("argument", BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_an_argument_that_kernels_cannot_take_is_refused(argument):
    kernel, _ = counted()
    with pytest.raises(emulator.Refusal):
        emulator.simulate(kernel)(np.zeros((4, 8), np.float32), argument)


BAD_RESULTS = {
    "a tile": lambda x: nl.load(x),
    "private memory": lambda x: nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm),
    "nothing": lambda x: None,
    "a number": lambda x: 1,
}


@pytest.mark.parametrize("kernel", BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_only_shared_hbm_tensors_can_be_returned(kernel):
    with pytest.raises(emulator.Refusal, match="shared_hbm"):
        emulator.trace(kernel, np.zeros((4, 8), np.float32))


def test_jit_refuses_platform_target_and_ignores_mode():
    with pytest.raises(emulator.Refusal, match="platform_target"):
        nki.jit(platform_target="trn2")
    assert callable(nki.jit(lambda x: x))
    assert isinstance(nki.jit(mode="torch")(lambda x: x), emulator.Kernel)


def test_the_launch_grid_is_one_or_two():
    kernel, _ = counted()
    with pytest.raises(emulator.Refusal, match="launch grid"):
        kernel[3]


def test_an_instruction_outside_a_kernel_is_an_error():
    with pytest.raises(RuntimeError, match="outside a kernel"):
        nl.ndarray((4, 8), nl.float32)


def test_the_listing_names_instructions_operands_engines_and_source_lines():
    def kernel(x, count):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="result")
        tile = nl.load(x)
        register = nisa.register_alloc()
        nisa.register_load(register, count)

        def body(i):
            nisa.tensor_scalar(tile[:, 2:4], tile[:, 2:4], nl.multiply, 2.0)

        nl.fori_loop(0, register, body)
        nl.store(out, tile)
        return out

    program = emulator.trace(kernel, np.zeros((4, 8), np.float32), np.zeros(1, np.int32))
    text = str(program)
    assert program.counts() == {"dma": 2, "sync": 1, "vector": 1}
    assert "for r1 in 0..r0 step 1" in text
    assert "[4,2]@2:8*4x1*2" in text and "op0=multiply" in text
    assert "dst=result[4,8]" in text and "dst=tile." in text and "# test_program.py:" in text


def test_notes_are_errors_under_strict():
    def kernel(x):
        out = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        product = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(product, nl.load(x), nl.load(x))
        nl.store(out, nl.copy(product))
        return out

    x = np.ones((4, 8), np.float32)
    assert any("accumulate is inferred" in note for note in emulator.trace(kernel, x, strict=False).notes)
    with pytest.raises(emulator.Refusal, match="accumulate is inferred"):
        emulator.trace(kernel, x, strict=True)


def test_what_a_run_leaves_unwritten_is_nan_in_every_run():
    def kernel(x, mask):
        tile, predicate = nl.ndarray((4, 8), nl.float32), nl.load(mask)
        nisa.tensor_copy_predicated(tile, nl.load(x), predicate)
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    program = emulator.trace(kernel, np.zeros((4, 8), np.float32), np.zeros((4, 8), np.uint8))
    for columns in (8, 3):
        mask = np.repeat(np.arange(8)[None] < columns, 4, axis=0).astype(np.uint8)
        result = program.run(np.full((4, 8), 2, np.float32), mask)
        assert (result[:, :columns] == 2).all() and np.isnan(result[:, columns:]).all()


def test_scratch_in_hbm_that_is_written_in_part_may_be_carried_along_and_is_nan_where_it_is_not():
    def kernel(x):
        scratch = nl.ndarray((4, 8), nl.float32, buffer=nl.private_hbm)
        nl.store(scratch[:, 0:5], nl.load(x[:, 0:5]))
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.load(scratch))
        return out

    x = np.ones((4, 8), np.float32)
    program = emulator.trace(kernel, x, strict=False)
    assert any("reads what was never written" in note for note in program.notes)
    for _ in range(2):
        result = program.run(x)
        assert (result[:, :5] == 1).all() and np.isnan(result[:, 5:]).all()
    with pytest.raises(emulator.Refusal, match="reads what was never written"):
        emulator.trace(kernel, x, strict=True)


def test_trip_counts_of_the_last_run_are_kept():
    def kernel(x, count):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)
        register = nisa.register_alloc()
        nisa.register_load(register, count)
        nl.fori_loop(1, register, lambda i: nisa.tensor_scalar(tile, tile, nl.add, 1.0) and None, 2)
        nl.store(out, tile)
        return out

    program = emulator.trace(kernel, np.zeros((4, 8), np.float32), np.zeros(1, np.int32))
    for count, trips in ((0, 0), (1, 0), (2, 1), (8, 4)):
        result = program.run(np.zeros((4, 8), np.float32), np.array([count], np.int32))
        assert list(program.trips.values()) == [trips] and (result == trips).all()


def test_a_kernel_that_returns_nothing_writes_its_arguments():
    @nki.jit
    def doubled(x, out):
        tile = nl.load(x)
        nl.store(out, nl.add(tile, tile))

    x, out = np.ones((4, 8), np.float32), np.zeros((4, 8), np.float32)
    assert doubled(x, out) is None and (out == 2).all()
    with pytest.raises(emulator.Refusal, match="a kernel returns tensors in shared_hbm"):
        emulator.trace(lambda x: None, x)


def test_a_result_in_private_hbm_is_noted_on_one_core_and_refused_on_two():
    def kernel(x):
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.hbm)
        nl.store(out, nl.load(x))
        return out

    x = np.ones((4, 8), np.float32)
    program = emulator.trace(kernel, x, strict=False)
    assert "returns tensors in shared_hbm" in program.notes[0] and (program.run(x) == x).all()
    for launched, strict in ((emulator.jit(kernel), True), (emulator.jit(kernel)[2], False)):
        with pytest.raises(emulator.Refusal, match="returns tensors in shared_hbm"):
            emulator.trace(launched, x, strict=strict)


def test_scheduling_edges_are_given_by_name():
    @nki.jit
    def kernel(x):
        tile = nl.load(x)
        first, second = (nl.ndarray((4, 8), nl.float32) for _ in range(2))
        nisa.reciprocal(first, tile, name="first")
        nisa.activation(second, nl.square, tile, name="second")
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.add(first, second))
        return out

    x = np.full((4, 8), 2, np.float32)
    for producers in ("first", ["first"]):
        program = emulator.trace(kernel.with_schedule([("second", producers)]), x)
        reciprocal, square = [call for call in program.calls() if call.args.get("name")]
        assert square.depends == [reciprocal] and not reciprocal.depends
        assert (program.run(x) == 4.5).all()
    assert not any(call.depends for call in emulator.trace(kernel, x).calls())
    with pytest.raises(emulator.Refusal, match=r"an instruction that the kernel does not have.*third"):
        emulator.trace(kernel.with_schedule([("second", "third")]), x)


def test_a_tensor_knows_the_address_that_the_kernel_chose():
    def kernel(x):
        tile = nl.ndarray((4, 8), nl.float32, address=(0, 64))
        assert tile.address == (0, 64) and x.address is None
        nisa.dma_copy(tile, x)
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nl.store(out, tile)
        return out

    emulator.trace(kernel, np.ones((4, 8), np.float32))
