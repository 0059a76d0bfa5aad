"""project_draft_law: laws over a vocabulary of the draft's own as laws over the target's, on the device.

A gather: every target id fetches the masses of the draft ids that mean it. A core of GpSimd gathers for its 16
partitions by one list of indices, so they hold a law each, behind a zero for the ids that no draft id means, and the
core has the target ids of its 16 lanes. Its list takes an index of every lane in turn.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import over_rows, select, sequence_chunks, to_rows
from .node_facts import TARGET_OK, TARGET_TOTAL, node_columns, row_masses
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

MASS_ROWS = 32  # processed at a time: three values a row pass through one transpose
CORE = 16  # partitions of a core
COLUMNS = 192  # of its lanes at a time, of the 4096 indices / 16 that a gather takes: 12 KiB tiles
TILE_BYTES = 4 * 4 * COLUMNS * CORE  # of a partition: gathered masses and their sums, two of each in flight
SBUF_BYTES = 204800  # 32,768 draft ids of a law fit beside the tiles for 152k target ids


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
    # Two cores share the rows, or the columns where all rows are on the chip at once.
    core, cores = nl.program_id(0), nl.num_programs(0)
    first, end = 0, num_rows
    column, end_column = 0, group_size(target_to_draft.shape[1])
    if num_rows > CORE:
        first, end = end * core // cores, end * (core + 1) // cores
    else:
        column, end_column = end_column * core // cores, end_column * (core + 1) // cores
    if column < end_column:
        project_rows(projected, laws, target_to_draft, first, end, column, end_column)
    return projected


def processed_laws(draft_logits, empty, temperature, top_k, top_p, min_p, cut):
    """[B * R, Vd] fp32 in HBM, of logits [B, R, Vd]."""
    batch, rows, draft_size = draft_logits.shape
    laws = nl.ndarray((batch * rows, draft_size), dtype=nl.float32, buffer=nl.shared_hbm)
    most = max(1, min(MASS_ROWS, MASS_BYTES // (4 * group_size(draft_size))))
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        if repeated < count:
            partition_ids = first_ids(draft_size)
            _, _, _, _, scale, limits = load_parameters(
                empty, temperature, top_k, top_p, min_p, first, count, rows, cut, draft_size
            )
            found = node_columns(first, count, draft_logits, None, "one_hot", draft_size, scale, limits, partition_ids)
            facts = to_rows(found)
            row_scale = floats((1, count, rows))
            nisa.tensor_copy(dst=row_scale, src=over_rows(scale, rows))
            row_scale = row_scale.reshape((1, count * rows))
            for low in range(repeated * rows, count * rows, most):
                high = min(low + most, count * rows)
                here = facts[:, :, low:high]
                has_law = here[:, TARGET_OK]
                index = floats((1, high - low))
                nisa.iota(dst=index, pattern=[[1, high - low]], offset=first * rows + low, channel_multiplier=0)
                masses = row_masses(index, here, has_law, row_scale[:, low:high], draft_logits, cut, draft_size)
                weight = floats((1, high - low))
                nisa.reciprocal(dst=weight, data=select(has_law, here[:, TARGET_TOTAL], 1.0))
                weights = spread(transpose(select(has_law, weight, float("NaN"))))
                for row in range(low, high):
                    law = masses[:, row - low]
                    nisa.tensor_scalar(
                        dst=law, data=law, op0=nl.multiply, operand0=weights[:, row - low : row - low + 1]
                    )
                    store_row(laws, first * rows + row, law, draft_size)
    if nl.num_programs(0) > 1:
        nisa.core_barrier(data=laws, cores=(0, 1))
    return laws


def project_rows(projected, laws, target_to_draft, first, end, first_column, end_column):
    """Rows first..end of `laws` [.., Vd] to those of `projected` [.., V], in some columns of the lanes.

    A law that does not fit is gathered part by part, and its sums come back from HBM.
    """
    entries, _ = target_to_draft.shape
    draft_size = laws.shape[len(laws.shape) - 1]
    # Beside the law: a list of places an entry, uint16, and the two tiles of 4 bytes that it is made in.
    places_bytes = (2 * entries + 8) * (end_column - first_column)
    part = min(draft_size, (SBUF_BYTES - TILE_BYTES - places_bytes) // 4 - 1)
    law = floats((NUM_GROUPS, 1 + part))
    clear(law, end - first < CORE)
    for start in range(first, end, CORE):
        count = min(CORE, end - start)
        for first_id in range(0, draft_size, part):
            ids = min(part, draft_size - first_id)
            places = []
            for entry in range(entries):
                places.append(load_places(target_to_draft, entry, first_column, end_column, first_id, ids))
            load_law(law, laws, start, count, first_id, ids)
            for column in range(first_column, end_column, COLUMNS):
                width = min(COLUMNS, end_column - column)
                sums = floats((NUM_GROUPS, CORE, width))
                if first_id > 0:
                    nisa.memset(dst=sums, value=0.0)
                    move(sums, projected, start, count, column, True)
                for entry in range(entries):
                    gathered = floats((NUM_GROUPS, width, CORE))
                    nisa.local_gather(
                        dst=gathered,
                        src_buffer=law[:, 0 : 1 + ids],
                        index=places[entry][:, column - first_column : column - first_column + width],
                        num_elem_per_idx=1,
                        num_valid_indices=width * CORE,
                    )
                    by_lane = gathered.permute((0, 2, 1))
                    if first_id == 0 and entry == 0:
                        nisa.tensor_copy(dst=sums, src=by_lane, engine=nisa.engine.scalar)
                    else:
                        nisa.tensor_tensor(dst=sums, data1=sums, data2=by_lane, op=nl.add)
                move(sums, projected, start, count, column, False)


def clear(law, whole):
    """The zero in front; the rest too where partitions without a row gather, a long fill for two engines."""
    columns = law.shape[1] if whole else 1
    half = (columns + 1) // 2
    nisa.memset(dst=law[:, 0:half], value=0.0, engine=nisa.engine.vector)
    if half < columns:
        nisa.memset(dst=law[:, half:columns], value=0.0, engine=nisa.engine.gpsimd)


def row_partitions(count):
    """(partition, row, rows) of `count` rows on every core: half of them on the 8 partitions each DMA engine serves."""
    found = []
    half = (count + 1) // 2
    for core in range(0, NUM_GROUPS, CORE):
        found.append((core, 0, half))
        if half < count:
            found.append((core + CORE // 2, half, count - half))
    return found


def load_law(law, laws, first, count, first_id, ids):
    """`ids` draft ids from first_id on of rows first.. behind the zero of `law` [128, ..], once for every core."""
    draft_size = laws.shape[len(laws.shape) - 1]
    for own_rows in row_partitions(count):
        partition, row, rows = own_rows
        nisa.dma_copy(
            dst=law[partition : partition + rows, 1 : 1 + ids],
            src=laws.ap(pattern=[[draft_size, rows], [1, ids]], offset=(first + row) * draft_size + first_id),
        )


def load_places(target_to_draft, entry, column, end_column, first_id, num_ids):
    """[128, columns] uint16: where the law on the chip has the masses of the lanes' target ids, 0 where it has not.

    It has the zero, then num_ids draft ids from first_id on.
    """
    _, vocab_size = target_to_draft.shape
    size = group_size(vocab_size)
    columns = end_column - column
    ids = nl.ndarray((NUM_GROUPS, columns), dtype=nl.int32, buffer=nl.sbuf)
    if vocab_size < NUM_GROUPS * size:
        nisa.memset(dst=ids, value=-1)
    for span in spans(vocab_size, column, columns, 0, NUM_GROUPS):
        lane, lanes, held = span
        nisa.dma_copy(
            dst=ids[lane : lane + lanes, 0:held],
            src=target_to_draft.ap(
                pattern=[[size, lanes], [1, held]], offset=entry * vocab_size + lane * size + column
            ),
        )
    place = floats((NUM_GROUPS, columns))
    nisa.tensor_scalar(dst=place, data=ids, op0=nl.add, operand0=float(1 - first_id), op1=nl.maximum, operand1=0.0)
    places = nl.ndarray((NUM_GROUPS, columns), dtype=nl.uint16, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=places, data=place, op0=nl.less_equal, operand0=float(num_ids), op1=nl.multiply, operand1=place
    )
    return places


def move(sums, projected, first, count, column, load):
    """`sums` [128, 16, width], of a core's rows its 16 lanes from `column` on, to `projected`, or from there."""
    _, _, width = sums.shape
    vocab_size = projected.shape[2]
    size = group_size(vocab_size)
    for own_rows in row_partitions(count):
        partition, row, rows = own_rows
        core = partition // CORE * CORE
        for span in spans(vocab_size, column, width, core, CORE):
            lane, lanes, held = span
            in_hbm = projected.ap(
                pattern=[[vocab_size, rows], [size, lanes], [1, held]],
                offset=(first + row) * vocab_size + lane * size + column,
            )
            tile = sums[partition : partition + rows, lane - core : lane - core + lanes, 0:held]
            if load:
                nisa.dma_copy(dst=tile, src=in_hbm)
            else:
                nisa.dma_copy(dst=in_hbm, src=tile)


def spans(vocab_size, column, columns, first_lane, num_lanes):
    """(lane, lanes, columns) of the lanes, of `num_lanes` from `first_lane`, with target ids in columns `column`.."""
    size = group_size(vocab_size)
    found = []
    full = 0
    for lane in range(first_lane, first_lane + num_lanes):
        held = min(columns, vocab_size - lane * size - column)
        if held == columns:
            full += 1
        elif held > 0:
            found.append((lane, 1, held))
    if full > 0:
        found.append((first_lane, full, columns))
    return found
