"""What is to be known of rows that are looked at one by one: the nodes of a tree, the rows of a sampler."""

import nki.isa as nisa
import nki.language as nl

from .chain import over_rows, to_rows
from .statistics import combine_lanes, first_of_largest, lane_statistics
from .vocabulary import floats, spread, transpose

# As in `row_facts`: exp((x - peak) / T) / total, for x not below the threshold, is the law; BEST the best id.
TARGET_OK, BEST, TARGET_PEAK, TARGET_TOTAL, TARGET_THRESHOLD = 0, 1, 2, 3, 4
DRAFT_OK, DRAFT_PEAK, DRAFT_THRESHOLD, NODE_FACTS = 5, 6, 7, 8


def node_facts(first, count, target_logits, draft_law, draft_kind, vocab_size, scale, limits, partition_ids):
    """[1, NODE_FACTS, B, T] fp32, reading every target and draft row once."""
    _, rows, _ = target_logits.shape
    num_rows = count * rows
    row_scales = floats((1, count, rows))
    nisa.tensor_copy(dst=row_scales, src=over_rows(scale, rows))
    row_scale = transpose(row_scales.reshape((1, num_rows)))
    scales = spread(row_scale)
    cut = len(limits) > 0
    found = floats((num_rows, NODE_FACTS))
    nisa.memset(dst=found, value=1.0)

    maxima, totals, candidates, threshold = lane_statistics(
        target_logits, first, count, rows, rows, "logits", True, scales, limits, vocab_size, partition_ids
    )
    peak, total = combine_lanes(maxima, totals, row_scale, cut)
    nisa.tensor_scalar(dst=found[:, TARGET_OK : TARGET_OK + 1], data=total, op0=nl.greater, operand0=0.0)
    nisa.tensor_copy(dst=found[:, BEST : BEST + 1], src=first_of_largest(maxima, candidates, peak))
    nisa.tensor_copy(dst=found[:, TARGET_PEAK : TARGET_PEAK + 1], src=peak)
    nisa.tensor_copy(dst=found[:, TARGET_TOTAL : TARGET_TOTAL + 1], src=total)
    nisa.tensor_copy(dst=found[:, TARGET_THRESHOLD : TARGET_THRESHOLD + 1], src=threshold)
    if draft_kind != "one_hot":
        maxima, totals, _, threshold = lane_statistics(
            draft_law, first, count, rows, rows, draft_kind, False, scales, limits, vocab_size, partition_ids
        )
        peak, total = combine_lanes(maxima, totals, row_scale, cut)
        draft_ok = found[:, DRAFT_OK : DRAFT_OK + 1]
        if draft_kind == "logits":
            nisa.tensor_scalar(dst=draft_ok, data=total, op0=nl.greater, operand0=0.0)
        else:
            nisa.tensor_scalar(dst=draft_ok, data=total, op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0)
        nisa.tensor_copy(dst=found[:, DRAFT_PEAK : DRAFT_PEAK + 1], src=peak)
        nisa.tensor_copy(dst=found[:, DRAFT_THRESHOLD : DRAFT_THRESHOLD + 1], src=threshold)
    return to_rows(found).reshape((1, NODE_FACTS, count, rows))
