"""Many sequences, and short or windowed paged caches: passes listed in a table, and runtime loops that walk it.

While an item of the table is worked on, what the next one needs is on its way: keys as soon as this one's are scored,
values as soon as they are weighed. An item's last values are weighed with the next one's first scores.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import list_runs, load_table, locate_runs
from .attention_lengths import QUADRANT, checked_lengths, on_every_partition
from .attention_list import (
    STORED,
    fetch_entry,
    first_entries,
    late_copy,
    list_passes,
    listed_passes,
    new_entry,
    number_all,
    take_entry,
)
from .attention_loads import EVICTION_ENGINES, moving_keys, transpose_keys, transpose_queries
from .attention_output import output_of, store_output, write_output
from .attention_passes import (
    MOST_STREAMS,
    constants_of,
    has_window,
    new_stationary,
    own_constants,
    plan_items,
    silence_last_run,
    silence_pass,
    silenced_window,
)
from .attention_plan import PARTITIONS, count_row_tiles, plan_rows, tile, two_byte_cache
from .attention_room import (
    clear,
    clear_room,
    fetch_all_places,
    fetch_pass_keys,
    fetch_pass_values,
    fetch_rows,
    keep_places,
    new_room,
    own_heads,
    skip_dead,
    take_places,
    with_own_keys,
)
from .attention_softmax import (
    begin_maximum,
    begin_state,
    groups_of,
    idle_engine,
    live_flags,
    new_state,
    slot_bounds,
    window_mask,
)
from .attention_steps import begin_scores, end_values, new_step, new_weighing, score_and_weigh


@dataclass
class Walk(nl.NKIObject):
    """What items of one kind have in common, and what they change."""

    shape: object
    chunk: object
    dense: bool
    cores: int  # that take passes in turn
    groups: object
    operands: object
    runs: object  # of a paged cache, as list_runs leaves them; else None
    constants: object
    states: object  # of each row tile of each group
    stationaries: object
    entries: object  # what the table says of the item that comes next, and, on 32 partitions, of the one after it
    room: object
    held: object  # Step of the item before whose values are not weighed yet, its last; None if items have one pass
    done: object  # the entry of that item


@dataclass
class Item(nl.NKIObject):
    """An entry of the table while it is taken."""

    entry: object
    passes: object  # of the entry that are this core's
    constants: object
    live: object  # of each row tile of each group, as live_flags leaves them
    keep: object  # [128, 1] int32 of zeros where the item starts a sequence, else of ones
    windows: object  # (keys, values) of each group's window; empty where they are not this core's
    keys: object  # of each pass as they are scored, of the group that is taken


def attend_many(shape, query_heads, operands, lengths, slot_cores, core, sequence_cores):
    """One runtime loop over the passes of sequences longer than a pass, one over those of the others.

    Args:
        query_heads: (first, one past the last) that are this core's.
        slot_cores: that share the passes of each item.
        core, sequence_cores: which this is of how many that share the sequences.
    """
    # More streams cut values into descriptors below 4 KiB, which matters where the engines have less to do than DMA.
    most_streams = 2 if shape.cache_layout == "BHDS" and two_byte_cache(shape) else MOST_STREAMS
    groups = plan_rows(shape, query_heads, most_streams)
    plans = plan_items(shape, groups[0][0], count_row_tiles(groups), slot_cores)
    given = on_every_partition(lengths)
    numbers = number_all(shape, plans)
    num_blocks = operands.value_cache.shape[0]
    blocks = None
    runs = None
    if shape.block_size > 0:
        blocks = load_table(shape, operands.block_table)
        chunk = plans[0].chunk
        runs = list_runs(locate_runs(shape, chunk.run, blocks, num_blocks), chunk.slots // chunk.run)
    laps = checked_lengths(shape, given, blocks, num_blocks)
    walk = new_walk(shape, query_heads, plans[0], slot_cores, operands, runs, None)
    rest = None
    if len(plans) > 1:
        rest = new_walk(shape, query_heads, plans[1], slot_cores, operands, runs, walk.room)
    clear_room(walk.room)
    clear_walk(walk)
    work = list_passes(shape, plans, laps, numbers, core, sequence_cores)
    walk_first(walk, work[0])
    if rest != None and runs == None:  # noqa: E711
        clear_room(rest.room)
    walk_on(walk, work[0])
    if rest == None:  # noqa: E711
        return
    clear_walk(rest)
    if plans[0].chunk.transposed:
        # Of a paged cache, the keys of both kinds do not have room at once.
        clear(rest.room.keys)
    walk_first(rest, work[1])
    walk_on(rest, work[1])


def new_walk(shape, query_heads, plan, cores, operands, runs, room):
    """A Walk, over a paged cache in `room` if there is any, else in room of its own."""
    groups = plan_rows(shape, query_heads, plan.chunk.streams)
    # Only the pass that ends with a sequence's last run loads slots of it that are not live, if passes are dense.
    ending = None
    if plan.dense and runs != None and operands.shard == cores - 1:  # noqa: E711
        ending = plan.chunk
    constants = constants_of(shape, groups, operands, plan.chunk, ending if plan.dense else plan.chunk, ending)
    states = []
    stationaries = []
    for g in range(len(groups)):
        of_states = []
        of_stationaries = []
        for t in range(len(groups[g])):
            state = new_state(shape, groups[g][t])
            nisa.tensor_copy(dst=state.all, src=constants.rows[g][t].fresh.all, engine=idle_engine(shape))
            of_states.append(state)
            of_stationaries.append(new_stationary(shape, groups[g][t]))
        states.append(of_states)
        stationaries.append(of_stationaries)
    entries = (new_entry(plan.together), new_entry(plan.together, QUADRANT))
    if room == None or runs == None:  # noqa: E711
        room = new_room(shape, plan.chunk, groups, operands, plan.together // cores)
    elif len(room.moving[0]) == 0 and not plan.chunk.transposed:
        room = with_own_keys(shape, plan.chunk, groups, operands, room)
    held = None
    done = None
    if plan.together > cores:
        rows = groups[-1][-1]
        held = new_step(shape, plan.chunk, rows, constants.rows[-1][-1], False, tile((rows.count, 1)))
        done = new_entry(plan.together)
    return Walk(
        shape,
        plan.chunk,
        plan.dense,
        cores,
        groups,
        operands,
        runs,
        constants,
        states,
        stationaries,
        entries,
        room,
        held,
        done,
    )


def clear_walk(walk):
    """An item before the first: nothing is seen, and nothing of it stored."""
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            if groups_of(walk.groups[g][t]) == 1:
                clear(walk.stationaries[g][t])
    if walk.held != None:  # noqa: E711
        clear((walk.held.earlier, walk.held.cached, walk.held.negative_max, walk.done))
        nothing = walk.done.view(nl.int32)[:, STORED : STORED + 1]
        nisa.memset(dst=nothing, value=4 * walk.shape.batch, engine=nisa.engine.gpsimd)


def walk_first(walk, work):
    """Fetches the first item of the table, if there is one."""

    coming, after = walk.entries
    first_entries(work, coming, after)

    def fetch_first(_):
        passes = own_passes(walk, coming)
        fetch_rows(walk.shape, walk.groups, walk.operands, walk.room, passes[0])
        fetch_all_places(walk.chunk, walk.runs, walk.room, passes)
        take_places(walk.room)
        fetch_all_places(walk.chunk, walk.runs, walk.room, own_passes(walk, after))
        for turn in range(len(passes)):
            fetch_group_keys(walk, 0, fetched_entry(walk, 0, coming, turn, True), turn)
        # The last values' place is taken.
        for turn in range(len(passes) if walk.held == None else len(passes) - 1):  # noqa: E711
            fetch_group_values(walk, 0, fetched_entry(walk, 0, coming, turn, False), turn)
        transpose_all_queries(walk)

    nl.fori_loop(0, work.any, fetch_first)


def walk_on(walk, work):
    """Takes all items of the table; the first is fetched."""

    def next_item(item):
        attend_item(walk, work, item)

    def last_item(_):
        attend_item(walk, work, None)
        if walk.held != None:  # noqa: E711
            weighing = values_of_held(walk)
            score_and_weigh(None, weighing)
            end_values(weighing)
            write_held(walk, output_of_held(walk), walk.done)

    nl.fori_loop(0, work.before_last, next_item)
    nl.fori_loop(0, work.any, last_item)


def own_passes(walk, entry):
    return listed_passes(entry, walk.operands.shard, walk.cores)


def fetch_group_keys(walk, g, entry, turn):
    current = own_passes(walk, entry)[turn]
    if skips_dead(walk, g):
        skip_dead(walk.shape, walk.chunk, walk.constants.slot, walk.operands, walk.room, current, turn)
    fetch_pass_keys(walk.shape, walk.chunk, walk.groups[g][0], walk.operands, walk.room, current, turn)


def skips_dead(walk, g):
    """Whether some of a pass's runs are left out, once for all groups."""
    return walk.runs != None and g == 0 and not walk.dense  # noqa: E711


