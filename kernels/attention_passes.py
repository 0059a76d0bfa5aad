"""What the passes of few and of many sequences share: plans, constants, loads."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_loads import (
    EVICTION_ENGINES,
    bits_of,
    fetch_keys,
    fetch_window,
    moving_keys,
    new_keys,
    new_moving_keys,
    new_window,
    prepare_window,
    silence,
    slots_to_keep,
    transpose_keys,
)
from .attention_plan import (
    PARTITIONS,
    Chunk,
    count_row_tiles,
    head_parts,
    plan_chunk,
    plan_runs,
    tile,
    two_byte_cache,
)
from .attention_softmax import (
    groups_of,
    idle_engine,
    live_flags,
    load_exponential,
    row_constants,
    window_mask,
    with_tree,
)
from .attention_steps import score_step, weigh_step
from .attention_tree import tree_matters

LONGEST = 4096  # slots of a pass on one core: its fixed cost is then small beside its loads
SBUF_FOR_PASSES = 160 * 1024  # bytes a partition, of 208 KiB
MOST_STREAMS = 4
MOST_TOGETHER = 2  # passes of an item of a work list, on one core
FEW_SEQUENCES = 8  # one of them is much of what a core does
LONGEST_WHOLE = 8 * LONGEST  # slots of a sequence that one of two cores takes alone: it may be the only long one
UNROLLED_SLOTS = 8 * LONGEST  # of all row tiles of a pass: what loops unroll stays below 20,000 instructions
RAGGED = 2048  # slots of a pass, or an item, that may load some that are not live


@dataclass
class Operands(nl.NKIObject):
    """The tensors of a call in HBM; what is not there is None."""

    query: object
    key: object
    value: object
    key_cache: object
    value_cache: object
    trees: object  # [1 or B, T, T + 1], as ancestor_table leaves them
    block_table: object
    sinks: object
    key_scale: object
    value_scale: object
    outputs: object  # [shards, B, Hq, T, D]
    sums: object  # [shards, 2, B, Hq, T]
    shard: int  # this core's share of the slots
    shards: int  # how many there are


def share_heads(shape, core, cores):
    """The query heads that are a core's, first and one past the last: whole key/value heads, or some of one whose rows
    fill more than a row tile, unless its slots are so many that it is better to share those. None to share slots."""
    by_rows = shape.rows > PARTITIONS and shape.slots <= MOST_TOGETHER * LONGEST and shape.query_heads % cores == 0
    if shape.heads % cores > 0 and not by_rows:
        return None
    share = shape.query_heads // cores
    return core * share, (core + 1) * share


def plan_dense(shape, rows, shard, slot_cores):
    """Passes over live slots only, for row tiles like `rows`: at most half as long as a core's share of the cache, so
    that most sequences have one, and such that two fit in SBUF. None where that is short."""
    share = shape.slots // slot_cores
    if share < 2 * RAGGED or shape.ring:
        return None
    longest = min(longest_pass(shape, rows, 2), share // 2)
    return plan_chunk(shape.slots, longest, rows.streams, shard, slot_cores)


def share_line(shape, groups, dense):
    """Whether sequences that all have passes like `dense` take the outer ones in one line. What lies idle between
    sequences is long beside short passes of a full row tile; there has to be room for two sequences."""
    rows = groups[0][0]
    full = count_row_tiles(groups) == 1 and rows.streams == 1 and shape.batch > 1 and shape.sliding_window == 0
    return full and dense.slots < LONGEST and dense.slots <= longest_pass(shape, rows, 2 * MOST_TOGETHER)


def plan_ragged(shape, rows, shard, slot_cores):
    """Passes that may load slots that are not live."""
    return plan_chunk(shape.slots, min(longest_pass(shape, rows, 1), RAGGED), 1, shard, slot_cores)


def plan_paged(shape, rows, shard, slot_cores):
    """Passes of a few sequences of a paged cache: over live slots only, of which each core takes some, and over any, of
    which each core takes its share. None where the cache is short, or its first slots may be too old to be seen."""
    if shape.slots < 2 * RAGGED or shape.ring or shape.sliding_window > 0:
        return None
    dense = plan_runs(shape, min(longest_pass(shape, rows, MOST_TOGETHER), shape.slots // 2), rows, True)
    segments = max(1, dense.segments // 2)
    own = segments * dense.partitions * dense.run
    step = slot_cores * own
    most = (shape.slots + step - 1) // step
    return dense, Chunk(own, segments, dense.partitions, dense.run, 1, 1, shard * own, step, most)


@dataclass
class Plan(nl.NKIObject):
    """How many sequences are cut into items of a work list: some passes of one sequence, taken by the cores in turn."""

    chunk: Chunk
    together: int  # passes of an item
    most: int  # items of a sequence
    dense: bool  # no pass loads a slot that is not live, but for the rest of a last run


def plan_items(shape, rows, row_tiles, cores):
    """Plans for sequences of at least a dense pass, if there is one, and for all others; for row tiles like `rows`."""
    most = MOST_TOGETHER * cores
    longest = longest_pass(shape, rows, MOST_TOGETHER)
    while row_tiles * longest > UNROLLED_SLOTS:
        longest //= 2
    many_slots = shape.slots >= 2 * RAGGED and not shape.ring
    dense = None
    if shape.block_size == 0:
        ragged = plan_chunk(shape.slots, min(longest, RAGGED // most), 1, 0, 1)
        if many_slots:
            dense = plan_chunk(shape.slots, min(longest, shape.slots // most), rows.streams, 0, 1)
    elif many_slots and shape.sliding_window == 0:  # of a window's first run, slots may be too old to be seen
        dense = plan_runs(shape, min(longest, shape.slots // MOST_TOGETHER), rows, True)
        # As long as the others, so that they can use the same room.
        ragged = Chunk(dense.slots, dense.segments, dense.partitions, dense.run, 1, 1, 0, dense.step, dense.most)
    else:
        if shape.sliding_window > 0:
            longest = min(longest, max(PARTITIONS, shape.sliding_window))
        ragged = plan_runs(shape, min(longest, shape.slots // most), rows, False)
    plans = []
    live = shape.slots
    if shape.sliding_window > 0 and not shape.positioned:
        live = min(live, shape.sliding_window + shape.block_size)
    if dense != None:  # noqa: E711
        plans.append(new_plan(dense, cores, live, True))
        live = min(live, dense.step)
    plans.append(new_plan(ragged, cores, live, False))
    return plans


def new_plan(chunk, cores, live, dense):
    """A Plan for sequences of up to `live` live slots."""
    # While a pass is worked on, another's loads are under way; each core has as many.
    together = (min(MOST_TOGETHER * cores, chunk.most) + cores - 1) // cores * cores
    size = together * chunk.step
    return Plan(chunk, together, (live + size - 1) // size, dense)


def shares_sequences(shape):
    """Whether two cores take whole sequences of a work list, with nothing to merge, not some passes of each item: where
    sequences are short, and so many that one more or less matters little."""
    return shape.batch > FEW_SEQUENCES and shape.slots <= LONGEST_WHOLE


def longest_pass(shape, rows, count):
    """Slots of a pass of which `count` fit in SBUF: keys, also as loaded where they are to be transposed, values,
    scores and weights."""
    size = 4 if shape.dtype == nl.float32 else 2
    head_bytes = rows.heads * shape.head_dim * size // PARTITIONS
    slot_bytes = len(head_parts(shape.head_dim)) * rows.heads * size + head_bytes + (4 + size) // rows.streams
    if shape.cache_layout != "BHDS":
        slot_bytes += head_bytes
    if shape.block_size > 0 and two_byte_cache(shape):
        slot_bytes += head_bytes  # where passes of both kinds have room of their own
    longest = LONGEST
    while count * longest * slot_bytes > SBUF_FOR_PASSES:
        longest //= 2
    return longest


@dataclass
class Constants(nl.NKIObject):
    """What no pass changes."""

    rows: object  # Rows of each row tile of each group
    slot: object  # [partitions, segments, run] fp32, the number of each slot that a pass loads
    window_row: object  # [T, 1] fp32
    inverse_scales: object  # [T, Hkv] fp32, or None
    last_run: object  # [128, run] fp32, the number of each slot of a pass's last run


def constants_of(shape, groups, operands, dense, ragged, ending):
    """Constants, None where nothing asks for them: a tile that is written and not read is an error.

    Passes like `dense` are taken in streams, those like `ragged` load slots that are not live, those like `ending` in
    their last run only; None if none are.
    """
    if operands.trees == None:  # noqa: E711
        load_exponential()  # a tree's table was begun with it
    with_window = has_window(operands)
    rows = []
    for group in groups:
        own = []
        for row_tile in group:
            own.append(
                row_constants(
                    shape,
                    dense,
                    row_tile,
                    with_window and operands.trees == None,  # noqa: E711
                    operands.sinks if operands.shard == 0 else None,
                    operands.key_scale,
                    operands.value_scale,
                )
            )
        rows.append(own)
    slot = slots_of(ragged, 0) if ragged != None else None  # noqa: E711
    window_row = None
    if with_window:
        window_row = tile((shape.window, 1))
        nisa.iota(dst=window_row, pattern=[[0, 1]], offset=0, channel_multiplier=1)
    inverse_scales = None
    if with_window and operands.value_scale != None:  # noqa: E711
        inverse_scales = tile((shape.window, shape.heads))
        nisa.dma_copy(dst=inverse_scales, src=operands.value_scale.ap(pattern=[[0, shape.window], [1, shape.heads]]))
        nisa.reciprocal(dst=inverse_scales, data=inverse_scales)
    last_run = None
    if ending != None:  # noqa: E711
        last_run = tile((PARTITIONS, ending.run))
        nisa.iota(dst=last_run, pattern=[[1, ending.run]], offset=ending.slots - ending.run, channel_multiplier=0)
    return Constants(rows, slot, window_row, inverse_scales, last_run)


def slots_of(chunk, segment):
    """[partitions, segments, run] fp32: the number of each slot that a pass loads, from a segment on."""
    size = chunk.partitions * chunk.run
    slot = tile((chunk.partitions, chunk.segments - segment, chunk.run))
    nisa.iota(
        dst=slot,
        pattern=[[size, chunk.segments - segment], [1, chunk.run]],
        offset=chunk.first + segment * size,
        channel_multiplier=chunk.run,
    )
    return slot


def own_constants(shape, groups, operands, constants, current):
    """Constants for the sequence of a pass, which may have a tree of its own."""
    if operands.trees == None or not tree_matters(shape, has_window(operands)):  # noqa: E711
        return constants
    rows = []
    for g in range(len(groups)):
        own = []
        for t in range(len(groups[g])):
            own.append(with_tree(shape, groups[g][t], constants.rows[g][t], operands.trees, current))
        rows.append(own)
    return Constants(rows, constants.slot, constants.window_row, constants.inverse_scales, constants.last_run)


def has_window(operands):
    """Whether the window's keys are this core's to take: of two that share the slots, the first's."""
    return operands.key != None and operands.shard == 0  # noqa: E711


