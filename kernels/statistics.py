"""What a law's rows say on one read: peak, total, best id, the entry at a token.

Lanes first (a partition of a row's tile at a time), then rows, whose lanes are reduced with rows on partitions.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .chain import row_index, to_int
from .truncation import BEST8, candidate_maxima, lane_candidates
from .vocabulary import (
    BIG_ID,
    BLOCK,
    FILL,
    LOWEST_PEAK,
    MIN_COLUMNS,
    NUM_GROUPS,
    ROW_TILE_BYTES,
    allocate_rows,
    floats,
    load_row_at,
    load_rows,
    searched_width,
    tensor_scalar,
    tensor_tensor,
    transpose,
)


@dataclass
class Lanes(nl.NKIObject):
    """What the lanes say of n rows, [128, n] fp32 each."""

    maxima: object
    totals: object  # of the exponentials, relative to the lane's maximum
    ids: object  # the best ones; None unless they are searched for


def lane_statistics(
    law, first, count, law_rows, rows, kind, search, scales, vocab_size, partition_ids, candidates=None, shard=()
):
    """Reads rows of `law` [B, law_rows, V] once.

    Args:
        kind: "logits" or "probs".
        search: whether the best ids are wanted.
        scales: [128, n], 1 / T.
        candidates: [128, SEGMENTS, 8 n], written, where they are wanted.

    Returns:
        (maxima, totals, ids) of the n = count * rows window rows, [n, 128] each; ids None without a search.
    """
    columns = (NUM_GROUPS, count * rows)
    lanes = Lanes(floats(columns), floats(columns), floats(columns) if search else None)
    if law_rows < rows or kind == "probs":
        # The last row of a window has no draft law; probabilities have no maximum to subtract.
        nisa.memset(dst=lanes.maxima, value=0.0)
        nisa.memset(dst=lanes.totals, value=1.0)
    if candidates != None and law_rows < rows:  # noqa: E711
        nisa.memset(dst=candidates, value=FILL)
    for sequence in range(count):
        for span in row_tiles(law_rows, law, vocab_size):
            start, stop = span
            low, high = sequence * rows + start, sequence * rows + stop
            fill = 0.0 if kind == "probs" else FILL
            tile = load_rows(law, (first + sequence) * law_rows + start, stop - start, vocab_size, fill, shard)
            if kind == "probs":
                lane_sums(tile, lanes.totals[:, low:high])
            else:
                own = None if candidates == None else candidates[:, :, low * BEST8 : high * BEST8]  # noqa: E711
                tile_statistics(tile, lanes, low, search, scales[:, low:high], partition_ids, own, tile)
    ids = transpose(lanes.ids) if search else None
    return transpose(lanes.maxima), transpose(lanes.totals), ids


def tile_statistics(tile, lanes, low, search, scales, partition_ids, candidates, spent):
    """Fills columns low.. of `lanes` from logits `tile` [128, R, width].

    Args:
        scales: [128, R].
        candidates: [128, SEGMENTS, 8 R], written; or None.
        spent: where the exponentials go, which nobody needs: `tile` itself, whose rows are then used up, or one row.
    """
    own = slice(low, low + tile.shape[1])
    if candidates != None:  # noqa: E711
        lane_candidates(tile, candidates)
    if search:
        lane_best(tile, lanes.maxima[:, own], lanes.ids[:, own], partition_ids)
    elif candidates != None:  # noqa: E711
        candidate_maxima(candidates, lanes.maxima[:, own])
    else:
        lane_maxima(tile, lanes.maxima[:, own])
    lane_totals(tile, lanes.totals[:, own], lanes.maxima[:, own], scales, spent)


def row_tiles(rows, law, vocab_size, most=128):
    """(start, stop) of the tiles that `rows` rows of a sequence are read in, `most` at a time."""
    row_bytes = searched_width(vocab_size) * (4 if law.dtype == nl.float32 else 2)
    step = max(1, min(most, ROW_TILE_BYTES // row_bytes))
    tiles = []
    for start in range(0, rows, step):
        tiles.append((start, min(start + step, rows)))
    return tiles


def entry_at(law, law_row, token):
    """The entries of `law` [.., V] at rows and tokens [n, 1] fp32, as [n, 1] fp32."""
    count = token.shape[0]
    width = law.shape[len(law.shape) - 1]
    # Row times V passes 2^24: int32 arithmetic.
    index = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
    column = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
    widths = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=index, src=law_row)
    nisa.tensor_copy(dst=column, src=token)
    nisa.memset(dst=widths, value=width)
    nisa.tensor_tensor(dst=index, data1=index, data2=widths, op=nl.multiply)
    nisa.tensor_tensor(dst=index, data1=index, data2=column, op=nl.add)
    gathered = nl.ndarray((count, 1), dtype=law.dtype, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=gathered,
        src=law.reshape((law.size, 1)).ap(pattern=[[1, count], [1, 1]], vector_offset=index, indirect_dim=0),
    )
    entry = floats((count, 1))
    nisa.tensor_copy(dst=entry, src=gathered)
    return entry


def kept_mass(entry, peak, scale, threshold):
    """exp((entry - peak) * scale), 0 below the threshold, None where nothing is cut; all [n, 1]."""
    result = tensor_scalar(entry, nl.subtract, peak, nl.multiply, scale)
    nisa.activation(dst=result, op=nl.exp, data=result)
    if threshold != None:  # noqa: E711
        kept = tensor_tensor(entry, threshold, nl.greater_equal)
        nisa.tensor_tensor(dst=result, data1=result, data2=kept, op=nl.multiply)
    return result


def lane_maxima(tile, maxima):
    """Largest entry of each lane of each row of `tile` [128, R, width] -> maxima [128, R] fp32, finite or NaN."""
    _, num_rows, _ = tile.shape
    # In the tile's own dtype: the Vector engine reduces 16-bit values to 16 bits at twice the rate.
    largest = nl.ndarray((NUM_GROUPS, num_rows), dtype=tile.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=2)
    nisa.tensor_scalar(dst=maxima, data=largest, op0=nl.maximum, operand0=LOWEST_PEAK)


def lane_best(tile, maxima, candidates, partition_ids):
    """`lane_maxima`, and the id of the first entry of each lane that equals it -> candidates [128, R] fp32.

    A lane that holds a NaN may give any number. Long lanes are searched by blocks: the pass that finds the maximum
    leaves the blocks' maxima, then one block of each lane is gathered, instead of a second pass over all.
    """
    _, num_rows, width = tile.shape
    largest = nl.ndarray((NUM_GROUPS, num_rows), dtype=tile.dtype, buffer=nl.sbuf)
    if width < MIN_COLUMNS * BLOCK:
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=2)
        index = first_indices(tile, largest)
        nisa.tensor_scalar(dst=candidates, data=index, op0=nl.add, operand0=partition_ids)
    else:
        blocks = width // BLOCK
        block_maxima = nl.ndarray((NUM_GROUPS, num_rows, blocks), dtype=tile.dtype, buffer=nl.sbuf)
        nisa.tensor_reduce(
            dst=block_maxima, op=nl.maximum, data=tile.reshape((NUM_GROUPS, num_rows, blocks, BLOCK)), axis=3
        )
        nisa.tensor_reduce(dst=largest, op=nl.maximum, data=block_maxima, axis=2)
        start = floats((NUM_GROUPS, num_rows))
        # A lane with a NaN may have found none: stay inside the tile.
        nisa.tensor_scalar(
            dst=start,
            data=first_indices(block_maxima, largest),
            op0=nl.minimum,
            operand0=float(blocks - 1),
            op1=nl.multiply,
            operand1=float(BLOCK),
        )
        position = floats((NUM_GROUPS, num_rows, BLOCK))
        nisa.iota(dst=position, pattern=[[width, num_rows], [1, BLOCK]], offset=0, channel_multiplier=0)
        whole = nl.ndarray((NUM_GROUPS, num_rows, BLOCK), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=whole, data1=position, data2=start.expand_dim(2).broadcast(2, BLOCK), op=nl.add)
        block = nl.ndarray((NUM_GROUPS, num_rows, BLOCK), dtype=tile.dtype, buffer=nl.sbuf)
        nisa.nc_n_gather(dst=block, data=tile, indices=whole)
        nisa.scalar_tensor_tensor(
            dst=candidates,
            data=first_indices(block, largest),
            op0=nl.add,
            operand0=partition_ids,
            op1=nl.add,
            operand1=start,
        )
    nisa.tensor_scalar(dst=maxima, data=largest, op0=nl.maximum, operand0=LOWEST_PEAK)


def first_indices(rows, values):
    """Where each of `values` [128, R] first stands in its row of `rows` [128, R, n], both of one dtype, bit for bit.

    Returns a view [128, R] uint32; all ones where it does not.
    """
    _, num_rows, _ = rows.shape
    index = nl.ndarray((NUM_GROUPS, num_rows, 8), dtype=nl.uint32, buffer=nl.sbuf)
    for row in range(num_rows):
        nisa.nc_find_index8(dst=index[:, row], data=rows[:, row], vals=values[:, row : row + 1].broadcast(1, 8))
    return index[:, :, 0]


def lane_totals(tile, totals, maxima, scale, spent):
    """Per lane of each row: the sum of exp((x - lane maximum) * scale).

    Args:
        totals: [128, R] fp32, written; NaN where the lane holds a NaN or +inf, 0 where it holds nothing above -inf.
        maxima, scale: [128, R] fp32.
        spent: [128, R or 1, width], overwritten.
    """
    _, num_rows, _ = tile.shape
    bias = floats((NUM_GROUPS, num_rows))
    nisa.scalar_tensor_tensor(dst=bias, data=maxima, op0=nl.multiply, operand0=-1.0, op1=nl.multiply, operand1=scale)
    for row in range(num_rows):
        nisa.activation(
            dst=spent[:, min(row, spent.shape[1] - 1), :],
            op=nl.exp,
            data=tile[:, row, :],
            bias=bias[:, row : row + 1],
            scale=scale[:, row : row + 1],
            reduce_op=nl.add,
            reduce_res=totals[:, row : row + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )


def lane_sums(tile, totals):
    """Per lane of each row the plain sum, for laws given as probabilities."""
    _, num_rows, _ = tile.shape
    for row in range(num_rows):
        nisa.activation(
            dst=tile[:, row, :],
            op=nl.copy,
            data=tile[:, row, :],
            reduce_op=nl.add,
            reduce_res=totals[:, row : row + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )


def combine_lanes(maxima, totals, scale):
    """Peak and total of each row from those of its lanes.

    Args:
        maxima, totals: [n, 128] fp32, rows on partitions, of `lane_statistics`.
        scale: [n, 1] fp32.

    Returns:
        peak [n, 1], and total [n, 1] = sum of exp((x - peak) * scale).
    """
    count = maxima.shape[0]
    peak = floats((count, 1))
    total = floats((count, 1))
    weight = floats((count, NUM_GROUPS))
    nisa.tensor_reduce(dst=peak, op=nl.maximum, data=maxima, axis=1)
    nisa.tensor_scalar(dst=weight, data=maxima, op0=nl.subtract, operand0=peak, op1=nl.multiply, operand1=scale)
    nisa.activation(dst=weight, op=nl.exp, data=weight)
    nisa.tensor_tensor(dst=weight, data1=weight, data2=totals, op=nl.multiply)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weight, axis=1)
    return peak, total


def first_of_largest(maxima, candidates, peak):
    """The lowest candidate id among the lanes whose maximum is the peak: [n, 128], [n, 128], [n, 1] -> [n, 1]."""
    count = maxima.shape[0]
    score = floats((count, NUM_GROUPS))
    best = floats((count, 1))
    nisa.tensor_scalar(dst=score, data=maxima, op0=nl.equal, operand0=peak)
    nisa.scalar_tensor_tensor(
        dst=score, data=candidates, op0=nl.subtract, operand0=BIG_ID, op1=nl.multiply, operand1=score
    )
    nisa.tensor_reduce(dst=best, op=nl.minimum, data=score, axis=1)
    nisa.tensor_scalar(dst=best, data=best, op0=nl.add, operand0=BIG_ID)
    return best


def best_finite(logits, index, maxima, candidates, vocab_size, partition_ids, shard=()):
    """As `lane_best` for the row that `index` [1, 1] int32 names, NaN and infinities left out.

    Args:
        maxima, candidates: [128, 1] fp32, written; maximum LOWEST_PEAK where a lane has no finite entry.
    """
    width = searched_width(vocab_size)
    row = allocate_rows(1, width, logits.dtype, vocab_size, FILL, shard)
    load_row_at(row[:, 0], logits, index, vocab_size, shard)
    is_finite = nl.ndarray(row.shape, dtype=nl.uint16, buffer=nl.sbuf)
    finite = nl.ndarray(row.shape, dtype=row.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=is_finite, data=row, op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0)
    nisa.select_reduce(dst=finite, predicate=is_finite, on_true=row, on_false=FILL, reduce_cmd=nisa.reduce_cmd.idle)
    lane_best(finite, maxima, candidates, partition_ids)


def replace_spoiled(best, spoiled, accepted, first, logits, vocab_size, partition_ids):
    """Overwrites `best` [1, B] where `spoiled` [1, B] is set by the best finite id of row `accepted`, 0 without one.

    Spoiled rows hold NaN or nothing finite. They are rare, so their second read and search stand in a loop of no
    trips when there are none; but not on two cores with sequences of their own, which must make equally many.
    """
    _, count = best.shape
    index = to_int(row_index(accepted, first * logits.shape[1], logits.shape[1]))
    mask = nl.ndarray((1, count), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mask, src=spoiled)

    def search(trip):
        lanes = floats((NUM_GROUPS, 2, count))
        for sequence in range(count):
            column = slice(sequence, sequence + 1)
            best_finite(logits, index[:, column], lanes[:, 0, column], lanes[:, 1, column], vocab_size, partition_ids)
        maxima = transpose(lanes[:, 0])
        peak = floats((count, 1))
        nisa.tensor_reduce(dst=peak, op=nl.maximum, data=maxima, axis=1)
        found = first_of_largest(maxima, transpose(lanes[:, 1]), peak)
        some_finite = tensor_scalar(peak, nl.greater, LOWEST_PEAK)
        nisa.tensor_tensor(dst=found, data1=found, data2=some_finite, op=nl.multiply)
        nisa.tensor_copy_predicated(dst=best, src=transpose(found), predicate=mask)

    trips = nisa.register_alloc(1)
    if nl.num_programs(0) == 1 or logits.shape[0] == 1:
        some = floats((1, 1))
        nisa.tensor_reduce(dst=some, op=nl.maximum, data=spoiled, axis=1)
        nisa.register_load(trips, to_int(some))
    nl.fori_loop(0, trips, search)
