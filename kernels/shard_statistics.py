"""shard_statistics: what one rank of a sharded vocabulary knows of every row, by lane."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import load_tokens, proposed, row_numbers, sequence_chunks
from .row_facts import load_parameters, row_columns, row_lanes
from .shards import ENTRIES, LANE_STATISTICS, shard_first_ids, shard_geometry
from .truncation import BEST8, allocate_candidates, candidate_tile, widest
from .vocabulary import NUM_GROUPS, SEGMENTS, floats


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
    batch, rows, width = target_logits.shape
    own, vocabulary = shard_geometry(width, shard, num_shards, vocab_size)
    lanes = NUM_GROUPS // num_shards
    statistics = nl.ndarray((batch, rows, LANE_STATISTICS * lanes + ENTRIES), dtype=nl.float32, buffer=nl.shared_hbm)
    cut_laws = [target_logits]
    if draft_kind == "logits":
        cut_laws.append(draft_law)
    candidates = None
    if cut:
        candidates = nl.ndarray(
            (len(cut_laws), batch, rows, BEST8, SEGMENTS * lanes), dtype=widest(cut_laws), buffer=nl.shared_hbm
        )
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        row_number = row_numbers(count, rows)
        tokens = load_tokens(draft_tokens, first, count, rows)
        lens, _, _, _, scale, _ = load_parameters(
            draft_lens, temperature, None, None, None, first, count, rows, False, vocab_size
        )
        has_draft = proposed(tokens, lens, row_number, vocab_size)
        columns = row_columns(tokens, has_draft, first, uniforms, scale)
        _, largest = allocate_candidates(cut_laws, count * rows, cut)
        target, draft = row_lanes(
            columns,
            tokens,
            first,
            target_logits,
            draft_law,
            draft_kind,
            vocabulary,
            shard_first_ids(width, num_shards),
            largest,
            own,
        )
        result = floats((count * rows, LANE_STATISTICS * lanes + ENTRIES))
        nisa.memset(dst=result, value=0.0)
        parts = [target[0], target[1], target[2]]
        entries = [target[3]]
        if draft_kind != "one_hot":
            parts.append(draft[0])
            parts.append(draft[1])
            entries.append(draft[3])
        for i in range(len(parts)):
            nisa.tensor_copy(dst=result[:, i * lanes : (i + 1) * lanes], src=parts[i][:, own[0] : own[0] + lanes])
        for i in range(len(entries)):
            place = LANE_STATISTICS * lanes + i
            nisa.tensor_copy(dst=result[:, place : place + 1], src=entries[i])
        if repeated < count:
            kept = slice(repeated * rows, count * rows)
            flat = statistics.reshape((batch * rows, LANE_STATISTICS * lanes + ENTRIES))
            nisa.dma_copy(dst=flat[(first + repeated) * rows : (first + count) * rows], src=result[kept])
            for law in range(len(largest)):
                store_candidates(
                    candidates[law], (first + repeated) * rows, largest[law][:, :, repeated * rows * BEST8 :], own[0]
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
