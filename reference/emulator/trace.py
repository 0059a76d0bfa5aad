"""Tracing: Python runs once with opaque tensors and leaves a program."""

from __future__ import annotations

_tracers: list = []


def current(what: str):
    """The tracer of the kernel being traced."""
    if not _tracers:
        raise RuntimeError(f"{what} outside a kernel: instructions exist only while a kernel is traced")
    return _tracers[-1]


def note(text: str) -> None:
    """Records something risky in the program's notes; an error under strict."""
    if _tracers:
        _tracers[-1].note(text)
