"""shard_excess: what one rank of a sharded vocabulary holds of the masses that block verification asks for."""

import nki
import nki.isa as nisa
import nki.language as nl

from .block_rule import excess_masses
from .chain import sequence_chunks
from .row_facts import load_chains
from .shards import shard_facts, shard_laws
from .vocabulary import NUM_GROUPS


@nki.jit
def shard_excess(
    statistics,
    cuts,
    draft_tokens,
    target_logits,
    uniforms,
    draft_law,
    draft_lens,
    temperature,
    draft_kind,
    shard,
    vocab_size,
):
    """Sums of max(weight * target - draft, 0) * draft total over this rank's lanes, of every row between.

    Args:
        draft_law: [B, K, V / n] fp32 or bf16, logits or probabilities.
        The others as `shard_draws`.

    Returns:
        [B, T, 128 / n] fp32.
    """
    batch, rows, _ = target_logits.shape
    num_shards = statistics.shape[0]
    lanes = NUM_GROUPS // num_shards
    laws = shard_laws(target_logits, draft_law, draft_kind, cuts, shard, num_shards, vocab_size)
    excess = nl.ndarray((batch, rows, lanes), dtype=nl.float32, buffer=nl.shared_hbm)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        chains = load_chains(draft_tokens, uniforms, draft_lens, temperature, None, first, count, rows, vocab_size)
        masses = excess_masses(chains, laws, shard_facts(statistics, cuts, chains, True, draft_kind))
        if repeated < count:
            start, stop = (first + repeated) * rows, (first + count) * rows
            nisa.dma_copy(
                dst=excess.reshape((batch * rows, lanes))[start:stop],
                src=masses[repeated * rows : count * rows, shard * lanes : (shard + 1) * lanes],
            )
    return excess
