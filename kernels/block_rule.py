"""Block verification (arXiv 2403.10444): the longest prefix of drafts that passes as a whole."""

import nki.isa as nisa
import nki.language as nl

from .chain import leading_count, over_rows, select
from .row_facts import (
    DRAFT_OK,
    DRAFT_PEAK,
    DRAFT_THRESHOLD,
    DRAFT_TOTAL,
    HAS_DRAFT,
    RATIO,
    TARGET_OK,
    TARGET_PEAK,
    TARGET_THRESHOLD,
    TARGET_TOTAL,
)
from .statistics import row_tiles
from .truncation import drop_below
from .vocabulary import FILL, NUM_GROUPS, floats, load_rows, spread, tensor_scalar, tensor_tensor, transpose


def block_prefix(facts, row_number, first, target_logits, uniforms, draft_law, draft_kind, cut, scale, vocab_size):
    """The prefix that passes, [1, B], and the weights of all prefixes, [1, B, T].

    Prefix i < k passes iff u * (S + 1 - w) <= S, S the mass of max(w * target - draft, 0) in row i; the whole block of
    k drafts iff u <= w. k counts the leading rows with a draft and both laws.
    """
    _, _, count, rows = facts.shape
    num_rows = count * rows
    weights = prefix_weights(facts[:, RATIO])
    live = tensor_tensor(facts[:, TARGET_OK], facts[:, DRAFT_OK], nl.multiply)
    nisa.tensor_tensor(dst=live, data1=live, data2=facts[:, HAS_DRAFT], op=nl.multiply)
    num_live = over_rows(leading_count(live, row_number), rows)

    # The excess S of every row.
    if draft_kind == "one_hot":
        excess = tensor_scalar(facts[:, RATIO], nl.multiply, -1.0, nl.add, 1.0)
        nisa.tensor_tensor(dst=excess, data1=excess, data2=weights, op=nl.multiply)
    else:
        share = reciprocal(facts[:, DRAFT_TOTAL])
        row_scale = floats((1, count, rows))
        nisa.tensor_copy(dst=row_scale, src=over_rows(scale, rows))
        factor = tensor_tensor(weights, facts[:, DRAFT_TOTAL], nl.multiply)
        nisa.tensor_tensor(dst=factor, data1=factor, data2=reciprocal(facts[:, TARGET_TOTAL]), op=nl.multiply)
        lane_values = {
            "scale": on_lanes(row_scale),
            "factor": on_lanes(factor),
            "target_bias": on_lanes(negative_product(facts[:, TARGET_PEAK], row_scale)),
        }
        if cut:
            lane_values["target_threshold"] = on_lanes(facts[:, TARGET_THRESHOLD])
        if draft_kind == "logits":
            lane_values["draft_bias"] = on_lanes(negative_product(facts[:, DRAFT_PEAK], row_scale))
            if cut:
                lane_values["draft_threshold"] = on_lanes(facts[:, DRAFT_THRESHOLD])
        sums = excess_masses(first, count, target_logits, draft_law, draft_kind, lane_values, cut, vocab_size)
        by_row = floats((num_rows, 1))
        nisa.tensor_reduce(dst=by_row, op=nl.add, data=transpose(sums), axis=1)
        excess = tensor_tensor(transpose(by_row).reshape((1, count, rows)), share, nl.multiply)

    uniform = floats((1, count, rows))
    nisa.memset(dst=uniform, value=0.0)
    if rows > 1:
        nisa.dma_copy(dst=uniform[:, :, 1:rows], src=uniforms.expand_dim(0)[:, first : first + count, 0 : rows - 1])
    left = tensor_tensor(excess, weights, nl.subtract)
    nisa.tensor_scalar(dst=left, data=left, op0=nl.add, operand0=1.0)
    nisa.tensor_tensor(dst=left, data1=left, data2=uniform, op=nl.multiply)
    passes = select(
        tensor_tensor(row_number, num_live, nl.equal),
        tensor_tensor(uniform, weights, nl.less_equal),
        tensor_tensor(left, excess, nl.less_equal),
    )
    nisa.tensor_tensor(dst=passes, data1=passes, data2=row_number, op=nl.multiply)
    within = tensor_tensor(row_number, num_live, nl.less_equal)
    nisa.tensor_tensor(dst=passes, data1=passes, data2=within, op=nl.multiply)
    longest = floats((1, count))
    nisa.tensor_reduce(dst=longest, op=nl.maximum, data=passes, axis=2)
    return longest, weights


