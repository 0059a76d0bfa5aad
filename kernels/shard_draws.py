"""shard_draws: the masses of one rank's lanes in the row after the accepted drafts, and the id each lane would give."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import row_index, sequence_chunks, to_int
from .draw import inverse_cdf, load_uniforms
from .last_row import last_masses
from .row_facts import load_chains
from .shards import (
    DRAWS,
    FINITE_ID,
    FINITE_MAXIMUM,
    RESIDUAL_ID,
    RESIDUAL_SUM,
    TARGET_ID,
    TARGET_SUM,
    decide_together,
    shard_laws,
)
from .statistics import best_finite
from .vocabulary import MASS_BYTES, NUM_GROUPS, floats, group_size, spread, transpose


@nki.jit
def shard_draws(
    statistics,
    cuts,
    excess,
    draft_tokens,
    target_logits,
    uniforms,
    draft_law,
    draft_lens,
    temperature,
    draft_kind,
    rule,
    shard,
    vocab_size,
):
    """Decides as every rank does, and draws inside each of this rank's lanes with the second uniform.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2] fp32, of all ranks.
        cuts: [laws, B, T, SHARD_CUTS] fp32 of `shard_cuts`; None where nothing is cut.
        excess: [n, B, T, 128 / n] fp32 of `shard_excess`; None under the token rule and for one-hot drafts.
        rule: "token" or "block".
        The others as `shard_statistics`.

    Returns:
        [B, DRAWS, 128 / n] fp32.
    """
    batch, rows, _ = target_logits.shape
    num_shards = statistics.shape[0]
    lanes = NUM_GROUPS // num_shards
    laws = shard_laws(target_logits, draft_law, draft_kind, cuts, shard, num_shards, vocab_size)
    draws = nl.ndarray((batch, DRAWS, lanes), dtype=nl.float32, buffer=nl.shared_hbm)
    for chunk in sequence_chunks(batch, rows, 8 * group_size(laws.vocab_size), MASS_BYTES):
        first, count, repeated = chunk
        chains = load_chains(draft_tokens, uniforms, draft_lens, temperature, None, first, count, rows, vocab_size)
        decision = decide_together(statistics, cuts, excess, chains, rule, draft_kind)
        residual_masses, target_masses, sums = last_masses(chains, laws, decision)
        found = floats((NUM_GROUPS, DRAWS, count))
        nisa.tensor_copy(dst=found[:, RESIDUAL_SUM], src=sums[:, 0])
        nisa.tensor_copy(dst=found[:, TARGET_SUM], src=sums[:, 1])
        within = spread(load_uniforms(uniforms, first, count)[:, 1:2])
        index = to_int(row_index(decision.accepted, first * rows, rows))
        for sequence in range(count):
            column = slice(sequence, sequence + 1)
            for pair in ((residual_masses, RESIDUAL_ID), (target_masses, TARGET_ID)):
                masses, place = pair
                drawn = inverse_cdf(masses[:, sequence], within[:, column])
                nisa.tensor_tensor(dst=found[:, place, column], data1=drawn, data2=laws.partition_ids, op=nl.add)
            best_finite(
                target_logits,
                index[:, column],
                found[:, FINITE_MAXIMUM, column],
                found[:, FINITE_ID, column],
                laws.vocab_size,
                laws.partition_ids,
                laws.shard,
            )
        for place in range(DRAWS):
            by_sequence = transpose(found[:, place])
            if repeated < count:
                nisa.dma_copy(
                    dst=draws[first + repeated : first + count, place],
                    src=by_sequence[repeated:count, shard * lanes : (shard + 1) * lanes],
                )
    return draws
