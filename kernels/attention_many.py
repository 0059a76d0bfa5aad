"""Many sequences: their passes listed in a table, and runtime loops that walk it."""

import nki.isa as nisa
import nki.language as nl

from .attention_lengths import checked_lengths, on_every_partition
from .attention_loads import EVICTION_ENGINES, load_queries
from .attention_output import store_output
from .attention_passes import (
    MOST_STREAMS,
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
from .attention_plan import plan_rows, tile
from .attention_softmax import new_state, restart, score_steps, slot_bounds, weigh_step, window_mask
from .attention_work import list_passes, listed_pass, long_sequences


def attend_many(shape, heads, operands, lengths, slot_cores):
    """Many sequences: one runtime loop over the passes of those longer than a pass, one over those of the others.

    `heads`: (first, one past the last) that are this core's.
    """
    laps = checked_lengths(shape, on_every_partition(lengths))
    groups = plan_rows(shape, heads[0], heads[1], 1)
    ragged = plan_ragged(shape, groups[0][0], operands.shard, slot_cores)
    chosen = tile(laps[0].cached.shape)
    if plan_dense(shape, groups[0][0], operands.shard, slot_cores) == None:  # noqa: E711
        nisa.memset(dst=chosen, value=1.0)
    else:
        streamed = plan_rows(shape, heads[0], heads[1], MOST_STREAMS)
        dense = plan_dense(shape, streamed[0][0], operands.shard, slot_cores)
        is_dense = long_sequences(dense, laps[0])
        attend_listed(shape, dense, streamed, operands, laps, is_dense, True)
        nisa.tensor_scalar(dst=chosen, data=is_dense, op0=nl.equal, operand0=0.0)
    attend_listed(shape, ragged, groups, operands, laps, chosen, False)


def attend_listed(shape, chunk, groups, operands, laps, chosen, dense):
    """The passes of the chosen sequences, in one runtime loop."""
    work = list_passes(shape, chunk, laps, chosen, dense)
    constants = constants_of(shape, chunk, groups, operands)
    states = []
    stationaries = []
    for g in range(len(groups)):
        for t in range(len(groups[g])):
            state = new_state(shape, groups[g][t])
            nisa.tensor_copy(dst=state.all, src=constants.rows[g][t].fresh.all)
            states.append(state)
            stationaries.append(new_stationary(shape, groups[g][t]))

    def next_pass(item):
        current, stored = listed_pass(work, item)
        mine = own_constants(shape, groups, operands, constants, current)
        places = places_of(shape, chunk, operands, constants.runs, current)
        index = 0
        for g in range(len(groups)):
            window = ()
            if has_window(operands):
                window = own_window(shape, groups[g][0], operands, constants, current)
            for t in range(len(groups[g])):
                load_queries(shape, groups[g][t], operands.query, current, stationaries[index + t])
            keys = pass_keys(shape, chunk, groups[g][0], operands, places, current)
            values = pass_values(shape, chunk, groups[g][0], operands, places, current)
            if not dense:
                silence_pass(shape, constants.slot, values, current)
            for t in range(len(groups[g])):
                rows = groups[g][t]
                own = mine.rows[g][t]
                state = states[index]
                queries = stationaries[index]
                restart(state, own.fresh, current.starts)
                seen = ()
                window_values = None
                if len(window) > 0:
                    seen = (window[0], window_mask(shape, own, current))
                    window_values = window[1]
                cached = [(keys, slot_bounds(shape, chunk, own, current))]
                step = score_steps(shape, chunk, rows, own, queries, cached, seen, state.negative_max)[0]
                weigh_step(shape, chunk, rows, step, values, window_values, state, False, EVICTION_ENGINES)
                store_output(shape, rows, own, state, operands.outputs, operands.sums, operands.shard, stored)
                index += 1

    nl.fori_loop(0, work.count, next_pass)
