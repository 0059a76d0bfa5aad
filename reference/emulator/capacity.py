"""SBUF, PSUM and registers: what is live at once must fit, tensors at chosen addresses must not overwrite live ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .instruction import Refusal
from .machine import trn2
from .opaque import VirtualRegister
from .program import Block, Loop, Program
from .tensor import PARTITIONS, Storage

SBUF_BYTES = int(trn2.sbuf_bytes)
PSUM_BANKS = int(trn2.psum_banks)
PSUM_BANK_BYTES = int(trn2.psum_bank_bytes)
SBUF_ALIGN = 32
REGISTERS = int(trn2.registers)


def lifetimes(block: Block) -> dict[Storage, tuple[int, int]]:
    """First and last call that touches each storage; what a loop uses from outside lives through the loop."""
    spans: dict[Storage, tuple[int, int]] = {}
    for call in block.calls():
        for storage in call.storages():
            first = last = call.index
            if call.loop is not None and storage.loop is not call.loop:
                first, last = call.loop.first, call.loop.last - 1
            start, end = spans.get(storage, (first, last))
            spans[storage] = (min(start, first), max(end, last))
    return spans


def sbuf_bytes(storage: Storage) -> int:
    """Bytes that a tensor takes of each partition."""
    return -(-storage.partition_bytes // SBUF_ALIGN) * SBUF_ALIGN


def psum_banks(storage: Storage) -> int:
    return -(-storage.partition_bytes // PSUM_BANK_BYTES)


@dataclass
class Peak:
    """The most that is live at once, where, and what it consists of."""

    amount: int = 0
    index: int = 0
    storages: tuple[Storage, ...] = ()


def peak(block: Block, buffer: str) -> Peak:
    """Peak use of a core's "sbuf" in bytes a partition, or of its "psum" in banks, in program order.

    Pessimistic: padding as above, every tensor counted on all partitions; a tensor at a chosen address counts where it
    lies, so that tensors which share an address by choice count once.
    """
    size = sbuf_bytes if buffer == "sbuf" else psum_banks
    unit = 1 if buffer == "sbuf" else PSUM_BANK_BYTES
    spans = {storage: span for storage, span in lifetimes(block).items() if storage.buffer == buffer}
    starts: dict[int, list] = {}
    ends: dict[int, list] = {}
    for storage, (first, last) in spans.items():
        starts.setdefault(first, []).append(storage)
        ends.setdefault(last, []).append(storage)
    live: dict[Storage, None] = {}
    automatic = 0
    best = Peak()
    for index in sorted({*starts, *ends}):
        for storage in starts.get(index, ()):
            live[storage] = None
            automatic += size(storage) if storage.address is None else 0
        placed = {s.address[1] // unit: size(s) for s in live if s.address is not None} if index in starts else {}
        amount = automatic + sum(placed.values())
        if amount > best.amount:
            best = Peak(amount, index, tuple(live))
        for storage in ends.get(index, ()):
            del live[storage]
            automatic -= size(storage) if storage.address is None else 0
    return best


def peak_registers(block: Block) -> int:
    """The most registers that hold a value at once on a core, each from its first use to its last.

    Pessimistic: as if one sequencer held them all.
    """
    changes: dict[int, int] = {}
    spans: dict[VirtualRegister, tuple[int, int]] = {}
    for register, first, last in _register_uses(block):
        start, end = spans.get(register, (first, last))
        spans[register] = (min(start, first), max(end, last))
    for first, last in spans.values():
        changes[first] = changes.get(first, 0) + 1
        changes[last + 1] = changes.get(last + 1, 0) - 1
    live = most = 0
    for index in sorted(changes):
        live += changes[index]
        most = max(most, live)
    return most


def _register_uses(block: Block) -> Iterator[tuple[VirtualRegister, int, int]]:
    """(register, first call, last call) of each use: all of a loop for its own, and for what its body uses."""
    for item in block.items:
        if isinstance(item, Loop):
            used = [item.register, item.lower, item.upper, item.condition, item.next_condition]
            used += [register for register, _, _ in _register_uses(item.body)]
            first, last = item.first, item.last - 1
        else:
            used = [*item.args.values(), *(tensor.scalar_offset for _, tensor, _ in item.tensors())]
            first = last = item.index
        for register in used:
            if isinstance(register, VirtualRegister):
                yield register, first, last


def check(program: Program) -> None:
    """Refuses a program that needs more SBUF or PSUM than there is, or puts live tensors over one another.

    More registers than there are is a note: the compiler allocates them, and no document says what it does then.
    """
    for core, block in enumerate(program.cores):
        for buffer, limit, what in (("sbuf", SBUF_BYTES, "bytes a partition"), ("psum", PSUM_BANKS, "banks")):
            most = peak(block, buffer)
            if most.amount > limit:
                where = next(call.source for call in block.calls() if call.index >= most.index)
                largest = sorted(most.storages, key=lambda storage: -storage.partition_bytes)[:4]
                refusal = Refusal(f"{buffer.upper()} is full: more {what} are live at once than there are", core=core,
                                  live=most.amount, limit=limit,
                                  largest=[f"{s} {s.source}" for s in largest])  # fmt: skip
                refusal.where = f"{where}: "
                raise refusal
        registers = peak_registers(block)
        if registers > REGISTERS:
            program.notes.append(
                f"core {core}: {registers} registers are live at once, an engine has {REGISTERS}: UNVERIFIED"
            )
        _check_addresses(block)


def _check_addresses(block: Block) -> None:
    spans = [(storage, span) for storage, span in lifetimes(block).items() if storage.address is not None]
    for storage, _ in spans:
        _check_address(storage)
    spans.sort(key=lambda entry: entry[1][0])
    live: list = []
    for storage, (first, last) in spans:
        live = [(other, end) for other, end in live if end >= first]
        for other, _ in live:
            if _overlap(storage, other):
                raise _refusal(
                    storage, "lies over a tensor that is still in use", other=_place(other), other_source=other.source
                )
        live.append((storage, last))


def _check_address(storage: Storage) -> None:
    partition, byte = storage.address
    limit = SBUF_BYTES if storage.buffer == "sbuf" else PSUM_BANKS * PSUM_BANK_BYTES
    if partition < 0 or partition + storage.shape[0] > PARTITIONS or byte < 0 or byte + storage.partition_bytes > limit:
        raise _refusal(storage, "lies outside its memory", limit=limit)
    if storage.buffer == "psum" and byte % PSUM_BANK_BYTES:
        raise _refusal(storage, "PSUM tensor at a chosen address begins at a bank", bank_bytes=PSUM_BANK_BYTES)
    if byte % storage.dtype.itemsize:
        raise _refusal(storage, "is not aligned to its dtype")


def _overlap(a: Storage, b: Storage) -> bool:
    return (
        a.buffer == b.buffer
        and a.address[0] < b.address[0] + b.shape[0]
        and b.address[0] < a.address[0] + a.shape[0]
        and a.address[1] < b.address[1] + b.partition_bytes
        and b.address[1] < a.address[1] + a.partition_bytes
    )


def _place(storage: Storage) -> str:
    return f"{storage.name}{list(storage.shape)} {storage.dtype} at {storage.address}"


def _refusal(storage: Storage, rule: str, **values) -> Refusal:
    refusal = Refusal(f"{_place(storage)} {rule}", **values)
    refusal.where = f"{storage.source}: "
    return refusal
