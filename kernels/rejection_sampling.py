"""rejection_sampling: drafts kept so that every emitted token follows the target's law, on the device.

Two phases a chunk of sequences. First every target and draft row is read once for its statistics, from which all
accept tests follow. Then only the row after the last accepted draft is read again, for the one token drawn.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .block_rule import block_prefix
from .chain import (
    allocate_outputs,
    at_row,
    leading_count,
    load_tokens,
    over_rows,
    proposed,
    row_index,
    row_numbers,
    select,
    sequence_chunks,
    store_acceptance,
    to_int,
)
from .draw import draw, load_uniforms
from .row_facts import (
    BEST,
    DRAFT_OK,
    DRAFT_PEAK,
    DRAFT_THRESHOLD,
    DRAFT_TOTAL,
    HAS_DRAFT,
    TARGET_OK,
    TARGET_PEAK,
    TARGET_THRESHOLD,
    TARGET_TOTAL,
    TOKEN,
    accepted_rows,
    load_parameters,
    row_facts,
)
from .statistics import replace_spoiled
from .truncation import clear_below
from .vocabulary import (
    FILL,
    NUM_GROUPS,
    first_ids,
    floats,
    group_size,
    load_row_at,
    spread,
    tensor_scalar,
    tensor_tensor,
    transpose,
)

MASS_BYTES = 98304  # of a partition, for the masses of a chunk's last rows

LANE_VALUES = 6  # what the lanes need of each sequence for its last token


@nki.jit
def rejection_sampling(
    draft_tokens,
    target_logits,
    uniforms,
    draft_law,
    draft_lens,
    temperature,
    top_k,
    top_p,
    min_p,
    draft_kind,
    rule,
    cut,
    vocab_size,
):
    """Accepts drafts by their laws, and draws the token after them from the residual law, or the target's own.

    Token rule (arXiv 2211.17192): accept iff uniform * draft < target. Block rule (2403.10444): see `block_rule`.

    Args:
        draft_tokens: [B, K] int32; None where K is 0.
        target_logits: [B, T, V] fp32 or bf16, T = K + 1.
        uniforms: [B, T + 1] fp32.
        draft_law: [B, K, V] fp32 or bf16: logits or probabilities; None for one-hot drafts.
        draft_lens: [B] int32, -1 an empty slot.
        temperature: [B] fp32, 0 greedy.
        top_k, top_p, min_p: [B] int32, fp32, fp32; None unless `cut`.
        draft_kind: "logits", "probs" or "one_hot".
        rule: "token" or "block".
        cut: whether any of the three may be on.
        vocab_size: columns of V that count.

    Returns:
        tokens [B, T], num_accepted [B], path [B, T], invalid [B], all int32.
    """
    batch, rows, _ = target_logits.shape
    outputs = allocate_outputs(batch, rows)
    # Two fp32 masses an id: the target's and the residual's.
    for first, count, repeated in sequence_chunks(batch, rows, 8 * group_size(vocab_size), MASS_BYTES):
        verify_chunk(
            outputs,
            first,
            count,
            repeated,
            draft_tokens,
            target_logits,
            uniforms,
            draft_law,
            draft_lens,
            temperature,
            top_k,
            top_p,
            min_p,
            draft_kind,
            rule,
            cut,
            vocab_size,
        )
    return outputs


def verify_chunk(
    outputs,
    first,
    count,
    repeated,
    draft_tokens,
    target_logits,
    uniforms,
    draft_law,
    draft_lens,
    temperature,
    top_k,
    top_p,
    min_p,
    draft_kind,
    rule,
    cut,
    vocab_size,
):
    _, rows, _ = target_logits.shape
    partition_ids = first_ids(vocab_size)
    row_number = row_numbers(count, rows)
    tokens = load_tokens(draft_tokens, first, count, rows)
    lens, good, active, greedy, scale, limits = load_parameters(
        draft_lens, temperature, top_k, top_p, min_p, first, count, rows, cut, vocab_size
    )
    has_draft = proposed(tokens, lens, row_number, vocab_size)
    facts = row_facts(
        tokens,
        has_draft,
        first,
        target_logits,
        uniforms,
        draft_law,
        draft_kind,
        vocab_size,
        scale,
        limits,
        rule == "block",
        partition_ids,
    )

    accept = accepted_rows(facts, greedy)
    accepted = leading_count(accept, row_number)
    sampled = tensor_scalar(greedy, nl.multiply, -1.0, nl.add, 1.0)
    if rule == "block":
        passing, weights = block_prefix(
            facts, row_number, first, target_logits, uniforms, draft_law, draft_kind, cut, scale, vocab_size
        )
        accepted = select(sampled, passing, accepted)
    chosen = tensor_tensor(row_number, over_rows(accepted, rows), nl.equal)
    last = at_row(facts, chosen)
    if rule == "block" and draft_kind != "one_hot":
        # The residual is of weight * target: as if the draft's total were larger by the weight.
        weight = at_row(weights.expand_dim(1), chosen)
        nisa.tensor_tensor(dst=last[:, DRAFT_TOTAL], data1=last[:, DRAFT_TOTAL], data2=weight[:, 0], op=nl.multiply)

    sampled_draft = tensor_tensor(last[:, HAS_DRAFT], sampled, nl.multiply)
    nisa.tensor_tensor(dst=sampled_draft, data1=sampled_draft, data2=last[:, TARGET_OK], op=nl.multiply)
    residual = tensor_tensor(sampled_draft, last[:, DRAFT_OK], nl.multiply)
    # 1 - target_ok + sampled_draft * (1 - draft_ok)
    invalid = tensor_tensor(sampled_draft, residual, nl.subtract)
    nisa.tensor_tensor(dst=invalid, data1=invalid, data2=last[:, TARGET_OK], op=nl.subtract)
    nisa.tensor_scalar(dst=invalid, data=invalid, op0=nl.add, operand0=1.0)

    has_law = tensor_tensor(active, last[:, TARGET_OK], nl.multiply)
    drawn = drawn_tokens(
        first,
        count,
        accepted,
        last,
        has_law,
        residual,
        scale,
        target_logits,
        uniforms,
        draft_law,
        draft_kind,
        cut,
        vocab_size,
    )
    best = floats((1, count))
    nisa.tensor_copy(dst=best, src=last[:, BEST])
    replace_spoiled(
        best, tensor_tensor(active, has_law, nl.subtract), accepted, first, target_logits, vocab_size, partition_ids
    )
    by_law = tensor_tensor(has_law, sampled, nl.multiply)
    emitted = select(by_law, drawn, best)
    store_acceptance(outputs, first, repeated, tokens, row_number, accepted, emitted, active, good, invalid, row_number)


def drawn_tokens(
    first,
    count,
    accepted,
    last,
    has_law,
    residual,
    scale,
    target_logits,
    uniforms,
    draft_law,
    draft_kind,
    cut,
    vocab_size,
):
    """[1, B]: the token after the accepted drafts, drawn from the residual law or the target's own.

    Args:
        accepted, scale: [1, B].
        last: [1, ROW_FACTS, B], the facts of row `accepted`.
        has_law: [1, B] flags; the others' masses are made up, but finite, since sequences meet in one product.
        residual: [1, B] flags of the sequences whose law is target less draft.
    """
    batch, rows, _ = target_logits.shape
    drafts = rows - 1
    size = group_size(vocab_size)

    # What the lanes need of each sequence; without a residual nothing of the draft's, which may be NaN.
    lane_values = floats((1, LANE_VALUES, count))
    bias = tensor_tensor(last[:, TARGET_PEAK], scale, nl.multiply)
    nisa.tensor_copy(dst=lane_values[:, 0], src=select(has_law, scale, 0.0))
    nisa.tensor_copy(dst=lane_values[:, 1], src=select(has_law, bias, 0.0))
    if draft_kind == "one_hot":
        # The draft's id, -1 where nothing is to be left out.
        nisa.tensor_copy(dst=lane_values[:, 2], src=select(residual, last[:, TOKEN], -1.0))
        nisa.memset(dst=lane_values[:, 3], value=0.0)
    else:
        bias = tensor_tensor(last[:, DRAFT_PEAK], scale, nl.multiply)
        ratio = floats((1, count))
        nisa.reciprocal(dst=ratio, data=last[:, DRAFT_TOTAL])
        nisa.tensor_tensor(dst=ratio, data1=ratio, data2=last[:, TARGET_TOTAL], op=nl.multiply)
        nisa.tensor_copy(dst=lane_values[:, 2], src=select(residual, bias, 0.0))
        nisa.tensor_copy(dst=lane_values[:, 3], src=select(residual, ratio, 0.0))
    nisa.tensor_scalar(dst=lane_values[:, 1], data=lane_values[:, 1], op0=nl.multiply, operand0=-1.0)
    if draft_kind != "one_hot":
        nisa.tensor_scalar(dst=lane_values[:, 2:4], data=lane_values[:, 2:4], op0=nl.multiply, operand0=-1.0)
    nisa.tensor_copy(dst=lane_values[:, 4], src=select(has_law, last[:, TARGET_THRESHOLD], FILL))
    nisa.tensor_copy(dst=lane_values[:, 5], src=select(residual, last[:, DRAFT_THRESHOLD], FILL))
    on_lanes = spread(transpose(lane_values.reshape((1, LANE_VALUES * count))))

    # Past the end where there is nothing to read: the DMA then leaves the tile alone.
    target_row = to_int(select(has_law, row_index(accepted, first * rows, rows), float(batch * rows)))
    if draft_kind != "one_hot":
        draft_row = to_int(select(residual, row_index(accepted, first * drafts, drafts), float(batch * drafts)))
    else:
        ids = floats((NUM_GROUPS, size))
        nisa.iota(dst=ids, pattern=[[1, size]], offset=0, channel_multiplier=size)

    target_masses = floats((NUM_GROUPS, count, size))
    residual_masses = floats((NUM_GROUPS, count, size))
    lanes = floats((NUM_GROUPS, 2, count))
    for sequence in range(count):
        column = slice(sequence, sequence + 1)
        values = []
        for kind in range(LANE_VALUES):
            values.append(on_lanes[:, kind * count + sequence : kind * count + sequence + 1])
        lane_scale, target_bias, draft_value, ratio, target_threshold, draft_threshold = values

        logits = nl.ndarray((NUM_GROUPS, size), dtype=target_logits.dtype, buffer=nl.sbuf)
        nisa.memset(dst=logits, value=FILL)
        load_row_at(logits, target_logits, target_row[:, column], vocab_size)
        target_mass = target_masses[:, sequence]
        nisa.activation(
            dst=target_mass,
            op=nl.exp,
            data=logits,
            bias=target_bias,
            scale=lane_scale,
            reduce_op=nl.add,
            reduce_res=lanes[:, 1, column],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )

        if cut:
            clear_below(logits.expand_dim(1), target_mass.expand_dim(1), target_threshold)
            nisa.tensor_reduce(dst=lanes[:, 1, column], op=nl.add, data=target_mass, axis=1)

        mass = residual_masses[:, sequence]
        if draft_kind == "one_hot":
            nisa.scalar_tensor_tensor(
                dst=mass, data=ids, op0=nl.not_equal, operand0=draft_value, op1=nl.multiply, operand1=target_mass
            )
        else:
            law = nl.ndarray((NUM_GROUPS, size), dtype=draft_law.dtype, buffer=nl.sbuf)
            nisa.memset(dst=law, value=FILL if draft_kind == "logits" else 0.0)
            load_row_at(law, draft_law, draft_row[:, column], vocab_size)
            if draft_kind == "logits":
                nisa.activation(dst=mass, op=nl.exp, data=law, bias=draft_value, scale=lane_scale)
                if cut:
                    clear_below(law.expand_dim(1), mass.expand_dim(1), draft_threshold)
                law = mass
            nisa.scalar_tensor_tensor(
                dst=mass, data=law, op0=nl.multiply, operand0=ratio, op1=nl.add, operand1=target_mass
            )
        nisa.tensor_scalar_reduce(
            dst=mass,
            data=mass,
            op0=nl.maximum,
            operand0=0.0,
            reduce_op=nl.add,
            reduce_res=lanes[:, 0, column],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )

    residual_groups, target_groups = transpose(lanes[:, 0]), transpose(lanes[:, 1])
    # A residual is zero everywhere only by rounding: then the target's own law.
    total = floats((count, 1))
    nisa.tensor_reduce(dst=total, op=nl.add, data=residual_groups, axis=1)
    use_residual = tensor_scalar(total, nl.greater, 0.0, nl.multiply, transpose(residual))
    use_target = tensor_scalar(use_residual, nl.multiply, -1.0, nl.add, 1.0)
    laws = [(residual_masses, residual_groups, use_residual), (target_masses, target_groups, use_target)]
    return transpose(draw(laws, load_uniforms(uniforms, first, count), vocab_size))
