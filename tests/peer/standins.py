"""Stand-ins for what nki-library's own tests import and does not come from a public index, or is not needed here."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import math
import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from draft_verify.reference import emulator

# Metrics, plots, hosts: imported at the top of modules we do need, never called.
_UNUSED = ("aws_embedded_metrics", "plotext", "boto3", "botocore", "fabric2", "invoke", "paramiko", "pytest_html")


class _Anything(ModuleType):
    """A module in which every name is a class that does nothing."""

    __path__: list = []  # noqa: RUF012 - what makes a module a package

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in _UNUSED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


def _module(name: str, **contents) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules.setdefault(name, module)


def _numpy_dtype(dtype) -> np.dtype:
    if str(dtype).endswith("_x4"):
        pytest.xfail(_TRN3)
    return np.dtype(getattr(dtype, "np", dtype))


def _static_cast(array, dtype) -> np.ndarray:
    """neuron_dtypes: conversion by value."""
    return np.asarray(array).astype(_numpy_dtype(dtype))


def _is_float(dtype) -> bool:
    dtype = _numpy_dtype(dtype)
    return np.issubdtype(dtype, np.floating) or dtype.kind == "V" or hasattr(ml_dtypes, dtype.name)


def _all_pairs(values, filter_func=lambda row: True):
    """allpairspy: a set of rows that holds every pair of values which the filter lets pass."""
    rows = [list(row) for row in itertools.product(*values) if filter_func(list(row))]
    seen: set = set()
    for row in rows:
        pairs = set(itertools.combinations(enumerate(map(repr, row)), 2))
        if not pairs <= seen:
            seen |= pairs
            yield row


_erf = np.vectorize(math.erf, otypes=[float])


def _expit(x) -> np.ndarray:
    """scipy.special: the logistic function."""
    return 1 / (1 + np.exp(-np.asarray(x)))


def _circulant(column) -> np.ndarray:
    """scipy.linalg: column j is `column` rotated by j."""
    column = np.asarray(column)
    index = np.arange(len(column))
    return column[(index[:, None] - index) % len(column)]


_TRN3 = "trn3 only: MX types, matrix products and activation functions of NeuronCore-v4"

# Where a kernel of theirs breaks a rule that the documentation states.
_REFUSED_AS_DOCUMENTED = {
    "NeuronCore-v4": _TRN3,
    "value must match the dtype of dst": "nisa.memset of an integer tile with a float: an error since NKI 0.3",
    "data is a tensor in shared HBM": "nisa.core_barrier on a tile in SBUF",
    "is full: more": "needs more of SBUF or PSUM at once than there is: the compiler would have to spill",
    "both cores write the same bytes, and not the same values": "each core zeroes all of the output, then stores its"
    " half, with no core_barrier between: what the other core stored first is lost",
}

# Modules of which constants are repaired, so that the rest of the kernel runs: integers where dge_mode is to be a
# member of the enumeration (an error since NKI 0.3).
_INTEGER_DGE_MODE = (
    "core.subkernels.norm_tkg_utils", "core.qkv.qkv_tkg", "core.mlp.mlp_tkg.mlp_tkg_gate_up_projection",
    "core.mlp.mlp_tkg.mlp_tkg_utils", "core.mlp.mlp_tkg.mlp_tkg_down_projection",
)  # fmt: skip


class Orchestrator:
    """Runs a kernel of nki-library's tests on the emulator and holds it against the test's own reference."""

    def __init__(self, *args, **kwargs):
        pass

    def execute(self, kernel_args) -> None:
        """kernel_args: their KernelArgs. Raises AssertionError where an output differs from the golden one."""
        kernel, lnc = emulator.jit(kernel_args.kernel_func), kernel_args.compiler_input.logical_nc_config
        inputs = {name: _argument(value) for name, value in _plain_names(kernel_args.kernel_input).items()}
        try:
            outputs = kernel[lnc](**inputs)
        except emulator.Refusal as refusal:
            for rule, why in _REFUSED_AS_DOCUMENTED.items():
                if rule in refusal.rule:
                    pytest.xfail(why)
            raise
        finally:
            kernel.programs.clear()  # no two cases share a program, and a thousand of them fill the memory
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        arguments = kernel_args.validation_args
        expected = getattr(arguments.golden_output, "golden", arguments.golden_output)
        if expected is None:  # a kernel that checks itself
            return
        assert len(outputs) >= len(expected), "a tensor for each reference; their own check ignores others too"
        for (name, golden), output in zip(expected.items(), outputs):
            _compare(name, output, golden, arguments)


def _argument(value):
    """What their harness hands to a kernel: nl dtypes for NumPy's, everything else as it is."""
    if isinstance(value, type) and issubclass(value, np.generic):
        return emulator.modules()["nki.language"].__dict__[np.dtype(value).name]
    return value


