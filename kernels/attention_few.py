"""A few sequences, unrolled: each one's window, then its passes in runtime loops.

A sequence with at least a pass of live slots takes two passes together, its first and the one that ends with its last
slot, and then the others, whose addresses are the loop's own register. A shorter one takes passes that load more than
is live, and silences it.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_exchange import add_streams, exchanges_of, finish, join_next, other_states
from .attention_lengths import checked_lengths, on_every_partition
from .attention_loads import fetch_slots, load_queries, new_slots
from .attention_order import PIECE_FETCH, finish_line, finish_steps, new_line, score_first
from .attention_parts import Walk, extend_line, limits_of, line_for, parts_of, take
from .attention_passes import (
    LONGEST,
    attend_window,
    constants_of,
    has_window,
    new_stationary,
    own_constants,
    own_window,
    pass_keys,
    plan_dense,
    plan_ragged,
    share_line,
    silence_pass,
)
from .attention_plan import PARTITIONS, PIECE, tile
from .attention_softmax import idle_engine, new_state
from .attention_work import (
    Pass,
    anywhere,
    counters,
    dense_passes,
    first_pass,
    latest_passes,
    latest_start,
    pass_from,
    ragged_ends,
)


@dataclass
class Opening(nl.NKIObject):
    """What the first steps of a sequence need, except what they load from the cache."""

    windows: object  # as windows_of leaves them
    outer: object  # as outer_passes leaves them; () if no sequence has any
    limits: object  # of these for each step of each group, as far as they are known


@dataclass
class Ahead(nl.NKIObject):
    """What of the first sequence's outer passes, in its first group, comes before it is known whether it has any."""

    keys: object
    values: object  # of the first pass, if keys are not long on their way; else ()
    line: object  # whose first step is scored, or None


def attend_few(shape, groups, operands, lengths, slot_cores):
    ragged = plan_ragged(shape, groups[0][0], operands.shard, slot_cores)
    dense = plan_dense(shape, groups[0][0], operands.shard, slot_cores)
    given = on_every_partition(lengths)
    constants = constants_of(shape, groups, operands, dense, ragged, None)
    # What needs no length comes before what does.
    walks = []
    for sequence in range(shape.batch):
        walks.append(begin_walk(shape, groups, operands, constants, sequence))
    if ragged.most == 1 and not shape.ring and shape.sliding_window == 0:
        every = checked_lengths(shape, given)[0]
        for walk in walks:
            first = first_pass(every, walk.sequence)
            attend_once(walk, ragged, first)
            add_streams(walk)
            finish(walk, exchanges_of(walk, other_states(walk)), first)
        return

    whole = None
    if dense != None:  # noqa: E711
        whole = latest_passes(shape, dense, given[0])
    laps = checked_lengths(shape, given)
    begins = None
    if shape.sliding_window > 0 or shape.ring:
        begins = []
        for lap in laps:
            begins.append(counters(lap.base))
    is_ragged = None
    together = False
    if dense != None:  # noqa: E711
        together = share_line(shape, groups, dense)
        is_ragged = dense_passes(shape, dense, laps[0], whole, together)
    firsts = []
    for sequence in range(shape.batch):
        firsts.append(first_pass(laps[0], sequence))
    # What the first steps need comes before where loops end.
    begin = None if begins == None else begins[0][0]  # noqa: E711
    openings = [open_sequence(walks[0], laps[0], whole, begin, firsts[0])]
    dense_ends = None
    if dense != None:  # noqa: E711
        dense_ends = counters(whole.latest)
    ends = []
    for lap in laps:
        ends.append(ragged_ends(lap, is_ragged))
    ahead = None
    if together:
        for sequence in range(1, shape.batch):
            openings.append(open_sequence(walks[sequence], laps[0], whole, None, firsts[sequence]))
        ahead = Ahead(attend_together(walks, dense, whole, openings), (), None)
    exchanges = []
    finished = 0
    for sequence in range(shape.batch):
        walk = walks[sequence]
        # Engines keep their order: what a sequence needs first comes before the passes of the one before, its output
        # after those of the next.
        while len(openings) < min(sequence + 2, shape.batch):
            coming = len(openings)
            begin = None if begins == None else begins[0][coming]  # noqa: E711
            openings.append(open_sequence(walks[coming], laps[0], whole, begin, firsts[coming]))
        if sequence == 0 and not together and dense != None and begins == None:  # noqa: E711
            ahead = look_ahead(walk, dense, openings[0])
        begin = None if begins == None else begins[0][sequence]  # noqa: E711
        end = None if dense_ends == None else dense_ends[sequence]  # noqa: E711
        attend_begin(walk, dense, whole, begin, end, openings[sequence], firsts[sequence], ahead)
        ahead = None
        for lap in range(len(laps)):
            begin = 0 if begins == None else begins[lap][sequence]  # noqa: E711
            attend_ragged(walk, ragged, laps[lap], begin, ends[lap][sequence])
        if sequence > 0 and not together:
            finished = join_next(walks, firsts, exchanges, finished)
        add_streams(walk)
    while len(exchanges) < shape.batch:
        finished = join_next(walks, firsts, exchanges, finished)
    if finished < shape.batch:
        finish(walk, exchanges[finished], firsts[finished])


