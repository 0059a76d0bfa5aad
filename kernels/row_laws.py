"""What a law's rows say on one read each: peak, total, best id and, where top-k, top-p or min-p may cut, threshold.

Rows that may be cut stay on the chip until their thresholds are known, in parts of as many rows as are searched at
once and find room. So a row that is cut below its candidates is searched where it lies.
"""

import nki.isa as nisa
import nki.language as nl

from .chain import at_row, to_int, to_rows
from .statistics import (
    Lanes,
    combine_lanes,
    first_of_largest,
    lane_statistics,
    row_tiles,
    tile_statistics,
)
from .truncation import (
    BEST8,
    CUTS,
    MASS,
    PARAMETERS,
    PEAK,
    SCALE,
    SEARCHED_ROWS,
    THRESHOLD,
    TOTAL,
    VALUES,
    bits_of,
    candidate_tile,
    cut_candidates,
    cut_rows,
    deep_trips,
    flags_of,
    relative_masses,
    row_groups,
    take_flag,
)
from .vocabulary import (
    FILL,
    NUM_GROUPS,
    SEGMENTS,
    allocate_rows,
    fill_rows,
    floats,
    group_size,
    searched_width,
    spread,
    tensor_scalar,
    transpose,
)

PART_BYTES = 155648  # of a partition: 64 bf16 rows of 152k ids, with room for their search
DEEP_ROWS = 2  # searched at once: one alone leaves the engines waiting for each other


def row_laws(laws, first, count, rows, row_scale, limits, vocab_size, partition_ids):
    """Reads every row once.

    Args:
        laws: (array [B, law rows, V], kind) of the target and, if it has one, the draft; kind "logits" or "probs".
        row_scale: [n, 1], 1 / T.
        limits: [1, PARAMETERS, n] of `truncation.row_parameters`; None where nothing is cut.

    Returns:
        for each law a dictionary of peak, total, best (of the target) and threshold (None where nothing is cut), all
        [n, 1] of the chunk's n = count * rows window rows.
    """
    scales = spread(row_scale)
    results = []
    if limits != None:  # noqa: E711
        arrays = [laws[0][0]]
        if len(laws) == 2 and laws[1][1] == "logits":
            arrays.append(laws[1][0])
        results = cut_laws(arrays, first, count, rows, row_scale, scales, limits, vocab_size, partition_ids)
    for i in range(len(results), len(laws)):
        array, kind = laws[i]
        lanes = lane_statistics(
            array, first, count, array.shape[1], rows, kind, i == 0, scales, vocab_size, partition_ids
        )
        results.append(combine_rows(lanes, row_scale))
    return results


def combine_rows(lanes, row_scale):
    """A dictionary of `row_laws`, uncut, from [n, 128] maxima, totals and ids; row_scale [n, 1]."""
    maxima, totals, ids = lanes
    peak, total = combine_lanes(maxima, totals, row_scale)
    best = first_of_largest(maxima, ids, peak) if ids != None else None  # noqa: E711
    return {"peak": peak, "total": total, "best": best, "threshold": None}


def cut_laws(arrays, first, count, rows, row_scale, scales, limits, vocab_size, partition_ids):
    """`row_laws` of logits that may be cut: all laws' rows are the columns of one sequence, N = laws * n.

    Args:
        arrays: [B, law rows, V] each; row_scale: [n, 1]; scales: the same on all lanes, [128, n].
    """
    num_rows = count * rows
    num_columns = len(arrays) * num_rows
    lanes = Lanes(floats((NUM_GROUPS, num_columns)), floats((NUM_GROUPS, num_columns)), floats((NUM_GROUPS, num_rows)))
    by_row_scale = transpose(row_scale)
    values = floats((1, VALUES, num_columns))
    cuts = floats((1, CUTS, num_columns))
    for i in range(len(arrays)):
        own = slice(i * num_rows, (i + 1) * num_rows)
        nisa.tensor_copy(dst=values[:, 0:PARAMETERS, own], src=limits)
        nisa.tensor_copy(dst=values[:, SCALE, own], src=by_row_scale)
    for tiles in row_parts(arrays, count, rows, vocab_size):
        cut_part(tiles, arrays, first, rows, num_rows, lanes, values, cuts, scales, vocab_size, partition_ids)

    results = []
    for i in range(len(arrays)):
        own = slice(i * num_rows, (i + 1) * num_rows)
        peak = transpose(values[:, PEAK, own])
        best = first_of_largest(transpose(lanes.maxima[:, own]), transpose(lanes.ids), peak) if i == 0 else None
        threshold, total = transpose(cuts[:, THRESHOLD, own]), transpose(cuts[:, MASS, own])
        results.append({"peak": peak, "total": total, "best": best, "threshold": threshold})
    return results