def fetch_group_values(walk, g, entry, turn):
    current = own_passes(walk, entry)[turn]
    fetch_pass_values(walk.shape, walk.chunk, walk.groups[g][0], walk.operands, walk.room, current, turn)


def attend_item(walk, work, item):
    """Takes the passes of the item in `room`, and fetches the one after `item`, a register, None for the last."""
    shape = walk.shape
    groups = walk.groups
    coming, after = walk.entries
    current = open_item(walk, late_copy(shape, coming))
    following = None
    if item != None:  # noqa: E711
        take_entry(shape, coming, after)
        fetch_entry(work, item, 2, after)
        fetch_rows(shape, groups, walk.operands, walk.room, own_passes(walk, coming)[0])
        following = coming

    order = steps_of(groups, len(current.passes))
    last = len(order) - 1
    steps = []
    scoring = next_scores(walk, current, order, steps)
    kept = None
    kept_entry = None
    for k in range(len(order)):
        turn = order[k][2]
        weighing = None
        weighed = None
        if k > 0:
            weighed = order[k - 1]
            weighing = values_of(walk, current, weighed, steps[k - 1])
        elif walk.held != None:  # noqa: E711
            weighed = order[last]
            weighing = values_of_held(walk)
        # Engines keep their order: copies for the fetches come before all that these wait for.
        keys_next = next_place(walk, order[k], current.entry, following, True)
        values_next = None
        if k > 0:
            values_next = next_place(walk, weighed, current.entry, following, False)
        elif walk.held != None:  # noqa: E711
            values_next = (0, fetched_entry(walk, 0, current.entry, weighed[2], False))
        score_and_weigh(scoring, weighing)
        if following != None and order[k] == (len(groups) - 1, 0, 0):  # noqa: E711
            take_places(walk.room)
            fetch_all_places(walk.chunk, walk.runs, walk.room, own_passes(walk, after))
        if len(walk.room.moving[0]) > 0 and weighing != None:  # noqa: E711
            end_values(weighing)
            weighing = None
        if k < last:
            scoring = next_scores(walk, current, order, steps)
        elif following != None and walk.held != None:  # noqa: E711
            transpose_all_queries(walk)
        if weighing != None:  # noqa: E711
            end_values(weighing)
        if keys_next != None:  # noqa: E711
            fetch_group_keys(walk, keys_next[0], keys_next[1], turn)
        if values_next != None:  # noqa: E711
            fetch_group_values(walk, values_next[0], values_next[1], weighed[2])
        if k > 0:
            store_last(walk, weighed, current.entry)
        elif walk.held != None:  # noqa: E711
            kept = output_of_held(walk)
            kept_entry = late_copy(shape, walk.done)
    if walk.held != None:  # noqa: E711
        write_held(walk, kept, kept_entry)
        nisa.tensor_copy(dst=walk.done, src=current.entry, engine=idle_engine(shape))
        return
    weighing = values_of(walk, current, order[last], steps[last])
    score_and_weigh(None, weighing)
    end_values(weighing)
    values_next = next_place(walk, order[last], current.entry, following, False)
    if values_next != None:  # noqa: E711
        fetch_group_values(walk, values_next[0], values_next[1], 0)
    if following != None:  # noqa: E711
        transpose_all_queries(walk)
    store_last(walk, order[last], current.entry)


