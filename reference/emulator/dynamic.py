"""Run-time addresses: offsets from registers and tensors, gathers, scatters, and masks of what a run has written."""

from __future__ import annotations

import numpy as np

from . import context, hazards, initialisation
from .instruction import Call, Refusal
from .memory import POISON, Memory, Place, Written, strided
from .opaque import VirtualRegister
from .program import Program
from .races import Contention
from .tensor import NkiTensor


class _OutOfBounds(Exception):
    """A dynamic access leaves its tensor."""

    def __init__(self, tensor: NkiTensor, index: int, limit: int):
        self.tensor, self.index, self.limit = tensor, index, limit


class Step:
    """Runs one call whose operands move or are tracked: resolves addresses, checks, runs the body, writes back."""

    def __init__(self, call: Call, args: list, moving: list, memory: Memory):
        """moving: (list, position, tensor) of the dynamically addressed operands inside `args`."""
        self.call, self.args, self.memory = call, args, memory
        self.skip = getattr(call.args.get("oob_mode"), "name", "error") == "skip"
        self.scalars = [entry for entry in moving if entry[2].scalar_offset is not None]
        self.vectors = [entry for entry in moving if entry[2].vector_offset is not None]
        operands = list(call.tensors())
        self.written = [tensor for _, tensor, access in operands if access == "write"]
        self.tracked_reads = [(name, t) for name, t, access in operands if access == "read" and t.storage.tracked]
        self.tracked_reads += [(f"the offset of {name}", t) for name, t in call.indices() if t.storage.tracked]
        self.contended = [(tensor, access == "write") for _, tensor, access in operands if tensor.storage.contended]

        self.overtakes = memory.unordered.get(call, ())
        self.watched = []
        if any(call in reads for reads in memory.unordered.values()):
            self.watched = [tensor for _, tensor, access in operands if access == "read" and tensor.is_hbm]

    def __call__(self):
        try:
            self.run()
        except _OutOfBounds as fault:
            if not self.skip:
                raise Refusal("run-time offset out of bounds", tensor=fault.tensor, offset=fault.index,
                              limit=fault.limit) from None  # fmt: skip

    def run(self):
        memory = self.memory
        offsets: dict[int, int] = {}
        rows: dict[int, np.ndarray] = {}
        finish = []
        for holder, position, tensor in self.scalars:
            offsets[id(tensor)] = offset = scalar_offset(tensor, memory)
            holder[position] = memory.view(tensor, offset)
        for holder, position, tensor in self.vectors:
            index = row_indices(tensor, memory)
            inside = index < row_limit(tensor)
            if not inside.all() and not self.skip:
                raise _OutOfBounds(tensor, int(index[~inside][0]), row_limit(tensor))
            if self.skip:
                count_moved(self.call, inside)
            rows[id(tensor)] = index[inside]
            holder[position] = value = np.zeros(tensor.shape, tensor.dtype.np)
            if self._reads(holder, position):
                value[inside] = row_view(memory, tensor)[index[inside]]
            if self._writes(holder, position):
                _refuse_duplicates(tensor, index[inside])
                finish.append((row_view(memory, tensor), index[inside], value, inside))
            elif not inside.all() and self.written[0].vector_offset is None:
                target = self._gathered_into(inside)
                rows[id(target)] = np.flatnonzero(inside)
                finish.append((memory.view(target), ~inside, memory.view(target).copy(), ~inside))
        for name, tensor in self.tracked_reads:
            _check_written(memory, name, tensor, offsets.get(id(tensor), 0), rows.get(id(tensor)))
        self.call.instruction.body(*self.args)
        for destination, at, value, select in finish:
            destination[at] = value[select]
        for tensor in self.written:
            if tensor.storage.tracked:
                mark(memory.written[tensor.storage], tensor, offsets.get(id(tensor), 0), rows.get(id(tensor)))
        for tensor, write in self.contended:
            at = rows.get(id(tensor))
            place = Place(tensor, offsets.get(id(tensor), 0), at, 0 if at is None else row_limit(tensor))
            memory.contention[tensor.storage].record(self.call, write, place, memory.bytes[tensor.storage])
        if self.watched:
            memory.last_read[self.call] = [
                (t.storage, hazards.runs(t, offsets.get(id(t), 0), rows.get(id(t)))) for t in self.watched
            ]
        for tensor in self.written if self.overtakes else ():
            self._check_order(tensor, hazards.runs(tensor, offsets.get(id(tensor), 0), rows.get(id(tensor))))

    def _check_order(self, tensor: NkiTensor, written) -> None:
        for read in self.overtakes:
            for storage, bytes_read in self.memory.last_read.get(read, ()):
                if storage is tensor.storage and hazards.meet(bytes_read, written):
                    self.call.note(f"nothing keeps this write behind the read of the same bytes at {read.source}: "
                                   "use nl.no_reorder() or another tensor")  # fmt: skip

    def _writes(self, holder: list, position: int) -> bool:
        """One tensor may be both a source and the destination: what counts is the parameter, lists are only read."""
        instruction = self.call.instruction
        return holder is self.args and instruction.parameters[position] in instruction.writes

    def _reads(self, holder: list, position: int) -> bool:
        instruction = self.call.instruction
        return holder is not self.args or instruction.parameters[position] in instruction.reads

    def _gathered_into(self, inside: np.ndarray) -> NkiTensor:
        """The destination of a gather that skips rows: its partitions without a row stay as they were."""
        target = self.written[0]
        if target.is_indirect() or target.shape[0] != len(inside):
            raise Refusal("a gather that skips rows writes one row per partition", dst=target)
        return target


