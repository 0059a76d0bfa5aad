"""Passes of a sequence as steps of its row tiles: scores, and the values that they weigh."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_order import finish_line, join_line, new_line
from .attention_plan import PARTITIONS, Chunk
from .attention_softmax import live_flags, one_stream, slot_bounds, window_mask
from .attention_steps import FEW_COLUMNS, new_scoring, new_step, new_weighing


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
class Part(nl.NKIObject):
    """What a step takes of a pass."""

    chunk: object
    turn: int  # which of some passes it is
    current: object
    keys: object
    values: object


@dataclass
class Limits(nl.NKIObject):
    """What a row tile sees of a pass."""

    bounds: object  # as slot_bounds leaves them
    mask: object  # of the window, if it comes with the pass and is known


def parts_of(walk, chunk, g, passes, keys, values):
    """Parts of passes, their keys and, if they are given, their values: a segment each where row tiles take turns at
    nothing else."""
    count = chunk.segments if len(walk.groups[g]) == 1 and chunk.streams == 1 else 1
    segments = chunk.segments // count
    slots = chunk.slots // count
    parts = []
    for turn in range(len(passes)):
        for i in range(count):
            own = slice(i * segments, (i + 1) * segments)
            some = Chunk(
                slots,
                segments,
                chunk.partitions,
                chunk.run,
                chunk.streams,
                chunk.pieces,
                chunk.first + i * slots,
                chunk.step,
                chunk.most,
                chunk.transposed,
            )
            own_values = None if len(values) == 0 else values[turn][own]
            parts.append(Part(some, turn, passes[turn], keys[turn][own], own_values))
    return parts


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
    """Limits of a pass for a row tile, with the mask of a chain."""
    own = row_tile(walk, dense, g, t)[1]
    live = live_flags(own, current, engine)
    mask = None
    if with_window and walk.operands.trees == None:  # noqa: E711
        mask = window_mask(walk.shape, own, current, live, engine)
    return Limits(slot_bounds(walk.shape, own, current, live, engine), mask)


def scores_of(walk, dense, g, t, part, window, before, limits=None):
    """Scoring of a part of a pass for a row tile; `window` as extend_line has it, `before` the Step before that is not
    weighed yet, `limits` None if they are not known yet."""
    rows, own, state, queries = row_tile(walk, dense, g, t)
    if limits == None:  # noqa: E711
        limits = limits_of(walk, dense, g, t, part.current, has_values(window), nisa.engine.vector)
    seen = seen_window(walk, own, part.current, window, limits)
    earlier = state.negative_max if before == None else before.negative_max  # noqa: E711
    step = new_step(walk.shape, part.chunk, rows, own, len(seen) > 0, earlier)
    return new_scoring(walk.shape, part.chunk, rows, own, queries, part.keys, limits.bounds, seen, step)


def seen_window(walk, constants, current, window, limits):
    """The keys of `window`, as extend_line has it, and which of them each row sees; () if there are none."""
    if not has_values(window):
        return ()
    mask = limits.mask
    if mask == None:  # noqa: E711
        live = live_flags(constants, current, nisa.engine.gpsimd)
        mask = window_mask(walk.shape, constants, current, live, nisa.engine.gpsimd)
    return window[0], mask


def weighing_of(walk, dense, g, k, parts, step, window):
    """Weighing of step k of extend_line; `window` as there."""
    t = k // len(parts)
    i = k % len(parts)
    part = parts[i]
    rows, _, state, _ = row_tile(walk, dense, g, t)
    tiles = len(walk.groups[g])
    busy = dense and tiles > 1 and k < tiles * len(parts) - 1
    engines, columns = transposing_engines(walk.shape, part.chunk, rows, busy, i, len(parts))
    begins = i == 0 and window != None  # noqa: E711
    window_values = window[1] if begins and has_values(window) else None
    ends = k == tiles * len(parts) - 1 and k < 2
    return new_weighing(
        walk.shape, part.chunk, rows, step, part.values, window_values, state, begins, engines, columns, ends
    )


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
            return (None, None, nisa.engine.dma), quarter
        return (nisa.engine.dma, nisa.engine.dma, None), quarter
    if shape.block_size > 0:
        # Vector has more to do besides.
        return (nisa.engine.scalar, nisa.engine.scalar, nisa.engine.vector), FEW_COLUMNS
    if rows.count <= PARTITIONS // 2:
        # Few rows take Vector as long to mask as many.
        return (None, nisa.engine.scalar), FEW_COLUMNS
    if shape.cache_layout != "BHDS" and rows.streams == 1:
        # Vector copies transposed keys besides.
        return (nisa.engine.scalar, None, None, None), FEW_COLUMNS
    if shape.batch == 1 and passes == 2 and rows.streams == 1:
        # Two steps of full rows keep Vector the busiest, though Scalar copies them later.
        return (nisa.engine.scalar, None), FEW_COLUMNS
    return (None,), FEW_COLUMNS


def line_for(walk, g, fetch=0.0):
    """A Line for a group; `fetch` as new_line has it."""
    # Where there is always more to do, weights do not come sooner than what follows.
    return new_line(1 if len(walk.groups[g]) > 1 else 3, fetch)


def take(walk, dense, g, parts, window):
    """Takes parts of passes of a group into the states of its row tiles; arguments as for extend_line."""
    line = line_for(walk, g)
    extend_line(line, len(walk.groups[g]) * len(parts), walk, dense, g, parts, window, ())
    finish_line(line)


def extend_line(line, count, walk, dense, g, parts, window, limits, base=0):
    """The first `count` steps of parts of passes of a group, of each of its row tiles in turn, with their values if
    the parts have any.

    Args:
        window: of passes that begin the states, () where it is not this core's; else None.
        limits: of the first row tiles in each pass, as far as they are known.
        base: steps of the line that come before.
    """
    passes = parts[-1].turn + 1
    every = 0
    for part in parts:
        every += part.chunk.slots
    steps = line.steps
    fetched = 0 if base == 0 else steps[base - 1].first + steps[base - 1].slots + steps[base - 1].every
    for k in range(count):
        t = k // len(parts)
        i = k % len(parts)
        if base + k == len(steps):
            known = t * passes + parts[i].turn
            own = limits[known] if known < len(limits) else None
            before = None if i == 0 else steps[base + k - 1].scoring.step
            first = fetched if i == 0 else steps[base + k - 1].first + steps[base + k - 1].slots
            scoring = scores_of(walk, dense, g, t, parts[i], window if i == 0 else None, before, own)
            join_line(line, scoring, first, parts[i].chunk.slots, every)
        if parts[i].values != None:  # noqa: E711
            steps[base + k].weighing = weighing_of(walk, dense, g, k, parts, steps[base + k].scoring.step, window)
