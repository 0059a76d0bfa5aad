"""Writes after reads of one HBM tensor with a run-time address, that nothing orders (nki-reference.md 6, row 28).

The compiler follows data through on-chip tiles, through HBM at fixed addresses and from writes to later reads. That it
keeps a write behind an earlier read of the same tensor, where one of them has a run-time address, is UNVERIFIED. Such
pairs are found from the program; whether they meet in the same bytes is seen at run time, and noted.
"""

from __future__ import annotations

import numpy as np

from .control import core_barrier
from .instruction import Call
from .opaque import VirtualRegister
from .program import Block, Loop, Program
from .tensor import NkiTensor, Storage


def find(program: Program) -> dict[Call, set[Call]]:
    """Each write with the earlier reads of its HBM tensor that nothing makes it wait for."""
    pairs: dict[Call, set[Call]] = {}
    for block in program.cores:
        suspects = _suspects(block)
        if suspects:
            _Order(suspects, pairs).block(block)
    return pairs


def _suspects(block: Block) -> set[Storage]:
    """HBM storages that are both read and written, somewhere at a run-time address."""
    seen: dict[str, set[Storage]] = {"read": set(), "write": set()}
    moving = set()
    for call in block.calls():
        for _, tensor, access in call.tensors():
            if tensor.is_hbm:
                seen[access].add(tensor.storage)
                if tensor.is_indirect():
                    moving.add(tensor.storage)
    return seen["read"] & seen["write"] & moving


class _Order:
    """Which reads of suspects each instruction is known to come after, as bit sets."""

    def __init__(self, suspects: set[Storage], pairs: dict[Call, set[Call]]):
        self.suspects = suspects
        self.pairs = pairs
        self.bits: dict[Call, int] = {}
        self.reads: dict[Storage, list[tuple[Call, bool]]] = {}
        # For each tile, register, fixed HBM address, instruction or region: the reads behind its writes and its reads.
        self.written: dict = {}
        self.read: dict = {}

    def block(self, block: Block) -> None:
        for item in block.items:
            if isinstance(item, Loop):
                # Twice, so that the end of an iteration meets the start of the next.
                self.block(item.body)
                self.block(item.body)
            else:
                self.call(item)

    def call(self, call: Call) -> None:
        used, set_ = self._keys(call)
        behind = 0
        for key in used:
            behind |= self.written.get(key, 0)
        for key in set_:
            behind |= self.written.get(key, 0) | self.read.get(key, 0)
        suspect = [(t, access, t.is_indirect()) for _, t, access in call.tensors() if t.storage in self.suspects]
        for tensor, access, moves in suspect:
            for read, read_moves in self.reads.get(tensor.storage, ()) if access == "write" else ():
                if (moves or read_moves) and read is not call and not behind & self.bits[read]:
                    self.pairs.setdefault(call, set()).add(read)
        for tensor, access, moves in suspect:
            if access == "read":
                self.bits.setdefault(call, 1 << len(self.bits))
                self.reads.setdefault(tensor.storage, []).append((call, moves))
        behind |= self.bits.get(call, 0)
        for key in used:
            self.read[key] = self.read.get(key, 0) | behind
        for key in (*set_, call):
            self.written[key] = self.written.get(key, 0) | behind

    def _keys(self, call: Call) -> tuple[set, set]:
        """What the call reads, and what it writes or stands in line with: tiles, registers, fixed HBM addresses."""
        used: set = {tensor.storage for _, tensor in call.indices()} | set(call.depends)
        set_: set = {call.region} - {None}
        for _, tensor, access in call.tensors():
            if not (tensor.is_indirect() and tensor.storage in self.suspects):
                (set_ if access == "write" else used).add(tensor.storage)
            if isinstance(tensor.scalar_offset, VirtualRegister):
                used.add(tensor.scalar_offset)
        for name, value in call.args.items():
            if isinstance(value, VirtualRegister):
                (set_ if name == "dst" else used).add(value)
        if call.instruction is core_barrier:
            set_.add(call.data.storage)
        return used, set_


def runs(tensor: NkiTensor, offset: int, rows: np.ndarray | None) -> tuple[np.ndarray, int]:
    """The contiguous runs of bytes that an access touches: their starts, sorted, and their length."""
    shape, strides = list(tensor.shape), list(tensor.strides)
    length = 1
    while shape and strides[-1] in (length, 0) and (len(shape) > 1 or rows is None):
        length *= shape.pop() if strides.pop() else 1
    starts = np.array([tensor.offset + offset], np.int64)
    if rows is not None:
        starts = starts + rows * tensor.index_stride
        shape, strides = shape[1:], strides[1:]
    for size, stride in zip(shape, strides):
        starts = np.add.outer(starts, np.arange(size) * stride).reshape(-1)
    return np.sort(starts) * tensor.itemsize, length * tensor.itemsize


def meet(one: tuple[np.ndarray, int], other: tuple[np.ndarray, int]) -> bool:
    """Whether two sets of runs share a byte."""
    (starts, length), (others, other_length) = one, other
    if not len(starts) or not len(others):
        return False
    at = np.searchsorted(others, starts)
    following = others[np.minimum(at, len(others) - 1)] - starts
    preceding = starts - others[np.maximum(at - 1, 0)]
    return bool((((following >= 0) & (following < length)) | ((preceding >= 0) & (preceding < other_length))).any())
