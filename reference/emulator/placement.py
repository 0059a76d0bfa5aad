"""Where a compiler could put on-chip tensors, so that a schedule waits for memory before it is taken over."""

from __future__ import annotations

from . import capacity
from .program import Block
from .tensor import Storage


class Placement:
    """Address ranges of a core's tensors: the space freed longest ago is reused first, in program order.

    `takes(storage)` names, each time a tensor is touched, the tensors that lay in its place since it was last there.
    Tensors that find no gap (the compiler would pack tighter) overlap with nothing.
    """

    def __init__(self, block: Block):
        self.ranges: dict[Storage, tuple[int, int]] = {}
        spans = capacity.lifetimes(block)
        for buffer, size in (("sbuf", capacity.SBUF_BYTES), ("psum", capacity.PSUM_BANKS)):
            of_buffer = {storage: span for storage, span in spans.items() if storage.buffer == buffer}
            self._place(of_buffer, size, capacity.sbuf_bytes if buffer == "sbuf" else capacity.psum_banks)
        self.resident: dict[str, dict[Storage, None]] = {"sbuf": {}, "psum": {}}

    def _place(self, spans: dict[Storage, tuple[int, int]], size: int, needed) -> None:
        live: dict[Storage, int] = {}
        cursor = 0
        for storage, (first, last) in sorted(spans.items(), key=lambda entry: entry[1][0]):
            live = {other: end for other, end in live.items() if end >= first}
            length = needed(storage)
            if storage.address is not None:
                unit = 1 if storage.buffer == "sbuf" else capacity.PSUM_BANK_BYTES
                start = storage.address[1] // unit
            else:
                start = self._gap(live, cursor, length, size)
            if start is not None:
                self.ranges[storage] = (start, start + length)
                live[storage] = last
                cursor = start + length

    def _gap(self, live: dict[Storage, int], cursor: int, length: int, size: int) -> int | None:
        """First free range of `length` from `cursor` on, around the end once."""
        taken = sorted(self.ranges[storage] for storage in live)
        for start, end in ((cursor, size), (0, size)):
            for low, high in [*taken, (end, end)]:
                if start + length <= low:
                    return start
                start = max(start, high)
        return None

    def takes(self, storage: Storage) -> list[Storage]:
        """The tensors whose memory this one takes over now."""
        resident = self.resident[storage.buffer]
        if storage in resident or storage not in self.ranges:
            return []
        low, high = self.ranges[storage]
        before = [other for other in resident if self.ranges[other][0] < high and low < self.ranges[other][1]]
        for other in before:
            del resident[other]
        resident[storage] = None
        return before