def transpose_all_queries(walk):
    """Queries of an item that has been fetched; no other's are needed any more."""
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            transpose_queries(walk.shape, walk.groups[g][t], walk.room.queries[g][t], walk.stationaries[g][t])


def steps_of(groups, passes):
    """A step for each pass of each row tile of each group, in the order in which an item takes them: (group, tile,
    pass)."""
    order = []
    for g in range(len(groups)):
        for t in range(len(groups[g])):
            for turn in range(passes):
                order.append((g, t, turn))
    return order


def open_item(walk, entry):
    shape = walk.shape
    groups = walk.groups
    passes = own_passes(walk, entry)
    windows = []
    for g in range(len(groups)):
        if has_window(walk.operands):
            windows.append(silenced_window(shape, groups[g][0], walk.room.windows[g], walk.constants, passes[0]))
    constants = own_constants(shape, groups, walk.operands, walk.constants, passes[0])
    live = []
    for of_group in constants.rows:
        of_tiles = []
        for own in of_group:
            of_tiles.append(live_flags(own, passes[0], idle_engine(shape)))
        live.append(of_tiles)
    return Item(entry, passes, constants, live, keep_bits(passes[0]), windows, [])


def keep_bits(current):
    """[128, 1] int32 of zeros where a pass starts a sequence, else of ones."""
    keep = tile((PARTITIONS, 1), nl.int32)
    nisa.tensor_scalar(dst=keep, data=current.starts, op0=nl.add, operand0=-1.0, engine=nisa.engine.scalar)
    return keep


