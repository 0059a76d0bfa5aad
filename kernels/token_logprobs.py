"""token_logprobs: log-probabilities of emitted tokens, on the device."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import over_rows, select, sequence_chunks, to_rows
from .node_facts import TARGET_OK, TARGET_PEAK, TARGET_THRESHOLD, TARGET_TOTAL, fetch_rows, node_columns
from .row_facts import load_parameters
from .statistics import entry_at
from .vocabulary import first_ids, floats, tensor_scalar, tensor_tensor, transpose


@nki.jit
def token_logprobs(
    target_logits, masked_logits, tokens, path, empty, temperature, top_k, top_p, min_p, cut, vocab_size
):
    """log of exp((x - peak) / T) / total of each token in its row, processed and raw.

    Args:
        target_logits: [B, T, V] fp32 or bf16.
        masked_logits: the same with a grammar's mask applied, for the processed values.
        tokens, path: [B, T] int32, -1 where there is none.
        empty: [B] int32 zeros.
        temperature: [B] fp32, 0 greedy.
        top_k, top_p, min_p: [B] int32, fp32, fp32; None unless `cut`.
        cut: whether any of the three may be on.
        vocab_size: columns of V that count.

    Returns:
        processed, raw [B, T] fp32.
    """
    batch, rows, _ = target_logits.shape
    processed = nl.ndarray((batch, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    raw = nl.ndarray((batch, rows), dtype=nl.float32, buffer=nl.shared_hbm)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        num_rows = count * rows
        partition_ids = first_ids(vocab_size)
        token = load_chunk(tokens, first, count)
        place = load_chunk(path, first, count)
        there = tensor_scalar(token, nl.greater_equal, 0.0)
        _, _, _, greedy, scale, limits = load_parameters(
            empty, temperature, top_k, top_p, min_p, first, count, rows, cut, vocab_size
        )
        ones = floats((1, count))
        nisa.memset(dst=ones, value=1.0)

        # Each place's row in the chunk.
        row = floats((1, count, rows))
        nisa.iota(dst=row, pattern=[[rows, count], [0, rows]], offset=0, channel_multiplier=0)
        known = tensor_scalar(place, nl.maximum, 0.0)
        nisa.tensor_tensor(dst=row, data1=row, data2=known, op=nl.add)
        local = transpose(row.reshape((1, num_rows)))
        column = transpose(tensor_tensor(token, there, nl.multiply).reshape((1, num_rows)))
        in_hbm = tensor_scalar(local, nl.add, float(first * rows))

        # Processed, raw, and processed in a greedy row, which is certain of its token.
        values = floats((num_rows, 3))
        for which in range(2):
            logits, heat, cuts = (masked_logits, scale, limits) if which == 0 else (target_logits, ones, None)
            found = node_columns(first, count, logits, None, "one_hot", vocab_size, heat, cuts, partition_ids)
            facts = fetch_rows(found, local)
            logprob = logarithm(entry_at(logits, in_hbm, column), facts, heat, rows)
            nisa.tensor_copy(dst=values[:, which : which + 1], src=logprob)
            if which == 0:
                has_law = facts[:, TARGET_OK : TARGET_OK + 1]
                certain = select(has_law, tensor_scalar(has_law, nl.multiply, 0.0), float("NaN"))
                nisa.tensor_copy(dst=values[:, 2:3], src=certain)
        by_row = to_rows(values).reshape((1, 3, count, rows))
        own = select(over_rows(greedy, rows), by_row[:, 2], by_row[:, 0])
        for pair in ((processed, own), (raw, by_row[:, 1])):
            output, value = pair
            result = select(there, value, 0.0)
            if repeated < count:
                nisa.dma_copy(
                    dst=output.expand_dim(0)[:, first + repeated : first + count], src=result[:, repeated:count]
                )
    return processed, raw


def load_chunk(values, first, count):
    """[1, count, T] fp32 of [B, T] int32."""
    loaded = nl.ndarray((1, count, values.shape[1]), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=values.expand_dim(0)[:, first : first + count, :])
    result = floats(loaded.shape)
    nisa.tensor_copy(dst=result, src=loaded)
    return result


def logarithm(entry, facts, scale, rows):
    """[n, 1]: (entry - peak) / T - ln(total); -inf below the threshold or masked, NaN where the row has no law.

    Args:
        entry: [n, 1]; facts: [n, NODE_FACTS]; scale: [1, B].
    """
    count = scale.shape[1]
    row_scale = floats((1, count, rows))
    nisa.tensor_copy(dst=row_scale, src=over_rows(scale, rows))
    result = tensor_tensor(entry, facts[:, TARGET_PEAK : TARGET_PEAK + 1], nl.subtract)
    nisa.tensor_tensor(dst=result, data1=result, data2=transpose(row_scale.reshape((1, count * rows))), op=nl.multiply)
    # A total is at least 1; rows without a law have 0 or NaN, which the logarithm must not see.
    has_law = facts[:, TARGET_OK : TARGET_OK + 1]
    total = select(has_law, facts[:, TARGET_TOTAL : TARGET_TOTAL + 1], 1.0)
    nisa.activation(dst=total, op=nl.log, data=total)
    nisa.tensor_tensor(dst=result, data1=result, data2=total, op=nl.subtract)
    kept = tensor_tensor(entry, facts[:, TARGET_THRESHOLD : TARGET_THRESHOLD + 1], nl.greater_equal)
    result = select(kept, result, float("-inf"))
    return select(has_law, result, float("NaN"))
