"""Known-wrong variants of our own sources: each must make the named tests fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, a text that stands once in `file`, becomes `new`; then one of `tests` (pytest node ids) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
