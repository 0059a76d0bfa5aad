"""The softmax of a row tile: what its rows see, and what they carry from pass to pass.

What a row carries from pass to pass (Milakov and Gimelshein, 1805.02867): its weighted values, the sum of its weights,
and minus the maximum of its scores, negated because that is the bias of the exponential.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_loads import repeat
from .attention_plan import RowTile, psum, tile
from .attention_tree import load_ancestors

NOTHING_SEEN = 1e20  # minus the maximum of a row that saw no key yet: exp(masked score + this) is 0
MASKED = -3.4028234663852886e38  # what range_select writes where a slot is not seen
SMALLEST_SUM = 1e-18  # a row that saw a key has a sum of at least 1; the logarithm's domain starts at 2^-64


@dataclass
class Rows(nl.NKIObject):
    """What does not change for a row tile; [count, 1] unless said otherwise."""

    row: object  # the window row
    depth: object  # its position, counted from row 0's
    sees: object  # [count, T] the window keys that it sees
    skipped: object  # slots of a piece before those of the row's stream; None if there is but one
    key_scale: object  # of scores of the cache; None if that is shape.scale
    value_scale: object  # of weighted values; None if there is none
    fresh: object  # State of rows that have seen nothing but their sink


@dataclass
class State(nl.NKIObject):
    """The streams of a row have one maximum, so that what they weigh adds up in PSUM."""

    values: object  # [rows, heads * D] fp32, weighted; those of heads other than the row's own are by-products
    total: object  # [count, 1], of the row's stream
    negative_max: object  # [count, 1], of scaled scores
    all: object  # the tile that holds the three


def load_exponential():
    """Has the exponential's table loaded while the Scalar engine has nothing else to do."""
    first = tile((1, 1))
    nisa.memset(dst=first, value=0.0)
    nisa.activation(dst=first, op=nl.exp, data=first)


def groups_of(rows):
    return rows.heads * rows.streams


