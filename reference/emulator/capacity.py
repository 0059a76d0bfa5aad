"""SBUF and PSUM: what is live at once must fit, tensors at chosen addresses must not overwrite live ones."""

from __future__ import annotations

from dataclasses import dataclass

from .instruction import Refusal
from .machine import trn2
from .program import Block, Program
from .tensor import PARTITIONS, Storage

SBUF_BYTES = int(trn2.sbuf_bytes)
PSUM_BANKS = int(trn2.psum_banks)
PSUM_BANK_BYTES = int(trn2.psum_bank_bytes)
SBUF_ALIGN = 32


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


def check(program: Program) -> None:
    """Refuses a program that needs more SBUF or PSUM than there is, or puts live tensors over one another."""
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