def next_scores(walk, item, order, steps):
    """Scoring of the step of `order` that comes after `steps`, which it becomes one of."""
    shape = walk.shape
    g, t, turn = order[len(steps)]
    rows = walk.groups[g][t]
    constants = item.constants.rows[g][t]
    if t == 0:
        if turn == 0:
            item.keys.clear()
        # One pass's keys are transposed while the other's scores are masked.
        item.keys.append(scored_keys(walk, rows, item.passes, turn))
    seen = ()
    if turn > 0:
        earlier = steps[len(steps) - 1].negative_max
    else:
        before = walk.states[g][t].negative_max
        if len(order) == len(item.passes) and walk.held != None:  # noqa: E711
            before = walk.held.negative_max
        earlier = tile((rows.count, 1))
        begin_maximum(shape, earlier, before, constants.fresh, item.passes[0].starts)
        if len(item.windows) > 0:
            seen = (
                item.windows[g][0],
                window_mask(shape, constants, item.passes[0], item.live[g][t], idle_engine(shape)),
            )
    if walk.held != None and len(steps) == len(order) - 1:  # noqa: E711
        step = walk.held
        nisa.tensor_copy(dst=step.earlier, src=earlier, engine=idle_engine(shape))
    else:
        step = new_step(shape, walk.chunk, rows, constants, len(seen) > 0, earlier)
    steps.append(step)
    bounds = slot_bounds(shape, constants, item.passes[turn], item.live[g][t], idle_engine(shape))
    return begin_scores(
        shape, walk.chunk, rows, constants, walk.stationaries[g][t], item.keys[turn], bounds, seen, step
    )


def scored_keys(walk, rows, passes, turn):
    """Keys of a pass as they are scored, once they are transposed."""
    transpose_keys(
        walk.shape, walk.chunk, rows, own_heads(walk.room.keys[turn], rows), own_heads(walk.room.moving[turn], rows)
    )
    keys = own_heads(walk.room.keys[turn], rows)
    keys = moving_keys(walk.shape, walk.chunk, rows, keys, own_heads(walk.room.moving[turn], rows))
    if turn == len(passes) - 1 and walk.constants.last_run != None:  # noqa: E711
        silence_last_run(walk.chunk, walk.constants.last_run, keys, passes[turn])
    return keys


