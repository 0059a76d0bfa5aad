"""combine_shards: the decision and the last token from what all ranks of a sharded vocabulary found."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import allocate_outputs, select, sequence_chunks
from .decision import store_chains
from .draw import inverse_cdf, load_uniforms
from .last_row import choose_law
from .row_facts import BEST, load_chains
from .shards import (
    DRAWS,
    FINITE_ID,
    FINITE_MAXIMUM,
    RESIDUAL_ID,
    RESIDUAL_SUM,
    TARGET_ID,
    TARGET_SUM,
    decide_together,
)
from .statistics import first_of_largest
from .vocabulary import LOWEST_PEAK, NUM_GROUPS, floats, tensor_scalar, tensor_tensor, transpose


@nki.jit
def combine_shards(
    statistics, cuts, excess, draws, draft_tokens, uniforms, draft_lens, temperature, draft_kind, rule, vocab_size
):
    """Chooses the group with the first uniform; its rank has drawn the id already.

    Args:
        statistics: [n, B, T, 5 * 128 / n + 2] fp32; draws: [n, B, DRAWS, 128 / n] fp32, of all ranks.
        cuts, excess, rule: as `shard_draws`.
        draft_tokens: [B, K] int32; None where K is 0.
        uniforms: [B, T + 1] fp32.
        draft_lens, temperature: [B] int32, fp32.
        draft_kind: "logits", "probs" or "one_hot".
        vocab_size: ids of the whole vocabulary.

    Returns:
        tokens [B, T], num_accepted [B], path [B, T], invalid [B], all int32.
    """
    num_shards, batch, rows, _ = statistics.shape
    lanes = NUM_GROUPS // num_shards
    outputs = allocate_outputs(batch, rows)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        chains = load_chains(draft_tokens, uniforms, draft_lens, temperature, None, first, count, rows, vocab_size)
        decision = decide_together(statistics, cuts, excess, chains, rule, draft_kind)
        found = floats((count, DRAWS, NUM_GROUPS))
        for shard in range(num_shards):
            nisa.dma_copy(dst=found[:, :, shard * lanes : (shard + 1) * lanes], src=draws[shard, first : first + count])
        use_residual, use_target = choose_law(found[:, RESIDUAL_SUM], decision.residual)
        groups = mixed(found[:, RESIDUAL_SUM], use_residual, found[:, TARGET_SUM], use_target)
        ids = mixed(found[:, RESIDUAL_ID], use_residual, found[:, TARGET_ID], use_target)
        group = inverse_cdf(groups, load_uniforms(uniforms, first, count)[:, 0:1])
        numbers = floats((count, NUM_GROUPS))
        nisa.iota(dst=numbers, pattern=[[1, NUM_GROUPS]], offset=0, channel_multiplier=0)
        nisa.scalar_tensor_tensor(
            dst=numbers, data=numbers, op0=nl.equal, operand0=group, op1=nl.multiply, operand1=ids
        )
        drawn = floats((count, 1))
        nisa.tensor_reduce(dst=drawn, op=nl.add, data=numbers, axis=1)

        peak = floats((count, 1))
        nisa.tensor_reduce(dst=peak, op=nl.maximum, data=found[:, FINITE_MAXIMUM], axis=1)
        finite = first_of_largest(found[:, FINITE_MAXIMUM], found[:, FINITE_ID], peak)
        some = tensor_scalar(peak, nl.greater, LOWEST_PEAK)
        nisa.tensor_tensor(dst=finite, data1=finite, data2=some, op=nl.multiply)
        best = select(decision.has_law, decision.last[:, BEST], transpose(finite))
        by_law = tensor_tensor(decision.has_law, decision.sampled, nl.multiply)
        store_chains(outputs, repeated, chains, decision, select(by_law, transpose(drawn), best))
    return outputs


def mixed(residual, use_residual, target, use_target):
    """residual where use_residual, target where use_target; [B, 128] and [B, 1]."""
    result = tensor_scalar(residual, nl.multiply, use_residual)
    nisa.scalar_tensor_tensor(
        dst=result, data=target, op0=nl.multiply, operand0=use_target, op1=nl.add, operand1=result
    )
    return result
