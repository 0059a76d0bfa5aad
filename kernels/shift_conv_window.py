"""shift_conv_window: the inputs that a causal convolution sees next, after the last accepted row."""

import nki
import nki.isa as nisa
import nki.language as nl

MAX_TILE = 8192  # elements a partition at a time


@nki.jit
def shift_conv_window(history, num_accepted, num_rows):
    """history [B, C, W - 1 + T], num_accepted [B] int32 -> history[b, :, n + 1 .. n + W - 1], 0 for an empty slot.

    The shift is data: one gather on the chip, for all sequences and channels at once, instead of dynamic addresses
    (about 600 cycles a sequence) or descriptors of W - 1 elements.
    """
    batch, channels, length = history.shape
    width = length - num_rows
    parts = 1
    for candidate in range(2, nl.tile_size.pmax + 1):
        if channels % candidate == 0:
            parts = candidate
    part = channels // parts
    output = nl.ndarray((batch, channels, width), dtype=history.dtype, buffer=nl.shared_hbm)
    source = history.reshape((batch, parts, part, length)).permute((1, 0, 2, 3))
    target = output.reshape((batch, parts, part, width)).permute((1, 0, 2, 3))

    cores = nl.num_programs(0)
    step = max(1, min(-(-batch // cores), MAX_TILE // (part * length)))
    for first in range(nl.program_id(0) * step, batch, cores * step):
        count = min(step, batch - first)
        rows = nl.ndarray((parts, count, part, length), dtype=history.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=rows, src=source[:, first : first + count])
        accepted = nl.ndarray((parts, count), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=accepted, src=num_accepted.ap(pattern=[[0, parts], [1, count]], offset=first))

        # What is out of range, an empty slot's -1 among it, is clamped here and left out below.
        shift = nl.ndarray((parts, count), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=shift, data=accepted, op0=nl.maximum, operand0=0.0, op1=nl.minimum, operand1=float(num_rows - 1)
        )
        live = nl.ndarray((parts, count), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=live, data1=shift, data2=accepted, op=nl.equal)

        shape = (parts, count, part, width)
        index = nl.ndarray(shape, dtype=nl.uint32, buffer=nl.sbuf)
        nisa.iota(dst=index, pattern=[[part * length, count], [length, part], [1, width]], offset=1)
        nisa.tensor_tensor(dst=index, data1=index, data2=each_column(shift, part, width), op=nl.add)
        gathered = nl.ndarray(shape, dtype=history.dtype, buffer=nl.sbuf)
        nisa.nc_n_gather(dst=gathered, data=rows, indices=index)
        shifted = nl.ndarray(shape, dtype=history.dtype, buffer=nl.sbuf)
        nisa.memset(dst=shifted, value=0.0)
        nisa.tensor_copy_predicated(dst=shifted, src=gathered, predicate=each_column(live, part, width))
        nisa.dma_copy(dst=target[:, first : first + count], src=shifted)
    return output


def each_column(values, part, width):
    """[parts, count] seen as [parts, count, part, width]."""
    return values.expand_dim(2).broadcast(2, part).expand_dim(3).broadcast(3, width)
