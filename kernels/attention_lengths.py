"""Lengths of all sequences on the chip: checked, and as slots, where caches are paged, rings, or seen through windows.

Values below 2^24 are exact in fp32; NKI has neither division nor mod.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import count_bad_blocks
from .attention_plan import PARTITIONS, tile

EVERYWHERE = float(1 << 24)  # past any slot
QUADRANT = 32  # partitions that a shuffle reaches
APART = 16  # a partition of a DMA engine that serves no window


@dataclass
class Lengths(nl.NKIObject):
    """fp32 tiles of one shape, an entry a sequence; all zero for an empty slot. For a ring, those of one lap of it."""

    cached: object  # one past the last live slot
    live_rows: object
    position: object  # of row 0, in slots
    oldest: object  # first slot that any row sees
    base: object  # first slot to load: oldest, or where its block begins


def checked_lengths(shape, given, blocks=None, num_blocks=0):
    """Lengths [128, B] of all sequences, one or, for a ring, of two laps.

    From fp32 tiles [128, B]: seq_lens, draft_lens, then, if the call is positioned, cache_start and query_positions.

    A sequence whose values do not fit counts as empty: 0 < live rows <= T, 0 <= seq_lens, room for both, and, of
    `num_blocks`, the blocks that a paged cache needs; `blocks` as load_table leaves them.
    """
    size = given[0].shape
    cached = tile(size)
    rows = tile(size)
    total = tile(size)
    good = tile(size)
    nisa.tensor_scalar(dst=good, data=given[0], op0=nl.greater_equal, operand0=0.0)
    room = EVERYWHERE if shape.ring else float(shape.slots)
    if shape.cache_only:
        total = given[0]
    else:
        nisa.tensor_tensor(dst=total, data1=given[0], data2=given[1], op=nl.add)
        room -= 1.0
    for rule in (
        (given[1], nl.greater_equal, 0.0),
        (given[1], nl.less, float(shape.window)),
        (total, nl.less_equal, room),
    ):
        values, op, bound = rule
        nisa.scalar_tensor_tensor(dst=good, data=values, op0=op, operand0=bound, op1=nl.multiply, operand1=good)
    nisa.tensor_tensor(dst=cached, data1=given[0], data2=good, op=nl.multiply)
    nisa.scalar_tensor_tensor(dst=rows, data=given[1], op0=nl.add, operand0=1.0, op1=nl.multiply, operand1=good)
    if blocks != None:  # noqa: E711
        bad = count_bad_blocks(shape, blocks, num_blocks, cached)
        for values in (cached, rows):
            nisa.scalar_tensor_tensor(
                dst=values, data=bad, op0=nl.equal, operand0=0.0, op1=nl.multiply, operand1=values
            )

    position = cached
    if shape.positioned:
        position = tile(size)
        nisa.tensor_tensor(dst=position, data1=given[3], data2=given[2], op=nl.subtract)
    oldest = tile(size)
    if shape.sliding_window > 0:
        nisa.tensor_scalar(
            dst=oldest,
            data=position,
            op0=nl.subtract,
            operand0=float(shape.sliding_window - 1),
            op1=nl.maximum,
            operand1=0.0,
        )
        nisa.tensor_tensor(dst=oldest, data1=oldest, data2=cached, op=nl.minimum)
    else:
        nisa.memset(dst=oldest, value=0.0)
    if not shape.ring:
        return [based(shape, cached, rows, position, oldest)]
    return laps(shape, cached, rows, position, oldest)


def on_every_partition(lengths):
    """[B] int32 arrays in HBM as fp32 tiles [128, B], the same on every partition.

    By way of one partition: a DMA would need a descriptor for each of the 128.
    """
    batch = lengths[0].shape[0]
    count = len(lengths)
    first = tile((QUADRANT, count, batch))
    everywhere = tile((PARTITIONS, count, batch))
    nisa.memset(dst=first, value=0.0)
    for i in range(count):
        nisa.dma_copy(dst=first[APART : APART + 1, i, :], src=lengths[i].reshape((1, batch)))
    spread(everywhere, first, nisa.engine.vector, APART)
    tiles = []
    for i in range(count):
        tiles.append(everywhere[:, i, :])
    return tiles


def spread(everywhere, some, engine, partition=0):
    """everywhere [128, ...] = a partition of `some` [32, ...], bit by bit."""
    nisa.nc_stream_shuffle(dst=everywhere[0:QUADRANT], src=some, shuffle_mask=[partition] * QUADRANT)
    repeat_quadrant(everywhere, engine)


def repeat_quadrant(everywhere, engine):
    """everywhere [128, ...] = its first 32 partitions, again and again."""
    nisa.tensor_copy(dst=everywhere[QUADRANT : 2 * QUADRANT], src=everywhere[0:QUADRANT], engine=engine)
    nisa.tensor_copy(dst=everywhere[2 * QUADRANT : PARTITIONS], src=everywhere[0 : 2 * QUADRANT], engine=engine)


def laps(shape, cached, rows, position, oldest):
    """A ring's newer lap, from slot 0 on, then what is left of the lap before it: two Lengths."""
    size = cached.shape
    slots = float(shape.slots)
    kept = tile(size)
    nisa.tensor_scalar(dst=kept, data=cached, op0=nl.subtract, operand0=slots)
    nisa.tensor_tensor(dst=kept, data1=kept, data2=oldest, op=nl.maximum)
    _, turn = whole_steps(cached, shape.slots)

    newer = []
    older = []
    for values in (cached, position, kept):
        here = tile(size)
        before = tile(size)
        nisa.tensor_tensor(dst=here, data1=values, data2=turn, op=nl.subtract)
        nisa.tensor_scalar(dst=before, data=here, op0=nl.add, operand0=slots)
        newer.append(here)
        older.append(before)
    # The older lap ends with the last slot; it has none where the newer one holds all that is seen.
    nisa.tensor_scalar(dst=newer[2], data=newer[2], op0=nl.maximum, operand0=0.0)
    nisa.tensor_scalar(dst=older[0], data=older[0], op0=nl.minimum, operand0=slots)
    nisa.tensor_tensor(dst=older[2], data1=older[2], data2=older[0], op=nl.minimum)
    return [
        based(shape, newer[0], rows, newer[1], newer[2]),
        based(shape, older[0], rows, older[1], older[2]),
    ]


