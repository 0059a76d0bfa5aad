"""greedy_acceptance: drafts kept while they are the target's own first choice, on the device."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import (
    allocate_outputs,
    at_row,
    leading_count,
    load_sequences,
    load_tokens,
    over_rows,
    proposed,
    row_numbers,
    sequence_chunks,
    store_acceptance,
    to_rows,
    usable,
)
from .statistics import combine_lanes, first_of_largest, lane_statistics, replace_spoiled
from .vocabulary import (
    NUM_GROUPS,
    first_ids,
    floats,
    tensor_scalar,
    tensor_tensor,
)


@nki.jit
def greedy_acceptance(draft_tokens, target_logits, draft_lens, vocab_size):
    """The drafts that equal the target's argmax (the lowest id among equals), up to the first that does not.

    Args:
        draft_tokens: [B, K] int32; None where K is 0.
        target_logits: [B, T, V] fp32 or bf16, T = K + 1.
        draft_lens: [B] int32, -1 an empty slot.
        vocab_size: columns of V that count.

    Returns:
        tokens [B, T], num_accepted [B], path [B, T], invalid [B], all int32.
    """
    batch, rows, _ = target_logits.shape
    outputs = allocate_outputs(batch, rows)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        verify_chunk(outputs, first, count, repeated, draft_tokens, target_logits, draft_lens, vocab_size)
    return outputs


def verify_chunk(outputs, first, count, repeated, draft_tokens, target_logits, draft_lens, vocab_size):
    _, rows, _ = target_logits.shape
    num_rows = count * rows
    partition_ids = first_ids(vocab_size)
    row_number = row_numbers(count, rows)
    tokens = load_tokens(draft_tokens, first, count, rows)
    lens = load_sequences(draft_lens, first, count)
    good, active = usable(lens, rows - 1)

    # The total of the exponentials is not needed but for what it says of the row: NaN or 0 if it has no law.
    ones = floats((NUM_GROUPS, num_rows))
    nisa.memset(dst=ones, value=1.0)
    maxima, totals, candidates = lane_statistics(
        target_logits, first, count, rows, rows, "logits", True, ones, vocab_size, partition_ids
    )
    peak, total = combine_lanes(maxima, totals, ones[0:num_rows, 0:1])
    found = floats((num_rows, 2))
    nisa.tensor_copy(dst=found[:, 0:1], src=first_of_largest(maxima, candidates, peak))
    nisa.tensor_scalar(dst=found[:, 1:2], data=total, op0=nl.greater, operand0=0.0)
    by_row = to_rows(found).reshape((1, 2, count, rows))
    best, has_law = by_row[:, 0], by_row[:, 1]

    accept = proposed(tokens, lens, row_number, vocab_size)
    match = tensor_tensor(best, tokens, nl.equal)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=match, op=nl.multiply)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=has_law, op=nl.multiply)
    accepted = leading_count(accept, row_number)

    chosen = tensor_tensor(row_number, over_rows(accepted, rows), nl.equal)
    last = at_row(by_row, chosen)
    spoiled = tensor_scalar(last[:, 1], nl.multiply, -1.0, nl.add, 1.0)
    nisa.tensor_tensor(dst=spoiled, data1=spoiled, data2=active, op=nl.multiply)
    emitted = floats((1, count))
    nisa.tensor_copy(dst=emitted, src=last[:, 0])
    replace_spoiled(emitted, spoiled, accepted, first, target_logits, vocab_size, partition_ids)
    store_acceptance(outputs, first, repeated, tokens, row_number, accepted, emitted, active, good, spoiled, row_number)
