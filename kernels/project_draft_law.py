"""project_draft_law: laws over a vocabulary of the draft's own as laws over the target's, on the device.

A gather: the partitions share out the target ids, and each fetches the masses of its ids from a copy of the law, in
which a zero stands first for the ids that no draft id means.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import row_index, select, sequence_chunks
from .node_facts import TARGET_OK, TARGET_TOTAL, node_facts, row_masses
from .row_facts import load_parameters
from .vocabulary import (
    MASS_BYTES,
    NUM_GROUPS,
    first_ids,
    floats,
    group_size,
    spread,
    store_row,
    transpose,
)

ROWS = 8  # laws on the chip at a time: fewer copies of each to load, more target ids a partition
SHARE = 16384  # target ids of a partition at most, whose sums stay on the chip
COLUMNS = 1024  # of them at a time: runs of 4 KiB, and room for two rounds of temporary tiles
LAW_BYTES = 172032  # of a partition, for a law and the sums; 32,768 draft ids fit beside 8 rows of 152k target ids


@nki.jit
def project_draft_law(draft_law, target_to_draft, empty, temperature, top_k, top_p, min_p, draft_kind, cut):
    """Sums the masses of the draft ids that mean a target id; logits are processed in the draft's vocabulary first.

    Args:
        draft_law: [B, R, Vd] fp32 or bf16.
        target_to_draft: [M, V] int32, the draft ids of each target id; others than 0 to Vd - 1 are none.
        empty: [B] int32 zeros.
        temperature: [B] fp32; 0 is greedy, a row that nobody asks for a law: as 1.
        top_k, top_p, min_p: [B] int32, fp32, fp32; None unless `cut`.
        draft_kind: "logits" or "probs".
        cut: whether any of the three may be on.

    Returns:
        [B, R, V] fp32; NaN where logits have no law.
    """
    batch, rows, _ = draft_law.shape
    num_rows = batch * rows
    laws = draft_law
    if draft_kind == "logits":
        laws = processed_laws(draft_law, empty, temperature, top_k, top_p, min_p, cut)
    projected = nl.ndarray((batch, rows, target_to_draft.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    first = num_rows * nl.program_id(0) // nl.num_programs(0)
    end = num_rows * (nl.program_id(0) + 1) // nl.num_programs(0)
    largest = max(1, min(ROWS, SHARE * NUM_GROUPS // target_to_draft.shape[1]))
    groups = (end - first + largest - 1) // largest
    for group in range(groups):
        start = first + (end - first) * group // groups
        stop = first + (end - first) * (group + 1) // groups
        project_rows(projected, laws, target_to_draft, start, stop - start)
    return projected


def processed_laws(draft_logits, empty, temperature, top_k, top_p, min_p, cut):
    """[B * R, Vd] fp32 in HBM, of logits [B, R, Vd]."""
    batch, rows, draft_size = draft_logits.shape
    laws = nl.ndarray((batch * rows, draft_size), dtype=nl.float32, buffer=nl.shared_hbm)
    for first, count, repeated in sequence_chunks(batch, rows, 4 * group_size(draft_size), MASS_BYTES):
        partition_ids = first_ids(draft_size)
        _, _, _, _, scale, limits = load_parameters(
            empty, temperature, top_k, top_p, min_p, first, count, rows, cut, draft_size
        )
        facts = node_facts(first, count, draft_logits, None, "one_hot", draft_size, scale, limits, partition_ids)
        for row in range(rows):
            here = facts[:, :, :, row]
            has_law = here[:, TARGET_OK]
            offset = floats((1, count))
            nisa.memset(dst=offset, value=float(row))
            index = row_index(offset, first * rows, rows)
            masses, _ = row_masses(index, here, has_law, scale, draft_logits, cut, draft_size)
            weight = floats((1, count))
            nisa.reciprocal(dst=weight, data=select(has_law, here[:, TARGET_TOTAL], 1.0))
            weights = spread(transpose(select(has_law, weight, float("nan"))))
            for sequence in range(repeated, count):
                law = masses[:, sequence]
                nisa.tensor_scalar(dst=law, data=law, op0=nl.multiply, operand0=weights[:, sequence : sequence + 1])
                store_row(laws, (first + sequence) * rows + row, law, draft_size)
    if nl.num_programs(0) > 1:
        nisa.core_barrier(data=laws, cores=(0, 1))
    return laws


def project_rows(projected, laws, target_to_draft, first, count):
    """Rows first.. of `laws` [.., Vd] to those of `projected` [.., V].

    Partition row * copies + i has target ids i * width .. of a row. A law that does not fit is gathered part by part.
    """
    entries, vocab_size = target_to_draft.shape
    draft_size = laws.shape[len(laws.shape) - 1]
    copies = NUM_GROUPS // count
    width = (vocab_size + copies - 1) // copies
    part = min(draft_size, LAW_BYTES // 4 - width - 1)
    sums = floats((count * copies, width))
    steps = []
    for first_id in range(0, draft_size, part):
        for column in range(0, width, COLUMNS):
            for entry in range(entries):
                steps.append((first_id, min(part, draft_size - first_id), column, entry))
    law = None
    next_places = load_places(target_to_draft, steps[0], count, copies, width)
    for i in range(len(steps)):
        first_id, size, column, entry = steps[i]
        if column == 0 and entry == 0:
            law = load_law(laws, first, count, copies, first_id, size)
        # A step ahead, so that they do not queue behind the store of what is gathered by them.
        places = next_places
        if i + 1 < len(steps):
            next_places = load_places(target_to_draft, steps[i + 1], count, copies, width)
        columns = min(COLUMNS, width - column)
        piece = sums[:, column : column + columns]
        if first_id == 0 and entry == 0:
            nisa.nc_n_gather(dst=piece, data=law, indices=places)
        else:
            gathered = floats((count * copies, columns))
            nisa.nc_n_gather(dst=gathered, data=law, indices=places)
            nisa.tensor_tensor(dst=piece, data1=piece, data2=gathered, op=nl.add)
        if first_id + size == draft_size and entry == entries - 1:
            for row in range(count):
                start = (first + row) * vocab_size + column
                for low, parts, held in spans(vocab_size, width, column, columns):
                    nisa.dma_copy(
                        dst=projected.ap(pattern=[[width, parts], [1, held]], offset=start + low * width),
                        src=piece[row * copies + low : row * copies + low + parts, 0:held],
                    )


def load_law(laws, first, count, copies, first_id, size):
    """[count * copies, 1 + size] fp32: a zero, and ids first_id.. of a row; every row on as many partitions."""
    law = floats((count * copies, 1 + size))
    nisa.memset(dst=law[:, 0:1], value=0.0)
    draft_size = laws.shape[len(laws.shape) - 1]
    for row in range(count):
        nisa.dma_copy(
            dst=law[row * copies : (row + 1) * copies, 1 : 1 + size],
            src=laws.ap(pattern=[[0, copies], [1, size]], offset=(first + row) * draft_size + first_id),
        )
    return law


def load_places(target_to_draft, step, count, copies, width):
    """[count * copies, columns] uint32: where the `size` draft ids from `first_id` hold the target ids' masses.

    0, where the zero is, for those they do not hold.
    """
    first_id, size, column, entry = step
    _, vocab_size = target_to_draft.shape
    columns = min(COLUMNS, width - column)
    ids = nl.ndarray((count * copies, columns), dtype=nl.int32, buffer=nl.sbuf)
    if vocab_size < copies * width:
        nisa.memset(dst=ids, value=-1)
    for row in range(count):
        for low, parts, held in spans(vocab_size, width, column, columns):
            nisa.dma_copy(
                dst=ids[row * copies + low : row * copies + low + parts, 0:held],
                src=target_to_draft.ap(
                    pattern=[[width, parts], [1, held]], offset=entry * vocab_size + low * width + column
                ),
            )
    place = floats((count * copies, columns))
    nisa.tensor_scalar(dst=place, data=ids, op0=nl.add, operand0=float(1 - first_id), op1=nl.maximum, operand1=0.0)
    places = nl.ndarray((count * copies, columns), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=places, data=place, op0=nl.less_equal, operand0=float(size), op1=nl.multiply, operand1=place
    )
    return places


def spans(vocab_size, width, column, columns):
    """(first partition of a row, partitions, columns) that hold target ids, of `columns` from `column` on."""
    found = []
    full = max(0, (vocab_size - column - columns) // width + 1)
    if full > 0:
        found.append((0, full, columns))
    rest = min(columns, vocab_size - full * width - column)
    if rest > 0:
        found.append((full, 1, rest))
    return found
