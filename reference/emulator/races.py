"""Races between the two cores of an LNC pair, and between indirect DMAs and what may be reordered around them."""

from __future__ import annotations

from .instruction import Call
from .program import Program


def counterparts(first: Call, second: Call) -> bool:
    """Whether two cross-core instructions are the two sides of one meeting."""
    if first.instruction is not second.instruction:
        return False
    if first.instruction.name == "core_barrier":
        return first.data.storage is second.data.storage and first.args["engine"] is second.args["engine"]
    return (
        first.pipe_id == second.pipe_id
        and first.args["dma_engine"] is second.args["dma_engine"]
        and (first.src.shape, first.src.dtype) == (second.dst.shape, second.dst.dtype)
    )


def check(program: Program) -> None:
    pass
