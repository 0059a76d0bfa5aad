"""Neighbouring rows of a window as runs of a few sizes: descriptors as long as the outcome allows."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import add_lengths, divide, element_bytes, num_slots
from .row_moves import MAX_BYTES, RUN_BYTES

RUNS_FROM_BYTES = 1 << 19  # of all windows; below that, more DMAs cost more than longer descriptors save
EXACT_DESCRIPTORS = 1024  # for each length of a run: see run_sizes


def runs_pay(moves, window, cache_layout, most, unit):
    """Whether the rows of `moves`, each of a window like this one, move in runs, and not one by one."""
    all_bytes = nl.num_programs(0) * len(moves) * window.size * element_bytes(window.dtype)
    sizes, _ = run_sizes(window, cache_layout, longest_run(most, unit))
    return len(sizes) > 1 and (cache_layout == "BHDS" or all_bytes >= RUNS_FROM_BYTES)


def longest_run(most, unit):
    """The most neighbours among `most` rows."""
    return most if unit == 0 else min(most, unit)


def run_unit(cache, cache_layout, block_table, ring):
    """Slots after which rows are no longer neighbours, a block's or a ring's (whole blocks); 0 for never."""
    if cache_layout == "NHPD":
        return cache.shape[2]
    if cache_layout == "NPHD":
        return cache.shape[1]
    return num_slots(cache, cache_layout, block_table) if ring else 0


def run_sizes(window, cache_layout, longest):
    """Rows of each kind of run, the largest first, of segments of at most `longest` rows; and whether they are exact.

    Each kind costs two DMAs that GpSimd writes the descriptors of, about 2 us, so there are two: long enough for good
    descriptors, and single rows. "NPHD", whose heads lie side by side, needs no more than pairs. Transposed keys take a
    descriptor for each element of a head, however long, about 2 ns: many of them pay for more kinds, powers of two, or
    even every length that a segment may have, which is then one run.
    """
    batch, heads, _, head_dim = window.shape
    row_bytes = head_dim * element_bytes(window.dtype)
    sizes = []
    if cache_layout == "BHDS":
        descriptors = batch * heads * head_dim
        exact = descriptors >= EXACT_DESCRIPTORS * longest and longest * row_bytes <= MAX_BYTES
        candidates = (64, 16, 4, 1) if descriptors < 2 * EXACT_DESCRIPTORS else (128, 64, 32, 16, 8, 4, 2, 1)
        for size in range(longest, 0, -1) if exact else candidates:
            if size <= longest and size * row_bytes <= MAX_BYTES:
                sizes.append(size)
        return sizes, exact
    for size in (2,) if cache_layout == "NPHD" else (8, 4, 2):
        if len(sizes) == 0 and 2 * size <= longest and size // 2 * row_bytes < RUN_BYTES:
            sizes.append(size)
    sizes.append(1)
    return sizes, False


def runs_of(kept, begin, seq_len, most, unit, window, cache_layout):
    """Cuts the rows flagged in `kept`, of each sequence neighbours, into runs that end where a unit of slots does.

    Every row moves once. The size of a run is known when the kernel is traced; which of them a sequence has, and where
    each starts, is data.

    Args:
        kept: [B, T] fp32 flags.
        begin: [B, 1] int32, the first flagged row.
        seq_len: [B, 1] int32, the position of row 0.
        most: the most rows that can be flagged.
        unit: see run_unit.
        window, cache_layout: see run_sizes.

    Returns:
        A list of (size, first [B, C] int32: the first row of each run of that size, exists [B, C] uint8 flags).
    """
    batch = kept.shape[0]
    total = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=kept, axis=1)
    segments = 1 if unit == 0 else 1 + -(-(most - 1) // unit)
    longest = longest_run(most, unit)

    # Rows up to the end of each segment, and before the first.
    edges = nl.ndarray((batch, segments + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=edges[:, 0:1], value=0.0)
    if unit == 0:
        nisa.tensor_copy(dst=edges[:, 1:2], src=total)
    else:
        _, remainder = divide(add_lengths(begin, seq_len), unit)
        offset = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)  # in range whatever the lengths
        nisa.tensor_scalar(
            dst=offset, data=remainder, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(unit - 1)
        )
        units = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=units, pattern=[[unit, segments]], offset=unit, channel_multiplier=0)
        nisa.tensor_scalar(
            dst=edges[:, 1 : segments + 1], data=units, op0=nl.subtract, operand0=offset, op1=nl.minimum, operand1=total
        )
    length = nl.ndarray((batch, segments), dtype=nl.int32, buffer=nl.sbuf)
    end = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
    ends = edges[:, 1 : segments + 1]
    nisa.tensor_tensor(dst=length, data1=ends, data2=edges[:, 0:segments], op=nl.subtract)
    nisa.tensor_tensor(dst=end, data1=ends, data2=begin.broadcast(1, segments), op=nl.add)

    sizes, exact = run_sizes(window, cache_layout, longest)
    if exact:
        return exact_runs(length, end, sizes)
    runs = []
    rest = length  # what larger runs leave of each segment, at its end
    left = longest
    for size in sizes:
        after = nl.ndarray((batch, segments), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=after, data=rest, op0=nl.bitwise_and, operand0=size - 1)
        slots = min(most // size, segments * (left // size))
        first, exists = runs_of_size(size, slots, rest, after, end)
        runs.append((size, first, exists))
        rest = after
        left = min(left, size - 1)
    return runs


def exact_runs(length, end, sizes):
    """For each of `sizes` the segments [B, K] of that length."""
    first = nl.ndarray(length.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=first, data1=end, data2=length, op=nl.subtract)
    runs = []
    for size in sizes:
        exists = nl.ndarray(length.shape, dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=exists, data=length, op0=nl.equal, operand0=float(size))
        runs.append((size, first, exists))
    return runs


def runs_of_size(size, slots, rest, after, end):
    """The first row [B, slots] int32 and existence [B, slots] uint8 of the runs that the first rest - after rows of the
    last `rest` of each segment [B, K] are cut into, one after the other, whatever the segment."""
    batch, segments = rest.shape
    covered = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
    start = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=covered, data1=rest, data2=after, op=nl.subtract)
    nisa.tensor_tensor(dst=start, data1=end, data2=rest, op=nl.subtract)
    step = nl.ndarray((batch, slots), dtype=nl.float32, buffer=nl.sbuf)  # rows in the runs before
    nisa.iota(dst=step, pattern=[[size, slots]], offset=0, channel_multiplier=0)

    if segments == 1:
        skipped = start.broadcast(1, slots)
        total = covered
    else:
        # Row `step` of all runs is in the last segment that begins no later; rows of other sizes before it are skipped.
        ones = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
        upto = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
        before = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=ones, value=1.0)
        nisa.tensor_tensor_scan(dst=upto, data0=ones, data1=covered, initial=0.0, op0=nl.multiply, op1=nl.add)
        nisa.tensor_tensor(dst=before, data1=upto, data2=covered, op=nl.subtract)
        nisa.tensor_tensor(dst=start, data1=start, data2=before, op=nl.subtract)
        shape = (batch, slots, segments)
        begun = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=begun,
            data1=before.expand_dim(1).broadcast(1, slots),
            data2=step.expand_dim(2).broadcast(2, segments),
            op=nl.less_equal,
        )
        nisa.tensor_tensor(dst=begun, data1=begun, data2=start.expand_dim(1).broadcast(1, slots), op=nl.multiply)
        skipped = nl.ndarray((batch, slots), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=skipped, op=nl.maximum, data=begun, axis=2)
        total = upto[:, segments - 1 : segments]

    first = nl.ndarray((batch, slots), dtype=nl.int32, buffer=nl.sbuf)
    exists = nl.ndarray((batch, slots), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=first, data1=step, data2=skipped, op=nl.add)
    nisa.tensor_scalar(dst=exists, data=step, op0=nl.less, operand0=total)
    return first, exists


def slots_of(first, slot):
    """What `slot` [B, T] int32 says of the rows `first` [B, C]; a run that does not exist may start past the window."""
    inside = nl.ndarray(first.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=inside, data=first, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(slot.shape[1] - 1)
    )
    slots = nl.ndarray(first.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=slots, data=slot, indices=inside)
    return slots