def new_state(shape, rows):
    width = rows.heads * shape.head_dim
    stored = tile(((rows.count + 15) // 16 * 16, width + 2))  # a multiple of 16, as sendrecv needs
    return State(
        stored[0 : rows.rows, 0:width],
        stored[0 : rows.count, width : width + 1],
        stored[0 : rows.count, width + 1 : width + 2],
        stored,
    )


def one_stream(rows, constants, state):
    """A row tile, its constants and its state, without the streams but the first.

    What is then taken in leaves the others behind, which must not have seen anything.
    """
    if rows.streams == 1:
        return rows, constants, state
    count = rows.rows
    return (
        RowTile(rows.first_row, count, rows.first_head, rows.heads, 1, count),
        Rows(
            constants.row[0:count],
            constants.depth[0:count],
            None,
            None,
            None if constants.key_scale == None else constants.key_scale[0:count],  # noqa: E711
            None if constants.value_scale == None else constants.value_scale[0:count],  # noqa: E711
            None,
        ),
        State(state.values, state.total[0:count], state.negative_max[0:count], None),
    )


def row_constants(shape, chunk, rows, with_window, sinks, key_scale, value_scale):
    """Rows of a row tile.

    Args:
        chunk: of passes that are taken in streams; None if none are.
        with_window: whether the window's keys are this core's to take.
    """
    stride = rows.count // rows.streams
    across = tile((1, rows.streams, stride))
    nisa.memset(dst=across, value=0.0)
    nisa.iota(
        dst=across[:, :, 0 : rows.rows],
        pattern=[[0, rows.streams], [0, rows.rows // shape.window], [1, shape.window]],
        offset=0,
        channel_multiplier=0,
    )
    staged = psum((rows.count, 1))
    row = tile((rows.count, 1))
    nisa.nc_transpose(dst=staged, data=across, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=row, src=staged, engine=nisa.engine.scalar)
    skipped = None
    if rows.streams > 1:
        skipped = tile((rows.count, 1))
        own = chunk.slots // chunk.pieces // rows.streams
        for i in range(rows.streams):
            nisa.memset(dst=skipped[i * stride : (i + 1) * stride], value=float(i * own))

    fresh = new_state(shape, rows)
    nisa.memset(dst=fresh.all, value=0.0)
    nisa.memset(dst=fresh.negative_max, value=NOTHING_SEEN)
    if sinks != None:  # noqa: E711
        # A sink is a key with a score of its own and no value.
        heads = rows.rows // shape.window
        sink = fresh.negative_max
        nisa.dma_copy(
            dst=sink[0 : rows.rows],
            src=sinks.ap(pattern=[[1, heads], [0, shape.window]], offset=rows.first_row // shape.window),
        )
        repeat(rows, sink)
        nisa.tensor_scalar(dst=sink, data=sink, op0=nl.multiply, operand0=-1.0)
        nisa.memset(dst=fresh.total[0 : rows.rows], value=1.0)
    return Rows(
        row=row,
        depth=row,
        sees=chain_sees(shape, rows, row) if with_window else None,
        skipped=skipped,
        key_scale=row_scale(rows, key_scale, shape.scale if shape.softcap == 0.0 else shape.scale / shape.softcap),
        value_scale=row_scale(rows, value_scale, 1.0),
        fresh=fresh,
    )


def with_tree(shape, rows, constants, table, current):
    """Constants of a row tile in a sequence that has a tree."""
    sees, depth = load_ancestors(shape, rows, table, current)
    return Rows(
        constants.row,
        depth,
        sees,
        constants.skipped,
        constants.key_scale,
        constants.value_scale,
        constants.fresh,
    )


def row_scale(rows, scales, factor):
    """factor * scales [Hkv] of each row's head, as [count, 1]; None without scales."""
    if scales == None:  # noqa: E711
        return None
    scale = tile((rows.count, 1))
    nisa.memset(dst=scale, value=0.0)
    own = rows.rows // rows.heads
    nisa.dma_copy(dst=scale[0 : rows.rows], src=scales.ap(pattern=[[1, rows.heads], [0, own]], offset=rows.first_head))
    repeat(rows, scale)
    nisa.tensor_scalar(dst=scale, data=scale, op0=nl.multiply, operand0=factor)
    return scale


def chain_sees(shape, rows, row):
    """[count, T] fp32 flags: each row sees itself and the window rows before it; of streams, the first does."""
    every = tile((rows.count, shape.window))
    if rows.streams > 1:
        nisa.memset(dst=every, value=0.0)
    size = (rows.rows, shape.window)
    row = row[0 : rows.rows]
    sees = every[0 : rows.rows]
    column = tile(size)
    nisa.iota(dst=column, pattern=[[1, shape.window]], offset=0, channel_multiplier=0)
    nisa.tensor_scalar(dst=sees, data=column, op0=nl.less_equal, operand0=row)
    if shape.sliding_window > 0 and shape.sliding_window < shape.window:
        near = tile(size)
        nisa.tensor_scalar(
            dst=near,
            data=column,
            op0=nl.subtract,
            operand0=row,
            op1=nl.greater,
            operand1=-float(shape.sliding_window),
        )
        nisa.tensor_tensor(dst=sees, data1=sees, data2=near, op=nl.multiply)
    return every


def idle_engine(shape):
    """For what needs no PSUM: GpSimd, unless it has gathers to describe."""
    return nisa.engine.gpsimd if shape.block_size == 0 else nisa.engine.vector


def live_flags(constants, current, engine):
    """[count, 1] of 1 for each row, 0 for rows of padding."""
    live = tile(constants.row.shape)
    limit = current.live_rows[0 : live.shape[0]]
    nisa.tensor_tensor(dst=live, data1=constants.row, data2=limit, op=nl.less, engine=engine)
    return live


def window_mask(shape, constants, current, live, engine):
    """[count, T] uint8: which window keys each row sees, if this pass takes the window; rows of padding see none."""
    count = live.shape[0]
    if current.starts != None:  # noqa: E711
        takes = tile((count, 1))
        nisa.tensor_tensor(dst=takes, data1=live, data2=current.starts[0:count], op=nl.multiply, engine=engine)
        live = takes
    mask = tile((count, shape.window), nl.uint8)
    seen_by_live = live.broadcast(1, shape.window)
    nisa.tensor_tensor(dst=mask, data1=constants.sees, data2=seen_by_live, op=nl.multiply, engine=engine)
    return mask


def slot_bounds(shape, constants, current, live, engine):
    """First slot that each row sees in its stream, and one past the last, [count, 1] each; rows of padding see none."""
    count = live.shape[0]
    size = (count, 1)
    first = current.first[0:count]
    end = tile(size)
    nisa.tensor_tensor(dst=end, data1=live, data2=current.end[0:count], op=nl.multiply, engine=engine)
    if shape.sliding_window > 0 or shape.positioned:
        position = tile(size)
        nisa.tensor_scalar(dst=position, data=constants.depth, op0=nl.add, operand0=current.position[0:count])
    if shape.sliding_window > 0:
        own_first = tile(size)
        nisa.tensor_scalar(
            dst=own_first,
            data=position,
            op0=nl.subtract,
            operand0=float(shape.sliding_window - 1),
            op1=nl.maximum,
            operand1=first,
        )
        first = own_first
    if shape.positioned:
        # No slot after the row's own position.
        nisa.tensor_scalar(dst=end, data=position, op0=nl.add, operand0=1.0, op1=nl.minimum, operand1=end)
    if constants.skipped == None:  # noqa: E711
        return first, end
    stream_first = tile(size)
    for pair in ((first, stream_first), (end, end)):
        bound, shifted = pair
        nisa.tensor_tensor(dst=shifted, data1=bound, data2=constants.skipped, op=nl.subtract, engine=engine)
    return stream_first, end


def over_streams(rows, dst, values, op, engine):
    """dst = `values` [count, 1] combined by `op` over the streams of each row, the same on all of them; with one
    stream, nothing."""
    half = rows.count // 2
    while half >= rows.count // rows.streams:
        others = tile(values.shape)
        for first in range(0, rows.count, 2 * half):
            low = slice(first, first + half)
            high = slice(first + half, first + 2 * half)
            nisa.tensor_copy(dst=others[low], src=values[high], engine=engine)
            nisa.tensor_copy(dst=others[high], src=values[low], engine=engine)
        nisa.tensor_tensor(dst=dst, data1=values, data2=others, op=op, engine=engine)
        values = dst
        half //= 2


def begin_maximum(shape, earlier, before, fresh, starts):
    """earlier [count, 1] = minus the maximum that a row tile starts over with where `starts` [128, 1] fp32 is 1, that
    it had `before` where it is 0."""
    nisa.tensor_copy(dst=earlier, src=before, engine=idle_engine(shape))
    nisa.tensor_copy_predicated(
        dst=earlier, src=fresh.negative_max, predicate=starts.view(nl.uint32)[0 : earlier.shape[0]]
    )


def begin_state(state, fresh, starts, keep, with_sinks):
    """Starts over with values and total where `starts` is 1 and `keep` [128, 1] int32 all zeros, not all ones; bit by
    bit, since another sequence's may hold NaN."""
    count = state.total.shape[0]
    sums = state.all[0:count, 0 : state.values.shape[1] + 1].view(nl.int32)
    nisa.tensor_scalar(dst=sums, data=sums, op0=nl.bitwise_and, operand0=keep[0:count])
    if with_sinks:
        nisa.scalar_tensor_tensor(
            dst=state.total,
            data=fresh.total,
            op0=nl.multiply,
            operand0=starts[0:count],
            op1=nl.add,
            operand1=state.total,
        )
