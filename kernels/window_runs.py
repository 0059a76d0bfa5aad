"""Neighbouring rows of a window as runs of a few sizes: descriptors as long as the outcome allows."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import element_bytes, num_slots
from .row_moves import MAX_BYTES, RUN_BYTES, fill_partitions

RUNS_FROM_BYTES = 1 << 20  # read and written; below that, more DMAs cost more than longer descriptors save
FEW_DESCRIPTORS = 2048  # which take about as long as the two DMAs of a kind of runs
COLUMN_BYTES = 16384  # a partition, of all rows of a segment
MAX_DMAS = 8192  # of a launch, which a compiler unrolls


def runs_pay(moves, window, share, cache_layout, most, unit, chain):
    """Whether the rows of `moves`, each a likely `share` of a window like this one, move in runs, and not one by one.

    A tree's rows are gathered one by one all the same: only where that takes no more DMAs, they are written in runs.
    """
    if not chain and (cache_layout == "BHDS" or not fill_partitions(window.shape[0])):
        return False
    moved_bytes = 2 * share * nl.num_programs(0) * len(moves) * window.size * element_bytes(window.dtype)
    sizes = run_sizes(window, cache_layout, longest_run(most, unit))
    few_runs = cache_layout == "BHDS" or fill_partitions(window.shape[0])
    return len(sizes) > 1 and (few_runs or moved_bytes >= RUNS_FROM_BYTES)


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
    """Rows of each kind of run, the largest first, of segments of at most `longest` rows.

    Each kind costs two DMAs that GpSimd writes the descriptors of, about 2 us, so there are two: long enough for good
    descriptors, and single rows. "NPHD", whose heads lie side by side, needs no more than pairs. Powers of two take the
    fewest runs: for transposed keys, which take a descriptor for each element of a head, however long, about 2 ns, and
    for sequences that fill the partitions, whose every run has DMAs of its own.
    """
    batch, heads, _, head_dim = window.shape
    row_bytes = head_dim * element_bytes(window.dtype)
    sizes = []
    if cache_layout == "BHDS":
        few = batch * heads * head_dim < FEW_DESCRIPTORS
        for size in (64, 16, 4) if few else (128, 64, 32, 16, 8, 4, 2):
            if size <= longest and size * row_bytes <= MAX_BYTES:
                sizes.append(size)
    elif fill_partitions(batch):
        for size in (64, 32, 16, 8, 4, 2):
            if 2 * size <= longest and size * heads * row_bytes <= MAX_BYTES:
                sizes.append(size)
    else:
        for size in (2,) if cache_layout == "NPHD" else (8, 4, 2):
            if len(sizes) == 0 and 2 * size <= longest and size // 2 * row_bytes < RUN_BYTES:
                sizes.append(size)
    sizes.append(1)
    return sizes


def columns_pay(moves, longest, chain):
    """Whether rows for transposed keys are gathered one by one, to be written by one run a segment: see move_columns.

    That costs two DMAs for each row of `longest`, ~2 us. It saves the descriptors of all but one of the runs that a
    segment would take, B * Hkv * D of ~2 ns each: of a chain one or two, of a tree one a row. As runs, few heads are
    spread over more partitions.
    """
    window, _, _, _ = moves[0]
    batch, heads, _, head_dim = window.shape
    descriptors = batch * heads * head_dim
    tiles = -(-batch * heads // nl.tile_size.pmax)
    fits = longest * head_dim * element_bytes(window.dtype) <= COLUMN_BYTES
    if not fits or 2 * longest * tiles * len(moves) > MAX_DMAS:
        return False
    return descriptors >= (FEW_DESCRIPTORS // 2 * max(longest, 8) if chain else 2 * FEW_DESCRIPTORS)


def segments_of(kept, offset, most, unit):
    """Cuts the rows flagged in `kept`, of each sequence neighbours, into segments that end where a unit of slots does.

    Args:
        kept: [B, T] fp32 flags.
        offset: [B, T] int32, what `locate` says of each row.
        most: the most rows that can be flagged.
        unit: see run_unit.

    Returns:
        length: [B, K] int32, rows of each segment.
        end: [B, K] fp32, the row after its last.
    """
    batch, window = kept.shape
    total = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=kept, axis=1)
    after = nl.ndarray((batch, window), dtype=nl.float32, buffer=nl.sbuf)  # the row after each flagged one
    last = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)
    begin = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=after, pattern=[[1, window]], offset=1, channel_multiplier=0)
    nisa.tensor_tensor(dst=after, data1=after, data2=kept, op=nl.multiply)
    nisa.tensor_reduce(dst=last, op=nl.maximum, data=after, axis=1)
    nisa.tensor_tensor(dst=begin, data1=last, data2=total, op=nl.subtract)
    segments = 1 if unit == 0 else 1 + -(-(most - 1) // unit)

    # Rows up to the end of each segment, and before the first.
    edges = nl.ndarray((batch, segments + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=edges[:, 0:1], value=0.0)
    if unit == 0:
        nisa.tensor_copy(dst=edges[:, 1:2], src=total)
    else:
        place = nl.ndarray((batch, 1), dtype=nl.float32, buffer=nl.sbuf)  # in range whatever the lengths
        nisa.tensor_scalar(
            dst=place,
            data=slots_of(begin, offset),
            op0=nl.maximum,
            operand0=0.0,
            op1=nl.minimum,
            operand1=float(unit - 1),
        )
        units = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=units, pattern=[[unit, segments]], offset=unit, channel_multiplier=0)
        nisa.tensor_scalar(
            dst=edges[:, 1 : segments + 1], data=units, op0=nl.subtract, operand0=place, op1=nl.minimum, operand1=total
        )
    length = nl.ndarray((batch, segments), dtype=nl.int32, buffer=nl.sbuf)
    end = nl.ndarray((batch, segments), dtype=nl.float32, buffer=nl.sbuf)
    ends = edges[:, 1 : segments + 1]
    nisa.tensor_tensor(dst=length, data1=ends, data2=edges[:, 0:segments], op=nl.subtract)
    nisa.tensor_tensor(dst=end, data1=ends, data2=begin.broadcast(1, segments), op=nl.add)
    return length, end


def runs_of(kept, offset, most, unit, window, cache_layout):
    """Cuts segments (see segments_of) into runs of the sizes that run_sizes names.

    Every row moves once. The size of a run is known when the kernel is traced; which of them a sequence has, and where
    each starts, is data.

    Returns:
        A list of (size, first [B, C] int32: the first row of each run of that size, exists [B, C] uint8 flags).
    """
    length, end = segments_of(kept, offset, most, unit)
    batch, segments = length.shape
    runs = []
    rest = length  # what larger runs leave of each segment, at its end
    left = longest_run(most, unit)
    for size in run_sizes(window, cache_layout, left):
        after = nl.ndarray((batch, segments), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=after, data=rest, op0=nl.bitwise_and, operand0=size - 1)
        slots = min(most // size, segments * (left // size))
        first, exists = runs_of_size(size, slots, rest, after, end)
        runs.append((size, first, exists))
        rest = after
        left = min(left, size - 1)
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