def values_of(walk, item, place, step):
    """Weighing of the step at `place` of an item."""
    g, t, turn = place
    if turn == 0:
        with_sinks = walk.operands.sinks != None and walk.operands.shard == 0  # noqa: E711
        fresh = walk.constants.rows[g][t].fresh
        begin_state(walk.states[g][t], fresh, item.passes[0].starts, item.keep, with_sinks)
    window_values = item.windows[g][1] if step.window != None else None  # noqa: E711
    return weighing_of(walk, item.passes, place, step, window_values)


def values_of_held(walk):
    passes = own_passes(walk, walk.done)
    return weighing_of(walk, passes, last_place(walk, passes), walk.held, None)


def weighing_of(walk, passes, place, step, window_values):
    g, t, turn = place
    rows = walk.groups[g][t]
    values = own_heads(walk.room.values[turn], rows)
    if t == 0:
        silence_values(walk, values, passes, turn)
    return new_weighing(
        walk.shape, walk.chunk, rows, step, values, window_values, walk.states[g][t], False, EVICTION_ENGINES
    )


def last_place(walk, passes):
    return (len(walk.groups) - 1, len(walk.groups[-1]) - 1, len(passes) - 1)


def output_of_held(walk):
    operands = walk.operands
    g, t, _ = last_place(walk, own_passes(walk, walk.done))
    return output_of(
        walk.shape,
        walk.groups[g][t],
        walk.constants.rows[g][t],
        walk.states[g][t],
        operands.outputs.dtype,
        operands.sums != None,  # noqa: E711
        own_passes(walk, walk.done)[0],
    )


def write_held(walk, output, entry):
    operands = walk.operands
    current = own_passes(walk, entry)[0]
    write_output(walk.shape, walk.groups[-1][-1], output, operands.outputs, operands.sums, operands.shard, current)


def store_last(walk, place, entry):
    """Stores what a row tile saw of an entry after the last of its passes."""
    g, t, turn = place
    passes = own_passes(walk, entry)
    if turn < len(passes) - 1:
        return
    operands = walk.operands
    store_output(
        walk.shape,
        walk.groups[g][t],
        walk.constants.rows[g][t],
        walk.states[g][t],
        operands.outputs,
        operands.sums,
        operands.shard,
        own_passes(walk, late_copy(walk.shape, entry))[0],
    )


def silence_values(walk, values, passes, turn):
    slot = walk.constants.slot
    if not walk.dense:
        silence_pass(walk.shape, slot, values, passes[turn])
    elif turn == len(passes) - 1 and walk.constants.last_run != None:  # noqa: E711
        last = walk.chunk.segments - 1
        silence_pass(walk.shape, slot[:, last:], values[last:], passes[turn])


def next_place(walk, place, entry, following, keys):
    """Where no other row tile needs the keys, or values, of the step at `place`: the group that needs the room next,
    and an entry to fetch by, of the same item or, with the last group, of `following`. None if none does."""
    g, t, turn = place
    if t < len(walk.groups[g]) - 1:
        return None
    if g < len(walk.groups) - 1:
        return (g + 1, fetched_entry(walk, g + 1, entry, turn, keys))
    if following == None:  # noqa: E711
        return None
    return (0, fetched_entry(walk, 0, following, turn, keys))


def fetched_entry(walk, g, entry, turn, keys):
    """The entry to fetch a group's keys, or values, by: what it is fetched by is copied, since the next item's may come
    before."""
    if walk.runs != None and not keys:  # noqa: E711
        keep_places(walk.room, turn)
    elif walk.runs == None or skips_dead(walk, g):  # noqa: E711
        return late_copy(walk.shape, entry)
    return entry
