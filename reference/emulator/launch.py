"""Kernels as Python callables: jit, launch grid, arguments, and the cache of traced programs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect

import numpy as np

from draft_verify.reference.tensors import is_torch, to_numpy, to_torch

from . import capacity, context, dtypes, initialisation, races
from .enums import dge_mode
from .instruction import Refusal
from .objects import NKIObject
from .program import Program
from .tensor import NkiTensor, Storage
from .trace import MAX_HBM_BYTES, Tracer

_MAX_PROGRAMS = 32  # a kernel keeps; each holds the memory its tiles live in


class Kernel:
    """A kernel and its launch grid. Calling it on arrays traces it once per shapes, dtypes and constants, and runs it;
    called from another kernel it is a plain function."""

    def __init__(self, function, lnc: int = 1, grid_ndim: int = 0, programs: dict | None = None, schedule=()):
        functools.update_wrapper(self, function)
        self.function = function
        self.signature = inspect.signature(function)
        self.lnc = lnc
        self.grid_ndim = grid_ndim
        self.programs = {} if programs is None else programs
        self.schedule = schedule

    def __getitem__(self, grid) -> Kernel:
        if isinstance(grid, tuple) and len(grid) == 1:
            grid = grid[0]
        if grid not in (1, 2):
            raise Refusal("the launch grid is 1 or 2, the cores of a logical NeuronCore", grid=grid)
        return Kernel(self.function, grid, 1, self.programs, self.schedule)

    def with_schedule(self, edges) -> Kernel:
        """This kernel with scheduling edges: pairs of an instruction's name and the name(s) it depends on."""
        return Kernel(self.function, self.lnc, self.grid_ndim, schedule=tuple(edges))

    def __call__(self, *args, **kwargs):
        if context.tracing():
            return self.function(*args, **kwargs)
        return self.launch(args, kwargs)

    def launch(self, args, kwargs, strict: bool | None = None):
        program, arrays = self._traced(args, kwargs, _strict if strict is None else strict)
        results = program.run(*map(to_numpy, arrays))
        return to_torch(results) if any(map(is_torch, arrays)) else results

    def program(self, *args, **kwargs) -> Program:
        """What a launch with these arguments runs, which may be shared: not to be changed."""
        return self._traced(args, kwargs, _strict)[0]

    def trace(self, args, kwargs, strict: bool | None = None) -> Program:
        """The program for arguments like these; of arrays only shape and dtype are looked at."""
        return self._trace(self._bind(args, kwargs), _strict if strict is None else strict)

    def _traced(self, args, kwargs, strict: bool) -> tuple[Program, list]:
        """The program for arguments like these, traced where none is kept, and the arrays among them."""
        arguments, arrays = self._bind(args, kwargs), []
        key = (self.lnc, self.grid_ndim, strict, *(_key(value, arrays) for value in arguments.arguments.values()))
        program = self.programs.pop(key, None) or self._trace(arguments, strict)
        self.programs[key] = program  # the last one used comes last
        if len(self.programs) > _MAX_PROGRAMS:
            del self.programs[next(iter(self.programs))]
        return program, arrays

    def _bind(self, args, kwargs) -> inspect.BoundArguments:
        try:
            arguments = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Refusal(f"{self.__name__}: {error}") from None
        arguments.apply_defaults()
        return arguments

    def _trace(self, arguments, strict: bool) -> Program:
        program = Program(self.__name__, self.lnc, self.grid_ndim, strict)
        returned = []
        for core in range(self.lnc):
            opaque = self._opaque_arguments(arguments, program)
            with Tracer(program, core).active() as tracer:
                returned.append(self.function(*opaque.args, **opaque.kwargs))
                tracer.add_schedule(self.schedule)
        program.outputs = _outputs(returned, program)
        _check_static_dmas(program)
        for check in (races.check, initialisation.check, capacity.check):
            check(program)
        return program

    def _opaque_arguments(self, arguments, program: Program) -> inspect.BoundArguments:
        """The arguments as a core's trace sees them; both cores see the same input storages."""
        known = iter(list(program.inputs))
        opaque = inspect.BoundArguments(self.signature, type(arguments.arguments)(arguments.arguments))
        for name, value in arguments.arguments.items():
            annotation = self.function.__annotations__.get(name)
            mutable = "mutable_tensor" in (str(annotation).rpartition(".")[2], getattr(annotation, "__name__", ""))

            def tensor(array, path, mutable=mutable):
                storage = next(known, None)
                if storage is None:
                    shape = tuple(int(size) for size in array.shape) or (1,)
                    storage = hbm_storage(shape, _dtype_of(array), path, mutable)
                    program.inputs.append(storage)
                    program.storages.append(storage)
                return NkiTensor.whole(storage)

            opaque.arguments[name] = _opaque(value, name, tensor)
        return opaque


def hbm_storage(shape, dtype, name: str, mutable: bool) -> Storage:
    """The storage of a kernel's tensor argument."""
    storage = Storage(shape, dtype, "shared_hbm", name, kind="input", mutable=mutable)
    if storage.nbytes >= MAX_HBM_BYTES:
        raise Refusal("an HBM tensor must be smaller than 4 GB", argument=name, bytes=storage.nbytes, shape=shape)
    return storage


def jit(function=None, **options):
    """Marks a top-level kernel. `mode` is ignored, `platform_target` is refused, as documented."""
    if "platform_target" in options:
        raise Refusal("jit(platform_target=...) is an error since NKI 0.4")
    if function is None:
        return jit
    return function if isinstance(function, Kernel) else Kernel(function)