def attend_once(walk, chunk, current):
    """A sequence in a single pass, its window with it."""
    windows = windows_of(walk, current)
    for g in range(len(walk.groups)):
        keys = keys_of(walk, chunk, g, current)
        values = values_of(walk, chunk, g, current)
        silence_pass(walk.shape, walk.constants.slot, values, current)
        take(walk, False, g, parts_of(walk, chunk, g, (current,), (keys,), (values,)), windows[g])


def windows_of(walk, current):
    """The window's keys and values for each group, as own_window leaves them; () where they are not this core's."""
    windows = []
    for group in walk.groups:
        if has_window(walk.operands):
            windows.append(own_window(walk.shape, group[0], walk.operands, walk.constants, current))
        else:
            windows.append(())
    return windows


def begin_walk(shape, groups, operands, constants, sequence):
    """A Walk with its queries and with states that saw nothing yet."""
    own = own_constants(shape, groups, operands, constants, anywhere(sequence))
    walk = Walk(shape, groups, operands, own, sequence, [], [])
    for g in range(len(groups)):
        states = []
        stationaries = []
        for t in range(len(groups[g])):
            rows = groups[g][t]
            state = new_state(shape, rows)
            stationary = new_stationary(shape, rows)
            # GpSimd describes the gathers of a paged cache.
            engine = nisa.engine.gpsimd if shape.block_size == 0 else nisa.engine.scalar
            nisa.tensor_copy(dst=state.all, src=own.rows[g][t].fresh.all, engine=engine)
            load_queries(shape, rows, operands.query, anywhere(sequence), stationary)
            states.append(state)
            stationaries.append(stationary)
        walk.states.append(states)
        walk.stationaries.append(stationaries)
    return walk


def open_sequence(walk, every, dense, begin, current):
    """The Opening of a sequence; arguments as for attend_begin and outer_passes."""
    if dense == None:  # noqa: E711
        return Opening(windows_of(walk, current), (), ())
    engine = idle_engine(walk.shape)
    # A sliding window seldom has these passes.
    likely = begin == None  # noqa: E711
    with_window = has_window(walk.operands)
    if walk.operands.trees != None:  # noqa: E711
        # A tree comes late: what waits for it would hold up the rest.
        with_window = False
        likely = likely and not walk.shape.positioned
    outer = outer_passes(walk.shape, every, dense, begin, walk.sequence)
    limits = []
    for g in range(len(walk.groups)):
        own = []
        for t in range(len(walk.groups[g]) if likely else 0):
            for i in range(len(outer)):
                own.append(limits_of(walk, True, g, t, outer[i], i == 0 and with_window, engine))
        limits.append(own)
    return Opening(windows_of(walk, current), outer, limits)