def _compare(name: str, output: np.ndarray, golden, arguments) -> None:
    from test.integration.nkilib.utils.comparators import maxAllClose

    if hasattr(golden, "validator"):
        assert golden.validator(None).validate(np.ascontiguousarray(output)), f"{name} fails its own validator"
        return
    actual, wanted = output.astype(np.float32), golden.astype(np.float32)
    close = maxAllClose(actual, wanted, arguments.relative_accuracy, arguments.absolute_accuracy, verbose=1)
    assert close, f"{name} differs by up to {np.nanmax(np.abs(actual - wanted))}"


class NoCollector:
    """Their metrics collector, collecting nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


@functools.cache
def install(checkout: str) -> None:
    """Makes `nkilib_src`, `nkilib` and `test` (their tests) importable from a checkout, on the emulator."""
    emulator.install()
    nki = sys.modules["nki"]
    # Names of earlier releases that their code still mentions in annotations.
    nki.dtype = sys.modules["nki.dtype"] = nki.language
    _module("neuronxcc")
    _module("neuronxcc.nki")
    _module("neuronxcc.nki.typing", mutable_tensor=nki.typing.mutable_tensor, tensor=nki.typing.tensor)
    sys.modules["neuronxcc"].nki = sys.modules["neuronxcc.nki"]
    sys.modules["neuronxcc.nki"].typing = sys.modules["neuronxcc.nki.typing"]
    _module(
        "neuron_dtypes",
        static_cast=_static_cast,
        is_float_type=_is_float,
        sizeinbytes=lambda dtype: _numpy_dtype(dtype).itemsize,
        # Their table of dtypes names the packed ones of trn3 too.
        __getattr__=lambda name: getattr(ml_dtypes, name, name),
    )
    _module("allpairspy", AllPairs=_all_pairs)
    if importlib.util.find_spec("scipy") is None:
        _module("scipy")
        _module("scipy.linalg", circulant=_circulant)
        _module("scipy.special", erf=_erf, expit=_expit)
    _module("test.utils.test_orchestrator", Orchestrator=Orchestrator)
    _module("test.utils.tensor_histogram", TensorHistogram=lambda *args, **kwargs: NoCollector())
    _module("test.utils.metrics_collector", IMetricsCollector=NoCollector, NoopMetricsCollector=NoCollector,
            MetricName=SimpleNamespace(), MetricsCollector=NoCollector)  # fmt: skip
    sys.meta_path.append(_Finder())
    sys.modules.pop("test", None)
    sys.path[:0] = [checkout, f"{checkout}/src", f"{checkout}/src/nkilib_src"]
    for module in _INTEGER_DGE_MODE:
        constants = vars(importlib.import_module(f"nkilib_src.nkilib.{module}"))
        constants.update(_DGE_MODE_NONE=nki.isa.dge_mode.unknown, _DGE_MODE_UNKNOWN=nki.isa.dge_mode.unknown)
    _name_arguments_without_suffix()


def _name_arguments_without_suffix() -> None:
    """Some of their tests look an aliased argument up by its plain name, which their framework does not offer."""
    from test.utils.unit_test_framework import UnitTestFramework

    initialise = UnitTestFramework.__init__

    def with_plain_names(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        describe = self.output_tensor_descriptor
        self.output_tensor_descriptor = lambda inputs: describe(inputs | _plain_names(inputs))

    UnitTestFramework.__init__ = with_plain_names


def _plain_names(inputs: dict) -> dict:
    return {name.removesuffix(".must_alias_input"): value for name, value in inputs.items()}
