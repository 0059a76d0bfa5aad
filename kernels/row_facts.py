"""Everything a chain's decisions need to know of its window rows, from one read of each."""

import nki.isa as nisa
import nki.language as nl

from .chain import load_sequences, over_rows, to_columns, to_rows, usable
from .statistics import combine_lanes, entry_at, first_of_largest, kept_mass, lane_statistics
from .truncation import PARAMETERS, row_parameters
from .vocabulary import floats, spread, tensor_scalar, tensor_tensor, transpose

# One fact is [B, T]. Peaks, totals and thresholds give a row's law: exp((x - peak) / T) / total, for x not below the
# threshold. TEST is the token rule's comparison, RATIO target / draft at the draft, BEST the target's best id.
TARGET_OK, DRAFT_OK, TEST, BEST, RATIO = 0, 1, 2, 3, 4
TARGET_PEAK, TARGET_TOTAL, TARGET_THRESHOLD, DRAFT_PEAK, DRAFT_TOTAL, DRAFT_THRESHOLD = 5, 6, 7, 8, 9, 10
HAS_DRAFT, TOKEN, ROW_FACTS = 11, 12, 13
SMALLEST = 2.0**-126  # instead of a draft mass of zero, which no draft was drawn with


def row_facts(
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
    ratios,
    partition_ids,
):
    """[1, ROW_FACTS, B, T] fp32, reading every target and draft row once.

    Args:
        tokens, has_draft: [1, B, T], the draft after each row, and whether there is one with an id.
        first: the chunk's first sequence.
        scale: [1, B], 1 / T.
        limits: PARAMETERS tiles [128, n] of `truncation.row_parameters`, or an empty list where nothing is cut.
        ratios: whether RATIO is wanted.
    """
    _, count, rows = tokens.shape
    drafts = rows - 1
    num_rows = count * rows
    facts = floats((1, ROW_FACTS, count, rows))
    nisa.tensor_copy(dst=facts[:, HAS_DRAFT], src=has_draft)
    nisa.tensor_copy(dst=facts[:, TOKEN], src=tokens)

    # What each row's partition needs: scale, uniform of the test, token (0 without one), its row in the draft law.
    per_row = floats((1, 4, count, rows))
    nisa.tensor_copy(dst=per_row[:, 0], src=over_rows(scale, rows))
    tests = floats((1, count, rows))
    nisa.dma_copy(dst=tests, src=uniforms.expand_dim(0)[:, first : first + count, 0:rows])
    nisa.tensor_copy(dst=per_row[:, 1], src=tests)
    nisa.tensor_tensor(dst=per_row[:, 2], data1=facts[:, TOKEN], data2=facts[:, HAS_DRAFT], op=nl.multiply)
    nisa.iota(dst=per_row[:, 3], pattern=[[drafts, count], [1, rows]], offset=first * drafts, channel_multiplier=0)
    nisa.memset(dst=per_row[:, 3, :, drafts:rows], value=0.0)
    columns = to_columns(per_row.reshape((1, 4, num_rows)))
    row_scale = columns[:, 0:1]
    scales = spread(row_scale)

    cut = len(limits) > 0
    target_maxima, target_totals, candidates, threshold = lane_statistics(
        target_logits, first, count, rows, rows, "logits", True, scales, limits, vocab_size, partition_ids
    )
    peak, total = combine_lanes(target_maxima, target_totals, row_scale, cut)
    best = first_of_largest(target_maxima, candidates, peak)
    token, draft_row = columns[:, 2:3], columns[:, 3:4]
    grid_row = floats((num_rows, 1))
    nisa.iota(dst=grid_row, pattern=[[0, 1]], offset=first * rows, channel_multiplier=1)
    mass = kept_mass(entry_at(target_logits, grid_row, token), peak, row_scale, threshold)

    found = floats((num_rows, HAS_DRAFT))
    if draft_kind == "one_hot":
        nisa.memset(dst=found, value=1.0)
        draft_mass, draft_total = found[:, DRAFT_OK : DRAFT_OK + 1], found[:, DRAFT_TOTAL : DRAFT_TOTAL + 1]
    else:
        draft_maxima, draft_totals, _, draft_threshold = lane_statistics(
            draft_law, first, count, drafts, rows, draft_kind, False, scales, limits, vocab_size, partition_ids
        )
        draft_peak, draft_total = combine_lanes(draft_maxima, draft_totals, row_scale, cut)
        draft_mass = entry_at(draft_law, draft_row, token)
        if draft_kind == "logits":
            draft_mass = kept_mass(draft_mass, draft_peak, row_scale, draft_threshold)
            nisa.tensor_scalar(dst=found[:, DRAFT_OK : DRAFT_OK + 1], data=draft_total, op0=nl.greater, operand0=0.0)
        else:
            # Finite: infinity and NaN times 0 are NaN.
            nisa.tensor_scalar(
                dst=found[:, DRAFT_OK : DRAFT_OK + 1],
                data=draft_total,
                op0=nl.multiply,
                operand0=0.0,
                op1=nl.equal,
                operand1=0.0,
            )
            nisa.memset(dst=draft_total, value=1.0)
        nisa.tensor_copy(dst=found[:, DRAFT_PEAK : DRAFT_PEAK + 1], src=draft_peak)
        nisa.tensor_copy(dst=found[:, DRAFT_TOTAL : DRAFT_TOTAL + 1], src=draft_total)
        nisa.tensor_copy(dst=found[:, DRAFT_THRESHOLD : DRAFT_THRESHOLD + 1], src=draft_threshold)

    # uniform * draft < target, both over the same denominator: no division.
    left = tensor_tensor(columns[:, 1:2], total, nl.multiply)
    nisa.tensor_tensor(dst=left, data1=left, data2=draft_mass, op=nl.multiply)
    right = tensor_tensor(mass, draft_total, nl.multiply)
    nisa.tensor_tensor(dst=found[:, TEST : TEST + 1], data1=left, data2=right, op=nl.less)
    nisa.tensor_copy(dst=found[:, BEST : BEST + 1], src=best)
    if ratios:
        ratio = tensor_tensor(draft_mass, total, nl.multiply)
        nisa.tensor_scalar(dst=ratio, data=ratio, op0=nl.maximum, operand0=SMALLEST)
        nisa.reciprocal(dst=ratio, data=ratio)
        nisa.tensor_tensor(dst=found[:, RATIO : RATIO + 1], data1=right, data2=ratio, op=nl.multiply)
    else:
        nisa.memset(dst=found[:, RATIO : RATIO + 1], value=0.0)
    nisa.tensor_scalar(dst=found[:, TARGET_OK : TARGET_OK + 1], data=total, op0=nl.greater, operand0=0.0)
    nisa.tensor_copy(dst=found[:, TARGET_PEAK : TARGET_PEAK + 1], src=peak)
    nisa.tensor_copy(dst=found[:, TARGET_TOTAL : TARGET_TOTAL + 1], src=total)
    nisa.tensor_copy(dst=found[:, TARGET_THRESHOLD : TARGET_THRESHOLD + 1], src=threshold)
    nisa.tensor_copy(dst=facts.reshape((1, ROW_FACTS, num_rows))[:, 0:HAS_DRAFT], src=to_rows(found))
    return facts