def based(shape, cached, rows, position, oldest):
    """Lengths with where loading begins."""
    if shape.block_size == 0 or (shape.sliding_window == 0 and not shape.ring):
        return Lengths(cached, rows, position, oldest, oldest)
    _, base = whole_steps(oldest, shape.block_size)
    return Lengths(cached, rows, position, oldest, base)


def whole_steps(values, step):
    """floor(values / step) and that times step, for fp32 integers; NKI has neither division nor mod."""
    size = values.shape
    rounded = tile(size, nl.int32)
    quotient = tile(size)
    rest = tile(size)
    # The int32 quotient may be one off either way; the exact remainder tells.
    nisa.tensor_scalar(dst=rounded, data=values, op0=nl.multiply, operand0=1.0 / step)
    nisa.scalar_tensor_tensor(
        dst=rest, data=rounded, op0=nl.multiply, operand0=-float(step), op1=nl.add, operand1=values
    )
    nisa.scalar_tensor_tensor(
        dst=quotient, data=rest, op0=nl.greater_equal, operand0=float(step), op1=nl.add, operand1=rounded
    )
    nisa.tensor_scalar(dst=rest, data=rest, op0=nl.less, operand0=0.0)
    nisa.tensor_tensor(dst=quotient, data1=quotient, data2=rest, op=nl.subtract)
    multiple = tile(size)
    nisa.tensor_scalar(dst=multiple, data=quotient, op0=nl.multiply, operand0=float(step))
    return quotient, multiple
