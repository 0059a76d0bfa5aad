"""A few sequences of a paged cache, unrolled.

GpSimd, which describes gathers, takes longest. It starts on the first sequence's keys before it is known whether they
are needed, and goes on from one sequence to the next: what else there is to do is left to other engines.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import (
    fetch_places,
    list_runs,
    load_table,
    locate_runs,
    located_dtype,
    places_from,
    row_elements,
    skip_dead_runs,
    spread_runs,
)
from .attention_exchange import add_streams
from .attention_few import begin_walk, windows_of
from .attention_lengths import checked_lengths, on_every_partition
from .attention_loads import fetch_keys, fetch_slots, new_keys, new_slots
from .attention_outer import (
    attend_outer,
    coming_keys,
    fetch_values,
    new_aheads,
    new_values,
    ready_ahead,
    score_ahead,
    weigh_ahead,
)
from .attention_output import joined_state, other_state, output_of, write_output
from .attention_parts import parts_of, row_tile, take
from .attention_passes import (
    MOST_STREAMS,
    MOST_TOGETHER,
    constants_of,
    moved_keys,
    plan_paged,
    silence_pass,
    slots_of,
)
from .attention_plan import PARTITIONS, plan_rows, tile
from .attention_room import own_heads
from .attention_softmax import one_stream
from .attention_work import Pass, counters

ROW_OF_TABLE = 2048  # entries that one partition holds


@dataclass
class Plan(nl.NKIObject):
    """What all sequences have in common."""

    dense: object  # Chunk of passes over live slots only, which the cores take in turn
    ragged: object  # Chunk of the passes of sequences that are shorter
    cores: int
    runs: object  # as list_runs leaves them
    sequence_runs: int
    tail: object  # as slots_of leaves those of a dense pass's last segment; None where that is not this core's


@dataclass
class Facts(nl.NKIObject):
    """Of each sequence: where its passes are. Dense are a first one, one that ends with the last live run, and, from
    the first on, those that start before that."""

    lengths: object  # Lengths
    latest: object  # slot where the pass that ends with the last live run starts, [128, B] fp32
    left: object  # live slots from there on, [128, B] fp32; None where that pass is not this core's
    none: object  # 0, [128, 1] fp32
    any: object  # a register each: 1 if there are dense passes, else 0
    between: object  # a register each: `latest`, 0 without dense passes; None if no cache has a third pass
    short: object  # a register each: live slots where there are no dense passes, else 0


def attend_paged(shape, query_heads, operands, lengths, slot_cores):
    """`query_heads`: (first, one past the last) that are this core's."""
    rows = plan_rows(shape, query_heads, MOST_STREAMS)[0][0]
    dense, ragged = plan_paged(shape, rows, operands.shard, slot_cores)
    groups = plan_rows(shape, query_heads, dense.streams)
    has_last = operands.shard == slot_cores - 1
    num_blocks = operands.value_cache.shape[0]

    # The table first: all gathers wait for it.
    parts = whole_segments(shape, dense, operands)
    blocks = load_table(shape, operands.block_table, parts)
    first_row = None
    if parts > 0 and has_last and shape.block_size == dense.run and shape.table_size <= ROW_OF_TABLE:
        first_row = load_table(shape, operands.block_table[0:1], 1)
    located = locate_runs(shape, dense.run, blocks, num_blocks)
    given = on_every_partition(lengths)
    constants = constants_of(shape, groups, operands, dense, ragged, dense if has_last else None)
    first_places = spread_runs(located) if parts > 0 and operands.shard == 0 else None
    latest, index = latest_passes(shape, dense, given[0])
    last_places = None
    if first_row != None:  # noqa: E711
        last_places = places_from(shape, dense, first_row, num_blocks, index[0:1, 0:1])
    walks = []
    for sequence in range(shape.batch):
        walks.append(begin_walk(shape, groups, operands, constants, sequence))
    plan = Plan(
        dense,
        ragged,
        slot_cores,
        list_runs(located, ragged.step // dense.run),
        shape.slots // dense.run,
        slots_of(dense, dense.segments - 1) if has_last else None,
    )
    places = []
    for sequence in range(shape.batch):
        own_last = last_places if sequence == 0 else None
        places.append(outer_places(plan, operands, sequence, first_places, index[0:1] if has_last else None, own_last))
    checked = checked_lengths(shape, given, blocks, num_blocks)[0]
    facts = facts_of(dense, checked, latest, has_last)
    first_keys = coming_keys(walks[0], dense, 0, places[0])
    passes = []
    windows = []
    for sequence in range(shape.batch):
        passes.append(outer_passes(shape, plan, operands, facts, sequence))
    # Until the first keys are there, the other engines have time.
    room = ragged_room(shape, ragged, groups[0][0], operands)
    stride = in_slots_and_runs(ragged, ragged.step)
    begins = []
    for sequence in range(shape.batch):
        begins.append(in_slots_and_runs(ragged, 0))
        windows.append(windows_of(walks[sequence], passes[sequence][0]))
    aheads = ()
    if slot_cores > 1 and dense.most <= 2 and len(groups) == 1 and len(groups[0]) == 1:
        aheads = new_aheads(walks, plan, passes, places, windows)
        score_ahead(aheads[0], plan, facts, first_keys)
        ready_ahead(aheads[0], facts)
    endings = []
    outputs = []
    for sequence in range(shape.batch):
        walk = walks[sequence]
        # Engines keep their order: what a sequence needs first comes before the passes of the one before, and what
        # waits for the other core after those of the next.
        is_last = sequence == shape.batch - 1
        if len(aheads) > 0 and not is_last:
            score_ahead(aheads[sequence + 1], plan, facts, ())
        while slot_cores > 1 and len(outputs) < len(endings) and not is_last:
            outputs.append(outputs_of(endings[len(outputs)]))
        between = begin_between(plan, operands, facts, sequence)
        if len(aheads) > 0:
            weigh_ahead(aheads[sequence], plan, facts)
            if not is_last:
                ready_ahead(aheads[sequence + 1], facts)
        else:
            keys = first_keys if sequence == 0 else ()
            attend_outer(walk, plan, facts, passes[sequence], places[sequence], windows[sequence], keys)
        if between != None:  # noqa: E711
            attend_between(walk, plan, facts, between)
        attend_ragged(walk, plan, facts, room, begins[sequence], stride)
        add_streams(walk)
        if slot_cores == 1:
            endings.append(Ending(walk, passes[sequence][0], (), 0, 1))
            outputs.append(outputs_of(endings[sequence]))
        elif sequence % 2 == 1:
            # Of two sequences each core ends one, and sends its states of the other.
            own = sequence - 1 + operands.shard
            sent = walks[sequence - operands.shard]
            endings.append(Ending(walks[own], passes[own][0], other_states(walks[own], sent, is_last), 0, 1))
        elif is_last:
            endings.append(
                Ending(walk, passes[sequence][0], other_states(walk, walk, True), operands.shard, slot_cores)
            )
    for i in range(len(outputs), len(endings)):
        outputs.append(outputs_of(endings[i]))
    # A store among loads would hold up those that come after.
    for i in range(len(outputs)):
        write_outputs(endings[i], outputs[i])


def ragged_room(shape, chunk, rows, operands):
    """Keys and values of a pass, zeros: a gather that skips a run leaves what was."""
    keys = new_keys(shape, chunk, rows, operands.key_cache.dtype)
    values = new_slots(shape, chunk, rows, operands.value_cache.dtype)
    for segment in range(chunk.segments):
        nisa.memset(dst=values[segment], value=0.0, engine=nisa.engine.vector)
        nisa.tensor_copy(dst=keys[segment], src=values[segment], engine=nisa.engine.scalar)
    return keys, values


def latest_passes(shape, chunk, cached):
    """Facts.latest, and its run, int32, from seq_lens as they are given, before any check: wherever that is, it can be
    loaded."""
    end = tile(cached.shape, nl.int32)
    index = tile(cached.shape, nl.int32)
    latest = tile(cached.shape)
    last_index = chunk.slots // chunk.run
    nisa.tensor_scalar(dst=end, data=cached, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(shape.slots))
    nisa.tensor_scalar(dst=end, data=end, op0=nl.add, operand0=float(chunk.run - 1))
    # A run is a power of two.
    nisa.tensor_scalar(dst=end, data=end, op0=nl.right_shift, operand0=log2(chunk.run))
    nisa.tensor_scalar(dst=index, data=end, op0=nl.subtract, operand0=float(last_index), op1=nl.maximum, operand1=0.0)
    nisa.tensor_scalar(dst=latest, data=index, op0=nl.multiply, operand0=float(chunk.run))
    return latest, index


def log2(power):
    """Of a power of two."""
    exponent = 0
    while power > 1 << exponent:
        exponent += 1
    return exponent


def facts_of(chunk, lengths, latest, has_last):
    size = lengths.cached.shape
    some = tile(size)
    short = tile(size)
    none = tile((PARTITIONS, 1))
    nisa.tensor_scalar(dst=some, data=lengths.cached, op0=nl.greater_equal, operand0=float(chunk.slots))
    any_pass = counters(some, nisa.engine.vector)
    nisa.scalar_tensor_tensor(
        dst=short, data=some, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=lengths.cached
    )
    shorts = counters(short, nisa.engine.vector)
    between = None
    if chunk.most > 2:
        ends = tile(size)
        nisa.tensor_tensor(dst=ends, data1=latest, data2=some, op=nl.multiply)
        between = counters(ends, nisa.engine.vector)
    left = None
    if has_last:
        left = tile(size)
        nisa.tensor_tensor(dst=left, data1=lengths.cached, data2=latest, op=nl.subtract)
    nisa.memset(dst=none, value=0.0, engine=nisa.engine.vector)
    return Facts(lengths, latest, left, none, any_pass, between, shorts)


def whole_segments(shape, chunk, operands):
    """The segments of a sequence, if all are whole and the first pass's places come from the chip, by spread_runs; else
    0."""
    size = PARTITIONS * chunk.run
    count = shape.slots // size
    fits = shape.slots % size == 0 and shape.table_size % count == 0 and shape.batch * count <= PARTITIONS
    return count if fits and located_dtype(shape, chunk.run, operands.value_cache.shape[0]) == nl.float32 else 0


def outer_places(plan, operands, sequence, first_places, index, last_places):
    """Where the runs of this core's outer passes lie: of the first, the last, or both."""
    dense = plan.dense
    first_run = sequence * plan.sequence_runs
    places = []
    if first_places != None:  # noqa: E711
        column = first_run // PARTITIONS
        places.append(first_places[:, column : column + dense.segments])
    elif operands.shard == 0:
        places.append(tile((dense.partitions, dense.segments), nl.int32))
        fetch_places(dense, plan.runs, first_run, None, places[0])
    if last_places != None:  # noqa: E711
        places.append(last_places)
    elif index != None:  # noqa: E711
        own = tile((dense.partitions, dense.segments), nl.int32)
        fetch_places(dense, plan.runs, first_run, index[:, sequence : sequence + 1], own)
        places.append(own)
    return places


def outer_passes(shape, plan, operands, facts, sequence):
    """The Passes of outer_places."""
    one = slice(sequence, sequence + 1)
    rows = facts.lengths.live_rows[:, one]
    latest = facts.latest[:, one]
    passes = []
    if plan.cores == 1 or operands.shard == 0:
        position = facts.lengths.position[:, one]
        passes.append(Pass(sequence, None, None, None, facts.none, latest, rows, None, position))
    if facts.left != None:  # noqa: E711
        position = position_from(shape, facts, sequence, latest)
        passes.append(Pass(sequence, None, None, None, facts.none, facts.left[:, one], rows, None, position))
    return passes


def position_from(shape, facts, sequence, start, engine=nisa.engine.vector):
    """The position of window row 0, counted from slot `start` [128, 1]; None where nothing asks for it."""
    if not shape.positioned:
        return None
    position = tile((PARTITIONS, 1))
    own = facts.lengths.position[:, sequence : sequence + 1]
    nisa.tensor_tensor(dst=position, data1=own, data2=start, op=nl.subtract, engine=engine)
    return position


@dataclass
class Between(nl.NKIObject):
    """The next of a core's dense passes between the first and the last. Pairs: [128, 2] fp32, in slots and in runs."""

    begins: object  # a pair each: where its own slots begin
    bounds: object  # [128, 3] fp32 each: its own slots, first and one past the last, from where it loads, and that
    places: object  # of its runs
    latest: object  # where the last pass starts, [128, 1] fp32
    limit: object  # a pair: the latest that a pass may load from; the last run may hold slots that are not live
    stride: object  # a pair


def begin_between(plan, operands, facts, sequence):
    """A Between for some passes on each core at a time; None if no cache has a third pass."""
    if facts.between == None:  # noqa: E711
        return None
    dense = plan.dense
    some = min(MOST_TOGETHER, (dense.most - 2 + plan.cores - 1) // plan.cores)
    latest = facts.latest[:, sequence : sequence + 1]
    limit = tile((PARTITIONS, 2))
    nisa.tensor_scalar(
        dst=limit[:, 0:1], data=latest, op0=nl.subtract, operand0=float(dense.run), op1=nl.maximum, operand1=0.0
    )
    nisa.tensor_scalar(dst=limit[:, 1:2], data=limit[:, 0:1], op0=nl.multiply, operand0=1.0 / dense.run)
    coming = Between([], [], [], latest, limit, in_slots_and_runs(dense, some * plan.cores * dense.slots))
    for i in range(some):
        first = (1 + i * plan.cores + operands.shard) * dense.slots
        coming.begins.append(in_slots_and_runs(dense, first))
        coming.bounds.append(tile((PARTITIONS, 3)))
        coming.places.append(tile((dense.partitions, dense.segments), nl.int32))
    look_up(plan, sequence, coming, nisa.engine.vector)
    return coming


def attend_between(walk, plan, facts, coming):
    """Dense passes between the first and the last; while they are gathered it is looked up where the next ones lie."""
    dense = plan.dense
    sequence = walk.sequence
    some = len(coming.begins)

    def next_passes(_):
        passes = []
        places = []
        for i in range(some):
            bounds = tile((PARTITIONS, 3))
            nisa.tensor_copy(dst=bounds, src=coming.bounds[i], engine=nisa.engine.gpsimd)
            places.append(copied_places(coming.places[i]))
            rows = facts.lengths.live_rows[:, sequence : sequence + 1]
            position = position_from(walk.shape, facts, sequence, bounds[:, 2:3])
            passes.append(Pass(sequence, None, None, None, bounds[:, 0:1], bounds[:, 1:2], rows, None, position))
        look_up(plan, sequence, coming, nisa.engine.gpsimd)
        value_places = []
        for g in range(len(walk.groups)):
            keys = []
            for fetched in coming_keys(walk, dense, g, places):
                keys.append(moved_keys(walk.shape, dense, walk.groups[g][0], fetched))
            if g == 0:
                # The keys of the next passes need not wait until these values are there.
                for own in places:
                    value_places.append(copied_places(own))
            values = new_values(walk, dense, g, value_places)
            fetch_values(walk, dense, g, value_places, values)
            take(walk, True, g, parts_of(walk, dense, g, passes, keys, values), None)

    nl.fori_loop(dense.slots, facts.between[sequence], next_passes, step=some * plan.cores * dense.slots)


def copied_places(places):
    copied = tile(places.shape, nl.int32)
    nisa.tensor_copy(dst=copied, src=places, engine=nisa.engine.gpsimd)
    return copied


def in_slots_and_runs(chunk, slots):
    pair = tile((PARTITIONS, 2))
    nisa.memset(dst=pair[:, 0:1], value=float(slots), engine=nisa.engine.vector)
    nisa.memset(dst=pair[:, 1:2], value=float(slots // chunk.run), engine=nisa.engine.vector)
    return pair


def look_up(plan, sequence, coming, engine):
    """Fills bounds and places of the passes that come next, and moves on."""
    for i in range(len(coming.begins)):
        begin = coming.begins[i]
        bounds = coming.bounds[i]
        start = tile((PARTITIONS, 2))
        index = tile((1, 1), nl.int32)
        nisa.tensor_tensor(dst=start, data1=begin, data2=coming.limit, op=nl.minimum, engine=engine)
        nisa.tensor_copy(dst=index, src=start[0:1, 1:2], engine=engine)
        fetch_places(plan.dense, plan.runs, sequence * plan.sequence_runs, index, coming.places[i])
        slot = start[:, 0:1]
        nisa.tensor_tensor(dst=bounds[:, 0:1], data1=begin[:, 0:1], data2=slot, op=nl.subtract, engine=engine)
        nisa.tensor_tensor(dst=bounds[:, 1:2], data1=coming.latest, data2=slot, op=nl.subtract, engine=engine)
        nisa.tensor_copy(dst=bounds[:, 2:3], src=slot, engine=engine)
        nisa.tensor_tensor(dst=begin, data1=begin, data2=coming.stride, op=nl.add, engine=engine)


def attend_ragged(walk, plan, facts, room, begin, stride):
    """The passes of a sequence without dense ones: of each, what is not live is not loaded.

    Args:
        room: as ragged_room leaves it.
        begin: where the next pass begins, [128, 2] fp32: in slots, in runs.
        stride: from a pass to the next, the same way.
    """
    shape = walk.shape
    chunk = plan.ragged
    one = slice(walk.sequence, walk.sequence + 1)
    engine = nisa.engine.gpsimd

    def next_pass(_):
        end = tile((PARTITIONS, 1))
        index = tile((1, 1), nl.int32)
        places = tile((chunk.partitions, chunk.segments), nl.int32)
        cached = facts.lengths.cached[:, one]
        nisa.tensor_tensor(dst=end, data1=cached, data2=begin[:, 0:1], op=nl.subtract, engine=engine)
        position = position_from(shape, facts, walk.sequence, begin[:, 0:1], engine)
        nisa.tensor_copy(dst=index, src=begin[0:1, 1:2], engine=engine)
        nisa.tensor_tensor(dst=begin, data1=begin, data2=stride, op=nl.add, engine=engine)
        rows = facts.lengths.live_rows[:, one]
        current = Pass(walk.sequence, None, None, None, facts.none, end, rows, None, position)
        first_run = walk.sequence * plan.sequence_runs + chunk.first // chunk.run
        fetch_places(chunk, plan.runs, first_run, index, places)
        cache_rows = walk.operands.value_cache.size // row_elements(shape, chunk.run)
        skip_dead_runs(chunk, walk.constants.slot, cache_rows, current, places)
        for g in range(len(walk.groups)):
            rows = walk.groups[g][0]
            keys = own_heads(room[0], rows)
            values = own_heads(room[1], rows)
            fetch_keys(shape, chunk, rows, walk.operands.key_cache, current, places, keys)
            fetch_slots(shape, chunk, rows, walk.operands.value_cache, current, None, places, values)
            moving = moved_keys(shape, chunk, rows, keys)
            silence_pass(shape, walk.constants.slot, values, current)
            take(walk, False, g, parts_of(walk, chunk, g, (current,), (moving,), (values,)), None)

    nl.fori_loop(0, facts.short[walk.sequence], next_pass, step=chunk.step)


@dataclass
class Ending(nl.NKIObject):
    """A sequence whose output is this core's."""

    walk: object
    current: object  # its Pass
    others: object  # the other core's states of all its row tiles; () if that saw nothing of it
    part: int  # of its rows, of `parts` equal ones
    parts: int


def other_states(walk, sent, is_last):
    """The other core's states of all row tiles of a sequence, for those of another, or of the same, that are `sent`.
    After the last gather GpSimd has time for them."""
    dma_engine = nisa.dma_engine.gpsimd_dma if is_last else nisa.dma_engine.dma
    others = []
    for g in range(len(walk.groups)):
        of_group = []
        for t in range(len(walk.groups[g])):
            rows = walk.groups[g][t]
            of_group.append(other_state(walk.shape, rows, sent.states[g][t], walk.operands.shard, dma_engine))
        others.append(of_group)
    return others


def outputs_of(ending):
    """Outputs of all row tiles."""
    walk = ending.walk
    operands = walk.operands
    outputs = []
    for g in range(len(walk.groups)):
        of_group = []
        for t in range(len(walk.groups[g])):
            rows, own, state, _ = row_tile(walk, True, g, t)
            if len(ending.others) > 0:
                state = joined_state(walk.shape, rows, state, ending.others[g][t])
                rows, own, state = one_stream(rows, own, state)
            with_facts = operands.sums != None and ending.part == 0  # noqa: E711
            of_group.append(output_of(walk.shape, rows, own, state, operands.outputs.dtype, with_facts, ending.current))
        outputs.append(of_group)
    return outputs


def write_outputs(ending, outputs):
    """Writes these; a core that ends a sequence with the other one writes its part of the rows."""
    walk = ending.walk
    operands = walk.operands
    for g in range(len(outputs)):
        for t in range(len(outputs[g])):
            write_output(
                walk.shape,
                walk.groups[g][t],
                outputs[g][t],
                operands.outputs,
                operands.sums,
                0,
                ending.current,
                ending.part,
                ending.parts,
            )