def accepted_rows(facts, greedy):
    """Flags [1, B, T]: the draft after the row is accepted, seen by itself."""
    _, _, _, rows = facts.shape
    by_law = tensor_tensor(facts[:, TEST], facts[:, DRAFT_OK], nl.multiply)
    # by_law + greedy * (match - by_law)
    accept = tensor_tensor(facts[:, BEST], facts[:, TOKEN], nl.equal)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=by_law, op=nl.subtract)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=over_rows(greedy, rows), op=nl.multiply)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=by_law, op=nl.add)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=facts[:, TARGET_OK], op=nl.multiply)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=facts[:, HAS_DRAFT], op=nl.multiply)
    return accept


def load_parameters(draft_lens, temperature, top_k, top_p, min_p, first, count, rows, cut, vocab_size):
    """A chunk's per-sequence values.

    Returns:
        draft_lens, good, active, greedy, 1 / T, all [1, B], where good flags values in their range, active those of
        them that are no empty slots; and the limits of `row_facts`. Greedy rows take their statistics at temperature
        1, since only their best id counts and whether they have a law.
    """
    lens = load_sequences(draft_lens, first, count)
    heat = load_sequences(temperature, first, count)
    good, active = usable(lens, rows - 1)
    heat_ok = tensor_scalar(heat, nl.greater_equal, 0.0)
    nisa.tensor_tensor(dst=good, data1=good, data2=heat_ok, op=nl.multiply)
    nisa.tensor_tensor(dst=active, data1=active, data2=heat_ok, op=nl.multiply)
    greedy = tensor_scalar(heat, nl.equal, 0.0)
    scale = tensor_tensor(heat, greedy, nl.add)
    limits = []
    if cut:
        parameters = row_parameters(
            load_sequences(top_k, first, count),
            load_sequences(top_p, first, count),
            load_sequences(min_p, first, count),
            scale,
            rows,
            vocab_size,
        )
        for kind in range(PARAMETERS):
            limits.append(spread(transpose(parameters[:, kind].reshape((1, count * rows)))))
    nisa.reciprocal(dst=scale, data=scale)
    return lens, good, active, greedy, scale, limits
