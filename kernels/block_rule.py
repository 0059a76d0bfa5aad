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


def block_prefix(chains, facts, excess):
    """The prefix that passes, [1, B], and the weights of all prefixes, [1, B, T].

    Prefix i < k passes iff u * (S + 1 - w) <= S, S the mass of max(w * target - draft, 0) in row i; the whole block of
    k drafts iff u <= w. k counts the leading rows with a draft and both laws.

    Args:
        facts: [1, ROW_FACTS, B, T].
        excess: [n, 128], the lanes' parts of S times the draft's total (`excess_masses`); None for one-hot drafts.
    """
    first, count, rows, row_number = chains.first, chains.count, chains.rows, chains.row_number
    weights = prefix_weights(facts[:, RATIO])
    live = tensor_tensor(facts[:, TARGET_OK], facts[:, DRAFT_OK], nl.multiply)
    nisa.tensor_tensor(dst=live, data1=live, data2=facts[:, HAS_DRAFT], op=nl.multiply)
    num_live = over_rows(leading_count(live, row_number), rows)

    if excess == None:  # noqa: E711
        excess = tensor_scalar(facts[:, RATIO], nl.multiply, -1.0, nl.add, 1.0)
        nisa.tensor_tensor(dst=excess, data1=excess, data2=weights, op=nl.multiply)
    else:
        sums = floats((count * rows, 1))
        nisa.tensor_reduce(dst=sums, op=nl.add, data=excess, axis=1)
        share = reciprocal(facts[:, DRAFT_TOTAL])
        excess = tensor_tensor(transpose(sums).reshape((1, count, rows)), share, nl.multiply)

    uniform = floats((1, count, rows))
    nisa.memset(dst=uniform, value=0.0)
    if rows > 1:
        tests = chains.uniforms.expand_dim(0)[:, first : first + count, 0 : rows - 1]
        nisa.dma_copy(dst=uniform[:, :, 1:rows], src=tests)
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


def excess_masses(chains, laws, facts):
    """[n, 128]: sums over the lanes' ids of max(weight * target - draft, 0) * draft total, of every row.

    The second pass over the rows, from HBM. Of each sequence the first row's (its weight is 1) and the last row's are
    not needed: 0.

    Args:
        facts: [1, ROW_FACTS, B, T].
    """
    first, count, rows = chains.first, chains.count, chains.rows
    draft_kind, shard = laws.draft_kind, laws.shard
    row_scale = floats((1, count, rows))
    nisa.tensor_copy(dst=row_scale, src=over_rows(chains.scale, rows))
    scales = on_lanes(row_scale)
    # Of the target's exponentials: weight * draft total / target total.
    factor = tensor_tensor(prefix_weights(facts[:, RATIO]), facts[:, DRAFT_TOTAL], nl.multiply)
    nisa.tensor_tensor(dst=factor, data1=factor, data2=reciprocal(facts[:, TARGET_TOTAL]), op=nl.multiply)
    factor = on_lanes(factor)
    target_bias = on_lanes(negative_product(facts[:, TARGET_PEAK], row_scale))
    draft_bias = on_lanes(negative_product(facts[:, DRAFT_PEAK], row_scale)) if draft_kind == "logits" else None
    if laws.cut:
        target_threshold = on_lanes(facts[:, TARGET_THRESHOLD])
        draft_threshold = on_lanes(facts[:, DRAFT_THRESHOLD]) if draft_kind == "logits" else None
    sums = floats((NUM_GROUPS, count * rows))
    nisa.memset(dst=sums, value=0.0)
    for sequence in range(count):
        for span in row_tiles(rows - 2, laws.draft_law, laws.vocab_size):
            start, stop = span
            length = stop - start
            target_row = (first + sequence) * rows + 1 + start
            target_tile = load_rows(laws.target_logits, target_row, length, laws.vocab_size, FILL, shard)
            fill = FILL if draft_kind == "logits" else 0.0
            draft_row = (first + sequence) * (rows - 1) + 1 + start
            draft_tile = load_rows(laws.draft_law, draft_row, length, laws.vocab_size, fill, shard)
            for row in range(length):
                column = slice(sequence * rows + 1 + start + row, sequence * rows + 2 + start + row)
                if laws.cut:
                    drop_below(target_tile[:, row], target_threshold[:, column])
                target_mass = exponentials(target_tile[:, row], target_bias[:, column], scales[:, column])
                draft_mass = draft_tile[:, row]
                if draft_kind == "logits":
                    if laws.cut:
                        drop_below(draft_tile[:, row], draft_threshold[:, column])
                    draft_mass = exponentials(draft_tile[:, row], draft_bias[:, column], scales[:, column])
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
    return transpose(sums)


def exponentials(logits, bias, scale):
    masses = floats(logits.shape)
    nisa.activation(dst=masses, op=nl.exp, data=logits, bias=bias, scale=scale)
    return masses
