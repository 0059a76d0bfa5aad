"""top-k, top-p and min-p as one threshold a row: the ids that stay are those whose logit is not below it.

Both searches ask for the largest value v such that the entries not below v weigh at least a goal: their number k, or
the share p of the mass. v is built bit by bit on rows that lie on the chip; nothing is sorted and HBM is not read.
"""

import nki.isa as nisa
import nki.language as nl

from .chain import over_rows, select
from .vocabulary import FILL, NUM_GROUPS, floats, tensor_scalar, tensor_tensor

FIRST_BIT = 1 << 30  # of a float's magnitude
SMALLEST_MIN_P = 2.0**-60  # 0 switches min-p off; ln is defined above 2^-64
TOP_K, TOP_P, LOG_MIN_P, PARAMETERS = 0, 1, 2, 3


def row_parameters(top_k, top_p, min_p, heat, rows, vocab_size):
    """[1, PARAMETERS, B, rows] fp32 from [1, B] each: k and p, 0 where they are off, and T * ln(min_p), FILL if off."""
    _, count = heat.shape
    below = tensor_scalar(top_k, nl.less, float(vocab_size))
    keep_k = tensor_scalar(top_k, nl.maximum, 0.0)
    nisa.tensor_tensor(dst=keep_k, data1=keep_k, data2=below, op=nl.multiply)
    keep_p = tensor_scalar(top_p, nl.less, 1.0)
    nisa.tensor_tensor(dst=keep_p, data1=keep_p, data2=top_p, op=nl.multiply)
    log_p = tensor_scalar(min_p, nl.maximum, SMALLEST_MIN_P)
    nisa.activation(dst=log_p, op=nl.log, data=log_p)
    nisa.tensor_tensor(dst=log_p, data1=log_p, data2=heat, op=nl.multiply)
    log_p = select(tensor_scalar(min_p, nl.greater, 0.0), log_p, FILL)
    parameters = floats((1, PARAMETERS, count, rows))
    nisa.tensor_copy(dst=parameters[:, TOP_K], src=over_rows(keep_k, rows))
    nisa.tensor_copy(dst=parameters[:, TOP_P], src=over_rows(keep_p, rows))
    nisa.tensor_copy(dst=parameters[:, LOG_MIN_P], src=over_rows(log_p, rows))
    return parameters


def truncate(tile, masses, peak, thresholds, parameters):
    """Thresholds [128, R] of rows `tile` [128, R, width]; clears the masses of the ids that go.

    Args:
        masses: [128, R, width] fp32, exp((x - peak) / T); changed.
        peak: [128, R] fp32, the row's largest entry on every lane.
        thresholds: [128, R] fp32, written, the same on every lane.
        parameters: PARAMETERS tiles [128, R] of `row_parameters`, on every lane.
    """
    ones = floats((NUM_GROUPS, NUM_GROUPS))
    nisa.memset(dst=ones, value=1.0)
    top_k, top_p = parameters[TOP_K], parameters[TOP_P]
    found = largest_reaching(tile, masses, False, top_k, ones)
    nisa.tensor_copy(dst=thresholds, src=select(tensor_scalar(top_k, nl.greater, 0.0), found, FILL))
    clear_below(tile, masses, thresholds)

    sums = floats(peak.shape)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=masses, axis=2)
    total = over_lanes(sums, ones)
    found = largest_reaching(tile, masses, True, tensor_tensor(total, top_p, nl.multiply), ones)
    found = select(tensor_scalar(top_p, nl.greater, 0.0), found, FILL)
    nisa.tensor_tensor(dst=thresholds, data1=thresholds, data2=found, op=nl.maximum)
    found = tensor_tensor(peak, parameters[LOG_MIN_P], nl.add)
    nisa.tensor_tensor(dst=thresholds, data1=thresholds, data2=found, op=nl.maximum)
    clear_below(tile, masses, thresholds)