def row_parts(arrays, count, rows, vocab_size):
    """Tiles (law, sequence, start, stop, low, high), in parts that are searched at once.

    A tile is rows start.. of a sequence's, and columns low.. of the laws' sequence; the columns go on past the rows
    where a law has fewer rows than the window. All rows of a part have one dtype.
    """
    parts, tiles = [], []
    for law in range(len(arrays)):
        array = arrays[law]
        law_rows = array.shape[1]
        row_bytes = searched_width(vocab_size) * (4 if array.dtype == nl.float32 else 2)
        most = min(SEARCHED_ROWS, PART_BYTES // row_bytes)
        for sequence in range(count):
            for span in row_tiles(law_rows, array, vocab_size):
                start, stop = span
                base = (law * count + sequence) * rows
                high = base + (rows if stop == law_rows else stop)
                if len(tiles) > 0:
                    fits = high - tiles[0][4] <= most and arrays[tiles[0][0]].dtype == array.dtype
                    if not fits:
                        parts.append(tiles)
                        tiles = []
                tiles.append((law, sequence, start, stop, base + start, high))
    parts.append(tiles)
    return parts


def cut_part(tiles, arrays, first, rows, num_rows, lanes, values, cuts, scales, vocab_size, partition_ids):
    """Reads the rows of one of `row_parts` and fills in their columns of lanes, values and cuts."""
    low, high = tiles[0][4], tiles[len(tiles) - 1][5]
    own = slice(low, high)
    dtype = arrays[tiles[0][0]].dtype
    width = searched_width(vocab_size)
    held = allocate_rows(high - low, width, dtype, vocab_size, FILL)
    # Where a lane has no more entries than candidates, no row is searched whole.
    deep_rows = DEEP_ROWS if group_size(vocab_size) > SEGMENTS * BEST8 else 0
    spent = nl.ndarray((NUM_GROUPS, DEEP_ROWS, width), dtype=dtype, buffer=nl.sbuf) if deep_rows > 0 else None
    candidates = nl.ndarray((NUM_GROUPS, SEGMENTS, (high - low) * BEST8), dtype=dtype, buffer=nl.sbuf)
    for tile in tiles:
        law, sequence, start, stop, first_column, last_column = tile
        length = stop - start
        rows_held = held[:, first_column - low : first_column - low + length]
        fill_rows(rows_held, arrays[law], (first + sequence) * arrays[law].shape[1] + start, vocab_size)
        place = (first_column - low) * BEST8
        row = first_column - law * num_rows
        tile_statistics(
            rows_held,
            lanes,
            first_column,
            law == 0,
            scales[:, row : row + length],
            partition_ids,
            candidates[:, :, place : place + length * BEST8],
            rows_held if spent == None else spent[:, 0:1],  # noqa: E711
        )
        if first_column + length < last_column:
            # The last row of a window has no draft law.
            absent = slice(first_column + length, last_column)
            nisa.memset(dst=lanes.maxima[:, absent], value=0.0)
            nisa.memset(dst=lanes.totals[:, absent], value=1.0)
            nisa.memset(dst=candidates[:, :, place + length * BEST8 : (last_column - low) * BEST8], value=FILL)
            nisa.memset(dst=held[:, absent.start - low : absent.stop - low], value=FILL)

    found = floats((high - low, 2))
    peak, total = combine_lanes(
        transpose(lanes.maxima[:, own]), transpose(lanes.totals[:, own]), transpose(values[:, SCALE, own])
    )
    nisa.tensor_copy(dst=found[:, 0:1], src=peak)
    nisa.tensor_copy(dst=found[:, 1:2], src=total)
    nisa.tensor_copy(dst=values[:, PEAK : TOTAL + 1, own], src=to_rows(found))
    deep = floats((1, high - low))
    cut_candidates(cuts[:, :, own], deep, candidate_tile(candidates), values[:, :, own], bits_of(dtype))
    if deep_rows > 0:
        cut_deep_rows(held, spent, values[:, :, own], cuts[:, :, own], deep)


def cut_deep_rows(held, rows, values, cuts, deep):
    """Corrects `cuts` [1, CUTS, m] of the rows of `held` [128, m, width] that `deep` [1, m] flags, searched whole.

    Args:
        rows: [128, DEEP_ROWS, width], overwritten.
        values: [1, VALUES, m].
    """
    _, num_held, width = held.shape
    groups = row_groups(1)

    def search(trip):
        here = floats((1, DEEP_ROWS, num_held))
        for row in range(DEEP_ROWS):
            # Some row, without effect, where no flag is left.
            place = tensor_scalar(take_flag(here[:, row], deep), nl.minimum, float(num_held - 1))
            nisa.tensor_copy(
                dst=rows[:, row],
                src=held.ap(
                    pattern=[[num_held * width, NUM_GROUPS], [1, width]], scalar_offset=to_int(place), indirect_dim=1
                ),
            )
        picked = at_row(values.expand_dim(2).broadcast(2, DEEP_ROWS), here)
        on_lanes = spread(transpose(picked.reshape((1, VALUES * DEEP_ROWS)))).reshape((NUM_GROUPS, VALUES, DEEP_ROWS))
        masses = floats(rows.shape)
        for row in range(DEEP_ROWS):
            column = slice(row, row + 1)
            relative_masses(masses[:, row], rows[:, row], on_lanes[:, PEAK, column], on_lanes[:, SCALE, column])
        found = cut_rows(rows, masses, on_lanes, groups, bits_of(held.dtype))
        for row in range(DEEP_ROWS):
            chosen = flags_of(here[:, row], nl.greater, 0.0)
            for kind in (THRESHOLD, MASS):
                nisa.tensor_copy_predicated(
                    dst=cuts[:, kind],
                    src=found[kind][0:1, row : row + 1].broadcast(1, num_held),
                    predicate=chosen,
                )

    nl.fori_loop(0, deep_trips(deep, DEEP_ROWS), search)
