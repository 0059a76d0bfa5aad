"""From the states of a sequence's row tiles to its output; of two cores that share its slots, each saw others."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_output import add_states, level_states, other_state, store_output
from .attention_parts import row_tile
from .attention_softmax import idle_engine, over_streams


@dataclass
class Exchange(nl.NKIObject):
    """A row tile's state and the other core's, weighed against one maximum, and room for what they add up to."""

    state: object
    theirs: object
    joined: object


def add_streams(walk):
    """Where two cores share the slots, the totals of all streams put together, in each: so they are exchanged."""
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g]) if walk.operands.shards > 1 else 0):
            total = walk.states[g][t].total
            over_streams(walk.groups[g][t], total, total, nl.add, idle_engine(walk.shape))


def other_states(walk):
    """The other core's states of all row tiles; () if no core shares their slots."""
    if walk.operands.shards == 1:
        return ()
    others = []
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            rows = walk.groups[g][t]
            state = walk.states[g][t]
            dma = nisa.dma_engine.gpsimd_dma
            others.append(other_state(walk.shape, rows, state, walk.operands.shard, dma))
    return others


def exchanges_of(walk, others):
    """Exchanges of all row tiles; `others` as other_states leaves them."""
    exchanges = []
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g]) if len(others) > 0 else 0):
            state = walk.states[g][t]
            theirs = others[len(exchanges)]
            exchanges.append(Exchange(state, theirs, level_states(walk.shape, walk.groups[g][t], state, theirs)))
    return exchanges


def finish(walk, exchanges, current):
    """Writes the output of all row tiles; of two cores that share the slots, each writes half of the rows."""
    operands = walk.operands
    outputs = operands.outputs
    done = 0
    for g in range(len(walk.groups)):
        for t in range(len(walk.groups[g])):
            if len(exchanges) > 0:
                exchange = exchanges[done]
                done += 1
                add_states(walk.shape, exchange.joined, exchange.state, exchange.theirs)
                walk.states[g][t] = exchange.joined
            rows, own, state, _ = row_tile(walk, operands.shards == 1, g, t)
            store_output(
                walk.shape, rows, own, state, outputs, operands.sums, 0, current, operands.shard, operands.shards
            )


def join_next(walks, firsts, exchanges, finished):
    """Exchanges of the sequence that comes next, and the output of the one before it, or, where nothing is exchanged,
    of itself: what a sequence adds up is weighed while something else runs. Returns how many are written."""
    walk = walks[len(exchanges)]
    exchanges.append(exchanges_of(walk, other_states(walk)))
    if len(exchanges) - finished > (1 if walk.operands.shards > 1 else 0):
        finish(walks[finished], exchanges[finished], firsts[finished])
        return finished + 1
    return finished
