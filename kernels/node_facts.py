"""What is to be known of rows that are looked at one by one: the nodes of a tree, the rows of a sampler."""

import nki.isa as nisa
import nki.language as nl

from .chain import over_rows, select, to_int, to_rows
from .row_laws import laws_and_kinds, row_laws
from .truncation import drop_below, put_threshold
from .vocabulary import (
    FILL,
    NUM_GROUPS,
    floats,
    group_size,
    load_row_at,
    spread,
    tensor_tensor,
    transpose,
)

# As in `row_facts`: exp((x - peak) / T) / total, for x not below the threshold, is the law; BEST the best id.
TARGET_OK, BEST, TARGET_PEAK, TARGET_TOTAL, TARGET_THRESHOLD = 0, 1, 2, 3, 4
DRAFT_OK, DRAFT_PEAK, DRAFT_THRESHOLD, NODE_FACTS = 5, 6, 7, 8


def node_facts(first, count, target_logits, draft_law, draft_kind, vocab_size, scale, limits, partition_ids):
    """[1, NODE_FACTS, B, T] fp32 of a chunk's rows, reading every target and draft row once."""
    found = node_columns(first, count, target_logits, draft_law, draft_kind, vocab_size, scale, limits, partition_ids)
    return to_rows(found).reshape((1, NODE_FACTS, count, target_logits.shape[1]))


def node_columns(first, count, target_logits, draft_law, draft_kind, vocab_size, scale, limits, partition_ids):
    """[n, NODE_FACTS] fp32 of the n = B * T rows, reading every target and draft row once."""
    _, rows, _ = target_logits.shape
    num_rows = count * rows
    row_scales = floats((1, count, rows))
    nisa.tensor_copy(dst=row_scales, src=over_rows(scale, rows))
    row_scale = transpose(row_scales.reshape((1, num_rows)))
    laws = laws_and_kinds(target_logits, draft_law, draft_kind)
    laws = row_laws(laws, first, count, rows, row_scale, limits, vocab_size, partition_ids)

    found = floats((num_rows, NODE_FACTS))
    nisa.memset(dst=found, value=1.0)
    target = laws[0]
    nisa.tensor_scalar(dst=found[:, TARGET_OK : TARGET_OK + 1], data=target["total"], op0=nl.greater, operand0=0.0)
    nisa.tensor_copy(dst=found[:, BEST : BEST + 1], src=target["best"])
    nisa.tensor_copy(dst=found[:, TARGET_PEAK : TARGET_PEAK + 1], src=target["peak"])
    nisa.tensor_copy(dst=found[:, TARGET_TOTAL : TARGET_TOTAL + 1], src=target["total"])
    put_threshold(found[:, TARGET_THRESHOLD : TARGET_THRESHOLD + 1], target["threshold"])
    if draft_kind != "one_hot":
        draft = laws[1]
        draft_ok = found[:, DRAFT_OK : DRAFT_OK + 1]
        if draft_kind == "logits":
            nisa.tensor_scalar(dst=draft_ok, data=draft["total"], op0=nl.greater, operand0=0.0)
        else:
            nisa.tensor_scalar(
                dst=draft_ok, data=draft["total"], op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0
            )
        nisa.tensor_copy(dst=found[:, DRAFT_PEAK : DRAFT_PEAK + 1], src=draft["peak"])
        put_threshold(found[:, DRAFT_THRESHOLD : DRAFT_THRESHOLD + 1], draft["threshold"])
    return found


def fetch_rows(facts, row):
    """Rows `row` [n, 1] fp32 of `facts` [n, F], through HBM: exact, and a row's NaN reaches only who asks for it."""
    num_rows, kinds = facts.shape
    shared = nl.ndarray((num_rows, kinds), dtype=nl.float32, buffer=nl.private_hbm)
    fetched = floats((num_rows, kinds))
    index = to_int(row)
    # Whether the compiler sees the dependency through an indexed read is not documented (UNVERIFIED).
    with nl.no_reorder():
        nisa.dma_copy(dst=shared, src=facts)
        nisa.dma_copy(
            dst=fetched,
            src=shared.ap(pattern=[[kinds, num_rows], [1, kinds]], vector_offset=index, indirect_dim=0),
        )
    return fetched


def row_masses(row, facts, has_law, scale, logits, cut, vocab_size):
    """exp((x - peak) / T) of the ids that stay, [128, B, size].

    Rows without a law get masses that mean nothing, but are finite: sequences meet in one product.

    Args:
        row: [1, B] fp32, the row of `logits` [.., V] of each sequence, whose node facts [1, NODE_FACTS, B] are `facts`.
    """
    _, count = has_law.shape
    size = group_size(vocab_size)
    bias = tensor_tensor(facts[:, TARGET_PEAK], scale, nl.multiply)
    nisa.tensor_scalar(dst=bias, data=bias, op0=nl.multiply, operand0=-1.0)
    values = floats((1, 3, count))
    nisa.tensor_copy(dst=values[:, 0], src=select(has_law, scale, 0.0))
    nisa.tensor_copy(dst=values[:, 1], src=select(has_law, bias, 0.0))
    nisa.tensor_copy(dst=values[:, 2], src=select(has_law, facts[:, TARGET_THRESHOLD], FILL))
    on_lanes = spread(transpose(values.reshape((1, 3 * count))))
    index = to_int(select(has_law, row, float(logits.size // logits.shape[len(logits.shape) - 1])))
    masses = floats((NUM_GROUPS, count, size))
    for sequence in range(count):
        tile = nl.ndarray((NUM_GROUPS, size), dtype=logits.dtype, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=FILL)
        load_row_at(tile, logits, index[:, sequence : sequence + 1], vocab_size)
        if cut:
            drop_below(tile, on_lanes[:, 2 * count + sequence : 2 * count + sequence + 1])
        nisa.activation(
            dst=masses[:, sequence],
            op=nl.exp,
            data=tile,
            bias=on_lanes[:, count + sequence : count + sequence + 1],
            scale=on_lanes[:, sequence : sequence + 1],
        )
    return masses


def lane_sums(masses):
    """Sums of masses [128, B, size] over each lane, [B, 128]."""
    sums = floats(masses.shape[0:2])
    nisa.tensor_reduce(dst=sums, op=nl.add, data=masses, axis=2)
    return transpose(sums)
