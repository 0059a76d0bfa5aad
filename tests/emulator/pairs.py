"""Pairs of kernels for the reject list: one that is refused, and its twin, which differs in one place and runs."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest

from draft_verify.reference import emulator

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]


class Pair(NamedTuple):
    """kernel(*arrays, wrong); the rule that refuses the wrong one while it is traced, or while it runs."""

    kernel: object
    rule: str
    arrays: tuple[np.ndarray, ...]
    run_time: bool


class Rows(dict):
    """Rows of the reject list by name, each with its pair."""

    def row(self, name, rule, *arrays, run_time=False):
        def register(kernel):
            self[name] = Pair(kernel, rule, arrays, run_time)
            return kernel

        return register

    def check(self, name, lnc=1):
        """The wrong kernel is refused by its rule, with a line of the kernel; the twin runs."""
        pair = self[name]

        def launched(wrong):
            def build(*tensors):
                return pair.kernel(*tensors, wrong)

            return emulator.jit(build)[lnc]

        if pair.run_time:
            program = emulator.trace(launched(True), *pair.arrays, strict=True)
            with pytest.raises(emulator.Refusal, match=pair.rule) as refused:
                program.run(*[array.copy() for array in pair.arrays])
        else:
            with pytest.raises(emulator.Refusal, match=pair.rule) as refused:
                emulator.trace(launched(True), *pair.arrays, strict=True)
        assert re.search(r"tests/emulator/\w+\.py:\d+", str(refused.value)), "the kernel's line"
        emulator.simulate(launched(False), strict=True)(*[array.copy() for array in pair.arrays])


def output(shape=(128, 64), dtype=nl.float32):
    return nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)


def stored(tile):
    """The tile in a new result of the kernel."""
    out = output(tile.shape, tile.dtype)
    nl.store(out, nl.copy(tile) if tile.buffer == nl.psum else tile)
    return out


def register(tensor):
    """A register with the tensor's one element."""
    loaded = nisa.register_alloc()
    nisa.register_load(loaded, tensor)
    return loaded
