"""On a machine with a Neuron device: every kernel against its reference, and its measured time beside the modelled one.

Measured is wall-clock time a call over a row of calls, the launch included; modelled are the bound and the makespan of
`bench cost`, without it. Elsewhere it says what is missing.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from draft_verify.arrays import to_numpy, to_torch
from draft_verify.backends import logical_cores
from draft_verify.reference import tolerances

from .arguments import whole
from .cost import measure, shape_text
from .shapes import Case, cases, operations, random_data
from .table import Table

PACKAGES = ("torch", "torch_xla", "torch_neuronx")
DEVICES = Path("/dev")


def missing() -> list[str]:
    """What this machine lacks to run on a Neuron device."""
    lacking = [f"Python package {name}" for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not list(DEVICES.glob("neuron*")):
        lacking.append("a Neuron device (/dev/neuron0: a trn2 instance with the Neuron driver)")
    return lacking


class NeuronDevice:
    """The calls of torch_xla that are needed: `device()` and `sync()`, both documented."""

    backend = "device"

    def __init__(self):
        import torch_xla

        self.torch_xla = torch_xla
        self.device = torch_xla.device()

    def put(self, array: np.ndarray) -> Any:
        return to_torch(array).to(self.device)

    def finish(self) -> None:
        """Returns when everything asked for has run."""
        self.torch_xla.sync(wait=True)

    def get(self, tensor: Any) -> np.ndarray:
        return to_numpy(tensor.cpu())


def check(case: Case, device: Any, lnc: int, repeat: int) -> tuple[str, float]:
    """What the comparison with the reference says, and the seconds a call takes on `device`."""
    make = random_data(0)
    args, kwargs = case.inputs(make)
    expected = _run(case, copy.deepcopy(args), copy.deepcopy(kwargs), backend="reference", lnc=lnc)
    put = lambda value: _each(value, device.put)  # noqa: E731
    args, kwargs = tuple(map(put, args)), {name: put(value) for name, value in kwargs.items()}
    actual = [device.get(tensor) for tensor in _run(case, args, kwargs, backend=device.backend, lnc=lnc)]
    verdict = compare(actual, expected, _narrowest(args, kwargs))
    device.finish()
    began = time.perf_counter()
    for _ in range(repeat):
        _run(case, args, kwargs, backend=device.backend, lnc=lnc)
        device.finish()
    return verdict, (time.perf_counter() - began) / repeat


def _run(case: Case, args: tuple, kwargs: dict, **options: Any) -> list:
    """The arrays that a call returns, in order; a result that was not asked for is None, and left out."""
    fixed = Case(case.operation, case.variant, case.shape, lambda _: (args, kwargs), case.must_move)
    return [leaf for leaf in _leaves(fixed.call(None, **options)) if leaf is not None]


def _leaves(value: Any) -> Iterator[Any]:
    for entry in value if isinstance(value, tuple | list) else ():
        yield from _leaves(entry)
    if not isinstance(value, tuple | list):
        yield value


def _each(value: Any, function: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_each(entry, function) for entry in value)
    return function(value) if isinstance(value, np.ndarray) else value


def _narrowest(args: tuple, kwargs: dict) -> str:
    """The dtype among the data that the tolerance goes by."""
    data = [leaf for leaf in _leaves([*args, *kwargs.values()]) if hasattr(leaf, "dtype")]
    names = {str(array.dtype).removeprefix("torch.") for array in data}
    if any(name.startswith("float8") for name in names):
        return "float8_e4m3"
    return "bfloat16" if "bfloat16" in names else "float32"


def compare(actual: list[np.ndarray], expected: list[np.ndarray], dtype: str) -> str:
    """ "agrees", or how far the results are apart, by the project's tolerances."""
    if [a.shape for a in actual] != [e.shape for e in expected]:
        return f"shapes {[a.shape for a in actual]}, expected {[e.shape for e in expected]}"
    for number, (have, want) in enumerate(zip(actual, expected)):
        if want.dtype.kind in "iub":
            same = float(np.mean(have == want))
            if same < tolerances.MIN_SAME_TOKEN_SHARE:
                return f"output {number}: {same:.1%} equal"
        else:
            finite = np.isfinite(np.asarray(want, np.float64))
            error = tolerances.scaled_error(have[finite], want[finite])
            if error > tolerances.ATTENTION[dtype] or (np.isfinite(np.asarray(have, np.float64)) != finite).any():
                return f"output {number}: error {error:.1e} of the largest value"
    return "agrees"


def rows(chosen: list[Case], device: Any, lnc: int, repeat: int) -> Iterator[list]:
    for case in chosen:
        modelled, _ = measure(case, lnc)
        try:
            verdict, seconds = check(case, device, lnc, repeat)
        except Exception as error:  # one kernel that does not compile must not hide the others
            verdict, seconds = f"{type(error).__name__}: {error}".splitlines()[0], float("nan")
        figures = [f"{value:.1f}" for value in (seconds * 1e6, modelled.bound_us, modelled.makespan_us)]
        yield [case.operation, case.variant, shape_text(case), verdict, *figures]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m draft_verify.bench device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="the whole grid of `bench cost`")
    parser.add_argument(
        "--operation", choices=operations(), action="append", metavar="NAME", help="only this operation (repeatable)"
    )
    parser.add_argument("--repeat", type=whole, default=20, help="calls that are timed (default 20)")
    parser.add_argument("--lnc", type=int, choices=(1, 2), help="default: NEURON_LOGICAL_NC_CONFIG, else 1")
    arguments = parser.parse_args(argv)
    lacking = missing()
    if lacking:
        print("Nothing was measured. Missing here:")
        print("\n".join(f"  - {what}" for what in lacking))
        print("`bench cost` gives the modelled figures; `make test` checks the kernels on the emulator.")
        return 1
    chosen = [c for c in cases(not arguments.all) if not arguments.operation or c.operation in arguments.operation]
    header = ["operation", "variant", "shape", "against the reference", "measured us", "bound us", "makespan us"]
    results = list(rows(chosen, NeuronDevice(), logical_cores(arguments.lnc), arguments.repeat))
    print(Table(header, results))
    return 0 if all(row[3] == "agrees" for row in results) else 1
