"""One description per instruction: signature, operand rules, engine, cost and NumPy meaning in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from . import context
from .enums import engine as engines


class NkiValidationError(Exception):
    """Raised where the documentation says that hardware, verifier or compiler refuses."""


class Refusal(NkiValidationError):
    """A rule that a kernel breaks: the rule in words, then the values that break it.

    The tracer adds the instruction's name and the kernel's source line.
    """

    def __init__(self, rule: str, **values):
        super().__init__(rule)
        self.rule = rule
        self.values = values
        self.where = ""

    def at(self, call: Call) -> Refusal:
        """This refusal with the place of `call`, unless it has one already."""
        self.where = self.where or f"{call.source}: nisa.{call.instruction.name}: "
        return self

    def __str__(self):
        values = ", ".join(f"{name}={value}" for name, value in self.values.items())
        return f"{self.where}{self.rule}" + (f" ({values})" if values else "")


class OpaqueUse(Refusal, TypeError):
    """Python looked at a value that exists only while the program runs."""


class Instruction:
    """What is known of one instruction; calling it while tracing appends a `Call` to the program.

    writes, reads: the parameters that may hold tensors (a parameter in both is read before it is written).
    engine: an `enums.engine` or a function of the call. cycles: busy cycles as a function of the call, None for DMA.
    may_write(call): true where elements of the destination can be left untouched, so that it counts as written only
    if it was before.
    """

    def __init__(self, body, writes, reads, engine, check, cycles, may_write):
        self.body = body
        self.name = body.__name__
        self.__name__ = body.__name__
        self.__doc__ = body.__doc__
        self.__signature__ = inspect.signature(body)
        self.parameters = tuple(self.__signature__.parameters)
        self.defaults = {
            name: parameter.default
            for name, parameter in self.__signature__.parameters.items()
            if parameter.default is not inspect.Parameter.empty
        }
        self.writes = tuple(writes.split())
        self.reads = tuple(reads.split())
        self.engine = engine
        self.check = check
        self.cycles = cycles
        self.may_write = may_write

    def __repr__(self):
        return f"nisa.{self.name}"

    def bind(self, args: tuple, kwargs: dict) -> dict:
        """The arguments by name, in the signature's order, defaults filled in."""
        if len(args) > len(self.parameters):
            raise Refusal("too many positional arguments", given=len(args), signature=self.__signature__)
        given = dict(zip(self.parameters, args))
        for name, value in kwargs.items():
            if name not in self.parameters:
                raise Refusal(f"unknown keyword argument {name!r}", signature=self.__signature__)
            if name in given:
                raise Refusal(f"argument {name!r} is given twice")
            given[name] = value
        bound = {}
        for name in self.parameters:
            if name in given:
                bound[name] = given[name]
            elif name in self.defaults:
                bound[name] = self.defaults[name]
            else:
                raise Refusal(f"missing argument {name!r}", signature=self.__signature__)
        return bound

    def __call__(self, *args, **kwargs):
        return context.current(self.name).emit(self, args, kwargs)


class Call:
    """One instruction of a program with its arguments; arguments are also attributes (`call.dst`)."""

    __slots__ = (
        "args", "core", "depends", "engine", "index", "instruction", "loop", "note", "offsets", "operands", "region",
        "source",
    )  # fmt: skip

    def __init__(self, instruction: Instruction, args: dict, tracer, source: str):
        self.instruction = instruction
        self.args = args
        self.source = source
        self.core = tracer.core
        self.index = -1
        self.engine = engines.unknown
        self.loop = tracer.loops[-1] if tracer.loops else None
        self.region = tracer.region  # the no_reorder block it stands in
        self.depends = []
        self.note = lambda text: tracer.note(f"nisa.{instruction.name}: {text}", source)
        # Every pass over a program asks for these.
        self.operands = tuple(self._operands())
        self.offsets = tuple(self._offsets())

    def __getattr__(self, name):
        try:
            return self.args[name]
        except KeyError:
            raise AttributeError(f"{self.instruction!r} has no argument {name!r}") from None

    def tensors(self) -> tuple[tuple, ...]:
        """(parameter, tensor, "read" | "write") for every tensor operand, reads first (offsets: `indices`)."""
        return self.operands

    def indices(self) -> tuple[tuple, ...]:
        """(parameter, offset tensor) of every dynamically addressed operand whose offset lies in memory."""
        return self.offsets

    def _operands(self) -> Iterator[tuple]:
        for names, access in ((self.instruction.reads, "read"), (self.instruction.writes, "write")):
            for name in names:
                value = self.args[name]
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if getattr(tensor, "storage", None) is not None:
                        yield name, tensor, access

    def _offsets(self) -> Iterator[tuple]:
        for name, tensor, _ in self.operands:
            for offset in (tensor.scalar_offset, tensor.vector_offset):
                if getattr(offset, "storage", None) is not None:
                    yield name, offset

    def storages(self, access: str | None = None) -> Iterator:
        """Every storage that the call reads or writes, or only one of these; offsets are read."""
        for _, tensor, how in self.tensors():
            if access in (None, how):
                yield tensor.storage
        if access != "write":
            for _, offset in self.indices():
                yield offset.storage

    @property
    def cycles(self) -> float | None:
        """Busy cycles of the engine by the documented rate, None for DMA and control."""
        return None if self.instruction.cycles is None else self.instruction.cycles(self)


class NkiInstruction:
    """Opaque handle of a traced instruction."""

    __slots__ = ("call",)

    def __init__(self, call: Call):
        self.call = call

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Adds scheduling edges: this instruction runs after each producer. Returns self."""
        context.current("depends_on").add_edges(self.call, [producer.call for producer in producers])
        return self


def instruction(
    writes: str = "",
    reads: str = "",
    engine=engines.unknown,
    check: Callable[[Call], None] | None = None,
    cycles: Callable[[Call], float] | None = None,
    may_write: Callable[[Call], bool] | None = None,
):
    """Turns a function with the documented signature and a NumPy body into an `Instruction`."""
    return lambda body: Instruction(body, writes, reads, engine, check, cycles, may_write)


def operand_rule(check: Callable[[Call], None]) -> Callable[[Call], None]:
    """Registers a check that runs on every call of every instruction, before the instruction's own."""
    operand_rules.append(check)
    return check


operand_rules: list[Callable[[Call], None]] = []