def attend_begin(walk, chunk, dense, begin, end, opening, current, ahead):
    """The window, and the passes over live slots only.

    Args:
        chunk: of those passes, None if no sequence has any.
        dense: DensePasses of all sequences, or None.
        begin: the first slot, a register, or None for 0.
        end: where the last of these passes starts, a register.
        ahead: the sequence's Ahead, None if it has none.
    """

    def window_alone(_):
        attend_windows(walk, opening.windows, current)

    if dense == None:  # noqa: E711
        attend_windows(walk, opening.windows, current)
        return
    attend_dense(walk, chunk, dense, begin, end, opening, ahead)
    nl.fori_loop(dense.any[walk.sequence], 1, window_alone)


def attend_windows(walk, windows, current):
    """Takes the window into the states of all row tiles."""
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            rows = walk.groups[g][t]
            own = walk.constants.rows[g][t]
            state = walk.states[g][t]
            if len(windows[g]) > 0:
                attend_window(walk.shape, rows, own, walk.stationaries[g][t], windows[g], current, state)


def outer_passes(shape, every, dense, begin, sequence):
    """A sequence's first pass, from slot `begin` on, a register, or None for 0, and the one that ends with its last
    slot, for a sequence that has both; `dense` are those of all."""
    one = slice(sequence, sequence + 1)
    positions = [None, None]
    if shape.sliding_window > 0 or shape.positioned:
        for i in range(2):
            positions[i] = tile((PARTITIONS, 1))
            start = dense.latest if i == 1 else every.base
            nisa.tensor_tensor(dst=positions[i], data1=every.position[:, one], data2=start[:, one], op=nl.subtract)
    index = dense.index[:, one]
    rows = every.live_rows[:, one]
    return (
        Pass(sequence, None, begin, begin, dense.none, dense.left[:, one], rows, None, positions[0]),
        Pass(sequence, None, index, index, dense.none, dense.step, rows, None, positions[1]),
    )


def look_ahead(walk, chunk, opening):
    """The Ahead of the first sequence: the engines are busy from the start, before it is known whether there are such
    passes."""
    # Vector, which masks full row tiles all the time, is not to wait for a whole piece.
    soon = PIECE // 2 if chunk.streams == 1 else PIECE
    keys = outer_keys(walk, chunk, 0, opening.outer, soon)
    values = ()
    # Short keys are soon there; other groups would want the room.
    if chunk.slots < LONGEST and len(walk.groups) == 1:
        values = (values_of(walk, chunk, 0, opening.outer[0]),)
    # Keys that are to be transposed are all there before the first is scored.
    line = line_for(walk, 0, PIECE_FETCH if walk.shape.cache_layout == "BHDS" else 0.0)
    parts = parts_of(walk, chunk, 0, opening.outer, keys, ())
    extend_line(line, 1, walk, True, 0, parts, opening.windows[0], opening.limits[0])
    score_first(line, 1)
    return Ahead(keys, values, line)


def attend_together(walks, chunk, dense, openings):
    """The outer passes of all sequences in one line, if all have them: one's values come with another's scores.

    Returns the keys of the first ones, which are under way before that is known.
    """
    keys_ahead = outer_keys(walks[0], chunk, 0, openings[0].outer)

    def all_outer(_):
        # As many weights as can be transposed at once: there is always more to do.
        line = new_line(2, PIECE_FETCH)
        for walk in walks:
            opening = openings[walk.sequence]
            outer = opening.outer
            for g in range(len(walk.groups)):
                keys = keys_ahead
                if walk.sequence + g > 0:
                    keys = outer_keys(walk, chunk, g, outer)
                values = outer_values(walk, chunk, g, outer, ())
                parts = parts_of(walk, chunk, g, outer, keys, values)
                before = len(line.steps)
                steps = len(walk.groups[g]) * len(parts)
                extend_line(line, steps, walk, True, g, parts, opening.windows[g], opening.limits[g], before)
                # So that there is room for the next group's.
                if before > 0:
                    finish_steps(line, before)
        finish_line(line)

    nl.fori_loop(0, dense.together, all_outer)
    return keys_ahead


