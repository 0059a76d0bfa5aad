"""The law of the row after the last accepted draft, as masses on the chip."""

import nki.isa as nisa
import nki.language as nl

from .chain import row_index, select, to_int
from .row_facts import (
    DRAFT_PEAK,
    DRAFT_THRESHOLD,
    DRAFT_TOTAL,
    TARGET_PEAK,
    TARGET_THRESHOLD,
    TARGET_TOTAL,
    TOKEN,
)
from .truncation import drop_below
from .vocabulary import (
    FILL,
    NUM_GROUPS,
    floats,
    group_size,
    load_row_at,
    spread,
    tensor_scalar,
    tensor_tensor,
    transpose,
)

LANE_VALUES = 6  # what the lanes need of each sequence for its last token


def last_masses(chains, laws, decision):
    """Masses of the row after the accepted drafts: target less draft, and the target's own, of all ids.

    Masses of sequences whose row has no law are made up, but finite, since sequences meet in one product.

    Returns:
        residual_masses, target_masses [128, B, size], and their sums over the lanes [128, 2, B].
    """
    first, count, rows = chains.first, chains.count, chains.rows
    accepted, last, has_law, residual = decision.accepted, decision.last, decision.has_law, decision.residual
    target_logits, draft_law, draft_kind = laws.target_logits, laws.draft_law, laws.draft_kind
    batch = target_logits.shape[0]
    drafts = rows - 1
    size = group_size(laws.vocab_size)

    # What the lanes need of each sequence; without a residual nothing of the draft's, which may be NaN.
    lane_values = floats((1, LANE_VALUES, count))
    bias = tensor_tensor(last[:, TARGET_PEAK], chains.scale, nl.multiply)
    nisa.tensor_copy(dst=lane_values[:, 0], src=select(has_law, chains.scale, 0.0))
    nisa.tensor_copy(dst=lane_values[:, 1], src=select(has_law, bias, 0.0))
    if draft_kind == "one_hot":
        # The draft's id, -1 where nothing is to be left out.
        nisa.tensor_copy(dst=lane_values[:, 2], src=select(residual, last[:, TOKEN], -1.0))
        nisa.memset(dst=lane_values[:, 3], value=0.0)
    else:
        bias = tensor_tensor(last[:, DRAFT_PEAK], chains.scale, nl.multiply)
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
        nisa.iota(dst=ids, pattern=[[1, size]], offset=0, channel_multiplier=0)
        nisa.tensor_scalar(dst=ids, data=ids, op0=nl.add, operand0=laws.partition_ids)

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
        load_row_at(logits, target_logits, target_row[:, column], laws.vocab_size, laws.shard)
        if laws.cut:
            drop_below(logits, target_threshold)
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

        mass = residual_masses[:, sequence]
        if draft_kind == "one_hot":
            nisa.scalar_tensor_tensor(
                dst=mass, data=ids, op0=nl.not_equal, operand0=draft_value, op1=nl.multiply, operand1=target_mass
            )
        else:
            law = nl.ndarray((NUM_GROUPS, size), dtype=draft_law.dtype, buffer=nl.sbuf)
            nisa.memset(dst=law, value=FILL if draft_kind == "logits" else 0.0)
            load_row_at(law, draft_law, draft_row[:, column], laws.vocab_size, laws.shard)
            if draft_kind == "logits":
                if laws.cut:
                    drop_below(law, draft_threshold)
                nisa.activation(dst=mass, op=nl.exp, data=law, bias=draft_value, scale=lane_scale)
                law = mass
            nisa.scalar_tensor_tensor(
                dst=mass, data=law, op0=nl.multiply, operand0=ratio, op1=nl.add, operand1=target_mass
            )
        nisa.activation(
            dst=mass,
            op=nl.relu,
            data=mass,
            reduce_op=nl.add,
            reduce_res=lanes[:, 0, column],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )

    return residual_masses, target_masses, lanes


def choose_law(residual_groups, residual):
    """[B, 1] flags (use_residual, use_target): the residual where `residual` [1, B] is set and it is not all zero.

    It is all zero only by rounding: then the target's own law. `residual_groups` are [B, 128] sums.
    """
    total = floats((residual_groups.shape[0], 1))
    nisa.tensor_reduce(dst=total, op=nl.add, data=residual_groups, axis=1)
    use_residual = tensor_scalar(total, nl.greater, 0.0, nl.multiply, transpose(residual))
    return use_residual, tensor_scalar(use_residual, nl.multiply, -1.0, nl.add, 1.0)
