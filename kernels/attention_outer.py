"""The outer passes of a sequence of a paged cache: the first and the last of its dense ones, or the one of these that
is this core's.

One pass a core is soon done. Where a sequence has one row tile, the scores of the next sequence therefore come before
the values of this one are weighed, its weights after; what waits for values then holds up nothing.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import fetch_runs
from .attention_few import attend_windows
from .attention_loads import fetch_keys, new_keys, new_slots
from .attention_order import finish_line, ready_line, score_first
from .attention_parts import extend_line, has_values, limits_of, line_for, parts_of, row_tile, seen_window
from .attention_passes import moved_keys, silence_last_run, silence_pass
from .attention_plan import PARTITIONS, tile
from .attention_steps import (
    FEW_COLUMNS,
    begin_scores,
    new_room,
    new_step,
    new_weighing,
    ready_weights,
    score_and_weigh,
    weigh_ready,
)
from .attention_work import anywhere


def attend_outer(walk, plan, facts, passes, places, windows, ahead):
    """The window and the outer passes, which begin the states.

    Args:
        passes, places: of each pass.
        windows: as windows_of leaves them.
        ahead: the first group's keys as they come, if they are on their way, else ().
    """
    dense = plan.dense
    last = len(passes) - 1

    def first_and_last(_):
        for g in range(len(walk.groups)):
            coming = ahead
            if g > 0 or len(ahead) == 0:
                coming = coming_keys(walk, dense, g, places)
            values = new_values(walk, dense, g, places)
            fetch_values(walk, dense, g, places, values)
            keys = []
            for own in coming:
                keys.append(moved_keys(walk.shape, dense, walk.groups[g][0], own))
            parts = parts_of(walk, dense, g, passes, keys, values)
            line = line_for(walk, g)
            extend_line(line, len(walk.groups[g]) * len(parts), walk, True, g, parts, windows[g], ())
            # What of the last pass is not live is cleared when it is there, which the first pass need not wait for.
            score_first(line, len(parts) // len(passes) * last)
            silence_last_keys(walk, plan, passes[last], keys[last])
            alone = len(walk.groups[g]) == 1
            if alone:
                ready_line(line, len(parts) - 1)
            silence_last(walk, plan, passes[last], values[last])
            for i in range(len(parts) if alone else 0):
                # Of the last pass, the last stream's values are there first.
                ready_line(line, i + 1)
                weigh_ready(line.steps[i].weighing, i == len(parts) - 1)
            if not alone:
                finish_line(line)

    def window_alone(_):
        attend_windows(walk, windows, passes[0])

    nl.fori_loop(0, facts.any[walk.sequence], first_and_last)
    nl.fori_loop(facts.any[walk.sequence], 1, window_alone)


@dataclass
class Ahead(nl.NKIObject):
    """A sequence with one outer pass on this core and one row tile."""

    walk: object
    current: object  # its Pass
    places: object
    windows: object
    values: object
    step: object
    weighing: object


def new_aheads(walks, plan, passes, places, windows):
    """An Ahead for each sequence. What one loop fills and another reads, either of which may run no time, is zeros
    before."""
    aheads = []
    small = []
    for walk in walks:
        rows, own, state, _ = row_tile(walk, True, 0, 0)
        sequence = walk.sequence
        window = windows[sequence][0]
        values = new_values(walk, plan.dense, 0, places[sequence])
        step = new_step(walk.shape, plan.dense, rows, own, has_values(window), state.negative_max)
        if sequence > 0:
            # The scores of one are weights before those of the next come, and weighed before its weights.
            step.cached = aheads[0].step.cached
            step.window = aheads[0].step.window
        # Vector masks the next pass first.
        engines = (nisa.engine.scalar, nisa.engine.scalar, nisa.engine.vector)
        window_values = window[1] if has_values(window) else None
        weighing = new_weighing(
            walk.shape,
            plan.dense,
            rows,
            step,
            values[0],
            window_values,
            state,
            True,
            engines,
            FEW_COLUMNS,
        )
        weighing.room = new_room(weighing) if sequence == 0 else aheads[0].weighing.room
        small.extend([step.negative_max, weighing.decay, weighing.sums])
        aheads.append(Ahead(walk, passes[sequence][0], places[sequence], windows[sequence], values, step, weighing))
    clear(small)
    clear(aheads[0].weighing.room)
    clear([aheads[0].step.cached])
    if aheads[0].step.window != None:  # noqa: E711
        clear([aheads[0].step.window])
    return aheads


def clear(tiles):
    """Zeros, by the Scalar engine, which has time before the first keys come."""
    zero = tile((PARTITIONS, 1))
    nisa.memset(dst=zero, value=0.0, engine=nisa.engine.vector)
    for one in tiles:
        count = one.shape[0]
        size = (count, one.size // count)
        nisa.tensor_copy(dst=one.reshape(size), src=zero[0:count].broadcast(1, size[1]), engine=nisa.engine.scalar)


def score_ahead(ahead, plan, facts, coming):
    """Scores of a sequence's pass and window; `coming` as for attend_outer."""
    walk = ahead.walk
    rows, own, _, queries = row_tile(walk, True, 0, 0)
    window = ahead.windows[0]

    def score(_):
        keys = coming
        if len(keys) == 0:
            keys = coming_keys(walk, plan.dense, 0, ahead.places)
        moving = moved_keys(walk.shape, plan.dense, rows, keys[0])
        silence_last_keys(walk, plan, ahead.current, moving)
        limits = limits_of(walk, True, 0, 0, ahead.current, has_values(window), nisa.engine.vector)
        seen = seen_window(walk, own, ahead.current, window, limits)
        scoring = begin_scores(walk.shape, plan.dense, rows, own, queries, moving, limits.bounds, seen, ahead.step)
        score_and_weigh(scoring, None)

    nl.fori_loop(0, facts.any[walk.sequence], score)


