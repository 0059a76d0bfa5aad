"""Neighbouring rows of a window as runs of 1, 2, 4, ... rows: descriptors as long as the outcome allows."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import add_lengths, divide

MAX_POWER = 7  # a window has at most 128 rows
MAX_ELEMENTS = 4096  # of a whole window of a head: 16 KiB in fp32, so that all buffers fit into a partition


def runs_pay(batch, heads, head_dim, window, slots, cache_layout, ring):
    """Whether runs beat single rows: where the rows fill more than one tile, and neighbours stay neighbours.

    A head's rows are contiguous in the window, and in the cache up to the end of a block or a ring ("NPHD" moves whole
    tokens, whose heads lie apart in the window). Within one tile, more DMAs cost more than long descriptors save.
    """
    if cache_layout == "NPHD" or (cache_layout == "NHPD" and ring) or (ring and window > slots):
        return False
    return batch * heads * window > nl.tile_size.pmax and window * head_dim <= MAX_ELEMENTS


def run_unit(cache, cache_layout, slots, ring):
    """Slots after which rows are no longer neighbours, a block's or a ring's; 0 for never."""
    if cache_layout == "NHPD":
        return cache.shape[2]
    return slots if ring else 0


def runs_of(kept, begin, seq_len, most, unit):
    """Cuts the rows flagged in `kept`, of each sequence the neighbours begin .. begin + m - 1, into runs.

    A segment, the rows up to the end of a block or ring, is cut into the powers of two that its length is in binary,
    the largest first: every row moves once, sizes are known when the kernel is traced, and which of them a sequence
    has, and where each starts, is data.

    Args:
        kept: [B, T] fp32 flags.
        begin: [B, 1] int32, the first flagged row.
        seq_len: [B, 1] int32, the position of row 0.
        most: the most rows that can be flagged.
        unit: see run_unit.

    Returns:
        first: [B, Q] int32, the first row of each run.
        move: [B, Q] fp32, 1 where the sequence has that run.
        sizes: rows of each of the Q runs.
    """
    batch = kept.shape[0]
    segments = segment_sizes(most, unit)
    sizes = []
    for segment in segments:
        sizes.extend(segment)
    first = nl.ndarray((batch, len(sizes)), dtype=nl.int32, buffer=nl.sbuf)
    move = nl.ndarray((batch, len(sizes)), dtype=nl.float32, buffer=nl.sbuf)
    total = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=kept, axis=1)
    left = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=left, src=total)
    if unit > 0:
        _, offset = divide(add_lengths(begin, seq_len), unit)

    run = 0
    for segment in range(len(segments)):
        length = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
        if unit == 0:
            nisa.tensor_copy(dst=length, src=left)
        elif segment == 0:
            room = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=room, data=offset, op0=nl.multiply, operand0=-1.0, op1=nl.add, operand1=float(unit))
            nisa.tensor_tensor(dst=length, data1=left, data2=room, op=nl.minimum)
        else:
            nisa.tensor_scalar(dst=length, data=left, op0=nl.minimum, operand0=float(unit))
        nisa.tensor_tensor(dst=left, data1=left, data2=length, op=nl.subtract)
        end = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
        bits = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=end, data1=total, data2=left, op=nl.subtract)
        nisa.tensor_tensor(dst=end, data1=end, data2=begin, op=nl.add)
        nisa.tensor_copy(dst=bits, src=length)

        for size in segments[segment]:
            # What larger runs leave of the segment starts with this run, if that is as long.
            rest = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=rest, data=bits, op0=nl.bitwise_and, operand0=2 * size - 1)
            nisa.tensor_scalar(dst=move[:, run : run + 1], data=rest, op0=nl.greater_equal, operand0=float(size))
            nisa.tensor_tensor(dst=first[:, run : run + 1], data1=end, data2=rest, op=nl.subtract)
            run += 1
    return first, move, sizes


def slots_of(first, slot):
    """What `slot` [B, T] int32 says of the rows `first` [B, Q]; a run that does not move may start past the window."""
    inside = nl.ndarray(first.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=inside, data=first, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(slot.shape[1] - 1)
    )
    slots = nl.ndarray(first.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=slots, data=slot, indices=inside)
    return slots


def segment_sizes(most, unit):
    """For each segment that `most` rows can touch, the sizes of its runs, the largest first."""
    longest = [most]
    if unit > 0:
        longest = [min(most, unit)]
        for rest in range(most - 1, 0, -unit):
            longest.append(min(rest, unit))
    segments = []
    for rows in longest:
        sizes = []
        for power in range(MAX_POWER, -1, -1):
            if (1 << power) <= rows:
                sizes.append(1 << power)
        segments.append(sizes)
    return segments
