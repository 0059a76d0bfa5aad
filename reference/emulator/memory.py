"""Bytes behind storages, views of them by a tensor's pattern, and which of them have been written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .tensor import NkiTensor, Storage

POISON = 0xFF  # NaN in every float dtype, -1 or the largest integer


def strided(memory: np.ndarray, tensor: NkiTensor, offset: int, shape=None, strides=None) -> np.ndarray:
    """A view of flat bytes by a tensor's pattern (or another one), in elements of the tensor's dtype."""
    size = tensor.itemsize
    return np.ndarray(
        shape or tensor.shape, tensor.dtype.np, memory, offset * size, [s * size for s in strides or tensor.strides]
    )


@dataclass(frozen=True)
class Place:
    """Where an operand lies in an array with one byte for each of its storage's: a pattern, or rows of one."""

    tensor: NkiTensor
    offset: int
    rows: np.ndarray | None
    num_rows: int  # rows that an index may name

    def _view(self, flat: np.ndarray) -> np.ndarray:
        tensor, size = self.tensor, self.tensor.itemsize
        shape, strides = tensor.shape, tensor.strides
        if self.rows is not None and tensor.vector_offset is not None:
            shape, strides = (self.num_rows, *shape[1:]), (tensor.index_stride, *strides[1:])
        return np.ndarray(
            (*shape, size), flat.dtype, flat, (tensor.offset + self.offset) * size, [*(s * size for s in strides), 1]
        )

    def get(self, flat: np.ndarray) -> np.ndarray:
        """A copy of the entries."""
        view = self._view(flat)
        return view.copy() if self.rows is None else view[self.rows]

    def put(self, flat: np.ndarray, values) -> None:
        self._view(flat)[... if self.rows is None else self.rows] = values


class Memory:
    """The bytes behind each storage. Those of arguments and results change from run to run."""

    def __init__(self):
        self.bytes: dict[Storage, np.ndarray] = {}
        self.written: dict[Storage, Written] = {}  # of the storages that are tracked at run time
        self.contention: dict[Storage, object] = {}  # races.Contention of the contended ones
        self.unordered: dict = {}  # a write's Call -> the reads' Calls it may overtake (hazards.find)
        self.last_read: dict = {}  # a read's Call -> [(storage, runs of bytes)] of its last execution
        self.bindings: dict[Storage, list] = {}  # (list, position, tensor) to be viewed anew when the bytes change

    def view(self, tensor: NkiTensor, offset: int = 0) -> np.ndarray:
        """The tensor's elements, `offset` elements further than its pattern says."""
        return strided(self.bytes[tensor.storage], tensor, tensor.offset + offset)

    def place(self, args: list, position: int, tensor: NkiTensor) -> None:
        """Puts the view into args[position], and again whenever the storage is bound to other bytes."""
        if tensor.storage in self.bindings:
            self.bindings[tensor.storage].append((args, position, tensor))
        else:
            args[position] = self.view(tensor)

    def bind(self, storage: Storage, array: np.ndarray) -> None:
        self.bytes[storage] = array.reshape(-1).view(np.uint8)
        for args, position, tensor in self.bindings[storage]:
            args[position] = self.view(tensor)


class Written:
    """Which elements of a storage have been written: nothing, everything, or a mask in units of `unit` bytes."""

    __slots__ = ("everything", "left", "mask", "storage", "unit")

    def __init__(self, storage: Storage, everything: bool = False):
        self.storage = storage
        self.everything = everything
        self.unit = storage.dtype.itemsize
        self.mask = None
        self.left = storage.size  # units not written yet

    def copy(self) -> Written:
        twin = Written(self.storage, self.everything)
        twin.unit, twin.left = self.unit, self.left
        twin.mask = None if self.mask is None else self.mask.copy()
        return twin

    def region(self, tensor: NkiTensor, offset: int = 0) -> np.ndarray:
        """The mask of what a tensor addresses."""
        if self.mask is None:
            self.mask = np.full(self.storage.nbytes // self.unit, self.everything)
        if tensor.itemsize % self.unit:
            self.mask = np.repeat(self.mask, self.unit // tensor.itemsize)
            self.left *= self.unit // tensor.itemsize
            self.unit = tensor.itemsize
        scale = tensor.itemsize // self.unit
        shape, strides = tensor.shape, tuple(stride * scale for stride in tensor.strides)
        if scale > 1:
            shape, strides = (*shape, scale), (*strides, 1)
        return np.ndarray(shape, bool, self.mask, (tensor.offset + offset) * scale, strides)

    def add(self, tensor: NkiTensor, offset: int = 0) -> None:
        """Everything the tensor addresses is written now."""
        if self.everything:
            return
        if self.mask is None and tensor.size * tensor.itemsize == self.storage.nbytes and 0 not in tensor.strides:
            self.everything = True
            return
        self.add_region(self.region(tensor, offset))

    def add_region(self, region: np.ndarray) -> None:
        if not region.all():
            before = int(np.count_nonzero(self.mask)) if 0 in region.strides else None
            new = region.size - int(np.count_nonzero(region))
            region[...] = True
            self.left -= new if before is None else int(np.count_nonzero(self.mask)) - before
            if self.left == 0:
                self.everything, self.mask = True, None

    def covers(self, tensor: NkiTensor, offset: int = 0) -> bool:
        if self.everything:
            return True
        return self.mask is not None and bool(self.region(tensor, offset).all())

    def first_missing(self, tensor: NkiTensor, offset: int = 0) -> tuple[int, ...]:
        """The index into the tensor of its first element that is not written."""
        missing = np.argwhere(~self.region(tensor, offset))
        return tuple(int(part) for part in missing[0][: tensor.ndim])
