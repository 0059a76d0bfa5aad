"""verify_attention: the rows of each window attend to the KV cache and to each other, in one pass over the cache."""

from typing import NamedTuple

import nki
import nki.isa as nisa
import nki.language as nl

from .attention_blocks import find_runs, runs_of
from .attention_loads import load_keys, load_queries, load_slots, load_window, silence, slots_to_keep
from .attention_output import log_sum_exp, store_output
from .attention_plan import PARTITIONS, Shape, head_parts, plan_blocks, plan_chunk, plan_rows, tile
from .attention_softmax import (
    attend,
    groups_of,
    mask_rows,
    new_state,
    one_stream,
    restart,
    row_constants,
    with_tree,
)
from .attention_tree import ancestor_table
from .attention_work import (
    chosen_only,
    count_passes,
    counters,
    every_sequence,
    first_pass,
    latest_start,
    list_passes,
    listed_pass,
    long_sequences,
    pass_from,
)
from .merge_attention import merge_all

LONGEST = 4096  # slots of a pass on one core: its fixed cost is then small beside its loads
RAGGED = 2048  # slots of a pass that may load some that are not live
MOST_STREAMS = 4
MOST_UNROLLED = 8  # row tiles times sequences


@nki.jit
def verify_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    lengths,
    parents,
    block_table,
    sinks,
    key_scale,
    value_scale,
    cache_layout,
    scale,
    sliding_window,
    ring,
    softcap,
    return_lse,
):
    """Passes of up to 4096 slots, each an online-softmax step for all rows of a head.

    Args:
        query: [B, Hq, T, D].
        key, value: [B, Hkv, T, D]; None for a call on the cache only.
        key_cache, value_cache: in `cache_layout`.
        lengths: seq_lens, draft_lens [B] int32; or these, cache_start and query_positions.
        parents: [1, T] or [B, T] int32, or None for chains.
        block_table: [B, M] int32, or None.
        sinks: [Hq] fp32, or None.
        key_scale, value_scale: [Hkv] fp32 for fp8 caches, else None.
        scale: of the scores.
        sliding_window: 0 for none.
        ring: whether position p lives in slot p mod S.
        softcap: 0.0 for none.
        return_lse: whether to return log-sum-exps.

    Returns:
        output [B, Hq, T, D], and the log-sum-exp [B, Hq, T] fp32.
    """
    batch, query_heads, window, head_dim = query.shape
    heads = value_cache.shape[2 if cache_layout == "NPHD" else 1]
    slots = value_cache.shape[2]
    block_size = 0
    table_size = 0
    if block_table != None:  # noqa: E711
        block_size = value_cache.shape[1 if cache_layout == "NPHD" else 2]
        table_size = block_table.shape[1]
        slots = table_size * block_size
    shape = Shape(
        batch=batch,
        query_heads=query_heads,
        heads=heads,
        window=window,
        head_dim=head_dim,
        slots=slots,
        rows=query_heads // heads * window,
        dtype=nl.float32 if value_cache.dtype == nl.float32 else nl.bfloat16,
        cache_layout=cache_layout,
        block_size=block_size,
        table_size=table_size,
        ring=ring,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        scaled=key_scale != None,  # noqa: E711
        cache_only=key == None,  # noqa: E711
        positioned=len(lengths) > 2,
    )

    # Two cores share the heads, or, if those are odd, the slots of each pass.
    cores = nl.num_programs(0)
    core = nl.program_id(0)
    by_slots = heads % cores > 0
    slot_cores = cores if by_slots else 1
    shard = core if by_slots else 0
    first_head = 0 if by_slots else heads // cores * core
    last_head = heads if by_slots else first_head + heads // cores

    output = nl.ndarray(query.shape, dtype=query.dtype, buffer=nl.shared_hbm)
    outputs = output.reshape((1, batch, query_heads, window, head_dim))
    sums = None
    if by_slots:
        outputs = nl.ndarray((cores, batch, query_heads, window, head_dim), dtype=nl.float32, buffer=nl.shared_hbm)
    if by_slots or return_lse:
        sums = nl.ndarray((slot_cores, 2, batch, query_heads, window), dtype=nl.float32, buffer=nl.shared_hbm)

    table = None
    if parents != None:  # noqa: E711
        table = ancestor_table(shape, parents)
    operands = Operands(
        query,
        key,
        value,
        key_cache,
        value_cache,
        table,
        block_table,
        sinks,
        key_scale,
        value_scale,
        outputs,
        sums,
        shard,
    )

    streams = MOST_STREAMS if plan_dense(shape, 1, shard, slot_cores) != None else 1  # noqa: E711
    groups = plan_rows(shape, first_head, last_head, streams)
    row_tiles = 0
    for group in groups:
        row_tiles += len(group)
    if batch * row_tiles <= MOST_UNROLLED:
        attend_few(shape, groups, operands, lengths, slot_cores)
    else:
        attend_many(shape, plan_rows(shape, first_head, last_head, 1), operands, lengths, slot_cores)

    if not by_slots and not return_lse:
        return output
    shard_lses = nl.ndarray((slot_cores, batch, query_heads, window), dtype=nl.float32, buffer=nl.shared_hbm)
    lse = shard_lses.reshape((batch, query_heads, window)) if slot_cores == 1 else None
    if by_slots:
        log_sum_exp(shard_lses, sums, shard)
        nisa.core_barrier(data=shard_lses, cores=(0, 1))
        nisa.core_barrier(data=outputs, cores=(0, 1))
        lse = nl.ndarray((batch, query_heads, window), dtype=nl.float32, buffer=nl.shared_hbm)
        merge_all(outputs, shard_lses, output, lse)
    else:
        if cores > 1:
            nisa.core_barrier(data=sums, cores=(0, 1))
        if core == 0:
            log_sum_exp(shard_lses, sums, 0)
    return (output, lse) if return_lse else output


