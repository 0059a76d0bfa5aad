"""Which kernel is being traced, and which of its lines is running."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))

# `name = ...`, where the kernel allocates or up to three helpers further out.
_ASSIGNMENT = re.compile(r"\s*(\w+) = ")
_MAX_CALLERS = 4

tracers: list = []


def current(what: str):
    """The tracer of the kernel being traced."""
    if not tracers:
        raise RuntimeError(f"{what} outside a kernel: it exists only while a kernel is traced")
    return tracers[-1]


def tracing() -> bool:
    return bool(tracers)


def note(text: str) -> None:
    """Records something risky in the program's notes; an error under strict."""
    if tracers:
        tracers[-1].note(text)


running: list = []  # programs being run


def kernel_line() -> str:
    """file:line of the innermost frame outside the emulator."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "?"


def source_line(place: str) -> str:
    """The text of a line named file:line."""
    file, _, line = place.rpartition(":")
    return linecache.getline(file, int(line))


def assigned_name() -> str | None:
    """The variable that the kernel's running line assigns to, or the line that called it: a name for messages only."""
    frame = sys._getframe(1)
    for _ in range(_MAX_CALLERS):
        while frame is not None and frame.f_code.co_filename.startswith(HERE):
            frame = frame.f_back
        if frame is None:
            return None
        found = _ASSIGNMENT.match(linecache.getline(frame.f_code.co_filename, frame.f_lineno))
        if found:
            return found[1]
        frame = frame.f_back
    return None


def raising_kernel_line(error: BaseException) -> str:
    """file:line of the innermost frame outside the emulator that an exception passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(HERE)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