def ready_ahead(ahead, facts):
    """Its weights, transposed."""

    def ready(_):
        ready_weights(ahead.weighing)

    nl.fori_loop(0, facts.any[ahead.walk.sequence], ready)


def weigh_ahead(ahead, plan, facts):
    """Its values, or the window alone."""
    walk = ahead.walk

    def weigh(_):
        fetch_values(walk, plan.dense, 0, ahead.places, ahead.values)
        silence_last(walk, plan, ahead.current, ahead.values[0])
        # The last segment's values come first, but may wait to be cleared.
        weigh_ready(ahead.weighing, plan.tail == None)  # noqa: E711

    def window_alone(_):
        attend_windows(walk, ahead.windows, ahead.current)

    nl.fori_loop(0, facts.any[walk.sequence], weigh)
    nl.fori_loop(facts.any[walk.sequence], 1, window_alone)


def silence_last_keys(walk, plan, current, keys):
    """Clears the last pass's keys that no row may see."""
    if plan.tail != None:  # noqa: E711
        silence_last_run(plan.dense, walk.constants.last_run, keys, current)


def silence_last(walk, plan, current, values):
    """The same of the last pass's values."""
    if plan.tail != None:  # noqa: E711
        silence_pass(walk.shape, plan.tail, values[plan.dense.segments - 1 :], current)


def coming_keys(walk, chunk, g, places):
    """Keys of passes for group g of row tiles, as they come; `places` of each."""
    rows = walk.groups[g][0]
    keys = []
    for own in places:
        fetched = new_keys(walk.shape, chunk, rows, walk.operands.key_cache.dtype)
        fetch_keys(walk.shape, chunk, rows, walk.operands.key_cache, anywhere(walk.sequence), own, fetched)
        keys.append(fetched)
    return keys


def new_values(walk, chunk, g, places):
    """Room for the values of passes for group g of row tiles; `places` of each."""
    values = []
    for _ in places:
        values.append(new_slots(walk.shape, chunk, walk.groups[g][0], walk.operands.value_cache.dtype))
    return values


def fetch_values(walk, chunk, g, places, values):
    """Fills what new_values makes, the very last segment first: what of it is not live is to be cleared."""
    rows = walk.groups[g][0]
    cache = walk.operands.value_cache
    last = chunk.segments - 1
    fetch_runs(walk.shape, chunk, rows, cache, places[len(places) - 1][:, last:], values[len(places) - 1][last])
    for i in range(len(places)):
        for segment in range(chunk.segments if i < len(places) - 1 else last):
            place = places[i][:, segment : segment + 1]
            fetch_runs(walk.shape, chunk, rows, cache, place, values[i][segment])
