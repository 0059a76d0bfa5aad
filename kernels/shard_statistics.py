"""shard_statistics: what one rank of a sharded vocabulary knows of every row, by lane."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import sequence_chunks
from .row_facts import load_chains, row_columns, token_entries
from .row_laws import laws_and_kinds
from .shards import ENTRIES, LANE_STATISTICS, shard_laws
from .statistics import lane_statistics
from .truncation import BEST8, candidate_tile
from .vocabulary import NUM_GROUPS, SEGMENTS, floats, spread


@nki.jit
def shard_statistics(
    draft_tokens,
    target_logits,
    uniforms,
    draft_law,
    draft_lens,
    temperature,
    draft_kind,
    shard,
    num_shards,
    cut,
    vocab_size,
):
    """One read of this rank's columns of every target and draft row.

    Args:
        draft_tokens: [B, K] int32; None where K is 0.
        target_logits: [B, T, V / n] fp32 or bf16.
        uniforms: [B, T + 1] fp32.
        draft_law: [B, K, V / n] fp32 or bf16, logits or probabilities; None for one-hot drafts.
        draft_lens, temperature: [B] int32, fp32.
        draft_kind: "logits", "probs" or "one_hot".
        shard, num_shards: this rank of n.
        cut: whether rows may be truncated.
        vocab_size: ids of the whole vocabulary.

    Returns:
        statistics [B, T, 5 * 128 / n + 2] fp32, and if `cut` candidates [laws, B, T, 8, SEGMENTS * 128 / n], the 8
        largest entries of every segment, fp32 unless all laws are bf16; laws are the target and draft logits.
    """
    batch, rows, _ = target_logits.shape
    lanes = NUM_GROUPS // num_shards
    first_lane = shard * lanes
    laws = shard_laws(target_logits, draft_law, draft_kind, None, shard, num_shards, vocab_size)
    statistics = nl.ndarray((batch, rows, LANE_STATISTICS * lanes + ENTRIES), dtype=nl.float32, buffer=nl.shared_hbm)
    candidates = None
    if cut:
        num_laws, dtype = 1, target_logits.dtype
        if draft_kind == "logits":
            num_laws = 2
            if draft_law.dtype == nl.float32:
                dtype = nl.float32
        candidates = nl.ndarray((num_laws, batch, rows, BEST8, SEGMENTS * lanes), dtype=dtype, buffer=nl.shared_hbm)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        chains = load_chains(draft_tokens, uniforms, draft_lens, temperature, None, first, count, rows, vocab_size)
        columns = row_columns(chains)
        entries = token_entries(columns, chains, laws)
        pairs = laws_and_kinds(target_logits, draft_law, draft_kind)
        scales = spread(columns[:, 0:1])
        parts, largest = [], []
        for i in range(len(pairs)):
            array, kind = pairs[i]
            found = None
            if cut and kind == "logits":
                found = nl.ndarray((NUM_GROUPS, SEGMENTS, count * rows * BEST8), dtype=candidates.dtype, buffer=nl.sbuf)
                largest.append(found)
            maxima, totals, ids = lane_statistics(
                array,
                first,
                count,
                array.shape[1],
                rows,
                kind,
                i == 0,
                scales,
                laws.vocab_size,
                laws.partition_ids,
                found,
                laws.shard,
            )
            parts.append(maxima)
            parts.append(totals)
            if i == 0:
                parts.append(ids)
        result = floats((count * rows, LANE_STATISTICS * lanes + ENTRIES))
        nisa.memset(dst=result, value=0.0)
        for i in range(len(parts)):
            nisa.tensor_copy(
                dst=result[:, i * lanes : (i + 1) * lanes], src=parts[i][:, first_lane : first_lane + lanes]
            )
        for i in range(len(pairs)):
            place = LANE_STATISTICS * lanes + i
            nisa.tensor_copy(dst=result[:, place : place + 1], src=entries[i])
        if repeated < count:
            kept = slice(repeated * rows, count * rows)
            flat = statistics.reshape((batch * rows, LANE_STATISTICS * lanes + ENTRIES))
            nisa.dma_copy(dst=flat[(first + repeated) * rows : (first + count) * rows], src=result[kept])
            for law in range(len(largest)):
                store_candidates(
                    candidates[law],
                    (first + repeated) * rows,
                    largest[law][:, :, repeated * rows * BEST8 :],
                    first_lane,
                )
    if cut:
        return statistics, candidates
    return statistics


def store_candidates(candidates, first_row, largest, first_lane):
    """Writes this rank's lanes of `largest` [128, SEGMENTS, 8 m] to rows of `candidates` [B, T, 8, SEGMENTS * G]."""
    batch, rows, _, width = candidates.shape
    flat = candidates.reshape((batch * rows * BEST8, width))
    tile = candidate_tile(largest)
    num_ranks = largest.shape[2]
    for group in range(tile.shape[1]):
        ranks = min(NUM_GROUPS, num_ranks - group * NUM_GROUPS)
        by_lane = tile[0:ranks, group].reshape((ranks, SEGMENTS, NUM_GROUPS))
        start = first_row * BEST8 + group * NUM_GROUPS
        nisa.dma_copy(
            dst=flat[start : start + ranks].reshape((ranks, SEGMENTS, width // SEGMENTS)),
            src=by_lane[:, :, first_lane : first_lane + width // SEGMENTS],
        )
