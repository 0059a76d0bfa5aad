"""Many sequences, and short or windowed paged caches: passes listed in a table, and runtime loops that walk it.

While an item of the table is worked on, what the next one needs is on its way: keys as soon as this one's are scored,
values as soon as they are weighed.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import list_runs, load_table, locate_runs
from .attention_lengths import checked_lengths, on_every_partition
from .attention_loads import EVICTION_ENGINES, moving_keys, transpose_queries
from .attention_output import store_output
from .attention_passes import (
    MOST_STREAMS,
    constants_of,
    new_stationary,
    own_constants,
    plan_items,
    silence_last_run,
    silence_pass,
    silenced_window,
)
from .attention_plan import count_row_tiles, plan_rows, tile
from .attention_room import (
    clear,
    clear_room,
    fetch_all_places,
    fetch_pass_keys,
    fetch_pass_values,
    fetch_rows,
    new_room,
    own_heads,
    skip_dead,
    take_places,
    with_own_keys,
)
from .attention_softmax import new_state, restart, score_step, slot_bounds, weigh_step, window_mask
from .attention_work import (
    fetch_entry,
    late_copy,
    list_passes,
    listed_passes,
    long_sequences,
    new_entry,
    number_all,
)


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
    entries: object  # what the table says of the item that comes next, and of the one after it
    room: object


def attend_many(shape, heads, operands, lengths, slot_cores):
    """One runtime loop over the passes of sequences longer than a pass, one over those of the others.

    `heads`: (first, one past the last) that are this core's.
    """
    groups = plan_rows(shape, heads[0], heads[1], MOST_STREAMS)
    plans = plan_items(shape, groups[0][0], count_row_tiles(groups), slot_cores)
    given = on_every_partition(lengths)
    num_blocks = operands.value_cache.shape[0]
    blocks = None
    runs = None
    if shape.block_size > 0:
        blocks = load_table(shape, operands.block_table)
        chunk = plans[0].chunk
        runs = list_runs(locate_runs(shape, chunk.run, blocks, num_blocks), chunk.slots // chunk.run)
    laps = checked_lengths(shape, given, blocks, num_blocks)
    numbers = number_all(shape, len(laps), plans)
    if plans[0].dense:
        chosen = long_sequences(plans[0].chunk, laps[0])
    else:
        chosen = tile(laps[0].cached.shape)
        nisa.memset(dst=chosen, value=1.0, engine=nisa.engine.vector)
    room = None
    walks = []
    for plan in plans:
        groups = plan_rows(shape, heads[0], heads[1], plan.chunk.streams)
        if room == None or runs == None:  # noqa: E711
            room = new_room(shape, plan.chunk, groups, operands, plan.together // slot_cores)
        elif plans[0].chunk.transposed:
            room = with_own_keys(shape, plan.chunk, groups, operands, room)
        walks.append(new_walk(shape, plan, slot_cores, groups, operands, runs, room))
        if len(walks) == 1:
            work = list_passes(shape, plan, laps, numbers, chosen)
    clear_room(walks[0].room)
    walk_first(walks[0], work)
    if len(walks) == 1:
        walk_on(walks[0], work)
        return
    # The other table is made while the first item is on its way.
    nisa.tensor_scalar(dst=chosen, data=chosen, op0=nl.equal, operand0=0.0)
    rest = list_passes(shape, plans[1], laps, numbers, chosen)
    walk_on(walks[0], work)
    if runs == None:  # noqa: E711
        clear_room(room)
    elif plans[0].chunk.transposed:
        clear(room.keys)
    walk_first(walks[1], rest)
    walk_on(walks[1], rest)


def new_walk(shape, plan, cores, groups, operands, runs, room):
    # Only the pass that ends with a sequence's last run loads slots of it that are not live, if passes are dense.
    ending = None
    if plan.dense and runs != None and operands.shard == cores - 1:  # noqa: E711
        ending = plan.chunk
    constants = constants_of(shape, groups, operands, ending if plan.dense else plan.chunk, ending)
    states = []
    stationaries = []
    for g in range(len(groups)):
        of_states = []
        of_stationaries = []
        for t in range(len(groups[g])):
            state = new_state(shape, groups[g][t])
            nisa.tensor_copy(dst=state.all, src=constants.rows[g][t].fresh.all)
            of_states.append(state)
            of_stationaries.append(new_stationary(shape, groups[g][t]))
        states.append(of_states)
        stationaries.append(of_stationaries)
    entries = (new_entry(plan.together), new_entry(plan.together))
    for entry in entries:
        nisa.memset(dst=entry, value=0.0)
    return Walk(
        shape, plan.chunk, plan.dense, cores, groups, operands, runs, constants, states, stationaries, entries, room
    )


def walk_first(walk, work):
    """Fetches the first item of the table, if there is one."""

    def fetch_first(item):
        fetch_entry(work, item, 0, walk.entries[0])
        fetch_entry(work, item, 1, walk.entries[1])
        passes = own_passes(walk, walk.entries[0])
        fetch_rows(walk.shape, walk.groups, walk.operands, walk.room, passes[0])
        fetch_all_places(walk.chunk, walk.runs, walk.room, passes)
        take_places(walk.room)
        fetch_all_places(walk.chunk, walk.runs, walk.room, own_passes(walk, walk.entries[1]))
        for turn in range(len(passes)):
            fetch_group_keys(walk, 0, walk.entries[0], turn)
        for turn in range(len(passes)):
            fetch_group_values(walk, 0, walk.entries[0], turn)

    nl.fori_loop(0, work.any, fetch_first)


def walk_on(walk, work):
    """Takes all items of the table; the first is fetched."""

    def next_item(item):
        attend_item(walk, work, item)

    def last_item(_):
        attend_item(walk, work, None)

    nl.fori_loop(0, work.before_last, next_item)
    nl.fori_loop(0, work.any, last_item)


def own_passes(walk, entry):
    return listed_passes(entry, walk.operands.shard, walk.cores)


def fetch_group_keys(walk, g, entry, turn):
    skips = walk.runs != None and g == 0 and not walk.dense  # noqa: E711
    if skips or walk.runs == None:  # noqa: E711
        entry = late_copy(entry)
    current = own_passes(walk, entry)[turn]
    if skips:
        skip_dead(walk.shape, walk.chunk, walk.constants.slot, walk.operands, walk.room, current, turn)
    fetch_pass_keys(walk.shape, walk.chunk, walk.groups[g][0], walk.operands, walk.room, current, turn)


def fetch_group_values(walk, g, entry, turn):
    if walk.runs == None:  # noqa: E711
        entry = late_copy(entry)
    current = own_passes(walk, entry)[turn]
    fetch_pass_values(walk.shape, walk.chunk, walk.groups[g][0], walk.operands, walk.room, current, turn)


def attend_item(walk, work, item):
    """Takes the passes of the item in `room`, and fetches the one after `item`, a register, None for the last."""
    shape = walk.shape
    operands = walk.operands
    room = walk.room
    groups = walk.groups
    coming, after = walk.entries
    entry = late_copy(coming)
    passes = own_passes(walk, entry)
    windows = []
    for g in range(len(groups)):
        for t in range(len(groups[g])):
            transpose_queries(shape, groups[g][t], room.queries[g][t], walk.stationaries[g][t])
        if len(room.windows) > 0:
            windows.append(silenced_window(shape, groups[g][0], room.windows[g], walk.constants, passes[0]))
    if item != None:  # noqa: E711
        nisa.tensor_copy(dst=coming, src=after, engine=nisa.engine.scalar)
        fetch_entry(work, item, 2, after)
        fetch_rows(shape, groups, operands, room, own_passes(walk, coming)[0])
        take_places(room)
        fetch_all_places(walk.chunk, walk.runs, room, own_passes(walk, after))
    constants = own_constants(shape, groups, operands, walk.constants, passes[0])
    for g in range(len(groups)):
        window = windows[g] if len(windows) > 0 else ()
        if g < len(groups) - 1:
            attend_group(walk, constants, g, window, entry, g + 1, entry)
        elif item == None:  # noqa: E711
            attend_group(walk, constants, g, window, entry, 0, None)
        else:
            attend_group(walk, constants, g, window, entry, 0, coming)


def attend_group(walk, constants, g, window, entry, next_group, following):
    """Takes an entry's passes for one group of row tiles, and fetches those of the entry that follows, None if none
    does, for the next."""
    passes = own_passes(walk, entry)
    shape = walk.shape
    chunk = walk.chunk
    group = walk.groups[g]
    keys = []
    values = []
    for turn in range(len(passes)):
        values.append(own_heads(walk.room.values[turn], group[0]))
    for t in range(len(group)):
        rows = group[t]
        own = constants.rows[g][t]
        state = walk.states[g][t]
        last_tile = t == len(group) - 1
        restart(state, own.fresh, passes[0].starts)
        steps = []
        earlier = state.negative_max
        for turn in range(len(passes)):
            if t == 0:
                # One pass's keys are transposed while the other's scores are masked.
                keys.append(scored_keys(walk, constants, group[0], passes, turn))
            seen = ()
            if turn == 0 and len(window) > 0:
                seen = (window[0], window_mask(shape, own, passes[0]))
            bounds = slot_bounds(shape, chunk, own, passes[turn])
            step = score_step(shape, chunk, rows, own, walk.stationaries[g][t], keys[turn], bounds, seen, earlier)
            steps.append(step)
            earlier = step.negative_max
            if last_tile and following != None:  # noqa: E711
                fetch_group_keys(walk, next_group, following, turn)
        if t == 0:
            silence_values(walk, values, passes)
        for turn in range(len(passes)):
            window_values = window[1] if turn == 0 and len(window) > 0 else None
            engines = EVICTION_ENGINES
            if turn < len(passes) - 1:
                # Vector still masks the next pass.
                engines = (nisa.engine.scalar, nisa.engine.scalar, nisa.engine.vector)
            weigh_step(shape, chunk, rows, steps[turn], values[turn], window_values, state, False, engines)
            if last_tile and following != None:  # noqa: E711
                fetch_group_values(walk, next_group, following, turn)
        operands = walk.operands
        stores = own_passes(walk, late_copy(entry))[0]
        store_output(shape, rows, own, state, operands.outputs, operands.sums, operands.shard, stores)


def scored_keys(walk, constants, rows, passes, turn):
    """Keys of a pass as they are scored."""
    keys = moving_keys(walk.shape, walk.chunk, rows, own_heads(walk.room.keys[turn], rows))
    if turn == len(passes) - 1 and constants.last_run != None:  # noqa: E711
        silence_last_run(walk.chunk, constants.last_run, keys, passes[turn])
    return keys


def silence_values(walk, values, passes):
    slot = walk.constants.slot
    if not walk.dense:
        for turn in range(len(passes)):
            silence_pass(walk.shape, slot, values[turn], passes[turn])
    elif walk.constants.last_run != None:  # noqa: E711
        last = walk.chunk.segments - 1
        silence_pass(walk.shape, slot[:, last:], values[len(passes) - 1][last:], passes[len(passes) - 1])