_strict = False


def set_strict(strict: bool) -> None:
    """Whether what is risky but legal is an error where a call does not say; a note otherwise."""
    global _strict
    _strict = strict


def simulate(kernel, strict: bool | None = None):
    """A callable that runs `kernel` on NumPy arrays or torch tensors and returns the same kind."""
    kernel = jit(kernel)
    return lambda *args, **kwargs: kernel.launch(args, kwargs, strict)


def trace(kernel, *args, strict: bool | None = None, **kwargs) -> Program:
    """The program of `kernel` (or `kernel[2]`) for arguments like these, not run."""
    return jit(kernel).trace(args, kwargs, strict)


def _is_array(value) -> bool:
    return isinstance(value, np.ndarray) or is_torch(value)


def _dtype_of(array):
    """The nl dtype an array arrives as. Looks at dtype only."""
    if is_torch(array):
        name = str(array.dtype).removeprefix("torch.")
        dtype = dtypes.resolve("float8_e4m3" if name == "float8_e4m3fn" else name)
    else:
        dtype = dtypes.from_numpy(array.dtype)
    if dtype is None:
        raise Refusal("trn2 has no such dtype", dtype=array.dtype)
    return dtype


def _fields(value) -> dict | None:
    """Attributes of a configuration object, None for anything else."""
    if isinstance(value, NKIObject) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return (
            dict(vars(value))
            if hasattr(value, "__dict__")
            else {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        )
    return None


def _key(value, arrays: list):
    """What a program depends on, hashable; collects the array leaves in order."""
    if _is_array(value):
        arrays.append(value)
        return ("array", tuple(value.shape), _dtype_of(value))
    if isinstance(value, tuple):
        return (type(value), *(_key(item, arrays) for item in value))
    if isinstance(value, list):
        raise Refusal("a kernel takes no list arguments: pass a tuple")
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        raise Refusal("a kernel takes nl dtypes, no NumPy dtypes", argument=value)
    if isinstance(value, np.generic):
        raise Refusal("a kernel takes Python numbers, no NumPy scalars", argument=repr(value))
    if isinstance(value, int) and not -(2**31) <= value < 2**31:
        raise Refusal("a kernel's int arguments fit 32 bits", argument=value)
    if isinstance(value, float):
        return (float, value.hex())  # -0.0 is another constant than 0.0
    if isinstance(value, dict):
        return ("dict", *((name, _key(item, arrays)) for name, item in value.items()))
    fields = _fields(value)
    if fields is not None:  # a configuration object may hold lists
        return (type(value), *((name, _field_key(item, arrays)) for name, item in sorted(fields.items())))
    try:
        hash(value)
    except TypeError:
        raise Refusal(
            "a kernel takes tensors, numbers, strings, tuples, enums and NKIObjects", argument=value
        ) from None
    return (type(value), value)


def _field_key(value, arrays):
    if isinstance(value, list):
        return ("list", *(_field_key(item, arrays) for item in value))
    return _key(value, arrays)


def _opaque(value, path: str, tensor):
    """The argument with tensor(array, path) in place of its arrays, in the order of `_key`."""
    if _is_array(value):
        return tensor(value, path)
    if isinstance(value, (tuple, list)):
        items = [_opaque(item, f"{path}_{number}", tensor) for number, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {name: _opaque(item, f"{path}_{name}", tensor) for name, item in value.items()}
    fields = _fields(value)
    if fields is None:
        return value
    clone = copy.copy(value)
    for name, item in sorted(fields.items()):
        object.__setattr__(clone, name, _opaque(item, f"{path}_{name}", tensor))
    return clone


def _check_static_dmas(program: Program) -> None:
    """A DMA with prebuilt descriptors inside a runtime loop reaches internal tensors only (BIR251, BIR252)."""
    for core in range(program.lnc):
        for call in program.calls(core):
            if call.loop is None or call.args.get("dge_mode") is not dge_mode.none:
                continue
            for name, tensor, _ in call.tensors():
                if tensor.storage.kind in ("input", "output"):
                    rule = (
                        f"{name} is an argument or result of the kernel: not with dge_mode.none inside a runtime loop"
                    )
                    raise Refusal(rule, tensor=tensor).at(call)


def _outputs(results, program: Program):
    """What the kernel returned, checked: shared HBM tensors, the same ones on both cores; None where it writes one of
    its arguments."""
    first = results[0]
    if first is None and any(storage.written for storage in program.inputs):
        return None
    if isinstance(first, list):
        first = tuple(first)
    tensors = first if isinstance(first, tuple) else (first,)
    for tensor in tensors:
        if isinstance(tensor, NkiTensor) and tensor.storage.buffer == "private_hbm" and program.lnc == 1:
            # The documentation disagrees with itself: its tutorials do, its migration guide calls it an error.
            program.note("a kernel returns tensors in shared_hbm, this one is in private_hbm", tensor.storage.source)
            tensor.storage.buffer = "shared_hbm"
        if not isinstance(tensor, NkiTensor) or tensor.storage.buffer != "shared_hbm":
            raise Refusal("a kernel returns tensors in shared_hbm, one or a tuple", returned=tensor)
        if tensor.storage.kind == "internal":
            tensor.storage.kind = "output"
    for other in results[1:]:
        twins = tuple(other) if isinstance(other, (list, tuple)) else (other,)
        if [t.storage for t in twins] != [t.storage for t in tensors]:
            raise Refusal("both cores return the same tensors", core0=tensors, core1=twins)
    return first
