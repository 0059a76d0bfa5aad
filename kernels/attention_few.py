"""A few sequences, unrolled: each one's window, then its passes in runtime loops.

A sequence with at least a pass of live slots takes two passes together, its first and the one that ends with its last
slot, and then the others, whose addresses are the loop's own register. A shorter one takes passes that load more than
is live, and silences it.
"""

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from .attention_lengths import load_lengths
from .attention_loads import EVICTION_ENGINES, load_queries
from .attention_output import store_output
from .attention_passes import (
    attend_window,
    constants_of,
    has_window,
    new_stationary,
    own_constants,
    own_window,
    pass_keys,
    pass_values,
    places_of,
    plan_dense,
    plan_ragged,
    silence_pass,
)
from .attention_plan import PARTITIONS, tile
from .attention_softmax import new_state, one_stream, score_step, slot_bounds, weigh_step, window_mask
from .attention_work import (
    Pass,
    counters,
    dense_passes,
    first_pass,
    latest_start,
    pass_from,
    ragged_ends,
)


class Walk(NamedTuple):
    """A sequence on its way: what its passes have in common, and what they change."""

    shape: object
    groups: object
    operands: object
    constants: object
    sequence: int
    states: object  # of each row tile of each group
    stationaries: object


def attend_few(shape, groups, operands, lengths, slot_cores):
    ragged = plan_ragged(shape, groups[0][0], operands.shard, slot_cores)
    dense = plan_dense(shape, groups[0][0], operands.shard, slot_cores)
    if ragged.most == 1 and not shape.ring and shape.sliding_window == 0 and shape.block_size == 0:
        every = load_lengths(shape, lengths)[0]
        constants = constants_of(shape, ragged, ragged, groups, operands)
        for sequence in range(shape.batch):
            first = first_pass(every, sequence)
            own = own_constants(shape, groups, operands, constants, first)
            attend_once(shape, ragged, groups, operands, own, first)
        return

    laps = load_lengths(shape, lengths)
    constants = constants_of(shape, ragged if dense == None else dense, ragged, groups, operands)  # noqa: E711
    every = laps[0]
    begins = None
    if shape.sliding_window > 0 or shape.ring:
        begins = []
        for lap in laps:
            begins.append(counters(lap.base))
    is_ragged = None
    if dense != None:  # noqa: E711
        whole, is_ragged = dense_passes(shape, dense, every)
    ends = []
    for lap in laps:
        ends.append(ragged_ends(lap, is_ragged))
    for sequence in range(shape.batch):
        first = first_pass(every, sequence)
        own = own_constants(shape, groups, operands, constants, first)
        walk = Walk(shape, groups, operands, own, sequence, [], [])
        if dense != None:  # noqa: E711
            one = slice(sequence, sequence + 1)
            last = pass_from(shape, every, sequence, whole.latest[:, one], float(shape.slots), None)
        windows = load_rows(walk, first)
        keys = ()
        if dense != None and sequence == 0 and begins == None:  # noqa: E711
            # The memory is busy from the start: whether these keys are needed is not known yet.
            keys = (keys_of(walk, dense, 0, None, first), keys_of(walk, dense, 0, None, last))
        attend_windows(walk, windows, first)
        if dense != None:  # noqa: E711
            begin = None if begins == None else begins[0][sequence]  # noqa: E711
            attend_dense(walk, dense, every, whole, begin, last, keys)
        for lap in range(len(laps)):
            begin = 0 if begins == None else begins[lap][sequence]  # noqa: E711
            attend_ragged(walk, ragged, laps[lap], begin, ends[lap][sequence])
        store_all(walk, first)


