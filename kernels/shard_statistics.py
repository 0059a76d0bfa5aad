"""shard_statistics: what one rank of a sharded vocabulary knows of every row, by lane."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import load_tokens, proposed, row_numbers, sequence_chunks
from .row_facts import load_parameters, row_columns, row_lanes
from .shards import ENTRIES, LANE_STATISTICS, shard_first_ids, shard_geometry
from .vocabulary import NUM_GROUPS, floats


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
        vocab_size: ids of the whole vocabulary.

    Returns:
        [B, T, 5 * 128 / n + 2] fp32.
    """
    batch, rows, width = target_logits.shape
    own, vocabulary = shard_geometry(width, shard, num_shards, vocab_size)
    lanes = NUM_GROUPS // num_shards
    statistics = nl.ndarray((batch, rows, LANE_STATISTICS * lanes + ENTRIES), dtype=nl.float32, buffer=nl.shared_hbm)
    for first, count, repeated in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        row_number = row_numbers(count, rows)
        tokens = load_tokens(draft_tokens, first, count, rows)
        lens, _, _, _, scale, _ = load_parameters(
            draft_lens, temperature, None, None, None, first, count, rows, False, vocab_size
        )
        has_draft = proposed(tokens, lens, row_number, vocab_size)
        columns = row_columns(tokens, has_draft, first, uniforms, scale)
        target, draft = row_lanes(
            columns,
            tokens,
            first,
            target_logits,
            draft_law,
            draft_kind,
            vocabulary,
            shard_first_ids(width, num_shards),
            shard=own,
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
    return statistics