def outer_keys(walk, chunk, g, outer, begin=PIECE):
    """Keys of the outer passes for group g of row tiles, `begin` slots of the first one's first."""
    return keys_of(walk, chunk, g, outer[0], begin), keys_of(walk, chunk, g, outer[1])


def outer_values(walk, chunk, g, outer, early):
    """The same for values; `early`: those that are under way."""
    values = []
    for one in early:
        values.append(one)
    for current in outer[len(early) :]:
        values.append(values_of(walk, chunk, g, current))
    return values


def attend_dense(walk, chunk, dense, begin, end, opening, ahead):
    """Passes over live slots only: the outer ones together, which begin the states, then those between."""
    outer = opening.outer
    windows = opening.windows

    def first_and_last(_):
        for g in range(len(walk.groups)):
            own = ahead
            if g > 0 or ahead == None:  # noqa: E711
                own = Ahead(outer_keys(walk, chunk, g, outer), (), None)
            line = line_for(walk, g) if own.line == None else own.line  # noqa: E711
            values = outer_values(walk, chunk, g, outer, own.values)
            parts = parts_of(walk, chunk, g, outer, own.keys, values)
            extend_line(line, len(walk.groups[g]) * len(parts), walk, True, g, parts, windows[g], opening.limits[g])
            finish_line(line)

    def next_pass(start):
        # On GpSimd, so as not to queue behind the work of the pass before.
        for count in (outer[0].end, outer[0].position):
            if count != None:  # noqa: E711
                nisa.tensor_tensor(dst=count, data1=count, data2=dense.step, op=nl.subtract, engine=nisa.engine.gpsimd)
        first = outer[0]
        current = Pass(walk.sequence, None, start, start, first.first, first.end, first.live_rows, None, first.position)
        for g in range(len(walk.groups)):
            keys = keys_of(walk, chunk, g, current)
            values = values_of(walk, chunk, g, current)
            take(walk, True, g, parts_of(walk, chunk, g, (current,), (keys,), (values,)), None)

    nl.fori_loop(0, dense.apart[walk.sequence], first_and_last)
    second = chunk.step
    if begin != None:  # noqa: E711
        second = dense.second[walk.sequence]
    nl.fori_loop(second, end, next_pass, step=chunk.step)


def attend_ragged(walk, chunk, lengths, begin_slot, end_slot):
    """Passes that may load slots that are not live, from `begin_slot` on, a register or 0, to before `end_slot`."""
    shape = walk.shape
    one = slice(walk.sequence, walk.sequence + 1)
    begin = tile((PARTITIONS, 1))
    nisa.tensor_copy(dst=begin, src=lengths.base[:, one], engine=nisa.engine.gpsimd)
    latest = latest_start(shape, chunk)

    def next_pass(_):
        current = pass_from(shape, lengths, walk.sequence, begin, latest)
        nisa.tensor_scalar(dst=begin, data=begin, op0=nl.add, operand0=float(chunk.step))
        for g in range(len(walk.groups)):
            keys = keys_of(walk, chunk, g, current)
            values = values_of(walk, chunk, g, current)
            silence_pass(shape, walk.constants.slot, values, current)
            take(walk, False, g, parts_of(walk, chunk, g, (current,), (keys,), (values,)), None)

    nl.fori_loop(begin_slot, end_slot, next_pass, step=chunk.step)


def keys_of(walk, chunk, g, current, begin=PIECE):
    """Keys of a pass for group g of row tiles, `begin` slots of them first."""
    return pass_keys(walk.shape, chunk, walk.groups[g][0], walk.operands, current, begin)


def values_of(walk, chunk, g, current):
    cache = walk.operands.value_cache
    values = new_slots(walk.shape, chunk, walk.groups[g][0], cache.dtype)
    fetch_slots(walk.shape, chunk, walk.groups[g][0], cache, current, current.value_index, None, values)
    return values
