"""Paged caches: where the runs of a pass lie, by the block table.

A run is what one descriptor moves: consecutive tokens of one head, or, where a token's heads are contiguous ("NPHD"),
of all of them. A pass gathers a run a partition.
"""

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PARTITIONS, tile


def list_runs(shape, chunk, block_table):
    """[n, 1] int32 in HBM: for each run of each sequence the cache row where head 0's begins, then room for a pass."""
    room = chunk.slots // chunk.run
    entries = shape.batch * shape.table_size
    per_block = shape.block_size // chunk.run
    partitions = min(PARTITIONS, entries)
    while entries % partitions > 0:
        partitions -= 1
    size = (partitions, entries // partitions, per_block)
    blocks = tile(size[0:2], nl.int32)
    nisa.dma_copy(dst=blocks, src=block_table.reshape(size[0:2]))
    # int32 maths: fp32 would not be exact.
    scale = tile(size, nl.int32)
    offset = tile(size, nl.int32)
    rows = tile(size, nl.int32)
    nisa.memset(dst=scale, value=per_block * (shape.heads if shape.cache_layout == "NHPD" else 1))
    nisa.iota(dst=offset, pattern=[[0, size[1]], [1, per_block]], offset=0, channel_multiplier=0)
    nisa.tensor_tensor(dst=rows, data1=blocks.expand_dim(2).broadcast(2, per_block), data2=scale, op=nl.multiply)
    nisa.tensor_tensor(dst=rows, data1=rows, data2=offset, op=nl.add)

    listed = nl.ndarray((entries * per_block + room, 1), dtype=nl.int32, buffer=nl.private_hbm)
    columns = size[1] * per_block
    nisa.dma_copy(dst=listed.ap(pattern=[[columns, partitions], [1, columns]]), src=rows)
    # Passes over the last sequence may reach past its runs.
    nothing = tile((1, room), nl.int32)
    nisa.memset(dst=nothing, value=0)
    nisa.dma_copy(dst=listed.ap(pattern=[[room, 1], [1, room]], offset=entries * per_block), src=nothing)
    return listed


def fetch_places(chunk, runs, current, places):
    """Fills `places` [partitions, segments] with the cache rows of a pass's runs."""
    nisa.dma_copy(
        dst=places,
        src=runs.ap(
            pattern=[[1, chunk.partitions], [chunk.partitions, chunk.segments]],
            scalar_offset=current.value_index,
            indirect_dim=0,
        ),
    )


def skip_dead_runs(chunk, slot, cache_rows, current, places):
    """One past the cache's last row instead of the places of runs without a live slot: a gather skips that."""
    dead = tile(places.shape, nl.uint8)
    nisa.tensor_scalar(dst=dead, data=slot[:, :, 0], op0=nl.greater_equal, operand0=current.end[0 : chunk.partitions])
    nisa.tensor_copy_predicated(dst=places, src=cache_rows, predicate=dead)


def row_elements(shape, run):
    """Elements of a cache row, of which a gather takes one or, of several heads, some."""
    return run * shape.head_dim * (shape.heads if shape.cache_layout == "NPHD" else 1)


def fetch_runs(shape, chunk, rows, cache, place, segment):
    """Fills a segment [partitions, heads, run, D] from the cache rows `place` [partitions, 1]."""
    head_dim = shape.head_dim
    run_size = chunk.run * head_dim
    row_size = row_elements(shape, chunk.run)
    if shape.cache_layout == "NPHD":
        segment = segment.permute((0, 2, 1, 3))
        pattern = [[row_size, chunk.partitions], [shape.heads * head_dim, chunk.run], [1, rows.heads * head_dim]]
        offset = rows.first_head * head_dim
    else:
        pattern = [[row_size, chunk.partitions], [shape.block_size * head_dim, rows.heads], [1, run_size]]
        offset = rows.first_head * shape.block_size * head_dim
    nisa.dma_copy(
        dst=segment,
        src=cache.reshape((cache.size // row_size, row_size)).ap(
            pattern=pattern, offset=offset, vector_offset=place, indirect_dim=0
        ),
        oob_mode=nisa.oob_mode.skip,
    )