def count_moved(call: Call, inside: np.ndarray) -> None:
    """Records how many rows the running program's DMA moves."""
    moved = context.running[-1].moved
    rows, addressed = moved.get(call, (0, 0))
    moved[call] = rows + int(inside.sum()), addressed + inside.size


def skips_rows(call: Call) -> bool:
    """Whether the DMA leaves out rows whose index is out of range."""
    skip = getattr(call.args.get("oob_mode"), "name", "error") == "skip"
    return skip and any(tensor.vector_offset is not None for _, tensor, _ in call.tensors())


def probe(call: Call, memory: Memory) -> None:
    """Stands in for a DMA that skips rows: counts what it would move, and moves nothing."""
    for _, tensor, _ in call.tensors():
        if tensor.vector_offset is not None:
            count_moved(call, row_indices(tensor, memory) < row_limit(tensor))


def scalar_offset(tensor: NkiTensor, memory: Memory) -> int:
    """Elements that the dynamic offset moves the tensor by; raises _OutOfBounds."""
    source = tensor.scalar_offset
    index = source.value if isinstance(source, VirtualRegister) else int(memory.view(source).reshape(-1)[0])
    limit = tensor.index_bound
    if limit is None:
        limit = _reach(tensor, tensor.pattern)
    if not 0 <= index < limit:
        raise _OutOfBounds(tensor, index, limit)
    return index * tensor.index_stride


def _reach(tensor: NkiTensor, pattern) -> int:
    """The first index that would move a pattern past the end of its storage (on chip: of its partition)."""
    offset, size = tensor.offset, tensor.storage.nbytes // tensor.itemsize
    if tensor.is_onchip:
        offset, size, pattern = offset % tensor.partition_elements, tensor.partition_elements, pattern[1:]
    last = offset + sum((count - 1) * stride for stride, count in pattern)
    return (size - 1 - last) // tensor.index_stride + 1 if tensor.index_stride else 1


def row_indices(tensor: NkiTensor, memory: Memory) -> np.ndarray:
    """Row of each partition, in the order of the index tensor's columns; negative ones count as huge."""
    columns = memory.view(tensor.vector_offset).reshape(tensor.vector_offset.shape[0], -1)
    index = columns.T.reshape(-1)[: tensor.shape[0]]
    return index.astype(np.uint32).astype(np.int64)


def row_limit(tensor: NkiTensor) -> int:
    return min(tensor.index_bound, _reach(tensor, tensor.pattern[1:]))


def row_view(memory: Memory, tensor: NkiTensor) -> np.ndarray:
    """[rows, ...]: what each possible row index addresses."""
    shape = (row_limit(tensor), *tensor.shape[1:])
    return strided(
        memory.bytes[tensor.storage], tensor, tensor.offset, shape, (tensor.index_stride, *tensor.strides[1:])
    )


def _refuse_duplicates(tensor: NkiTensor, index: np.ndarray) -> None:
    values, counts = np.unique(index, return_counts=True)
    if (counts > 1).any():
        raise Refusal("scatter to one row twice: which one stays is undefined", tensor=tensor,
                      row=int(values[counts > 1][0]))  # fmt: skip


def _check_written(memory: Memory, name: str, tensor: NkiTensor, offset: int, rows) -> None:
    state = memory.written[tensor.storage]
    if rows is not None:
        ok = state.everything or bool(_row_mask(state, tensor)[rows].all())
    else:
        ok = state.covers(tensor, offset)
    if not ok:
        raise Refusal(f"{name} reads what was never written", tensor=tensor)


def _row_mask(state: Written, tensor: NkiTensor) -> np.ndarray:
    """The mask of what each row index of a view addresses: of the storage for a gather, else of the view's rows."""
    shape, strides = tensor.shape, tensor.strides
    if tensor.vector_offset is not None:
        shape, strides = (row_limit(tensor), *shape[1:]), (tensor.index_stride, *strides[1:])
    return state.region(NkiTensor(tensor.storage, shape, strides, tensor.offset, tensor.dtype))


def mark(state: Written, tensor: NkiTensor, offset: int = 0, rows=None) -> None:
    """Records an access, to some rows or to all of the view."""
    if rows is None:
        state.add(tensor, offset)
    elif not state.everything:
        mask = _row_mask(state, tensor)
        for row in rows:
            if not state.everything:
                state.add_region(mask[row])


def reset(program: Program, memory: Memory) -> None:
    """At the start of a run nothing is written but arguments and constants."""
    memory.last_read.clear()
    for storage in program.storages:
        if storage.shows_unwritten and storage.kind != "input" and storage in memory.bytes:
            memory.bytes[storage][:] = POISON
        if storage.tracked:
            memory.written[storage] = Written(storage, storage.kind == "input" or storage.constant is not None)
        if storage.contended:
            memory.contention[storage] = Contention(storage)


def check_end(program: Program, memory: Memory) -> None:
    """At the end of a run: no race since the last barrier, and every output whole."""
    for contention in memory.contention.values():
        contention.check()
    for tensor in program.output_tensors():
        if tensor.storage.tracked:
            initialisation.check_output(tensor, memory.written[tensor.storage])
