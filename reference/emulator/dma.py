"""What a DMA instruction moves: bytes to and from HBM, descriptors, and the time of the engines that walk them."""

from __future__ import annotations

import math
from typing import NamedTuple

from .enums import dge_mode as dge_modes
from .instruction import Call
from .machine import Machine
from .tensor import NkiTensor


class Transfer(NamedTuple):
    """One DMA instruction. `engine_seconds` is the sum over the DMA engines; `shares` says how they divide it."""

    read_bytes: int
    written_bytes: int
    descriptors: int
    descriptor_bytes: float
    engine_seconds: float
    shares: tuple[float, ...]
    descriptor_source: str  # "static", "hwdge" or "swdge"
    rows: int  # gathered or scattered by index


def transfer(call: Call, machine: Machine, share: float = 1.0) -> Transfer:
    """What the DMA instruction `call` moves on one core of `machine`, where it moves `share` of its rows."""
    sources = [tensor for _, tensor, access in call.tensors() if access == "read"]
    target = next(tensor for _, tensor, access in call.tensors() if access == "write")
    moved = max(sum(map(_bytes, sources)), _bytes(target))
    descriptors = sum(_descriptors(source, target) for source in sources)
    size = moved / descriptors
    bandwidth = float(machine.dma_engine_bandwidth)
    if call.instruction.name == "dma_transpose":
        # The published shares already hold for rows as short as a head.
        bandwidth *= machine.transpose_from_hbm if sources[0].is_hbm else machine.transpose_from_sbuf
    else:
        bandwidth *= machine.efficiency(size)
    indices = [tensor.vector_offset for tensor in (*sources, target) if tensor.vector_offset is not None]
    return Transfer(
        read_bytes=round(share * sum(_bytes(source) for source in sources if source.is_hbm)),
        written_bytes=round(share * _bytes(target)) if target.is_hbm else 0,
        descriptors=round(share * descriptors),
        descriptor_bytes=size,
        engine_seconds=share * moved / bandwidth,
        shares=_shares(target if target.is_onchip else sources[0], machine),
        descriptor_source=_descriptor_source(call, (*sources, target)),
        rows=round(share * indices[0].shape[0] * indices[0].shape[1]) if indices else 0,
    )


def _bytes(tensor: NkiTensor) -> int:
    return tensor.size * tensor.itemsize


def contiguous_elements(tensor: NkiTensor) -> int:
    """Elements in a row that are walked without a jump; a partition or a gathered row ends a run."""
    free = tensor.pattern[1:] if tensor.is_onchip or tensor.vector_offset is not None else tensor.pattern
    run = 1
    for stride, count in reversed(free):
        if count > 1:
            if stride != run:
                break
            run *= count
    return run


def _descriptors(source: NkiTensor, target: NkiTensor) -> int:
    """Pieces that are contiguous on both sides: the two sequences of run ends, merged."""
    a, b = contiguous_elements(source), contiguous_elements(target)
    size = min(source.size, target.size)
    return size // a + size // b - size // math.lcm(a, b)


def _shares(tensor: NkiTensor, machine: Machine) -> tuple[float, ...]:
    """An engine serves the partitions of its number; between HBM and HBM all share alike (UNVERIFIED)."""
    engines = int(machine.dma_engines)
    if not tensor.is_onchip:
        return (1 / engines,) * engines
    shares = [0.0] * engines
    for partition in range(tensor.start_partition, tensor.start_partition + tensor.num_partitions):
        shares[partition // int(machine.dma_engine_partitions) % engines] += 1 / tensor.num_partitions
    return tuple(shares)


def _descriptor_source(call: Call, tensors: tuple[NkiTensor, ...]) -> str:
    """Who writes the descriptors: GpSimd for gathers, the hardware unit for addresses that only the run knows."""
    mode = call.args.get("dge_mode", dge_modes.unknown)
    if mode is dge_modes.swdge or any(tensor.vector_offset is not None for tensor in tensors):
        return "swdge"
    dynamic = any(tensor.scalar_offset is not None for tensor in tensors)
    in_loop = call.loop is not None and any(tensor.storage.kind != "internal" for tensor in tensors)
    return "hwdge" if mode is dge_modes.hwdge or dynamic or in_loop else "static"
