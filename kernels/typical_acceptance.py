"""typical_acceptance: drafts kept where the target finds them typical enough, on the device."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import (
    allocate_outputs,
    at_row,
    over_rows,
    proposed,
    row_index,
    row_numbers,
    select,
    sequence_chunks,
    store_acceptance,
    to_rows,
)
from .draw import draw, load_uniforms
from .node_facts import (
    BEST,
    NODE_FACTS,
    TARGET_OK,
    TARGET_PEAK,
    TARGET_THRESHOLD,
    TARGET_TOTAL,
    fetch_rows,
    lane_sums,
    row_masses,
)
from .row_facts import load_parameters
from .statistics import entry_at, first_of_largest, lane_best, replace_spoiled, row_tiles
from .tree import load_parents, load_row_tokens, require_tree
from .vocabulary import (
    FILL,
    MASS_BYTES,
    NUM_GROUPS,
    first_ids,
    floats,
    group_size,
    load_rows,
    spread,
    tensor_scalar,
    tensor_tensor,
    transpose,
)

LOWEST_DIFFERENCE = -1.0e30  # of a logit to the row's largest, instead of -inf: 0 times it is 0
LIMIT = NODE_FACTS  # after the node facts: what a draft's mass must exceed, as exp((x - peak) / T)
FACTS = NODE_FACTS + 1


@nki.jit
def typical_acceptance(
    draft_tokens,
    target_logits,
    uniforms,
    tree,
    draft_lens,
    temperature,
    posterior_threshold,
    posterior_alpha,
    chain,
    vocab_size,
):
    """Keeps drafts of probability above min(threshold, alpha * exp(-entropy)) (arXiv 2401.10774, section 2.3.1).

    Args:
        draft_tokens: [B, T - 1] int32; None where T is 1.
        target_logits: [B, T, V] fp32 or bf16.
        uniforms: [B, T + 1] fp32, of which the last two columns draw.
        tree: [T] or [B, T] int32 parents; None for a chain.
        draft_lens: [B] int32, -1 an empty slot.
        temperature: [B] fp32, 0 greedy.
        posterior_threshold, posterior_alpha: numbers.
        chain: whether there is no tree.
        vocab_size: columns of V that count.

    Returns:
        tokens [B, T], num_accepted [B], path [B, T], invalid [B], all int32.
    """
    batch, rows, _ = target_logits.shape
    outputs = allocate_outputs(batch, rows)
    for chunk in sequence_chunks(batch, rows, 4 * group_size(vocab_size), MASS_BYTES):
        first, count, repeated = chunk
        partition_ids = first_ids(vocab_size)
        row_number = row_numbers(count, rows)
        tokens = load_row_tokens(draft_tokens, first, count, rows)
        lens, good, active, greedy, scale, _ = load_parameters(
            draft_lens, temperature, None, None, None, first, count, rows, False, vocab_size
        )
        one_more = tensor_scalar(lens, nl.add, 1.0)
        live = proposed(tokens, one_more, row_number, vocab_size)
        if chain:
            parents = tensor_scalar(row_number, nl.subtract, 1.0)
        else:
            parents = load_parents(tree, first, count, rows)
            counted = tensor_tensor(row_number, over_rows(one_more, rows), nl.less)
            require_tree(good, active, parents, counted, row_number)
        nisa.tensor_tensor(dst=live, data1=live, data2=tensor_scalar(parents, nl.greater_equal, 0.0), op=nl.multiply)

        found = typical_facts(
            first, count, target_logits, scale, posterior_threshold, posterior_alpha, vocab_size, partition_ids
        )
        kept, likelihood = kept_rows(found, first, target_logits, tokens, parents, live, greedy, scale)
        facts = to_rows(found).reshape((1, FACTS, count, rows))
        path, path_tokens, accepted, last_row = longest_path(kept, likelihood, parents, tokens, row_number)

        last = at_row(facts, tensor_tensor(row_number, over_rows(last_row, rows), nl.equal))
        has_law = tensor_tensor(active, last[:, TARGET_OK], nl.multiply)
        index = row_index(last_row, first * rows, rows)
        masses = row_masses(index, last, has_law, scale, target_logits, False, vocab_size)
        groups = lane_sums(masses)
        always = floats((count, 1))
        nisa.memset(dst=always, value=1.0)
        drawn = transpose(draw([(masses, groups, always)], load_uniforms(uniforms, first, count), vocab_size))
        spoiled = tensor_tensor(active, has_law, nl.subtract)
        best = floats((1, count))
        nisa.tensor_copy(dst=best, src=last[:, BEST])
        replace_spoiled(best, spoiled, last_row, first, target_logits, vocab_size, partition_ids)
        emitted = select(tensor_tensor(spoiled, greedy, nl.maximum), best, drawn)
        store_acceptance(
            outputs, first, repeated, path_tokens, path, accepted, emitted, active, good, spoiled, row_number
        )
    return outputs


def typical_facts(first, count, target_logits, scale, posterior_threshold, posterior_alpha, vocab_size, partition_ids):
    """[n, FACTS] of the n = count * rows window rows, reading each once.

    With S the sum of e = exp((x - peak) / T) and M that of e * (x - peak) / T, exp(-entropy) is exp(M / S) / S.
    """
    _, rows, _ = target_logits.shape
    num_rows = count * rows
    row_scales = floats((1, count, rows))
    nisa.tensor_copy(dst=row_scales, src=over_rows(scale, rows))
    row_scale = transpose(row_scales.reshape((1, num_rows)))
    scales = spread(row_scale)
    maxima, candidates = floats((NUM_GROUPS, num_rows)), floats((NUM_GROUPS, num_rows))
    totals, moments = floats((NUM_GROUPS, num_rows)), floats((NUM_GROUPS, num_rows))
    for sequence in range(count):
        for span in row_tiles(rows, target_logits, vocab_size):
            start, stop = span
            low, high = sequence * rows + start, sequence * rows + stop
            tile = load_rows(target_logits, (first + sequence) * rows + start, stop - start, vocab_size, FILL)
            lane_best(tile, maxima[:, low:high], candidates[:, low:high], partition_ids)
            row_peak = floats((high - low, 1))
            nisa.tensor_reduce(dst=row_peak, op=nl.maximum, data=transpose(maxima[:, low:high]), axis=1)
            lane_moments(tile, totals[:, low:high], moments[:, low:high], spread(row_peak), scales[:, low:high])

    peak, total, moment = floats((num_rows, 1)), floats((num_rows, 1)), floats((num_rows, 1))
    by_row = transpose(maxima)
    nisa.tensor_reduce(dst=peak, op=nl.maximum, data=by_row, axis=1)
    nisa.tensor_reduce(dst=total, op=nl.add, data=transpose(totals), axis=1)
    nisa.tensor_reduce(dst=moment, op=nl.add, data=transpose(moments), axis=1)

    # min(threshold * S, alpha * exp(M / S)): both sides of the test times S.
    limit = floats((num_rows, 1))
    nisa.reciprocal(dst=limit, data=total)
    nisa.tensor_tensor(dst=limit, data1=limit, data2=moment, op=nl.multiply)
    nisa.activation(dst=limit, op=nl.exp, data=limit, scale=row_scale)
    bound = tensor_scalar(total, nl.multiply, posterior_threshold)
    nisa.scalar_tensor_tensor(
        dst=limit, data=limit, op0=nl.multiply, operand0=posterior_alpha, op1=nl.minimum, operand1=bound
    )

    found = floats((num_rows, FACTS))
    nisa.memset(dst=found, value=1.0)
    nisa.tensor_scalar(dst=found[:, TARGET_OK : TARGET_OK + 1], data=total, op0=nl.greater, operand0=0.0)
    best = first_of_largest(by_row, transpose(candidates), peak)
    nisa.memset(dst=found[:, TARGET_THRESHOLD : TARGET_THRESHOLD + 1], value=FILL)
    for pair in ((BEST, best), (TARGET_PEAK, peak), (TARGET_TOTAL, total), (LIMIT, limit)):
        fact, value = pair
        nisa.tensor_copy(dst=found[:, fact : fact + 1], src=value)
    return found


def lane_moments(tile, totals, moments, peak, scale):
    """Per lane of each row of `tile` [128, R, width]: the sums of e = exp((x - peak) * scale) and of e * (x - peak).

    Args:
        totals, moments: [128, R] fp32, written.
        peak, scale: [128, R] fp32.
    """
    _, num_rows, width = tile.shape
    for row in range(num_rows):
        column = slice(row, row + 1)
        difference = floats((NUM_GROUPS, width))
        mass = floats((NUM_GROUPS, width))
        nisa.tensor_scalar(
            dst=difference,
            data=tile[:, row],
            op0=nl.subtract,
            operand0=peak[:, column],
            op1=nl.maximum,
            operand1=LOWEST_DIFFERENCE,
        )
        nisa.activation(
            dst=mass,
            op=nl.exp,
            data=difference,
            scale=scale[:, column],
            reduce_op=nl.add,
            reduce_res=totals[:, column],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        nisa.tensor_tensor(dst=mass, data1=mass, data2=difference, op=nl.multiply)
        nisa.tensor_reduce(dst=moments[:, column], op=nl.add, data=mass, axis=1)


def kept_rows(found, first, target_logits, tokens, parents, live, greedy, scale):
    """Flags of the rows that pass under their parent's law, and their log-probabilities there, [1, B, T] each.

    Every row fetches its parent's facts through HBM: exact, and a parent's NaN reaches its own children only.
    """
    _, count, rows = tokens.shape
    num_rows = count * rows
    known = tensor_scalar(parents, nl.maximum, 0.0)
    parent_row = floats((1, count, rows))
    nisa.iota(dst=parent_row, pattern=[[rows, count], [0, rows]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=parent_row, data1=parent_row, data2=known, op=nl.add)
    local = transpose(parent_row.reshape((1, num_rows)))
    above = fetch_rows(found, local)

    token = transpose(tensor_tensor(tokens, live, nl.multiply).reshape((1, num_rows)))
    entry = entry_at(target_logits, tensor_scalar(local, nl.add, float(first * rows)), token)
    row_scales = floats((1, count, rows))
    nisa.tensor_copy(dst=row_scales, src=over_rows(scale, rows))
    likelihood = tensor_tensor(entry, above[:, TARGET_PEAK : TARGET_PEAK + 1], nl.subtract)
    nisa.tensor_tensor(
        dst=likelihood, data1=likelihood, data2=transpose(row_scales.reshape((1, num_rows))), op=nl.multiply
    )
    passed = floats((num_rows, 4))
    mass = floats((num_rows, 1))
    nisa.activation(dst=mass, op=nl.exp, data=likelihood)
    nisa.tensor_tensor(dst=passed[:, 0:1], data1=mass, data2=above[:, LIMIT : LIMIT + 1], op=nl.greater)
    nisa.tensor_tensor(dst=passed[:, 1:2], data1=token, data2=above[:, BEST : BEST + 1], op=nl.equal)
    nisa.tensor_copy(dst=passed[:, 2:3], src=above[:, TARGET_OK : TARGET_OK + 1])
    log_total = floats((num_rows, 1))
    # Rows without a law have a total of 0 or NaN; the logarithm is defined above 2^-64.
    nisa.tensor_scalar(dst=log_total, data=above[:, TARGET_TOTAL : TARGET_TOTAL + 1], op0=nl.maximum, operand0=1.0)
    nisa.activation(dst=log_total, op=nl.log, data=log_total)
    nisa.tensor_tensor(dst=passed[:, 3:4], data1=likelihood, data2=log_total, op=nl.subtract)
    by_row = to_rows(passed).reshape((1, 4, count, rows))

    kept = select(over_rows(greedy, rows), by_row[:, 1], by_row[:, 0])
    nisa.tensor_tensor(dst=kept, data1=kept, data2=by_row[:, 2], op=nl.multiply)
    nisa.tensor_tensor(dst=kept, data1=kept, data2=live, op=nl.multiply)
    return kept, select(kept, by_row[:, 3], 0.0)


def longest_path(kept, likelihood, parents, tokens, row_number):
    """The longest path of kept rows, among equals the likeliest, then the one whose last row is first.

    Rows come after their parents, so one pass down finds depths and one pass up marks the path.

    Args:
        kept, likelihood, parents, tokens, row_number: [1, B, T].

    Returns:
        path, path_tokens [1, B, T], accepted, last_row [1, B].
    """
    _, count, rows = kept.shape
    state = floats((1, 3, count, rows))  # reached, depth, log-likelihood of the path
    nisa.memset(dst=state, value=0.0)
    nisa.memset(dst=state[:, 0, :, 0:1], value=1.0)
    for row in range(1, rows):
        is_parent = tensor_tensor(row_number, over_rows(parents[:, :, row], rows), nl.equal)
        here = kept[:, :, row]
        for fact in range(3):
            picked = tensor_tensor(state[:, fact], is_parent, nl.multiply)
            from_parent = floats((1, count))
            nisa.tensor_reduce(dst=from_parent, op=nl.add, data=picked, axis=2)
            if fact == 1:
                nisa.tensor_scalar(dst=from_parent, data=from_parent, op0=nl.add, operand0=1.0)
            if fact == 2:
                nisa.tensor_tensor(dst=from_parent, data1=from_parent, data2=likelihood[:, :, row], op=nl.add)
            if fact == 0:
                here = tensor_tensor(from_parent, here, nl.multiply)
                nisa.tensor_copy(dst=state[:, 0, :, row], src=here)
            else:
                nisa.tensor_tensor(dst=state[:, fact, :, row], data1=from_parent, data2=here, op=nl.multiply)
    reached, depth, total = state[:, 0], state[:, 1], state[:, 2]

    accepted = floats((1, count))
    nisa.tensor_reduce(dst=accepted, op=nl.maximum, data=depth, axis=2)
    deepest = tensor_tensor(depth, over_rows(accepted, rows), nl.equal)
    nisa.tensor_tensor(dst=deepest, data1=deepest, data2=reached, op=nl.multiply)
    likeliest = floats((1, count))
    nisa.tensor_reduce(dst=likeliest, op=nl.maximum, data=select(deepest, total, FILL), axis=2)
    equal = tensor_tensor(total, over_rows(likeliest, rows), nl.equal)
    nisa.tensor_tensor(dst=deepest, data1=deepest, data2=equal, op=nl.multiply)
    last_row = floats((1, count))
    nisa.tensor_reduce(dst=last_row, op=nl.minimum, data=select(deepest, row_number, float(rows)), axis=2)

    on_path = tensor_tensor(row_number, over_rows(last_row, rows), nl.equal)
    for step in range(rows - 1):
        row = rows - 1 - step
        is_parent = tensor_tensor(row_number, over_rows(parents[:, :, row], rows), nl.equal)
        nisa.tensor_tensor(dst=is_parent, data1=is_parent, data2=over_rows(on_path[:, :, row], rows), op=nl.multiply)
        nisa.tensor_tensor(dst=on_path, data1=on_path, data2=is_parent, op=nl.maximum)

    path, path_tokens = floats((1, count, rows)), floats((1, count, rows))
    nisa.memset(dst=path, value=0.0)
    nisa.memset(dst=path_tokens, value=0.0)
    for place in range(1, rows):
        there = tensor_scalar(depth, nl.equal, float(place))
        nisa.tensor_tensor(dst=there, data1=there, data2=on_path, op=nl.multiply)
        picked = tensor_tensor(there, row_number, nl.multiply)
        nisa.tensor_reduce(dst=path[:, :, place], op=nl.add, data=picked, axis=2)
        picked = tensor_tensor(there, tokens, nl.multiply)
        nisa.tensor_reduce(dst=path_tokens[:, :, place - 1], op=nl.add, data=picked, axis=2)
    return path, path_tokens, accepted, last_row
