"""What a law's rows say on one read each: peak, total, best id and, where top-k, top-p or min-p may cut, threshold.

Rows that may be cut stay on the chip until their thresholds are known, in parts of as many rows as are searched at
once and find room. So a row that is cut below its candidates is searched where it lies.
"""

from dataclasses import dataclass

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

HELD_BYTES = 196608  # of a partition, for a part's rows and the whole rows among them that are searched at once
DEEP_BYTES = 14  # of an fp32 entry of those: itself, its mass, whether it is above a bound, and what of its mass is
DEEP_ROWS = 2  # searched at once, but of the longest rows: one alone leaves the engines waiting for each other


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


def laws_and_kinds(target_logits, draft_law, draft_kind):
    """The laws to read, as `row_laws` takes them: one-hot drafts have none."""
    if draft_kind == "one_hot":
        return [(target_logits, "logits")]
    return [(target_logits, "logits"), (draft_law, draft_kind)]


def combine_rows(lanes, row_scale):
    """A dictionary of `row_laws`, uncut, from [n, 128] maxima, totals and ids; row_scale [n, 1]."""
    maxima, totals, ids = lanes
    peak, total = combine_lanes(maxima, totals, row_scale)
    best = first_of_largest(maxima, ids, peak) if ids != None else None  # noqa: E711
    return {"peak": peak, "total": total, "best": best, "threshold": None}


@dataclass
class CutLaws(nl.NKIObject):
    """Logits whose rows may be cut, and what is found of them: all laws' rows as N = laws * n columns."""

    arrays: object  # [B, law rows, V] each
    first: int  # the chunk's sequences
    count: int
    rows: int
    scales: object  # [128, n], 1 / T on all lanes
    vocab_size: int
    partition_ids: object
    lanes: object  # of N columns; ids of the target's
    values: object  # [1, VALUES, N]
    cuts: object  # [1, CUTS, N]


@dataclass
class RowTile(nl.NKIObject):
    """Rows start..stop of a sequence's in a law: columns low..high, which go on where a law has no last row."""

    law: int
    sequence: int
    start: int
    stop: int
    low: int
    high: int


def cut_laws(arrays, first, count, rows, row_scale, scales, limits, vocab_size, partition_ids):
    """`row_laws` of logits `arrays` [B, law rows, V] that may be cut; scales: row_scale on all lanes, [128, n]."""
    num_rows = count * rows
    num_columns = len(arrays) * num_rows
    lanes = Lanes(floats((NUM_GROUPS, num_columns)), floats((NUM_GROUPS, num_columns)), floats((NUM_GROUPS, num_rows)))
    values, cuts = floats((1, VALUES, num_columns)), floats((1, CUTS, num_columns))
    by_row_scale = transpose(row_scale)
    for i in range(len(arrays)):
        own = slice(i * num_rows, (i + 1) * num_rows)
        nisa.tensor_copy(dst=values[:, 0:PARAMETERS, own], src=limits)
        nisa.tensor_copy(dst=values[:, SCALE, own], src=by_row_scale)
    laws = CutLaws(arrays, first, count, rows, scales, vocab_size, partition_ids, lanes, values, cuts)
    for tiles in row_parts(laws):
        cut_part(laws, tiles)

    results = []
    for i in range(len(arrays)):
        own = slice(i * num_rows, (i + 1) * num_rows)
        peak = transpose(values[:, PEAK, own])
        best = first_of_largest(transpose(lanes.maxima[:, own]), transpose(lanes.ids), peak) if i == 0 else None
        threshold, total = transpose(cuts[:, THRESHOLD, own]), transpose(cuts[:, MASS, own])
        results.append({"peak": peak, "total": total, "best": best, "threshold": threshold})
    return results


def deep_rows_at_once(vocab_size):
    """0 where a lane has no more entries than candidates, so that no row is searched whole."""
    if group_size(vocab_size) <= SEGMENTS * BEST8:
        return 0
    return DEEP_ROWS if DEEP_ROWS * DEEP_BYTES * searched_width(vocab_size) <= HELD_BYTES // 2 else 1


