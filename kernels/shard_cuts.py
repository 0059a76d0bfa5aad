"""shard_cuts: the thresholds of top-k, top-p and min-p from what all ranks of a sharded vocabulary gave."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import over_rows, sequence_chunks, to_columns
from .row_facts import load_parameters
from .shards import DEEP, LARGEST, SHARD_CUTS, WHOLE, gathered_laws
from .truncation import (
    BEST8,
    CUTS,
    GROUP_ROWS,
    MASS,
    PARAMETERS,
    PEAK,
    SCALE,
    SEARCHED_ROWS,
    THRESHOLD,
    TOTAL,
    VALUES,
    bits_of,
    cut_candidates,
)
from .vocabulary import FILL, NUM_GROUPS, SEGMENTS, floats, transpose


@nki.jit
def shard_cuts(statistics, candidates, empty, temperature, top_k, top_p, min_p, draft_kind, vocab_size):
    """Searches the candidates as one core does its own: the same on every rank.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2] fp32; candidates: [n, laws, B, T, 8, SEGMENTS * 128 / n], of all ranks.
        empty: [B] int32 zeros.
        temperature: [B] fp32, 0 greedy.
        top_k, top_p, min_p: [B] int32, fp32, fp32.
        draft_kind: "logits", "probs" or "one_hot".
        vocab_size: ids of the whole vocabulary.

    Returns:
        [laws, B, T, SHARD_CUTS] fp32; deep rows need `shard_weights` of all ranks.
    """
    _, num_laws, batch, rows, _, _ = candidates.shape
    result = nl.ndarray((num_laws, batch, rows, SHARD_CUTS), dtype=nl.float32, buffer=nl.shared_hbm)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        num_rows = count * rows
        _, _, _, _, scale, limits = load_parameters(
            empty, temperature, top_k, top_p, min_p, first, count, rows, True, vocab_size
        )
        row_scales = floats((1, count, rows))
        nisa.tensor_copy(dst=row_scales, src=over_rows(scale, rows))
        row_scale = transpose(row_scales.reshape((1, num_rows)))
        laws = gathered_laws(statistics, row_scale, first, count, rows, draft_kind)
        for law in range(num_laws):
            values = floats((1, VALUES, num_rows))
            nisa.tensor_copy(dst=values[:, 0:PARAMETERS], src=limits)
            for pair in ((SCALE, row_scale), (PEAK, laws[law]["peak"]), (TOTAL, laws[law]["total"])):
                kind, column = pair
                nisa.tensor_copy(dst=values[:, kind], src=transpose(column))
            cuts = floats((1, CUTS, num_rows))
            found = floats((1, SHARD_CUTS, num_rows))
            for low in range(0, num_rows, SEARCHED_ROWS):
                high = min(low + SEARCHED_ROWS, num_rows)
                tile = load_candidates(candidates, law, first * rows + low, high - low)
                cut_candidates(
                    cuts[:, :, low:high],
                    found[:, DEEP, low:high],
                    tile,
                    values[:, :, low:high],
                    bits_of(candidates.dtype),
                )
            nisa.tensor_copy(dst=found[:, THRESHOLD], src=cuts[:, THRESHOLD])
            nisa.tensor_copy(dst=found[:, MASS], src=cuts[:, MASS])
            nisa.tensor_copy(dst=found[:, LARGEST], src=values[:, PEAK])
            nisa.tensor_copy(dst=found[:, WHOLE], src=values[:, TOTAL])
            if repeated < count:
                start, stop = (first + repeated) * rows, (first + count) * rows
                flat = result[law].reshape((batch * rows, SHARD_CUTS))
                nisa.dma_copy(dst=flat[start:stop], src=to_columns(found)[repeated * rows : num_rows])
    return result


def load_candidates(candidates, law, first_row, num_rows):
    """A `candidate_tile` of rows of one law, whose lanes come from all ranks."""
    num_shards, _, batch, rows, _, width = candidates.shape
    lanes = NUM_GROUPS // num_shards
    groups = (num_rows + GROUP_ROWS - 1) // GROUP_ROWS
    tile = nl.ndarray((NUM_GROUPS, groups, SEGMENTS * NUM_GROUPS), dtype=candidates.dtype, buffer=nl.sbuf)
    if num_rows % GROUP_ROWS > 0:
        nisa.memset(dst=tile[:, groups - 1], value=FILL)
    for group in range(groups):
        ranks = min(NUM_GROUPS, (num_rows - group * GROUP_ROWS) * BEST8)
        start = first_row * BEST8 + group * NUM_GROUPS
        by_lane = tile[0:ranks, group].reshape((ranks, SEGMENTS, NUM_GROUPS))
        for shard in range(num_shards):
            flat = candidates[shard, law].reshape((batch * rows * BEST8, width))
            nisa.dma_copy(
                dst=by_lane[:, :, shard * lanes : (shard + 1) * lanes],
                src=flat[start : start + ranks].reshape((ranks, SEGMENTS, lanes)),
            )
    return tile
