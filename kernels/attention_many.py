"""Many sequences: their passes listed in a table, and runtime loops that walk it."""

import nki.isa as nisa
import nki.language as nl

from .attention_loads import EVICTION_ENGINES, load_queries
from .attention_output import store_output
from .attention_passes import (
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
from .attention_plan import tile
from .attention_softmax import new_state, restart, score_step, slot_bounds, weigh_step, window_mask
from .attention_work import list_passes, listed_pass, load_lengths, long_sequences


def attend_many(shape, groups, operands, lengths, slot_cores):
    """Many sequences: one runtime loop over the passes of those longer than a pass, one over those of the others."""
    laps = load_lengths(shape, lengths)
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
            keys = pass_keys(shape, chunk, groups[g][0], operands, places, current)
            values = pass_values(shape, chunk, groups[g][0], operands, places, current)
            if not dense:
                silence_pass(shape, constants.slot, values, current)
            window = own_window(shape, groups[g][0], operands, constants, current) if with_window else ()
            for t in range(len(groups[g])):
                rows = groups[g][t]
                own = mine.rows[g][t]
                load_queries(shape, rows, operands.query, current, stationaries[index])
                seen = ()
                if with_window:
                    seen = (window[0], window_mask(shape, own, current))
                restart(states[index], own.fresh, starts)
                cached = [(keys, slot_bounds(shape, own, current))]
                state = states[index]
                step = score_step(shape, chunk, rows, own, stationaries[index], cached, seen, state.negative_max)
                weigh_step(
                    shape,
                    chunk,
                    rows,
                    own,
                    step,
                    [values],
                    window[1] if with_window else None,
                    state,
                    False,
                    EVICTION_ENGINES,
                )
                store_output(shape, rows, own, states[index], operands.outputs, operands.sums, operands.shard, current)
                index += 1

    nl.fori_loop(0, work.count, next_pass)