def pass_keys(shape, chunk, rows, operands, current, begin):
    """Keys of a pass, a list of segments; `begin` as for fetch_keys."""
    keys = new_keys(shape, chunk, rows, operands.key_cache.dtype)
    fetch_keys(shape, chunk, rows, operands.key_cache, current, None, keys, begin)
    return moved_keys(shape, chunk, rows, keys)


def moved_keys(shape, chunk, rows, keys):
    """Keys of a pass, D on partitions, in room of their own where they are transposed."""
    room = new_moving_keys(shape, chunk, rows)
    transpose_keys(shape, chunk, rows, keys, room)
    return moving_keys(shape, chunk, rows, keys, room)


def silence_pass(shape, slot, values, current):
    """Clears the values of slots that no row may weigh."""
    keep = slots_to_keep(shape, slot, current, values[0].dtype)
    for segment in range(len(values)):
        silence(shape, values[segment], values[segment], keep[:, segment, :])


def own_window(shape, rows, operands, constants, current):
    """The window's keys and values for a group's heads, rows of padding silenced."""
    window = new_window(shape, rows)
    fetch_window(shape, rows, operands.key, operands.value, current, window)
    return silenced_window(shape, rows, window, constants, current)


def silenced_window(shape, rows, window, constants, current):
    """The same of a window as it lies."""
    keep = tile((shape.window, 1), bits_of(shape.head_dim, shape.dtype))
    live_rows = current.live_rows[0 : shape.window]
    nisa.tensor_tensor(dst=keep, data1=constants.window_row, data2=live_rows, op=nl.less, engine=idle_engine(shape))
    return prepare_window(shape, rows, window, keep, constants.inverse_scales)