def attend_once(shape, chunk, groups, operands, constants, current):
    """A sequence in a single pass, its window with it."""
    with_window = has_window(operands)
    for g in range(len(groups)):
        keys = pass_keys(shape, chunk, groups[g][0], operands, None, current)
        values = pass_values(shape, chunk, groups[g][0], operands, None, current)
        silence_pass(shape, constants.slot, values, current)
        window = own_window(shape, groups[g][0], operands, constants, current) if with_window else ()
        for t in range(len(groups[g])):
            rows = groups[g][t]
            own = constants.rows[g][t]
            stationary = new_stationary(shape, rows)
            state = new_state(shape, rows)
            load_queries(shape, rows, operands.query, current, stationary)
            seen = ()
            if with_window:
                seen = (window[0], window_mask(shape, own, current))
            cached = [(keys, slot_bounds(shape, own, current))]
            step = score_step(shape, chunk, rows, own, stationary, cached, seen, own.fresh.negative_max)
            window_values = window[1] if with_window else None
            weigh_step(shape, chunk, rows, own, step, [values], window_values, state, True, EVICTION_ENGINES)
            store_output(shape, rows, own, state, operands.outputs, operands.sums, operands.shard, current)


def load_rows(walk, current):
    """Queries of all row tiles; returns each group's window, () where that is not this core's."""
    windows = []
    for group in walk.groups:
        stationaries = []
        for rows in group:
            stationary = new_stationary(walk.shape, rows)
            load_queries(walk.shape, rows, walk.operands.query, current, stationary)
            stationaries.append(stationary)
        walk.stationaries.append(stationaries)
        if has_window(walk.operands):
            windows.append(own_window(walk.shape, group[0], walk.operands, walk.constants, current))
        else:
            windows.append(())
    return windows


def attend_windows(walk, windows, current):
    """States of all row tiles, the window taken in."""
    shape = walk.shape
    for g in range(len(walk.groups)):
        states = []
        for t in range(len(walk.groups[g])):
            rows = walk.groups[g][t]
            own = walk.constants.rows[g][t]
            state = new_state(shape, rows)
            nisa.tensor_copy(dst=state.all, src=own.fresh.all, engine=nisa.engine.gpsimd)
            if len(windows[g]) > 0:
                attend_window(shape, rows, own, walk.stationaries[g][t], windows[g], current, state)
            states.append(state)
        walk.states.append(states)


def attend_dense(walk, chunk, every, dense, begin, last, keys_ahead):
    """Passes over live slots only: the first and the one that ends with the last live slot together, then the others.

    Args:
        dense: DensePasses of all sequences.
        begin: the first slot, a register, or None for 0.
        last: the pass that ends with the last live slot.
        keys_ahead: keys of the first and of that pass, for the first group, if they are on their way already, else ().
    """
    shape = walk.shape
    sequence = walk.sequence
    one = slice(sequence, sequence + 1)
    size = (PARTITIONS, 1)
    none = tile(size)
    step = tile(size)
    nisa.memset(dst=none, value=0.0)
    nisa.memset(dst=step, value=float(chunk.step))
    # Slots from a pass's first to the last pass's, which has all its own.
    left = tile(size)
    nisa.tensor_tensor(
        dst=left, data1=dense.latest[:, one], data2=every.base[:, one], op=nl.subtract, engine=nisa.engine.gpsimd
    )
    position = None
    if shape.sliding_window > 0 or shape.positioned:
        position = tile(size)
        nisa.tensor_tensor(dst=position, data1=every.position[:, one], data2=every.base[:, one], op=nl.subtract)
    live_rows = every.live_rows[:, one]

    def first_and_last(_):
        first = Pass(sequence, None, begin, begin, none, left, live_rows, None, position, None)
        for g in range(len(walk.groups)):
            keys = keys_ahead
            if g > 0 or len(keys) == 0:
                keys = (keys_of(walk, chunk, g, None, first), keys_of(walk, chunk, g, None, last))
            values = (values_of(walk, chunk, g, None, first), values_of(walk, chunk, g, None, last))
            take(walk, chunk, True, g, [(first, keys[0], values[0]), (last, keys[1], values[1])])

    def next_pass(start):
        # On GpSimd, so as not to queue behind the work of the pass before.
        nisa.tensor_tensor(dst=left, data1=left, data2=step, op=nl.subtract, engine=nisa.engine.gpsimd)
        if position != None:  # noqa: E711
            nisa.tensor_tensor(dst=position, data1=position, data2=step, op=nl.subtract, engine=nisa.engine.gpsimd)
        current = Pass(sequence, None, start, start, none, left, live_rows, None, position, None)
        for g in range(len(walk.groups)):
            keys = keys_of(walk, chunk, g, None, current)
            take(walk, chunk, True, g, [(current, keys, values_of(walk, chunk, g, None, current))])

    nl.fori_loop(0, dense.any[sequence], first_and_last)
    second = chunk.step
    if begin != None:  # noqa: E711
        second = dense.second[sequence]
    nl.fori_loop(second, dense.end[sequence], next_pass, step=chunk.step)