class Operands(NamedTuple):
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
    shard: int  # this core's


def plan_dense(shape, streams, shard, slot_cores):
    """Passes over live slots only, at most half as long as a core's share of the cache; None where that is small."""
    share = shape.slots // slot_cores
    if share < 2 * RAGGED or shape.block_size > 0 or shape.ring:
        return None
    longest = RAGGED
    while 2 * longest <= min(LONGEST, share // 2):
        longest *= 2
    return plan_chunk(shape.slots, longest, streams, shard, slot_cores)


def plan_ragged(shape, shard, slot_cores):
    """Passes that may load slots that are not live."""
    if shape.block_size > 0:
        return plan_blocks(shape, LONGEST, shard, slot_cores)
    return plan_chunk(shape.slots, RAGGED, 1, shard, slot_cores)


def attend_few(shape, groups, operands, lengths, slot_cores):
    """A few sequences, unrolled: each one's window, then its passes in runtime loops."""
    laps = every_sequence(shape, lengths)
    ragged = plan_ragged(shape, operands.shard, slot_cores)
    dense = plan_dense(shape, groups[0][0].streams, operands.shard, slot_cores)
    if ragged.most == 1 and not shape.ring and shape.sliding_window == 0 and shape.block_size == 0:
        constants = constants_of(shape, ragged, ragged, groups, operands)
        for sequence in range(shape.batch):
            first = first_pass(laps[0], sequence)
            own = own_constants(shape, groups, operands, constants, first)
            attend_once(shape, ragged, groups, operands, own, first)
        return

    constants = constants_of(shape, ragged if dense == None else dense, ragged, groups, operands)  # noqa: E711
    is_ragged = tile(laps[0].cached.shape)
    if dense == None:  # noqa: E711
        nisa.memset(dst=is_ragged, value=1.0)
    else:
        is_dense = long_sequences(dense, laps[0])
        nisa.tensor_scalar(dst=is_ragged, data=is_dense, op0=nl.equal, operand0=0.0)
        dense_counts = counters(chosen_only(count_passes(dense, laps[0]), is_dense))
        dense_flags = counters(is_dense)
    ragged_counts = []
    for lap in laps:
        ragged_counts.append(counters(chosen_only(count_passes(ragged, lap), is_ragged)))
    for sequence in range(shape.batch):
        first = first_pass(laps[0], sequence)
        own = own_constants(shape, groups, operands, constants, first)
        walk = Walk(shape, groups, operands, own, sequence)
        begun = 0
        if dense != None and sequence == 0 and shape.sliding_window == 0:  # noqa: E711
            # Loads that need not wait for the lengths, so that the memory is busy from the start.
            loaded = load_groups(shape, dense, groups, operands, None, first)
            begun = 1
        states, stationaries = attend_windows(shape, groups, operands, own, first)
        if begun == 1:
            attend_loaded(walk, dense, first, loaded, dense_flags[0], states, stationaries)
        if dense != None:  # noqa: E711
            attend_passes(walk, dense, laps[0], True, begun, dense_counts[sequence], states, stationaries)
        for lap in range(len(laps)):
            attend_passes(walk, ragged, laps[lap], False, 0, ragged_counts[lap][sequence], states, stationaries)
        store_all(walk, first, states)


class Walk(NamedTuple):
    """What the passes of a sequence have in common."""

    shape: object
    groups: object
    operands: object
    constants: object
    sequence: int


def attend_once(shape, chunk, groups, operands, constants, current):
    """A sequence in a single pass, its window with it."""
    with_window = has_window(operands)
    for g in range(len(groups)):
        keys, values = load_pass(shape, chunk, groups[g][0], operands, None, current)
        silence_pass(shape, constants.slot, values, current)
        window = own_window(shape, groups[g][0], operands, constants, current) if with_window else ()
        for t in range(len(groups[g])):
            rows = groups[g][t]
            own = constants.rows[g][t]
            stationary = new_stationary(shape, rows)
            state = new_state(shape, rows)
            load_queries(shape, rows, operands.query, current, stationary)
            masks = mask_rows(shape, own, current, True, with_window)
            attend(shape, chunk, rows, own, stationary, (keys, values), window, masks, state, True)
            store_output(shape, rows, own, state, operands.outputs, operands.sums, operands.shard, current)


def attend_windows(shape, groups, operands, constants, current):
    """States and queries of all row tiles of a sequence, the window taken in where it is this core's."""
    states = []
    stationaries = []
    for g in range(len(groups)):
        window = own_window(shape, groups[g][0], operands, constants, current) if has_window(operands) else ()
        for t in range(len(groups[g])):
            rows = groups[g][t]
            own = constants.rows[g][t]
            stationary = new_stationary(shape, rows)
            state = new_state(shape, rows)
            load_queries(shape, rows, operands.query, current, stationary)
            nisa.tensor_copy(dst=state.all, src=own.fresh.all, engine=nisa.engine.gpsimd)
            if len(window) > 0:
                rows, own, first_stream = one_stream(shape, rows, own, state)
                masks = mask_rows(shape, own, current, False, True)
                queries = stationary[:, :, 0 : rows.heads, 0 : rows.count]
                attend(shape, None, rows, own, queries, (), window, masks, first_stream, True)
            states.append(state)
            stationaries.append(stationary)
    return states, stationaries


def attend_passes(walk, chunk, lengths, dense, begun, count, states, stationaries):
    """Passes begun..count - 1 of a sequence, `count` a register, in a runtime loop."""
    shape = walk.shape
    one = slice(walk.sequence, walk.sequence + 1)
    begin = tile((PARTITIONS, 1))
    nisa.tensor_scalar(dst=begin, data=lengths.base[:, one], op0=nl.add, operand0=float((begun - 1) * chunk.step))
    latest = latest_start(shape, chunk)
    if dense:
        # The last pass ends with the last live slot.
        latest = tile((PARTITIONS, 1))
        nisa.tensor_scalar(dst=latest, data=lengths.cached[:, one], op0=nl.subtract, operand0=float(chunk.step))
    block = None
    if shape.block_size > 0:
        per_pass = float(chunk.step // shape.block_size)
        block = tile((PARTITIONS, 1))
        nisa.tensor_scalar(dst=block, data=lengths.block[:, one], op0=nl.subtract, operand0=per_pass)

    def next_pass(_):
        nisa.tensor_scalar(dst=begin, data=begin, op0=nl.add, operand0=float(chunk.step))
        if shape.block_size > 0:
            nisa.tensor_scalar(dst=block, data=block, op0=nl.add, operand0=per_pass)
        current = pass_from(shape, lengths, walk.sequence, begin, latest, block)
        loaded = load_groups(shape, chunk, walk.groups, walk.operands, walk.constants.runs, current)
        take(walk, chunk, dense, current, loaded, states, stationaries)

    nl.fori_loop(begun, count, next_pass)


def attend_loaded(walk, chunk, current, loaded, is_dense, states, stationaries):
    """A first pass that is loaded already, if the register `is_dense` says that it holds live slots only."""

    def first_pass_of_many(_):
        take(walk, chunk, True, current, loaded, states, stationaries)

    nl.fori_loop(0, is_dense, first_pass_of_many)


def take(walk, chunk, dense, current, loaded, states, stationaries):
    """Takes a loaded pass into the states of all row tiles; slots that are not live, if there are any, silenced."""
    shape = walk.shape
    index = 0
    for g in range(len(walk.groups)):
        if not dense:
            silence_pass(shape, walk.constants.slot, loaded[g][1], current)
        for t in range(len(walk.groups[g])):
            rows = walk.groups[g][t]
            own = walk.constants.rows[g][t]
            state = states[index]
            queries = stationaries[index]
            if not dense:
                rows, own, state = one_stream(shape, rows, own, state)
                queries = queries[:, :, 0 : rows.heads, 0 : rows.count]
            masks = mask_rows(shape, own, current, True, False)
            attend(shape, chunk, rows, own, queries, loaded[g], (), masks, state, False)
            index += 1


def attend_many(shape, groups, operands, lengths, slot_cores):
    """Many sequences: one runtime loop over the passes of those longer than a pass, one over those of the others."""
    laps = every_sequence(shape, lengths)
    ragged = plan_ragged(shape, operands.shard, slot_cores)
    dense = plan_dense(shape, 1, operands.shard, slot_cores)
    chosen = tile(laps[0].cached.shape)
    if dense == None:  # noqa: E711
        nisa.memset(dst=chosen, value=1.0)
    else:
        is_dense = long_sequences(dense, laps[0])
        attend_listed(shape, dense, groups, operands, laps, is_dense, True)
        nisa.tensor_scalar(dst=chosen, data=is_dense, op0=nl.equal, operand0=0.0)
    attend_listed(shape, ragged, groups, operands, laps, chosen, False)


def attend_listed(shape, chunk, groups, operands, laps, chosen, dense):
    """The passes of the chosen sequences, in one runtime loop."""
    work = list_passes(shape, chunk, laps, chosen, dense)
    with_window = has_window(operands)
    constants = constants_of(shape, chunk, chunk, groups, operands)
    states = []
    stationaries = []
    for g in range(len(groups)):
        for t in range(len(groups[g])):
            state = new_state(shape, groups[g][t])
            nisa.tensor_copy(dst=state.all, src=constants.rows[g][t].fresh.all)
            states.append(state)
            stationaries.append(new_stationary(shape, groups[g][t]))

    def next_pass(item):
        current, starts = listed_pass(work, item)
        mine = own_constants(shape, groups, operands, constants, current)
        places = places_of(shape, chunk, operands, constants.runs, current)
        index = 0
        for g in range(len(groups)):
            keys, values = load_pass(shape, chunk, groups[g][0], operands, places, current)
            if not dense:
                silence_pass(shape, constants.slot, values, current)
            window = own_window(shape, groups[g][0], operands, constants, current) if with_window else ()
            for t in range(len(groups[g])):
                rows = groups[g][t]
                own = mine.rows[g][t]
                load_queries(shape, rows, operands.query, current, stationaries[index])
                masks = mask_rows(shape, own, current, True, with_window)
                restart(states[index], own.fresh, starts)
                attend(
                    shape, chunk, rows, own, stationaries[index], (keys, values), window, masks, states[index], False
                )
                store_output(shape, rows, own, states[index], operands.outputs, operands.sums, operands.shard, current)
                index += 1

    nl.fori_loop(0, work.count, next_pass)


class Constants(NamedTuple):
    """What no pass changes."""

    rows: object  # Rows of each row tile of each group
    slot: object  # [partitions, segments, run] fp32, the number of each slot that a ragged pass loads
    window_row: object  # [T, 1] fp32
    inverse_scales: object  # [T, Hkv] fp32, or None
    runs: object  # Runs of a paged cache, or None


def constants_of(shape, streamed, ragged, groups, operands):
    """Constants for passes `streamed`, whose rows may come in streams, and `ragged`, which load slots not live."""
    with_window = has_window(operands)
    rows = []
    for group in groups:
        own = []
        for row_tile in group:
            own.append(
                row_constants(
                    shape,
                    streamed,
                    row_tile,
                    with_window,
                    operands.sinks if operands.shard == 0 else None,
                    operands.key_scale,
                    operands.value_scale,
                )
            )
        rows.append(own)
    slot = tile((ragged.partitions, ragged.segments, ragged.run))
    nisa.iota(
        dst=slot,
        pattern=[[ragged.partitions * ragged.run, ragged.segments], [1, ragged.run]],
        offset=ragged.first,
        channel_multiplier=ragged.run,
    )
    window_row = tile((shape.window, 1))
    nisa.iota(dst=window_row, pattern=[[0, 1]], offset=0, channel_multiplier=1)
    inverse_scales = None
    if operands.value_scale != None:  # noqa: E711
        inverse_scales = tile((shape.window, shape.heads))
        nisa.dma_copy(dst=inverse_scales, src=operands.value_scale.ap(pattern=[[0, shape.window], [1, shape.heads]]))
        nisa.reciprocal(dst=inverse_scales, data=inverse_scales)
    runs = None
    if shape.block_size > 0:
        runs = runs_of(shape, ragged, slot)
    return Constants(rows, slot, window_row, inverse_scales, runs)


def own_constants(shape, groups, operands, constants, current):
    """Constants for the sequence of a pass, which may have a tree of its own."""
    if operands.trees == None:  # noqa: E711
        return constants
    rows = []
    for g in range(len(groups)):
        own = []
        for t in range(len(groups[g])):
            own.append(with_tree(shape, groups[g][t], constants.rows[g][t], operands.trees, current))
        rows.append(own)
    return Constants(rows, constants.slot, constants.window_row, constants.inverse_scales, constants.runs)


def has_window(operands):
    """Whether the window's keys are this core's to take: of two that share the slots, the first's."""
    return operands.key != None and operands.shard == 0  # noqa: E711


def places_of(shape, chunk, operands, runs, current):
    """Where the runs of a pass lie in a paged cache; None for others."""
    if runs == None:  # noqa: E711
        return None
    return find_runs(shape, chunk, runs, operands.block_table, operands.value_cache.shape[0], current)


def load_groups(shape, chunk, groups, operands, runs, current):
    """Keys and values of a pass for every group of row tiles."""
    places = places_of(shape, chunk, operands, runs, current)
    loaded = []
    for group in groups:
        loaded.append(load_pass(shape, chunk, group[0], operands, places, current))
    return loaded


def load_pass(shape, chunk, rows, operands, places, current):
    """Keys and values of a pass, a list of segments each; keys first, which are needed first."""
    keys = []
    values = []
    for segment in range(chunk.segments):
        keys.append(load_keys(shape, chunk, rows, operands.key_cache, current, segment, places))
    for segment in range(chunk.segments):
        values.append(
            load_slots(shape, chunk, rows, operands.value_cache, current, current.value_index, segment, places)
        )
    return keys, values


def silence_pass(shape, slot, values, current):
    """Clears the values of slots that no row may weigh."""
    keep = slots_to_keep(shape, slot, current)
    for segment in range(len(values)):
        silence(shape, values[segment], keep, segment)


def own_window(shape, rows, operands, constants, current):
    """The window's keys and values for a group's heads, rows of padding silenced."""
    padding = tile((shape.window, 1), nl.uint8)
    nisa.tensor_scalar(
        dst=padding, data=constants.window_row, op0=nl.greater_equal, operand0=current.live_rows[0 : shape.window]
    )
    return load_window(shape, rows, operands.key, operands.value, current, padding, constants.inverse_scales)


def new_stationary(shape, rows):
    """Room for a row tile's queries, zero outside each group's own rows."""
    parts = head_parts(shape.head_dim)
    stationary = tile((parts[0][1], len(parts), groups_of(rows), rows.count), shape.dtype)
    if groups_of(rows) > 1:
        nisa.memset(dst=stationary, value=0.0)
    return stationary


def store_all(walk, current, states):
    index = 0
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            own = walk.constants.rows[g][t]
            operands = walk.operands
            store_output(
                walk.shape,
                walk.groups[g][t],
                own,
                states[index],
                operands.outputs,
                operands.sums,
                operands.shard,
                current,
            )
            index += 1
