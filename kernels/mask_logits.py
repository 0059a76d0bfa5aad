"""mask_logits: logits of the ids a grammar allows, the others below all others, on the device."""

import nki
import nki.isa as nisa
import nki.language as nl

from .vocabulary import NUM_GROUPS

WORD = 32  # ids a word of the mask covers
HALF = WORD // 2
ROWS = 4  # a tile: enough to fill the Vector engine's issue interval, 20 KiB of bits a partition at 152k ids


@nki.jit
def mask_logits(logits, allowed_mask, vocab_size):
    """Ids whose bit is not set get -inf; what they held is not looked at.

    Args:
        logits: [B, T, V] fp32 or bf16.
        allowed_mask: [B, T, ceil(V / 32)] int32, id i at bit i % 32 of word i // 32.
        vocab_size: columns of V that count.

    Returns:
        [B, T, vocab_size] of the logits' dtype.
    """
    batch, rows, width = logits.shape
    masked = nl.ndarray((batch, rows, vocab_size), dtype=logits.dtype, buffer=nl.shared_hbm)
    num_rows = batch * rows
    words_width = allowed_mask.shape[2]
    # A lane holds whole words, so that bits and logits of an id meet on it.
    num_words = (vocab_size + WORD - 1) // WORD
    lane_words = (num_words + NUM_GROUPS - 1) // NUM_GROUPS
    lane_ids = lane_words * WORD
    first = num_rows * nl.program_id(0) // nl.num_programs(0)
    end = num_rows * (nl.program_id(0) + 1) // nl.num_programs(0)
    for start in range(first, end, ROWS):
        count = min(ROWS, end - start)
        words = nl.ndarray((NUM_GROUPS, count, lane_words), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=words, value=0)
        move(words, allowed_mask, start, count, num_words, words_width, True)
        # In half words, since a predicate has 16 bits at most.
        bits = nl.ndarray((NUM_GROUPS, count, 2 * lane_words, HALF), dtype=nl.uint16, buffer=nl.sbuf)
        for bit in range(HALF):
            nisa.tensor_scalar(
                dst=bits[:, :, :, bit],
                data=words.view(nl.uint16),
                op0=nl.right_shift,
                operand0=bit,
                op1=nl.bitwise_and,
                operand1=1,
            )
        values = nl.ndarray((NUM_GROUPS, count, lane_ids), dtype=logits.dtype, buffer=nl.sbuf)
        nisa.memset(dst=values, value=0.0)
        move(values, logits, start, count, vocab_size, width, True)
        nisa.select_reduce(
            dst=values,
            predicate=bits.reshape((NUM_GROUPS, count, lane_ids)),
            on_true=values,
            on_false=float("-inf"),
            reduce_cmd=nisa.reduce_cmd.idle,
        )
        move(values, masked, start, count, vocab_size, vocab_size, False)
    return masked


def move(tile, rows, first, count, length, stride, load):
    """`tile` [128, count, n] from (or to) `length` values of each of `count` rows, n of them on each lane.

    `rows` is [.., stride] in HBM; the last lanes may hold fewer values, or none.
    """
    _, _, size = tile.shape
    full = length // size
    rest = length - full * size
    pieces = []
    if full > 0:
        pieces.append((tile[0:full], [[size, full], [stride, count], [1, size]], 0))
    if rest > 0:
        pieces.append((tile[full : full + 1, :, 0:rest], [[size, 1], [stride, count], [1, rest]], full * size))
    for piece in pieces:
        part, pattern, offset = piece
        in_hbm = rows.ap(pattern=pattern, offset=first * stride + offset)
        if load:
            nisa.dma_copy(dst=part, src=in_hbm)
        else:
            nisa.dma_copy(dst=in_hbm, src=part)
