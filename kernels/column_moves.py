"""Rows of windows on their way into transposed keys, as columns of neighbours."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import ABSENT, cache_row_indices, constant, on_partitions, row_tiles
from .row_moves import at_rows, to_float8, zeros
from .window_runs import slots_of

NUM_BUFFERS = 2  # of all rows of a segment: one is gathered while another is written


def move_columns(moves, row, slot, length, end, longest, zero):
    """Moves the entries end - length .. end - 1 of each segment of each (window, cache, scales, layer) in `moves`.

    An element of a transposed key takes a descriptor for itself, or for as many neighbouring slots as are written at
    once. So the rows are gathered one by one, a head and segment a partition, reordered on the chip, and written by
    one of `longest` DMAs: the one for as many rows as there are.

    Args:
        row: [B, T] int32, the window row of each entry.
        slot: [B, T] int32, what `locate` says of each entry.
        length, end: [B, K] int32 and fp32, segments of entries whose slots are neighbours.
        longest: the most entries of a segment.
        zero: [128, 1] int32.
    """
    window, cache, _, _ = moves[0]
    batch, heads, _, head_dim = window.shape
    segments = length.shape[1]
    shape = (batch, segments, longest)
    columns = (batch, segments * longest)
    start = nl.ndarray((batch, segments), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=start, data1=end, data2=length, op=nl.subtract)

    column = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=column, pattern=[[0, segments], [1, longest]], offset=0, channel_multiplier=0)
    lengths = length.expand_dim(2).broadcast(2, longest)
    held = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=held, data1=column, data2=lengths, op=nl.less)
    last = nl.ndarray(shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(dst=last, data=column, op0=nl.add, operand0=1.0, op1=nl.equal, operand1=lengths)
    entry = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=entry, data1=column, data2=start.expand_dim(2).broadcast(2, longest), op=nl.add)
    first = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=first, src=slots_of(start, slot).expand_dim(2).broadcast(2, longest))

    sources = constant((batch, heads, segments, longest), ABSENT)
    targets = constant((batch, heads, segments, longest), ABSENT)
    by_column = (batch, heads, segments * longest)
    source_rows = slots_of(entry.reshape(columns), row)
    cache_row_indices(sources.reshape(by_column), source_rows, held.reshape(columns), window, "BHSD", 1)
    cache_row_indices(targets.reshape(by_column), first.reshape(columns), last.reshape(columns), cache, "BHDS", 1)

    for tile in row_tiles(batch, heads, segments):
        source = on_partitions(sources, tile)
        target = on_partitions(targets, tile)
        count = source.shape[0]
        buffers = []
        # The gathers of a window are issued before the scatters of the one before: these take longer.
        for turn in range(len(moves) + 1):
            if turn < len(moves):
                if turn < NUM_BUFFERS:
                    buffers.append(zeros((count, longest, head_dim), window.dtype, zero))
                for index in range(longest):
                    rows = at_rows(moves[turn][0], "BHSD", source[:, index : index + 1], 1, 1, 1)
                    buffer = buffers[turn % NUM_BUFFERS][:, index : index + 1, :]
                    nisa.dma_copy(dst=buffer, src=rows, oob_mode=nisa.oob_mode.skip)
            if turn > 0:
                _, cache, scales, layer = moves[turn - 1]
                buffer = buffers[(turn - 1) % NUM_BUFFERS]
                if cache.dtype != buffer.dtype:
                    buffer = to_float8(buffer, 1, scales, layer, tile).reshape((count, longest, head_dim))
                keys = nl.ndarray((count, head_dim, longest), dtype=cache.dtype, buffer=nl.sbuf)
                nisa.tensor_copy(dst=keys, src=buffer.permute((0, 2, 1)))
                for size in range(1, longest + 1):
                    rows = at_rows(cache, "BHDS", target[:, size - 1 : size], 1, size, 1)
                    nisa.dma_copy(dst=rows, src=keys[:, :, 0:size], oob_mode=nisa.oob_mode.skip)
