"""Paged caches: where the runs of a pass lie, by the block table.

A run is what one descriptor moves: consecutive tokens of one head, or, where a token's heads are contiguous ("NPHD"),
of all of them. A pass gathers a run a partition.
"""

import nki.isa as nisa
import nki.language as nl

from .attention_plan import PARTITIONS, head_parts, psum, tile

EXACT_IN_FP32 = 1 << 24  # integers up to this


def load_table(shape, block_table, parts=0):
    """The block table as [B * n, M / n] int32, each sequence's on n partitions: on `parts`, or, if that is 0, as many
    as there are."""
    if parts == 0:
        parts = PARTITIONS // shape.batch
        while shape.table_size % parts > 0:
            parts -= 1
    blocks = tile((block_table.shape[0] * parts, shape.table_size // parts), nl.int32)
    nisa.dma_copy(dst=blocks, src=block_table.reshape(blocks.shape))
    return blocks


def count_bad_blocks(shape, blocks, num_blocks, cached):
    """[128, B] fp32: how many of the blocks that hold a sequence's first `cached` [128, B] positions do not exist."""
    partitions, columns = blocks.shape
    parts = partitions // shape.batch
    # Slots are counted on over the sequences; a sequence's last one goes to each of its partitions.
    across = tile((1, shape.batch, parts))
    nisa.iota(dst=across, pattern=[[shape.slots, shape.batch], [0, parts]], offset=0, channel_multiplier=0)
    ends = cached[0:1].expand_dim(2).broadcast(2, parts)
    nisa.tensor_tensor(dst=across, data1=across, data2=ends, op=nl.add)
    end = psum((partitions, 1))
    nisa.nc_transpose(dst=end, data=across.reshape((1, partitions)), engine=nisa.engine.tensor)
    slot = tile(blocks.shape)
    bad = tile(blocks.shape)
    count = tile((partitions, 1))
    nisa.iota(
        dst=slot,
        pattern=[[shape.block_size, columns]],
        offset=0,
        channel_multiplier=columns * shape.block_size,
    )
    nisa.tensor_scalar(dst=bad, data=blocks, op0=nl.less, operand0=0.0)
    nisa.scalar_tensor_tensor(
        dst=bad, data=blocks, op0=nl.greater_equal, operand0=float(num_blocks), op1=nl.add, operand1=bad
    )
    nisa.scalar_tensor_tensor(dst=bad, data=slot, op0=nl.less, operand0=end, op1=nl.multiply, operand1=bad)
    nisa.tensor_reduce(dst=count, op=nl.add, data=bad, axis=1)

    # Column b sums the partitions of sequence b, on every partition.
    own = tile((partitions, shape.batch))
    upper = tile((partitions, shape.batch))
    ones = tile((partitions, PARTITIONS))
    counts = psum((PARTITIONS, shape.batch))
    nisa.iota(dst=own, pattern=[[-parts, shape.batch]], offset=0, channel_multiplier=1)
    nisa.tensor_scalar(dst=upper, data=own, op0=nl.less, operand0=float(parts), op1=nl.multiply, operand1=count)
    nisa.scalar_tensor_tensor(dst=own, data=own, op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=upper)
    nisa.memset(dst=ones, value=1.0)
    nisa.nc_matmul(dst=counts, stationary=ones, moving=own, accumulate=False)
    return counts


def locate_runs(shape, run, blocks, num_blocks):
    """[B * n, M / n, runs of a block]: the cache row where each run of head 0 begins; `blocks` as load_table left them.
    Those that do not exist are taken for the nearest one that does: keys may be gathered before any check."""
    per_block = shape.block_size // run
    partitions, columns = blocks.shape
    dtype = located_dtype(shape, run, num_blocks)
    existing = tile(blocks.shape, dtype)
    nisa.tensor_scalar(
        dst=existing, data=blocks, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(num_blocks - 1)
    )
    rows = existing.reshape((partitions, columns, 1))
    size = (partitions, columns, per_block)
    step = per_block * heads_of_block(shape)
    if step == 1:
        return rows
    rows = rows.broadcast(2, per_block)
    offset = tile(size, dtype)
    located = tile(size, dtype)
    nisa.iota(dst=offset, pattern=[[0, columns], [1, per_block]], offset=0, channel_multiplier=0)
    if dtype == nl.float32:
        nisa.scalar_tensor_tensor(
            dst=located, data=rows, op0=nl.multiply, operand0=float(step), op1=nl.add, operand1=offset
        )
        return located
    scale = tile(size, dtype)
    nisa.memset(dst=scale, value=step)
    nisa.tensor_tensor(dst=located, data1=rows, data2=scale, op=nl.multiply)
    nisa.tensor_tensor(dst=located, data1=located, data2=offset, op=nl.add)
    return located


def heads_of_block(shape):
    """Cache rows of as many runs of a block as it has tokens of one head."""
    return shape.heads if shape.cache_layout == "NHPD" else 1


def located_dtype(shape, run, num_blocks):
    """fp32 where locate_runs is exact in it: GpSimd, whose int32 maths is exact, has gathers to describe."""
    rows = num_blocks * (shape.block_size // run) * heads_of_block(shape)
    return nl.float32 if rows <= EXACT_IN_FP32 else nl.int32


def list_runs(rows, room):
    """[n, 1] int32 in HBM: `rows`, as locate_runs leaves them, then what passes may take for runs of the last sequence,
    `room` of them."""
    listed = nl.ndarray((rows.size + room, 1), dtype=nl.int32, buffer=nl.private_hbm)
    columns = rows.size // rows.shape[0]
    nisa.dma_copy(dst=listed.ap(pattern=[[columns, rows.shape[0]], [1, columns]]), src=rows)
    nothing = tile((1, room), nl.int32)
    nisa.memset(dst=nothing, value=0)
    nisa.dma_copy(dst=listed.ap(pattern=[[room, 1], [1, room]], offset=rows.size), src=nothing)
    return listed


def spread_runs(rows):
    """`rows`, as locate_runs leaves them in fp32, a run a partition: [runs, B * n] int32."""
    staged = psum((rows.size // rows.shape[0], rows.shape[0]))
    places = tile(staged.shape, nl.int32)
    nisa.nc_transpose(dst=staged, data=rows.flatten_dims(1, 2), engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=places, src=staged, engine=nisa.engine.scalar)
    return places


def places_from(shape, chunk, blocks, num_blocks, index):
    """As fetch_places leaves them, from run `index` [1, 1] int32 on, of a sequence with `blocks` [1, M] of a run each;
    without a DMA."""
    some = tile((1, chunk.segments, PARTITIONS))
    staged = psum((PARTITIONS, chunk.segments))
    below = tile(staged.shape)
    places = tile(staged.shape, nl.int32)
    nisa.tensor_copy(
        dst=some,
        src=blocks.ap(
            pattern=[[shape.table_size, 1], [PARTITIONS, chunk.segments], [1, PARTITIONS]],
            scalar_offset=index,
            indirect_dim=1,
        ),
        engine=nisa.engine.scalar,
    )
    for i in range(chunk.segments):
        nisa.nc_transpose(dst=staged[:, i : i + 1], data=some[:, i, :], engine=nisa.engine.tensor)
    # As locate_runs bounds them, but by the Scalar engine: Vector has lengths to check.
    step = float(heads_of_block(shape))
    last = step * (num_blocks - 1)
    nisa.activation(dst=below, op=nl.relu, data=staged, scale=-step, bias=last)
    nisa.activation(dst=places, op=nl.relu, data=below, scale=-1.0, bias=last)
    return places


def fetch_places(chunk, runs, first_run, index, places):
    """Fills `places` [partitions, segments] with the cache rows of a pass's runs, which are listed from `first_run` +
    `index` on; that is [1, 1] int32, or None for 0."""
    nisa.dma_copy(
        dst=places,
        src=runs.ap(
            pattern=[[1, chunk.partitions], [chunk.partitions, chunk.segments]],
            offset=first_run,
            scalar_offset=index,
            indirect_dim=0,
        ),
    )


def skip_dead_runs(chunk, slot, cache_rows, current, places):
    """Past the cache's last row instead of the places of runs without a live slot: a gather skips that.

    By GpSimd, which gathers next.
    """
    dead = tile(places.shape, nl.int32)
    past = tile(places.shape, nl.int32)
    end = current.end[0 : chunk.partitions].broadcast(1, chunk.segments)
    engine = nisa.engine.gpsimd
    nisa.memset(dst=past, value=cache_rows, engine=engine)
    nisa.tensor_tensor(dst=dead, data1=slot[:, :, 0], data2=end, op=nl.greater_equal, engine=engine)
    nisa.tensor_tensor(dst=dead, data1=dead, data2=past, op=nl.multiply)
    nisa.tensor_tensor(dst=places, data1=places, data2=dead, op=nl.add)


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


def fetch_transposed_runs(shape, chunk, rows, cache, places, keys):
    """Fills `keys`, a tile [part, heads, run, runs of the pass] for each part of D, from the cache rows `places`
    [partitions, segments].

    UNVERIFIED: the time it takes GpSimd to describe a row of several tokens, and the DMA engines to transpose it.
    """
    head_dim = shape.head_dim
    by_token = shape.cache_layout == "NPHD"
    row_size = row_elements(shape, chunk.run)
    head_size = head_dim * (1 if by_token else shape.block_size)
    # Heads and tokens are one axis where they lie one after the other: all heads of a token, all tokens of a head.
    together = rows.heads if (rows.heads == shape.heads if by_token else chunk.run == shape.block_size) else 1
    step = head_dim * (shape.heads if by_token and together == 1 else 1)
    parts = head_parts(head_dim)
    for i in range(len(parts)):
        first, part = parts[i]
        for head in range(0, rows.heads, together):
            own = keys[i][:, head : head + together]
            own = own.permute((0, 2, 1, 3)) if by_token else own
            nisa.dma_transpose(
                dst=own.flatten_dims(1, 2).expand_dim(1),
                src=cache.reshape((cache.size // row_size, row_size)).ap(
                    pattern=[
                        [row_size, chunk.segments * chunk.partitions],
                        [1, 1],
                        [step, together * chunk.run],
                        [1, part],
                    ],
                    offset=(rows.first_head + head) * head_size + first,
                    vector_offset=places.view(nl.uint32),
                    indirect_dim=0,
                ),
                axes=(3, 1, 2, 0),
            )
