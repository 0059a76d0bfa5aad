"""`bench device` with a stand-in: what it compares, what it times, and that it makes documented calls only."""

import sys
from types import ModuleType

import numpy as np
import pytest

import draft_verify
from draft_verify.bench import device
from draft_verify.bench.shapes import Case, cases

torch = pytest.importorskip("torch")


def double(values, scale=None, *, backend, lnc):
    """A public operation for these tests: its device kernel is exact, or wrong by `wrong`."""
    return values * 2 if backend == "reference" else values * (2 + double.wrong)


double.wrong = 0.0


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr(draft_verify, "double", double, raising=False)
    monkeypatch.setattr(double, "wrong", 0.0)
    return Case("double", "", {"N": 8}, lambda make: ((make((8,), np.float32),), {"scale": 1.0}), 64)


class StandIn:
    """A device whose tensors are NumPy arrays; counts what it is asked for."""

    backend = "stand-in"

    def __init__(self):
        self.finished = 0

    def put(self, array):
        return array.copy()

    def finish(self):
        self.finished += 1

    def get(self, tensor):
        return tensor


def test_a_right_kernel_agrees_and_is_timed_call_by_call(case):
    stand_in = StandIn()
    verdict, seconds = device.check(case, stand_in, lnc=1, repeat=5)
    assert verdict == "agrees"
    assert stand_in.finished == 6  # once before the clock starts
    assert 0 < seconds < 1


def test_a_result_that_was_not_asked_for_is_left_out(case, monkeypatch):
    monkeypatch.setattr(draft_verify, "double", lambda *args, **options: (double(*args, **options), None))
    assert device.check(case, StandIn(), lnc=1, repeat=1)[0] == "agrees"


def test_a_wrong_kernel_is_told(case):
    double.wrong = 1e-2
    verdict, _ = device.check(case, StandIn(), lnc=1, repeat=1)
    assert verdict.startswith("output 0: error 5.0e-03")


def test_decisions_are_compared_by_the_share_that_agrees():
    tokens = np.arange(1000, dtype=np.int32)
    off = tokens.copy()
    off[:3] += 1
    assert device.compare([off], [tokens], "float32") == "agrees"
    off[:30] += 1
    assert device.compare([off], [tokens], "float32") == "output 0: 97.0% equal"


def test_infinities_must_be_where_the_reference_has_them():
    want = np.array([1.0, -np.inf], np.float32)
    assert device.compare([want], [want], "float32") == "agrees"
    assert device.compare([np.array([1.0, 0.0], np.float32)], [want], "float32").startswith("output 0")


def test_a_kernel_that_fails_does_not_hide_the_others(case, monkeypatch):
    def broken(case, *_):
        raise RuntimeError("does not compile\nand more")

    monkeypatch.setattr(device, "check", broken)
    (row,) = device.rows([case], StandIn(), 1, 1)
    assert row[3] == "RuntimeError: does not compile"


def test_without_a_device_it_says_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    assert device.main([]) == 1
    out = capsys.readouterr().out
    assert "Nothing was measured" in out
    assert "/dev/neuron0" in out
    for name in device.PACKAGES:
        assert (f"package {name}\n" in out) == (device.importlib.util.find_spec(name) is None)


def test_only_documented_calls_are_made(case, monkeypatch, tmp_path, capsys):
    """torch_xla is asked for its device and to synchronise, nothing else."""
    calls = []
    fake = ModuleType("torch_xla")
    fake.device = lambda: calls.append("device") or torch.device("cpu")
    fake.sync = lambda wait: calls.append("sync")
    monkeypatch.setitem(sys.modules, "torch_xla", fake)
    monkeypatch.setattr(device, "missing", list)
    monkeypatch.setattr(device, "cases", lambda quick: [case])
    assert device.main(["--repeat", "3"]) == 0
    assert calls == ["device"] + ["sync"] * 4
    assert "agrees" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["select_hidden B=1 T=8 H=4096", "commit_window NPHD B=1 T=8 D=128 layers=1"])
def test_real_operations_pass_through_the_same_path(name):
    """Kernels on the emulator in place of the device; one of them changes a cache in place."""
    stand_in = StandIn()
    stand_in.backend = "emulator"
    case = next(case for case in cases(quick=True) if case.name == name)
    assert device.check(case, stand_in, lnc=1, repeat=1)[0] == "agrees"


@pytest.mark.full
@pytest.mark.parametrize("lnc", [1, 2])
@pytest.mark.parametrize("case", [c for c in cases(quick=True) if c.shape["B"] == 1], ids=lambda case: case.name)
def test_every_shape_of_the_table_agrees_with_its_reference(case, lnc):
    stand_in = StandIn()
    stand_in.backend = "emulator"
    assert device.check(case, stand_in, lnc, repeat=1)[0] == "agrees"
