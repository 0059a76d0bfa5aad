"""Room for what an item of a work list needs, and how it gets there while the item before is worked on."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .attention_blocks import fetch_places, row_elements, skip_dead_runs
from .attention_loads import (
    fetch_keys,
    fetch_queries,
    fetch_slots,
    fetch_window,
    new_keys,
    new_moving_keys,
    new_queries,
    new_slots,
    new_window,
)
from .attention_passes import has_window
from .attention_plan import tile


@dataclass
class Room(nl.NKIObject):
    """Keys and values are those of one group of row tiles after the other."""

    queries: object  # [rows, D] of each row tile of each group
    windows: object  # (keys, values) of each group; empty where they are not this core's
    next_places: object  # of the runs of each pass over a paged cache, [partitions, segments] int32; else None
    places: object  # the same while keys are fetched
    value_places: object  # and while values are
    keys: object  # of each pass
    moving: object  # the same transposed, where they are not stored so
    values: object


def new_room(shape, chunk, groups, operands, passes):
    queries = []
    windows = []
    for group in groups:
        of_group = []
        for rows in group:
            of_group.append(new_queries(shape, rows))
        queries.append(of_group)
        if has_window(operands):
            windows.append(new_window(shape, group[0]))
    values = []
    places = ([], [], [])
    for _ in range(passes):
        values.append(new_slots(shape, chunk, groups[0][0], operands.value_cache.dtype))
        for of_passes in places:
            of_passes.append(tile((chunk.partitions, chunk.segments), nl.int32) if shape.block_size > 0 else None)
    keys, moving = keys_of_passes(shape, chunk, groups, operands, passes)
    return Room(queries, windows, places[0], places[1], places[2], keys, moving, values)


def keys_of_passes(shape, chunk, groups, operands, passes):
    keys = []
    moving = []
    for _ in range(passes):
        keys.append(new_keys(shape, chunk, groups[0][0], operands.key_cache.dtype))
        moving.append(new_moving_keys(shape, chunk, groups[0][0]))
    return keys, moving


def with_own_keys(shape, chunk, groups, operands, room):
    """The same room, but for keys, which come in another shape."""
    keys, moving = keys_of_passes(shape, chunk, groups, operands, len(room.keys))
    return Room(room.queries, room.windows, room.next_places, room.places, room.value_places, keys, moving, room.values)


def clear_room(room):
    """Zeros everywhere: a loop that fetches may run no time, a gather that skips a run leaves what was."""
    clear((room.queries, room.windows, room.next_places, room.places, room.value_places, room.values))
    clear(room.keys)


def clear(tiles):
    """Zeros in a tile, or in all of a list."""
    if isinstance(tiles, (list, tuple)):
        for one in tiles:
            clear(one)
    elif tiles != None:  # noqa: E711
        nisa.memset(dst=tiles, value=0 if tiles.dtype == nl.int32 else 0.0, engine=nisa.engine.gpsimd)


def fetch_rows(shape, groups, operands, room, current):
    """Queries and windows of all groups."""
    for g in range(len(groups)):
        for t in range(len(groups[g])):
            fetch_queries(shape, groups[g][t], operands.query, current, room.queries[g][t])
        if has_window(operands):
            fetch_window(shape, groups[g][0], operands.key, operands.value, current, room.windows[g])


def fetch_all_places(chunk, runs, room, passes):
    """Where the runs of the passes after the next lie; `runs` as list_runs leaves them, None unless paged."""
    if runs != None:  # noqa: E711
        for turn in range(len(passes)):
            fetch_places(chunk, runs, 0, passes[turn].value_index, room.next_places[turn])


def take_places(room):
    """The passes that come next are those after."""
    for turn in range(len(room.places)):
        if room.places[turn] != None:  # noqa: E711
            nisa.tensor_copy(dst=room.places[turn], src=room.next_places[turn], engine=nisa.engine.scalar)


def skip_dead(shape, chunk, slot, operands, room, current, turn):
    """Runs of pass `turn` of an item without a live slot are not loaded."""
    cache_rows = operands.value_cache.size // row_elements(shape, chunk.run)
    skip_dead_runs(chunk, slot, cache_rows, current, room.places[turn])


def fetch_pass_keys(shape, chunk, rows, operands, room, current, turn):
    """Keys of the pass `current` for the heads of row tiles like `rows`, into the room of pass `turn` of an item."""
    keys = own_heads(room.keys[turn], rows)
    fetch_keys(shape, chunk, rows, operands.key_cache, current, room.places[turn], keys)


def fetch_pass_values(shape, chunk, rows, operands, room, current, turn):
    """The same for values, from `value_places`."""
    values = own_heads(room.values[turn], rows)
    places = room.value_places[turn]
    fetch_slots(shape, chunk, rows, operands.value_cache, current, current.value_index, places, values)


def keep_places(room, turn):
    """Places for the values of a pass: those of the next item may be taken before they are fetched."""
    nisa.tensor_copy(dst=room.value_places[turn], src=room.places[turn], engine=nisa.engine.scalar)


def own_heads(tiles, rows):
    """The part of a pass's tiles that rows like `rows` need: a last group may have fewer heads than the others."""
    own = []
    for one in tiles:
        own.append(own_heads(one, rows) if isinstance(one, list) else one[:, 0 : rows.heads])
    return own