def on_lanes(values):
    """[1, B, T] as [128, B * T], the same on every lane."""
    _, count, rows = values.shape
    return spread(transpose(values.reshape((1, count * rows))))


def reciprocal(values):
    result = floats(values.shape)
    nisa.reciprocal(dst=result, data=values)
    return result


def negative_product(data1, data2):
    result = floats(data1.shape)
    nisa.scalar_tensor_tensor(dst=result, data=data1, op0=nl.multiply, operand0=-1.0, op1=nl.multiply, operand1=data2)
    return result


def prefix_weights(ratio):
    """[1, B, T]: w_0 = 1, w_i = min(1, w_(i-1) * ratio_(i-1)), from target / draft at each row's draft."""
    _, count, rows = ratio.shape
    weights = floats((1, count, rows))
    nisa.memset(dst=weights, value=1.0)
    drafts = rows - 1
    if drafts > 0:
        ones = floats((1, drafts))
        nisa.memset(dst=ones, value=1.0)
        for sequence in range(count):
            nisa.tensor_tensor_scan(
                dst=weights[:, sequence, 1:rows],
                data0=ratio[:, sequence, 0:drafts],
                data1=ones,
                initial=1.0,
                op0=nl.multiply,
                op1=nl.minimum,
            )
    return weights


def excess_masses(first, count, target_logits, draft_law, draft_kind, lane_values, cut, vocab_size):
    """[128, n]: sums over the lanes' ids of max(weight * target - draft, 0) * draft total, of every row.

    The second pass over the rows, from HBM. Of each sequence the first row's (its weight is 1) and the last row's are
    not needed: 0.

    Args:
        lane_values: tiles [128, n], on every lane: scale (1 / T), target and draft bias and threshold, and factor,
            weight * draft total / target total.
    """
    _, rows, _ = target_logits.shape
    scales, factor, target_bias = lane_values["scale"], lane_values["factor"], lane_values["target_bias"]
    sums = floats((NUM_GROUPS, count * rows))
    nisa.memset(dst=sums, value=0.0)
    for sequence in range(count):
        for span in row_tiles(rows - 2, draft_law, vocab_size):
            start, stop = span
            length = stop - start
            target_tile = load_rows(target_logits, (first + sequence) * rows + 1 + start, length, vocab_size, FILL)
            fill = FILL if draft_kind == "logits" else 0.0
            draft_tile = load_rows(draft_law, (first + sequence) * (rows - 1) + 1 + start, length, vocab_size, fill)
            for row in range(length):
                column = slice(sequence * rows + 1 + start + row, sequence * rows + 2 + start + row)
                if cut:
                    drop_below(target_tile[:, row], lane_values["target_threshold"][:, column])
                target_mass = exponentials(target_tile[:, row], target_bias[:, column], scales[:, column])
                draft_mass = draft_tile[:, row]
                if draft_kind == "logits":
                    if cut:
                        drop_below(draft_tile[:, row], lane_values["draft_threshold"][:, column])
                    draft_mass = exponentials(
                        draft_tile[:, row], lane_values["draft_bias"][:, column], scales[:, column]
                    )
                nisa.scalar_tensor_tensor(
                    dst=target_mass,
                    data=target_mass,
                    op0=nl.multiply,
                    operand0=factor[:, column],
                    op1=nl.subtract,
                    operand1=draft_mass,
                )
                nisa.tensor_scalar_reduce(
                    dst=target_mass,
                    data=target_mass,
                    op0=nl.maximum,
                    operand0=0.0,
                    reduce_op=nl.add,
                    reduce_res=sums[:, column],
                    reduce_cmd=nisa.reduce_cmd.reset_reduce,
                )
    return sums


def exponentials(logits, bias, scale):
    masses = floats(logits.shape)
    nisa.activation(dst=masses, op=nl.exp, data=logits, bias=bias, scale=scale)
    return masses