def attend_ragged(walk, chunk, lengths, begin_slot, end_slot):
    """Passes that may load slots that are not live, from `begin_slot` on, a register or 0, to before `end_slot`."""
    shape = walk.shape
    one = slice(walk.sequence, walk.sequence + 1)
    begin = tile((PARTITIONS, 1))
    nisa.tensor_copy(dst=begin, src=lengths.base[:, one], engine=nisa.engine.gpsimd)
    latest = latest_start(shape, chunk)
    block = None
    if shape.block_size > 0:
        block = tile((PARTITIONS, 1))
        nisa.tensor_copy(dst=block, src=lengths.block[:, one])

    def next_pass(_):
        current = pass_from(shape, lengths, walk.sequence, begin, latest, block)
        places = places_of(shape, chunk, walk.operands, walk.constants.runs, current)
        nisa.tensor_scalar(dst=begin, data=begin, op0=nl.add, operand0=float(chunk.step))
        if shape.block_size > 0:
            per_pass = float(chunk.step // shape.block_size)
            nisa.tensor_scalar(dst=block, data=block, op0=nl.add, operand0=per_pass)
        for g in range(len(walk.groups)):
            keys = keys_of(walk, chunk, g, places, current)
            values = values_of(walk, chunk, g, places, current)
            silence_pass(shape, walk.constants.slot, values, current)
            take(walk, chunk, False, g, [(current, keys, values)])

    nl.fori_loop(begin_slot, end_slot, next_pass, step=chunk.step)


def keys_of(walk, chunk, g, places, current):
    """Keys of a pass for group g of row tiles."""
    return pass_keys(walk.shape, chunk, walk.groups[g][0], walk.operands, places, current)


def values_of(walk, chunk, g, places, current):
    return pass_values(walk.shape, chunk, walk.groups[g][0], walk.operands, places, current)


def take(walk, chunk, dense, g, passes):
    """Takes a group's (pass, keys, values) into the states of its row tiles.

    All scores come before all values, so that the engines, which keep their order, need not wait for the values.
    """
    shape = walk.shape
    for t in range(len(walk.groups[g])):
        rows = walk.groups[g][t]
        own = walk.constants.rows[g][t]
        state = walk.states[g][t]
        queries = walk.stationaries[g][t]
        if not dense:
            rows, own, state = one_stream(shape, rows, own, state)
            queries = queries[:, :, 0 : rows.heads, 0 : rows.count]
        bounds = []
        for current, _, _ in passes:
            bounds.append(slot_bounds(shape, own, current))
        steps = []
        earlier = state.negative_max
        for i in range(len(passes)):
            steps.append(score_step(shape, chunk, rows, own, queries, [(passes[i][1], bounds[i])], (), earlier))
            earlier = steps[i].negative_max
        for i in range(len(passes)):
            # While Vector masks a later pass, Scalar empties PSUM for an earlier one; streams leave Vector the time to
            # do so for the last, at which it is faster.
            engines = EVICTION_ENGINES
            if rows.streams > 1:
                engines = (nisa.engine.vector if i == len(passes) - 1 else nisa.engine.scalar,)
            weigh_step(shape, chunk, rows, own, steps[i], [passes[i][2]], None, state, False, engines)


def store_all(walk, current):
    operands = walk.operands
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            store_output(
                walk.shape,
                walk.groups[g][t],
                walk.constants.rows[g][t],
                walk.states[g][t],
                operands.outputs,
                operands.sums,
                operands.shard,
                current,
            )
