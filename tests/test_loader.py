"""Kernels are imported once per provider of `nki`; the emulator never counts as an SDK."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import ModuleType

import pytest

from draft_verify import backends, loader

KERNEL = "greedy_acceptance"


def stand_in_sdk(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An `nki` with just enough in it for the kernel files to be imported."""
    from draft_verify.reference import emulator

    for name, module in emulator.modules().items():
        twin = ModuleType(name)
        twin.__dict__.update({key: value for key, value in vars(module).items() if key != loader.MARKER})
        monkeypatch.setitem(sys.modules, name, twin)
    return sys.modules["nki"]


def test_emulator_and_sdk_kernels_live_side_by_side(monkeypatch):
    emulated = loader.kernel(KERNEL, "emulator")
    sdk = stand_in_sdk(monkeypatch)
    launched = loader.kernel(KERNEL, "device")
    assert launched is not emulated
    assert loader.kernel(KERNEL, "simulator") is launched
    assert loader.kernel(KERNEL, "emulator") is emulated
    assert sys.modules["nki"] is sdk


def test_loading_for_the_emulator_leaves_no_nki_behind():
    code = f"""
        import sys
        from draft_verify import loader
        loader.kernel({KERNEL!r}, "emulator")
        assert not [name for name in sys.modules if name == "nki" or name.startswith("nki.")]
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_an_installed_emulator_is_not_an_sdk(monkeypatch):
    from draft_verify.reference import emulator

    for name, module in emulator.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(RuntimeError, match="this library's emulator"):
        loader.kernel(KERNEL, "device")


def test_the_placeholder_from_pypi_is_named_as_such(monkeypatch):
    monkeypatch.setitem(sys.modules, "nki", ModuleType("nki"))
    with pytest.raises(RuntimeError, match="empty placeholder"):
        loader.kernel(KERNEL, "simulator")


def test_without_an_sdk_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "nki", None)
    with pytest.raises(RuntimeError, match="AWS's own package index"):
        loader.kernel(KERNEL, "device")


@pytest.mark.parametrize("setting", ["two", "", "0", "1.0"])
def test_a_bad_number_of_cores_in_the_environment_is_named(monkeypatch, setting):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", setting)
    with pytest.raises(ValueError, match=f"^NEURON_LOGICAL_NC_CONFIG: got '{setting}', expected 1 or 2"):
        backends.logical_cores(None)
    assert backends.logical_cores(2) == 2
