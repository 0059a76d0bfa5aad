"""Values that exist only while a program runs: Python may pass them on, never look at them."""

from __future__ import annotations

from .instruction import OpaqueUse


def _refuse(kind: str, operation: str):
    raise OpaqueUse(f"the value of a {kind} is not known while the kernel is traced: no {operation} on it")


class Opaque:
    """Mixin that refuses every operation that would need the value."""

    __slots__ = ()
    kind = "value"

    def __eq__(self, other):
        if other is None:
            return False
        return self is other or _refuse(self.kind, "comparison")

    def __ne__(self, other):
        return not self == other

    __hash__ = object.__hash__


def _refuser(operation):
    return lambda self, *args: _refuse(self.kind, operation)


for _names, _operation in {
    "bool": "Python `if`, `while`, `and`, `or` or `not`",
    "int float index complex round trunc floor ceil": "conversion to a Python number",
    "iter contains len": "iteration, `in` or len()",
    "lt le gt ge": "comparison",
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul lshift rlshift "
    "rshift rrshift and rand or ror xor rxor neg pos invert abs divmod rdivmod": "Python arithmetic",
    "setitem": "assignment to a slice (use an instruction whose dst it is)",
}.items():
    for _name in _names.split():
        setattr(Opaque, f"__{_name}__", _refuser(_operation))


class VirtualRegister(Opaque):
    """A 32-bit register of the engines' sequencers. `value` belongs to the running program."""

    __slots__ = ("core", "frozen", "index", "value")
    kind = "register"

    def __init__(self, index: int, core: int, frozen: bool = False):
        self.index = index
        self.core = core
        self.frozen = frozen
        self.value = None

    def __repr__(self):
        return f"r{self.index}"

    def __getitem__(self, key):
        _refuse(self.kind, "indexing")
