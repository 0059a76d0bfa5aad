"""Row num_accepted[b] of each sequence of [B, T, ...]: what select_state and select_hidden share."""

import nki.isa as nisa
import nki.language as nl

from .cache_rows import (
    ABSENT,
    constant,
    load_lengths,
    not_negative,
    on_partitions,
    row_indices,
    row_numbers,
    row_tiles,
)

MIN_PART = 1024  # elements of a descriptor, 2 KiB or more: shorter ones waste DMA time
MAX_PIECE = 4096  # elements a partition at a time: 16 KiB in fp32, so that several pieces fit beside each other


def select_rows(source, num_accepted):
    """Copies source[b, num_accepted[b]] to output [B, ...]; 0 where num_accepted is not in 0..T-1.

    A row is cut into parts, each on its own partition, so that even one sequence's row is shared by all DMA queues.
    """
    batch = source.shape[0]
    window = source.shape[1]
    output_shape = [batch]
    output_shape.extend(source.shape[2:])
    output = nl.ndarray(tuple(output_shape), dtype=source.dtype, buffer=nl.shared_hbm)

    row_elements = output.size // batch
    parts = num_parts(row_elements)
    part = row_elements // parts
    source_rows = source.reshape((batch * window * parts, part))
    output_rows = output.reshape((batch * parts, part))

    # Both cores of a pair share every row: each takes every other piece of its parts.
    piece = min(MAX_PIECE, -(-part // nl.num_programs(0)))
    pieces = -(-part // piece)
    if nl.program_id(0) >= pieces:
        return output
    indices = part_indices(num_accepted, window, parts)
    for tile in row_tiles(batch, 1, parts):
        sequence, sequences, _, _ = tile
        count = sequences * parts
        index = on_partitions(indices, tile)
        for turn in range(nl.program_id(0), pieces, nl.num_programs(0)):
            start = turn * piece
            size = min(piece, part - start)
            buffer = nl.ndarray((count, size), dtype=source.dtype, buffer=nl.sbuf)
            nisa.memset(dst=buffer, value=0.0, engine=nisa.engine.vector)
            nisa.dma_copy(
                dst=buffer,
                src=source_rows.ap(
                    pattern=[[part, count], [1, size]], offset=start, vector_offset=index, indirect_dim=0
                ),
                oob_mode=nisa.oob_mode.skip,
            )
            first = sequence * parts
            nisa.dma_copy(dst=output_rows[first : first + count, start : start + size], src=buffer)
    return output


def num_parts(row_elements):
    """The most equal parts of MIN_PART elements or more that 128 partitions can hold."""
    parts = 1
    for candidate in range(2, nl.tile_size.pmax + 1):
        if row_elements % candidate == 0 and row_elements // candidate >= MIN_PART:
            parts = candidate
    return parts


def part_indices(num_accepted, window, parts):
    """[B, 1, parts, 1] int32: the parts of row num_accepted[b] among those of all rows, out of range for no row."""
    accepted = load_lengths(num_accepted)
    batch = accepted.shape[0]
    first = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=first, data=accepted, op0=nl.multiply, operand0=float(parts))
    index = nl.ndarray((batch, parts), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=index, data1=row_numbers(batch, parts), data2=first.broadcast(1, parts), op=nl.add)

    exists = nl.ndarray((batch, 1), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=exists,
        data=accepted,
        op0=nl.less,
        operand0=float(window),
        op1=nl.multiply,
        operand1=not_negative(accepted),
    )
    result = constant((batch, 1, parts, 1), ABSENT)
    row_indices(result[:, :, :, 0], index, exists.broadcast(1, parts), 0, window * parts)
    return result