def row_parts(laws):
    """Lists of row tiles, each held and searched at once: rows of one dtype."""
    width = searched_width(laws.vocab_size)
    room = HELD_BYTES - deep_rows_at_once(laws.vocab_size) * DEEP_BYTES * width
    parts, tiles = [], []
    for law in range(len(laws.arrays)):
        array = laws.arrays[law]
        law_rows = array.shape[1]
        most = min(SEARCHED_ROWS, room // (width * (4 if array.dtype == nl.float32 else 2)))
        for sequence in range(laws.count):
            base = (law * laws.count + sequence) * laws.rows
            for span in row_tiles(law_rows, array, laws.vocab_size, most - (laws.rows - law_rows)):
                start, stop = span
                high = base + (laws.rows if stop == law_rows else stop)
                if len(tiles) > 0:
                    fits = high - tiles[0].low <= most and laws.arrays[tiles[0].law].dtype == array.dtype
                    if not fits:
                        parts.append(tiles)
                        tiles = []
                tiles.append(RowTile(law, sequence, start, stop, base + start, high))
    parts.append(tiles)
    return parts


def cut_part(laws, tiles):
    """Reads the rows of one of `row_parts` and fills in their columns of lanes, values and cuts."""
    low, high = tiles[0].low, tiles[len(tiles) - 1].high
    own = slice(low, high)
    dtype = laws.arrays[tiles[0].law].dtype
    width = searched_width(laws.vocab_size)
    held = allocate_rows(high - low, width, dtype, laws.vocab_size, FILL)
    deep_rows = deep_rows_at_once(laws.vocab_size)
    spent = nl.ndarray((NUM_GROUPS, deep_rows, width), dtype=dtype, buffer=nl.sbuf) if deep_rows > 0 else None
    candidates = nl.ndarray((NUM_GROUPS, SEGMENTS, (high - low) * BEST8), dtype=dtype, buffer=nl.sbuf)
    for tile in tiles:
        array = laws.arrays[tile.law]
        first, last = tile.low - low, tile.low - low + tile.stop - tile.start
        fill_rows(
            held[:, first:last], array, (laws.first + tile.sequence) * array.shape[1] + tile.start, laws.vocab_size
        )
        row = tile.low - tile.law * laws.count * laws.rows
        tile_statistics(
            held[:, first:last],
            laws.lanes,
            tile.low,
            tile.law == 0,
            laws.scales[:, row : row + last - first],
            laws.partition_ids,
            candidates[:, :, first * BEST8 : last * BEST8],
            spent[:, 0:1] if deep_rows > 0 else held[:, first:last],
        )
        if low + last < tile.high:
            # The last row of a window has no draft law.
            nisa.memset(dst=laws.lanes.maxima[:, low + last : tile.high], value=0.0)
            nisa.memset(dst=laws.lanes.totals[:, low + last : tile.high], value=1.0)
            nisa.memset(dst=candidates[:, :, last * BEST8 : (tile.high - low) * BEST8], value=FILL)
            nisa.memset(dst=held[:, last : tile.high - low], value=FILL)

    values = laws.values[:, :, own]
    peak, total = combine_lanes(
        transpose(laws.lanes.maxima[:, own]), transpose(laws.lanes.totals[:, own]), transpose(values[:, SCALE])
    )
    found = floats((high - low, 2))
    nisa.tensor_copy(dst=found[:, 0:1], src=peak)
    nisa.tensor_copy(dst=found[:, 1:2], src=total)
    nisa.tensor_copy(dst=values[:, PEAK : TOTAL + 1], src=to_rows(found))
    deep = floats((1, high - low))
    cut_candidates(laws.cuts[:, :, own], deep, candidate_tile(candidates), values, bits_of(dtype))
    if deep_rows > 0:
        cut_deep_rows(held, spent, values, laws.cuts[:, :, own], deep)


def cut_deep_rows(held, rows, values, cuts, deep):
    """Corrects `cuts` [1, CUTS, m] of the rows of `held` [128, m, width] that `deep` [1, m] flags, searched whole.

    Args:
        rows: [128, R, width], overwritten, of which R are searched at once.
        values: [1, VALUES, m].
    """
    _, num_held, width = held.shape
    num_rows = rows.shape[1]
    groups = row_groups(1)

    def search(trip):
        here = floats((1, num_rows, num_held))
        for row in range(num_rows):
            # Some row, without effect, where no flag is left.
            place = tensor_scalar(take_flag(here[:, row], deep), nl.minimum, float(num_held - 1))
            nisa.tensor_copy(
                dst=rows[:, row],
                src=held.ap(
                    pattern=[[num_held * width, NUM_GROUPS], [1, width]], scalar_offset=to_int(place), indirect_dim=1
                ),
            )
        picked = at_row(values.expand_dim(2).broadcast(2, num_rows), here)
        on_lanes = spread(transpose(picked.reshape((1, VALUES * num_rows)))).reshape((NUM_GROUPS, VALUES, num_rows))
        masses = floats(rows.shape)
        for row in range(num_rows):
            column = slice(row, row + 1)
            relative_masses(masses[:, row], rows[:, row], on_lanes[:, PEAK, column], on_lanes[:, SCALE, column])
        found = cut_rows(rows, masses, on_lanes, groups, bits_of(held.dtype))
        for row in range(num_rows):
            chosen = flags_of(here[:, row], nl.greater, 0.0)
            for kind in (THRESHOLD, MASS):
                nisa.tensor_copy_predicated(
                    dst=cuts[:, kind],
                    src=found[kind][0:1, row : row + 1].broadcast(1, num_held),
                    predicate=chosen,
                )

    nl.fori_loop(0, deep_trips(deep, num_rows), search)
