"""shard_weights: how much one rank of a sharded vocabulary holds above thresholds, in rows that are cut deep."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import at_row, over_rows, sequence_chunks, to_int
from .row_facts import load_parameters
from .shards import DEEP, LARGEST, SHARD_CUTS, shard_geometry
from .truncation import deep_trips, flags_of, lane_weights, relative_masses, take_flag
from .vocabulary import FILL, NUM_GROUPS, floats, group_size, load_row_at, spread, transpose


@nki.jit
def shard_weights(cuts, trials, target_logits, draft_law, empty, temperature, by_mass, shard, num_shards, vocab_size):
    """Number, or mass, of this rank's entries not below the trials, by lane; 0 in rows that are not deep.

    Args:
        cuts: [laws, B, T, SHARD_CUTS] fp32 of `shard_cuts`.
        trials: [laws, B, T, N] fp32 thresholds.
        target_logits: [B, T, V / n]; draft_law: [B, K, V / n] logits, None where only the target is cut.
        empty: [B] int32 zeros.
        temperature: [B] fp32, 0 greedy.
        by_mass: exp((x - peak) / T) is added up instead of 1.
        shard, num_shards: this rank of n.
        vocab_size: ids of the whole vocabulary.

    Returns:
        [128 / n, laws, B, T, N] fp32.
    """
    num_laws, batch, rows, num_trials = trials.shape
    own, vocabulary = shard_geometry(target_logits.shape[2], shard, num_shards, vocab_size)
    lanes = NUM_GROUPS // num_shards
    weights = nl.ndarray((lanes, num_laws, batch, rows, num_trials), dtype=nl.float32, buffer=nl.shared_hbm)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        _, _, _, _, scale, _ = load_parameters(
            empty, temperature, None, None, None, first, count, rows, False, vocab_size
        )
        for law in range(num_laws):
            array = target_logits if law == 0 else draft_law
            found = deep_weights(cuts[law], trials[law], array, scale, first, count, rows, by_mass, own, vocabulary)
            if repeated < count:
                flat = weights[:, law].reshape((lanes, batch * rows, num_trials))
                nisa.dma_copy(
                    dst=flat[:, (first + repeated) * rows : (first + count) * rows],
                    src=found[own[0] : own[0] + lanes, repeated * rows : count * rows],
                )
    return weights


def deep_weights(cuts, trials, array, scale, first, count, rows, by_mass, own, vocabulary):
    """[128, n, N] of a chunk's n rows; only the rank's own lanes say anything."""
    batch, _, num_trials = trials.shape
    num_rows = count * rows
    law_rows = array.shape[1]
    columns = floats((num_rows, SHARD_CUTS))
    nisa.dma_copy(dst=columns, src=cuts.reshape((batch * rows, SHARD_CUTS))[first * rows : (first + count) * rows])
    bounds = floats((1, num_rows, num_trials))
    nisa.dma_copy(dst=bounds.reshape((1, count, rows, num_trials)), src=trials.expand_dim(0)[:, first : first + count])
    deep = transpose(columns[:, DEEP : DEEP + 1])
    # What is fetched with a row: its peak, 1 / T and place in HBM.
    values = floats((1, 3, num_rows))
    nisa.tensor_copy(dst=values[:, 0], src=transpose(columns[:, LARGEST : LARGEST + 1]))
    nisa.tensor_copy(dst=values[:, 1].reshape((1, count, rows)), src=over_rows(scale, rows))
    nisa.iota(dst=values[:, 2], pattern=[[law_rows, count], [1, rows]], offset=first * law_rows, channel_multiplier=0)
    weights = floats((NUM_GROUPS, num_rows, num_trials))
    nisa.memset(dst=weights, value=0.0)

    def weigh(trip):
        here = floats((1, num_rows))
        take_flag(here, deep)
        at = at_row(values.expand_dim(2), here.expand_dim(1))
        tile = nl.ndarray((NUM_GROUPS, group_size(vocabulary)), dtype=array.dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=FILL)
        load_row_at(tile, array, to_int(at[:, 2]), vocabulary, own)
        masses = None
        if by_mass:
            peak_and_scale = spread(transpose(at[:, 0:2, 0]))
            masses = floats(tile.shape)
            relative_masses(masses, tile, peak_and_scale[:, 0:1], peak_and_scale[:, 1:2])
        picked = at_row(bounds.permute((0, 2, 1)).expand_dim(2), here.expand_dim(1))
        on_lanes = spread(transpose(picked[:, :, 0]))
        sums = floats((NUM_GROUPS, num_trials))
        above = nl.ndarray(tile.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
        for trial in range(num_trials):
            column = slice(trial, trial + 1)
            lane_weights(sums[:, column], tile, masses, on_lanes[:, column], above)
        chosen = flags_of(spread(transpose(here)), nl.greater, 0.0)
        nisa.tensor_copy_predicated(
            dst=weights,
            src=sums.expand_dim(1).broadcast(1, num_rows),
            predicate=chosen.expand_dim(2).broadcast(2, num_trials),
        )

    nl.fori_loop(0, deep_trips(deep, 1), weigh)
    return weights
