"""A few sequences, unrolled: each one's window, then its passes in runtime loops.

A sequence with at least a pass of live slots takes two passes together, its first and the one that ends with its last
slot, and then the others, whose addresses are the loop's own register. A shorter one takes passes that load more than
is live, and silences it.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_lengths import checked_lengths, on_every_partition
from .attention_loads import EVICTION_ENGINES, fetch_slots, load_queries, new_slots
from .attention_output import join_cores, store_output
from .attention_passes import (
    attend_window,
    constants_of,
    has_window,
    new_stationary,
    own_constants,
    own_window,
    pass_keys,
    plan_dense,
    plan_ragged,
    silence_pass,
)
from .attention_plan import PARTITIONS, tile
from .attention_softmax import idle_engine, live_flags, new_state, one_stream, over_streams, slot_bounds, window_mask
from .attention_steps import (
    FEW_COLUMNS,
    begin_scores,
    begin_values,
    end_values,
    new_step,
    ready_weights,
    score_and_weigh,
)
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
class Walk(nl.NKIObject):
    """A sequence on its way: what its passes have in common, and what they change."""

    shape: object
    groups: object
    operands: object
    constants: object
    sequence: int
    states: object  # of each row tile of each group
    stationaries: object


@dataclass
class Opening(nl.NKIObject):
    """What the first steps of a sequence need, except what they load from the cache."""

    windows: object  # as windows_of leaves them
    outer: object  # as outer_passes leaves them; () if no sequence has any
    limits: object  # of these for each step of each group, as far as they are known


@dataclass
class Limits(nl.NKIObject):
    """What a row tile sees of a pass."""

    bounds: object  # as slot_bounds leaves them
    mask: object  # of the window, if it comes with the pass


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
            finish(walk, first)
        return

    if dense != None:  # noqa: E711
        latest, index = latest_passes(shape, dense, given[0])
    laps = checked_lengths(shape, given)
    begins = None
    if shape.sliding_window > 0 or shape.ring:
        begins = []
        for lap in laps:
            begins.append(counters(lap.base))
    whole = None
    is_ragged = None
    if dense != None:  # noqa: E711
        whole, is_ragged = dense_passes(shape, dense, laps[0], latest, index)
    ends = []
    for lap in laps:
        ends.append(ragged_ends(lap, is_ragged))
    firsts = []
    for sequence in range(shape.batch):
        firsts.append(first_pass(laps[0], sequence))
    openings = []
    for sequence in range(shape.batch):
        walk = walks[sequence]
        # Engines keep their order: what a sequence needs first comes before the passes of the one before, its output
        # after those of the next.
        while len(openings) < min(sequence + 2, shape.batch):
            coming = len(openings)
            begin = None if begins == None else begins[0][coming]  # noqa: E711
            openings.append(open_sequence(walks[coming], laps[0], whole, begin, firsts[coming]))
        begin = None if begins == None else begins[0][sequence]  # noqa: E711
        attend_begin(walk, dense, whole, begin, openings[sequence], firsts[sequence])
        for lap in range(len(laps)):
            begin = 0 if begins == None else begins[lap][sequence]  # noqa: E711
            attend_ragged(walk, ragged, laps[lap], begin, ends[lap][sequence])
        if sequence > 0:
            finish(walks[sequence - 1], firsts[sequence - 1])
        add_streams(walk)
    finish(walks[shape.batch - 1], firsts[shape.batch - 1])


def attend_once(walk, chunk, current):
    """A sequence in a single pass, its window with it."""
    windows = windows_of(walk, current)
    for g in range(len(walk.groups)):
        keys = keys_of(walk, chunk, g, current)
        values = values_of(walk, chunk, g, current)
        silence_pass(walk.shape, walk.constants.slot, values, current)
        take(walk, chunk, False, g, (current,), (keys,), (values,), windows[g], ())


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
    outer = outer_passes(walk.shape, every, dense, begin, walk.sequence)
    limits = []
    for g in range(len(walk.groups)):
        own = []
        # A tree comes late: what waits for it would hold up the rest.
        for t in range(len(walk.groups[g]) if likely and walk.operands.trees == None else 0):  # noqa: E711
            for i in range(len(outer)):
                own.append(limits_of(walk, True, g, t, outer[i], i == 0 and has_window(walk.operands), engine))
        limits.append(own)
    return Opening(windows_of(walk, current), outer, limits)


def attend_begin(walk, chunk, dense, begin, opening, current):
    """The window, and the passes over live slots only.

    Args:
        chunk: of those passes, None if no sequence has any.
        dense: DensePasses of all sequences, or None.
        begin: the first slot, a register, or None for 0.
    """

    def window_alone(_):
        attend_windows(walk, opening.windows, current)

    if dense == None:  # noqa: E711
        attend_windows(walk, opening.windows, current)
        return
    attend_dense(walk, chunk, dense, begin, opening)
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


def attend_dense(walk, chunk, dense, begin, opening):
    """Passes over live slots only: the outer ones together, which begin the states, then those between."""
    outer = opening.outer
    windows = opening.windows
    # The engines are busy from the start, before it is known whether these passes are needed: the memory for the first
    # sequence, others for a single one.
    keys_ahead = ()
    values_ahead = ()
    steps = ()
    weighings = ()
    if walk.sequence == 0 and begin == None:  # noqa: E711
        keys_ahead = (keys_of(walk, chunk, 0, outer[0]), keys_of(walk, chunk, 0, outer[1]))
        if walk.shape.batch == 1:
            if len(walk.groups) == 1 and len(walk.groups[0]) == 1:
                values_ahead = (new_values(walk, chunk, 0), new_values(walk, chunk, 0))
            steps, weighings = begin_passes(walk, chunk, outer, keys_ahead, values_ahead, windows[0], opening.limits[0])

    def first_and_last(_):
        for g in range(len(walk.groups)):
            keys = keys_ahead
            if g > 0 or len(keys) == 0:
                keys = (keys_of(walk, chunk, g, outer[0]), keys_of(walk, chunk, g, outer[1]))
            values = values_ahead
            if len(values) == 0:
                values = (new_values(walk, chunk, g), new_values(walk, chunk, g))
            for i in range(len(outer)):
                fetch_values(walk, chunk, g, outer[i], values[i])
            known = steps if g == 0 else ()
            take(walk, chunk, True, g, outer, keys, values, windows[g], known, opening.limits[g], weighings)

    def next_pass(start):
        # On GpSimd, so as not to queue behind the work of the pass before.
        for count in (outer[0].end, outer[0].position):
            if count != None:  # noqa: E711
                nisa.tensor_tensor(dst=count, data1=count, data2=dense.step, op=nl.subtract, engine=nisa.engine.gpsimd)
        first = outer[0]
        current = Pass(walk.sequence, None, start, start, first.first, first.end, first.live_rows, None, first.position)
        for g in range(len(walk.groups)):
            keys = keys_of(walk, chunk, g, current)
            take(walk, chunk, True, g, (current,), (keys,), (values_of(walk, chunk, g, current),), None, ())

    nl.fori_loop(0, dense.any[walk.sequence], first_and_last)
    second = chunk.step
    if begin != None:  # noqa: E711
        second = dense.second[walk.sequence]
    nl.fori_loop(second, dense.end[walk.sequence], next_pass, step=chunk.step)


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
            take(walk, chunk, False, g, (current,), (keys,), (values,), None, ())

    nl.fori_loop(begin_slot, end_slot, next_pass, step=chunk.step)


def keys_of(walk, chunk, g, current):
    """Keys of a pass for group g of row tiles."""
    return pass_keys(walk.shape, chunk, walk.groups[g][0], walk.operands, current)


def values_of(walk, chunk, g, current):
    values = new_values(walk, chunk, g)
    fetch_values(walk, chunk, g, current, values)
    return values


def new_values(walk, chunk, g):
    """Room for what values_of loads."""
    return new_slots(walk.shape, chunk, walk.groups[g][0], walk.operands.value_cache.dtype)


def fetch_values(walk, chunk, g, current, values):
    cache = walk.operands.value_cache
    fetch_slots(walk.shape, chunk, walk.groups[g][0], cache, current, current.value_index, None, values)


def row_tile(walk, dense, g, t):
    """A row tile, its constants, state and queries, as passes of this kind take them."""
    rows = walk.groups[g][t]
    own = walk.constants.rows[g][t]
    queries = walk.stationaries[g][t]
    if dense:
        return rows, own, walk.states[g][t], queries
    # Another stream's keys that are not live would spread.
    rows, own, state = one_stream(rows, own, walk.states[g][t])
    return rows, own, state, queries[:, :, 0 : rows.heads, 0 : rows.count]


def limits_of(walk, dense, g, t, current, with_window, engine):
    """Limits of a pass for a row tile."""
    own = row_tile(walk, dense, g, t)[1]
    live = live_flags(own, current, engine)
    mask = None
    if with_window:
        # Trees come late, and Vector need not wait for them.
        late = engine if walk.operands.trees == None else nisa.engine.gpsimd  # noqa: E711
        mask = window_mask(walk.shape, own, current, live, late)
    return Limits(slot_bounds(walk.shape, own, current, live, engine), mask)


def scores_of(walk, chunk, dense, g, t, current, keys, window, before, limits=None):
    """Scoring of a pass for a row tile; `window` as take has it, `before` the Step before that is not weighed yet,
    `limits` None if they are not known yet."""
    rows, own, state, queries = row_tile(walk, dense, g, t)
    if limits == None:  # noqa: E711
        limits = limits_of(walk, dense, g, t, current, has_values(window), nisa.engine.vector)
    seen = (window[0], limits.mask) if has_values(window) else ()
    earlier = state.negative_max if before == None else before.negative_max  # noqa: E711
    step = new_step(walk.shape, chunk, rows, own, len(seen) > 0, earlier)
    return begin_scores(walk.shape, chunk, rows, own, queries, keys, limits.bounds, seen, step)


def score_pass(walk, chunk, dense, g, t, current, keys, window, before):
    """The Step of a pass for a row tile, scored alone; arguments as for scores_of."""
    scoring = scores_of(walk, chunk, dense, g, t, current, keys, window, before)
    score_and_weigh(scoring, None)
    return scoring.step


def begin_passes(walk, chunk, passes, keys, values, window, limits):
    """Steps of passes of the first row tile, and, if it is known where values will be, their Weighings: while a pass is
    scored, the weights of the one before are readied.

    `values`: for each pass, or (); the others as take has them.
    """
    steps = []
    weighings = []
    for i in range(len(passes)):
        begins = window if i == 0 else None
        before = None if i == 0 else steps[i - 1]
        weighing = None if len(weighings) == 0 else weighings[i - 1]
        own = limits[i] if i < len(limits) else None
        scoring = scores_of(walk, chunk, True, 0, 0, passes[i], keys[i], begins, before, own)
        score_and_weigh(scoring, weighing)
        steps.append(scoring.step)
        if weighing != None:  # noqa: E711
            ready_weights(weighing)
        if len(values) > 0:
            # Keys come before values, those of a pass's first stream before another's.
            late = 0 if i < len(passes) - 1 else 1
            weighings.append(weighing_of(walk, chunk, True, 0, i, len(passes), scoring.step, values[i], begins, late))
    return steps, weighings


def weighing_of(walk, chunk, dense, g, k, passes, step, values, window, late=PARTITIONS):
    """Weighing of step k of take; `window` as take has it, `late` as begin_values."""
    t = k // passes
    i = k % passes
    rows, _, state, _ = row_tile(walk, dense, g, t)
    tiles = len(walk.groups[g])
    busy = dense and tiles > 1 and k < tiles * passes - 1
    engines, columns = transposing_engines(walk.shape, chunk, rows, busy, i, passes)
    begins = i == 0 and window != None  # noqa: E711
    window_values = window[1] if begins and has_values(window) else None
    return begin_values(walk.shape, chunk, rows, step, values, window_values, state, begins, engines, columns, late)


def has_values(window):
    return window != None and len(window) > 0  # noqa: E711


def transposing_engines(shape, chunk, rows, busy, i, passes):
    """Engines that take turns at the transposed weights of pass i of `passes`, and the columns that each takes at once.

    `busy`: whether it counts how long they work, since there is always more to do, not how soon this pass is done.
    """
    if busy and shape.dtype == nl.bfloat16 and rows.count % 16 == 0:
        # DMA transposes 2-byte elements, to steps of 32 bytes; how well beside loads is UNVERIFIED.
        quarter = chunk.slots // chunk.partitions * rows.count // 4
        if i < passes - 1:
            return (nisa.engine.scalar, nisa.engine.dma), quarter
        return (nisa.engine.dma, nisa.engine.scalar, nisa.engine.dma, nisa.engine.vector), quarter
    if i < passes - 1 and shape.block_size == 0:
        return (nisa.engine.vector, nisa.engine.scalar), FEW_COLUMNS
    if i < passes - 1:
        # Vector masks the next pass first.
        return (nisa.engine.scalar, nisa.engine.scalar, nisa.engine.vector), FEW_COLUMNS
    if passes > 1 and not busy:
        return (nisa.engine.vector,), FEW_COLUMNS
    if rows.count <= PARTITIONS // 2:
        # Few rows are soon copied, but take Vector as long to mask as many.
        return (nisa.engine.scalar,), FEW_COLUMNS
    return EVICTION_ENGINES, FEW_COLUMNS


def take(walk, chunk, dense, g, passes, keys, values, window, ahead, limits=(), weighings=()):
    """Takes passes of a group, their keys and values, into the states of its row tiles.

    The scores of a step come with the values of the one before, or, if some are known, of the one before that: Vector
    masks while the others exponentiate and weigh.

    Args:
        window: of passes that begin the states, () where it is not this core's; else None.
        ahead: the first row tile's Steps, if they are known, else ().
        limits: of the first steps, as far as they are known.
        weighings: of the first steps, if they are begun, else ().
    """
    count = len(walk.groups[g]) * len(passes)
    steps = []
    for step in ahead:
        steps.append(step)
    for k in range(count + 1):
        scoring = None
        n = len(steps)
        if n < count and (n == k or (len(ahead) > 0 and k > 0)):
            t = n // len(passes)
            i = n % len(passes)
            new = window if i == 0 else None
            before = None if i == 0 else steps[n - 1]
            own = limits[n] if n < len(limits) else None
            scoring = scores_of(walk, chunk, dense, g, t, passes[i], keys[i], new, before, own)
            steps.append(scoring.step)
        weighing = None
        if k > 0:
            if k <= len(weighings):
                weighing = weighings[k - 1]
            else:
                own = values[(k - 1) % len(passes)]
                weighing = weighing_of(walk, chunk, dense, g, k - 1, len(passes), steps[k - 1], own, window)
        score_and_weigh(scoring, weighing)
        if weighing != None:  # noqa: E711
            end_values(weighing)


def add_streams(walk):
    """Where two cores share the slots, the totals of all streams put together, in each."""
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g]) if walk.operands.shards > 1 else 0):
            total = walk.states[g][t].total
            over_streams(walk.groups[g][t], total, total, nl.add, idle_engine(walk.shape))


def finish(walk, current):
    """Writes the output of all row tiles, together with what the other core saw of their slots."""
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g]) if walk.operands.shards > 1 else 0):
            walk.states[g][t] = join_cores(walk.shape, walk.groups[g][t], walk.states[g][t], walk.operands.shard)
    store_all(walk, current)


def store_all(walk, current):
    """Writes the output of all row tiles; of two cores that share the slots, each writes half of the rows."""
    operands = walk.operands
    outputs = operands.outputs
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            rows, own, state, _ = row_tile(walk, operands.shards == 1, g, t)
            store_output(
                walk.shape, rows, own, state, outputs, operands.sums, 0, current, operands.shard, operands.shards
            )
