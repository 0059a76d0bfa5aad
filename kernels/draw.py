"""The draw of one id a sequence from masses on the chip: first its group, then the id inside it."""

import nki.isa as nisa
import nki.language as nl

from .vocabulary import (
    NUM_GROUPS,
    floats,
    group_size,
    tensor_scalar,
    transpose,
)

PSUM_COLUMNS = 512  # fp32 values of a bank, the most one matmul writes
BELOW_ONE = 1.0 - 2.0**-23  # times a total: the largest usable target of an inverse CDF, below every fp32 total


def load_uniforms(uniforms, first, count):
    """[B, 2]: the last two columns of `uniforms` [B, T + 1], which draw the group and the id."""
    columns = uniforms.shape[1]
    uniform = floats((count, 2))
    nisa.dma_copy(dst=uniform, src=uniforms[first : first + count, columns - 2 : columns])
    return uniform


def draw(laws, uniform, vocab_size):
    """[B, 1]: one id a sequence, first its group, then the id inside it.

    Args:
        laws: (masses, groups, use) tuples, of which `use` [B, 1] flags one a sequence: masses [128, B, size] fp32 of
            the ids, all finite, and their sums over the lanes [B, 128].
        uniform: [B, 2], for the group and for the id.
    """
    count = uniform.shape[0]
    size = group_size(vocab_size)
    groups = floats((count, NUM_GROUPS))
    nisa.memset(dst=groups, value=0.0)
    for entry in laws:
        _, law_groups, use = entry
        nisa.scalar_tensor_tensor(
            dst=groups, data=law_groups, op0=nl.multiply, operand0=use, op1=nl.add, operand1=groups
        )
    group = inverse_cdf(groups, uniform[:, 0:1])

    # The chosen group's masses of every sequence, [B, size]: a product with one-hot columns, column b of the b-th
    # factor picking from sequence b's tile. Exact if the fp32 Tensor engine multiplies by 1 exactly; if not
    # (UNVERIFIED), still within its rounding, and zero stays zero.
    numbers = floats((count, NUM_GROUPS))
    nisa.iota(dst=numbers, pattern=[[1, NUM_GROUPS]], offset=0, channel_multiplier=0)
    pickers = []
    for entry in laws:
        _, _, use = entry
        chosen = transpose(tensor_scalar(numbers, nl.equal, group, nl.multiply, use))
        picker = floats((NUM_GROUPS, count, count))
        nisa.memset(dst=picker, value=0.0)
        nisa.tensor_copy(dst=picker.ap(pattern=[[count * count, NUM_GROUPS], [count + 1, count]], offset=0), src=chosen)
        pickers.append(picker)
    masses = floats((count, size))
    for start in range(0, size, PSUM_COLUMNS):
        stop = min(start + PSUM_COLUMNS, size)
        picked = nl.ndarray((count, stop - start), dtype=nl.float32, buffer=nl.psum)
        for sequence in range(count):
            for law in range(len(laws)):
                nisa.nc_matmul(
                    dst=picked,
                    stationary=pickers[law][:, sequence],
                    moving=laws[law][0][:, sequence, start:stop],
                    accumulate=sequence + law > 0,
                )
        nisa.tensor_copy(dst=masses[:, start:stop], src=picked)

    column = inverse_cdf(masses, uniform[:, 1:2])
    token = floats((count, 1))
    nisa.scalar_tensor_tensor(dst=token, data=group, op0=nl.multiply, operand0=float(size), op1=nl.add, operand1=column)
    return token


def inverse_cdf(masses, uniform):
    """The first index whose cumulative mass exceeds uniform times the total, so never one of zero mass.

    Args:
        masses: [n, m] fp32, SBUF; not negative, some positive in each row. Overwritten.
        uniform: [n, 1] fp32 in [0, 1).

    Returns:
        [n, 1] fp32.
    """
    count, columns = masses.shape
    target = floats((count, 1))
    index = floats((count, 1))
    # max(mass + sum so far, mass) is the sum: the second operand costs no tile of ones or zeros.
    nisa.tensor_tensor_scan(dst=masses, data0=masses, data1=masses, initial=0.0, op0=nl.add, op1=nl.maximum)
    total = masses[:, columns - 1 : columns]
    nisa.tensor_tensor(dst=target, data1=total, data2=uniform, op=nl.multiply)
    # A uniform of 1 (only a device lets one through) must not run past the last id.
    nisa.scalar_tensor_tensor(
        dst=target, data=total, op0=nl.multiply, operand0=BELOW_ONE, op1=nl.minimum, operand1=target
    )
    nisa.tensor_scalar_reduce(
        dst=masses,
        data=masses,
        op0=nl.less_equal,
        operand0=target,
        reduce_op=nl.add,
        reduce_res=index,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    return index