def largest_reaching(tile, masses, by_mass, goal, ones):
    """[128, R]: the largest value v such that the entries >= v have at least `goal` > 0 in number or in mass.

    FILL where all finite entries together do not reach it. The bits of v come from the top: first its sign, which
    says whether its other bits count up or down with v. bf16 rows need the upper 16 only.
    """
    _, num_rows, _ = tile.shape
    key = nl.ndarray((NUM_GROUPS, num_rows), dtype=nl.int32, buffer=nl.sbuf)
    trial = nl.ndarray((NUM_GROUPS, num_rows), dtype=nl.int32, buffer=nl.sbuf)
    flip = nl.ndarray((NUM_GROUPS, num_rows), dtype=nl.int32, buffer=nl.sbuf)
    bit = nl.ndarray((NUM_GROUPS, num_rows), dtype=nl.int32, buffer=nl.sbuf)
    reached = nl.ndarray((NUM_GROUPS, num_rows), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.memset(dst=key, value=0)
    nisa.memset(dst=trial, value=0)
    nisa.memset(dst=bit, value=FIRST_BIT)
    nisa.memset(dst=flip, value=-1)

    reaches(reached, tile, masses, by_mass, trial, goal, ones)
    nisa.tensor_copy_predicated(dst=flip, src=key, predicate=reached)

    def try_bit(trip):
        nisa.tensor_tensor(dst=trial, data1=key, data2=bit, op=nl.bitwise_or)
        value = nl.ndarray((NUM_GROUPS, num_rows), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=value, data1=trial, data2=flip, op=nl.bitwise_xor)
        reaches(reached, tile, masses, by_mass, value, goal, ones)
        nisa.tensor_copy_predicated(dst=key, src=trial, predicate=reached)
        nisa.tensor_scalar(dst=bit, data=bit, op0=nl.right_shift, operand0=1)

    first = nisa.register_alloc(0)
    nl.fori_loop(first, 31 if tile.dtype == nl.float32 else 15, try_bit)
    nisa.tensor_tensor(dst=key, data1=key, data2=flip, op=nl.bitwise_xor)
    value = key.view(nl.float32)
    return select(tensor_scalar(value, nl.greater_equal, FILL), value, FILL)


def reaches(reached, tile, masses, by_mass, value, goal, ones):
    """Flags [128, R] uint32: the entries not below `value` (a float's bits, int32) reach `goal`."""
    _, num_rows, width = tile.shape
    bound = value.view(nl.float32)
    sums = floats((NUM_GROUPS, num_rows))
    for row in range(num_rows):
        above = floats((NUM_GROUPS, width))
        if by_mass:
            nisa.scalar_tensor_tensor(
                dst=above,
                data=tile[:, row],
                op0=nl.greater_equal,
                operand0=bound[:, row : row + 1],
                op1=nl.multiply,
                operand1=masses[:, row],
            )
            nisa.tensor_reduce(dst=sums[:, row : row + 1], op=nl.add, data=above, axis=1)
        else:
            nisa.tensor_scalar_reduce(
                dst=above,
                data=tile[:, row],
                op0=nl.greater_equal,
                operand0=bound[:, row : row + 1],
                reduce_op=nl.add,
                reduce_res=sums[:, row : row + 1],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )
    nisa.tensor_tensor(dst=reached, data1=over_lanes(sums, ones), data2=goal, op=nl.greater_equal)


def over_lanes(values, ones):
    """Sums of [128, n] over the lanes, on every lane; `ones` is [128, 128]."""
    sums = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=ones, moving=values, accumulate=False)
    result = floats(values.shape)
    nisa.tensor_copy(dst=result, src=sums)
    return result


def clear_below(tile, masses, thresholds):
    """Masses [128, R, width] of the entries of `tile` below their row's threshold [128, R] become 0."""
    _, num_rows, _ = tile.shape
    for row in range(num_rows):
        nisa.scalar_tensor_tensor(
            dst=masses[:, row],
            data=tile[:, row],
            op0=nl.greater_equal,
            operand0=thresholds[:, row : row + 1],
            op1=nl.multiply,
            operand1=masses[:, row],
        )
