"""Paged caches: where the runs of a pass lie, by the block table.

A run is what one descriptor moves: consecutive tokens of one head, or, where a token's heads are contiguous ("NPHD"),
of all of them. A pass gathers a run a partition.
"""

from typing import NamedTuple

import nki.isa as nisa
import nki.language as nl

from .attention_plan import tile


class Runs(NamedTuple):
    """What no pass changes."""

    entry: object  # [partitions, segments] fp32: which of the pass's blocks a partition's run lies in
    offset: object  # [partitions, 1] int32: number of the run in its block
    slot: object  # [partitions, segments, run] fp32: number of each slot of the pass


def runs_of(shape, chunk, slot):
    """The runs of passes over whole blocks."""
    runs = shape.block_size // chunk.run  # of a block
    blocks = chunk.partitions // runs  # of a segment
    entry = tile((chunk.partitions, chunk.segments))
    offset = tile((chunk.partitions, 1), nl.int32)
    entries = tile((1, blocks, runs, chunk.segments))
    offsets = tile((1, blocks, runs), nl.int32)
    nisa.iota(
        dst=entries,
        pattern=[[1, blocks], [0, runs], [blocks, chunk.segments]],
        offset=chunk.first // shape.block_size,
        channel_multiplier=0,
    )
    nisa.iota(dst=offsets, pattern=[[0, blocks], [1, runs]], offset=0, channel_multiplier=0)
    nisa.dma_copy(dst=entry, src=entries)
    nisa.dma_copy(dst=offset, src=offsets)
    return Runs(entry, offset, slot)


def rows_per_block(shape, chunk):
    """Runs of a block, those of all heads where each has its own."""
    return shape.block_size // chunk.run * (shape.heads if shape.cache_layout == "NHPD" else 1)


def find_runs(shape, chunk, runs, block_table, num_blocks, current):
    """For each segment [partitions, 1] int32, the cache row of each partition's run of head 0; one past the last row
    where none of its slots is live: a gather skips that."""
    entries = block_table.shape[0] * block_table.shape[1]
    size = (chunk.partitions, 1)
    block_rows = rows_per_block(shape, chunk)
    scale = tile(size, nl.int32)
    nisa.memset(dst=scale, value=block_rows)
    found = []
    for segment in range(chunk.segments):
        entry = tile(size, nl.int32)
        block = tile(size, nl.int32)
        nisa.tensor_scalar(
            dst=entry,
            data=runs.entry[:, segment : segment + 1],
            op0=nl.add,
            operand0=current.block[0 : chunk.partitions],
            op1=nl.minimum,
            operand1=float(entries - 1),
        )
        nisa.dma_copy(
            dst=block,
            src=block_table.reshape((entries, 1)).ap(
                pattern=[[1, chunk.partitions], [1, 1]], vector_offset=entry, indirect_dim=0
            ),
        )
        row = tile(size, nl.int32)
        nisa.tensor_tensor(dst=row, data1=block, data2=scale, op=nl.multiply)
        nisa.tensor_tensor(dst=row, data1=row, data2=runs.offset, op=nl.add)

        live = tile(size, nl.uint8)
        place = tile(size, nl.int32)
        nisa.tensor_scalar(
            dst=live,
            data=runs.slot[:, segment, 0:1],
            op0=nl.less,
            operand0=current.end[0 : chunk.partitions],
        )
        nisa.memset(dst=place, value=num_blocks * block_rows)
        nisa.tensor_copy_predicated(dst=place, src=row, predicate=live)
        found.append(place)
    return found


def load_runs(shape, chunk, rows, cache, place):
    """A segment of a paged cache: [partitions, heads, run, D], zeros where nothing is live."""
    head_dim = shape.head_dim
    run_size = chunk.run * head_dim
    per_token = shape.cache_layout == "NPHD"
    if per_token:
        loaded = tile((chunk.partitions, chunk.run, rows.heads, head_dim), cache.dtype)
        row_size = shape.heads * run_size
        pattern = [
            [row_size, chunk.partitions],
            [shape.heads * head_dim, chunk.run],
            [1, rows.heads * head_dim],
        ]
        offset = rows.first_head * head_dim
    else:
        loaded = tile((chunk.partitions, rows.heads, chunk.run, head_dim), cache.dtype)
        row_size = run_size
        pattern = [[row_size, chunk.partitions], [shape.block_size * head_dim, rows.heads], [1, run_size]]
        offset = rows.first_head * shape.block_size * head_dim
    nisa.memset(dst=loaded, value=0.0, engine=nisa.engine.gpsimd)
    nisa.dma_copy(
        dst=loaded,
        src=cache.reshape((cache.size // row_size, row_size)).ap(
            pattern=pattern, offset=offset, vector_offset=place, indirect_dim=0
        ),
        oob_mode=nisa.oob_mode.skip,
    )
    return loaded.permute((0, 2, 1, 3)) if per_token else loaded