def attend_window(shape, rows, constants, queries, window, current, state):
    """Takes the window, (keys, values) as own_window leaves them, into a row tile's state."""
    engine = nisa.engine.vector
    seen = (window[0], window_mask(shape, constants, current, live_flags(constants, current, engine), engine))
    step = score_step(shape, None, rows, constants, queries, None, None, seen, state.negative_max)
    weigh_step(shape, None, rows, step, None, window[1], state, False, EVICTION_ENGINES)


def new_stationary(shape, rows):
    """Room for a row tile's queries, zero outside each group's own rows."""
    parts = head_parts(shape.head_dim)
    stationary = tile((parts[0][1], len(parts), groups_of(rows), rows.count), shape.dtype)
    if groups_of(rows) > 1:
        nisa.memset(dst=stationary, value=0.0)
    return stationary


def silence_last_run(chunk, last_run, keys, current):
    """Clears the keys of the slots of a pass's last run that no row may see: streams would spread them."""
    dead = tile(last_run.shape, nl.uint8)
    nisa.tensor_scalar(dst=dead, data=last_run, op0=nl.greater_equal, operand0=current.end)
    for part in keys[chunk.segments - 1]:
        size, heads = part.shape[0:2]
        nisa.tensor_copy_predicated(
            dst=part[:, :, 0, chunk.partitions - 1, :],
            src=0.0,
            predicate=dead[0:size].expand_dim(1).broadcast(1, heads),
        )
