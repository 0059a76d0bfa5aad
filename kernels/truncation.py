"""top-k, top-p and min-p as one threshold a row: the ids that stay are those whose logit is not below it.

top-k and top-p both ask for the largest value v such that the entries not below v weigh at least a goal: their number
k, or the share p of the mass. v is built bit by bit; nothing is sorted. The search looks at the candidates of all rows
at once, the 8 largest entries of each segment of each lane. What it finds is a row's own answer where it lies above
every entry that is no candidate. Rows where it does not are deep: they are searched whole, a few at a time, in a loop
that makes no trip when there are none.
"""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .chain import over_rows, row_numbers, select, to_int
from .vocabulary import (
    BIG_ID,
    FILL,
    LOWEST_PEAK,
    NUM_GROUPS,
    SEGMENTS,
    floats,
    tensor_scalar,
    tensor_tensor,
    transpose,
)

SMALLEST_MIN_P = 2.0**-60  # 0 switches min-p off; ln is defined above 2^-64
OFF = -FILL  # instead of k, p or what lies below the peak: nothing reaches it
KEEP_ALL = FILL / 2  # a threshold that every logit passes, and lanes without an id do not
TOP_K, TOP_P, BELOW_PEAK, PARAMETERS = 0, 1, 2, 3
SCALE, PEAK, TOTAL, VALUES = 3, 4, 5, 6  # of a row, after its parameters
THRESHOLD, MASS, BY_K, CUTS = 0, 1, 2, 3  # what a search finds: of all three, and of top-k alone
BEST8 = 8  # entries that one instruction finds, in order
GROUP_ROWS = NUM_GROUPS // BEST8  # rows whose candidates fill the partitions, one rank of 8 each
SEARCHED_ROWS = 4 * GROUP_ROWS  # at once: more would not fit beside the rows


def row_parameters(top_k, top_p, min_p, heat, rows, vocab_size):
    """[1, PARAMETERS, B * rows] fp32 from [1, B] each: k, p, and how far below its peak min-p cuts a row; or OFF."""
    _, count = heat.shape
    on_k = tensor_scalar(top_k, nl.greater, 0.0)
    below = tensor_scalar(top_k, nl.less, float(vocab_size))
    nisa.tensor_tensor(dst=on_k, data1=on_k, data2=below, op=nl.multiply)
    drop = tensor_scalar(min_p, nl.maximum, SMALLEST_MIN_P)
    nisa.activation(dst=drop, op=nl.log, data=drop)
    nisa.scalar_tensor_tensor(dst=drop, data=drop, op0=nl.multiply, operand0=-1.0, op1=nl.multiply, operand1=heat)
    limits = (
        select(on_k, top_k, OFF),
        select(tensor_scalar(top_p, nl.less, 1.0), top_p, OFF),
        select(tensor_scalar(min_p, nl.greater, 0.0), drop, OFF),
    )
    parameters = floats((1, PARAMETERS, count, rows))
    for kind in range(PARAMETERS):
        nisa.tensor_copy(dst=parameters[:, kind], src=over_rows(limits[kind], rows))
    return parameters.reshape((1, PARAMETERS, count * rows))


def lane_candidates(tile, candidates):
    """The 8 largest of each segment of each lane of rows `tile` [128, R, width] -> candidates [128, SEGMENTS, 8 R].

    A segment is every SEGMENTS-th column, since frequent ids are neighbours in most vocabularies.
    """
    _, num_rows, width = tile.shape
    for row in range(num_rows):
        for segment in range(SEGMENTS):
            nisa.max8(
                dst=candidates[:, segment, row * BEST8 : (row + 1) * BEST8], src=tile[:, row, segment:width:SEGMENTS]
            )


def candidate_maxima(candidates, maxima):
    """Largest entry of each lane of each row -> maxima [128, R] fp32, finite; `candidates` [128, SEGMENTS, 8 R]."""
    first = candidates[:, :, 0 : candidates.shape[2] : BEST8].permute((0, 2, 1))
    nisa.tensor_reduce(dst=maxima, op=nl.maximum, data=first, axis=2)
    nisa.tensor_scalar(dst=maxima, data=maxima, op0=nl.maximum, operand0=LOWEST_PEAK)


def candidate_tile(candidates):
    """[128, SEGMENTS, 8 n] -> [128, groups, SEGMENTS * 128]: partition 8 r + j holds the j-th ranks of row r of 16."""
    num_rows = candidates.shape[2] // BEST8
    groups = (num_rows + GROUP_ROWS - 1) // GROUP_ROWS
    tile = nl.ndarray((NUM_GROUPS, groups, SEGMENTS * NUM_GROUPS), dtype=candidates.dtype, buffer=nl.sbuf)
    if num_rows % GROUP_ROWS > 0:
        nisa.memset(dst=tile[:, groups - 1], value=FILL)
    for group in range(groups):
        low = group * NUM_GROUPS
        ranks = min(NUM_GROUPS, num_rows * BEST8 - low)
        turned = nl.ndarray((ranks, SEGMENTS * NUM_GROUPS), dtype=candidates.dtype, buffer=nl.psum)
        for segment in range(SEGMENTS):
            nisa.nc_transpose(
                dst=turned[:, segment * NUM_GROUPS : (segment + 1) * NUM_GROUPS],
                data=candidates[:, segment, low : low + ranks],
                engine=nisa.engine.tensor,
            )
        nisa.tensor_copy(dst=tile[0:ranks, group], src=turned, engine=nisa.engine.scalar)
    return tile


def bits_of(dtype):
    """Bits of a value after its sign that tell it from others: bf16 has the upper half of fp32's."""
    return 31 if dtype == nl.float32 else 15


def cut_candidates(cuts, deep, tile, values, num_bits):
    """Cuts [1, CUTS, m], written, and flags [1, m], written, of the deep rows, for which they may be wrong.

    Args:
        tile: of `candidate_tile`.
        values: [1, VALUES, m] of the rows; rows without a law are switched off in it.
    """
    _, groups, width = tile.shape
    num_rows = values.shape[2]
    lawless = flags_of(values[:, TOTAL], nl.greater, 0.0, nl.equal, 0.0)
    nisa.tensor_copy_predicated(
        dst=values[:, 0:PARAMETERS], src=OFF, predicate=lawless.expand_dim(1).broadcast(1, PARAMETERS)
    )
    on_ranks = to_ranks(values, groups)
    # Masses of rows without a law are 0: a NaN would reach other rows, whose sums are of one product.
    masses = floats(tile.shape)
    nisa.memset(dst=masses, value=0.0)
    lawful = flags_of(on_ranks[:, TOTAL], nl.greater, 0.0)
    for group in range(groups):
        column = slice(group, group + 1)
        exponentials = nl.ndarray((NUM_GROUPS, width), dtype=nl.float32, buffer=nl.psum)
        relative_masses(exponentials, tile[:, group], on_ranks[:, PEAK, column], on_ranks[:, SCALE, column])
        nisa.tensor_copy_predicated(
            dst=masses[:, group], src=exponentials, predicate=lawful[:, column].broadcast(1, width)
        )
    found = cut_rows(tile, masses, on_ranks, row_groups(GROUP_ROWS), num_bits)
    for kind in range(CUTS):
        of_rank(cuts[:, kind], found[kind], 0)

    least = floats((1, num_rows))
    nisa.tensor_reduce(dst=least, op=nl.minimum, data=values[:, 0:PARAMETERS].permute((0, 2, 1)), axis=2)
    on = tensor_scalar(least, nl.less, OFF)
    nisa.tensor_copy(dst=cuts[:, MASS], src=select(on, cuts[:, MASS], values[:, TOTAL]))
    # No entry that is not a candidate is above the least of the 8 in any segment.
    largest = nl.ndarray((NUM_GROUPS, groups), dtype=tile.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=tile, axis=2)
    exact = floats((NUM_GROUPS, groups))
    nisa.tensor_copy(dst=exact, src=largest, engine=nisa.engine.scalar)
    uncovered = floats((1, num_rows))
    of_rank(uncovered, exact, BEST8 - 1)
    on_k = tensor_scalar(values[:, TOP_K], nl.less, OFF)
    certain = select(on_k, cuts[:, BY_K], cuts[:, THRESHOLD])
    nisa.tensor_tensor(dst=deep, data1=certain, data2=uncovered, op=nl.less_equal)
    nisa.tensor_tensor(dst=deep, data1=deep, data2=on, op=nl.multiply)


def flags_of(values, op0, operand0, op1=None, operand1=None):
    """The comparison as uint32, for a predicate."""
    flags = nl.ndarray(values.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=flags, data=values, op0=op0, operand0=operand0, op1=op1, operand1=operand1)
    return flags


def deep_trips(deep, rows_a_trip):
    """A register: trips of `rows_a_trip` rows for all flagged in `deep` [1, n], or on the other core, if more."""
    total = floats((1, 1))
    nisa.tensor_reduce(dst=total, op=nl.add, data=deep, axis=1)
    # Rounded to the nearest whole number, this is the quotient rounded up.
    quotient = tensor_scalar(most_of_cores(total), nl.add, (rows_a_trip - 1) / 2, nl.multiply, 1 / rows_a_trip)
    trips = nisa.register_alloc()
    nisa.register_load(trips, to_int(quotient))
    return trips


def take_flag(here, deep):
    """Moves the first flag of `deep` [1, n] to `here` [1, n], written; none where there is none.

    Returns:
        [1, 1]: its place; BIG_ID without one.
    """
    places = row_numbers(1, deep.shape[1])[:, 0]
    place = floats((1, 1))
    nisa.tensor_reduce(dst=place, op=nl.minimum, data=select(deep, places, BIG_ID), axis=1)
    nisa.tensor_scalar(dst=here, data=places, op0=nl.equal, operand0=place)
    nisa.tensor_tensor(dst=deep, data1=deep, data2=here, op=nl.subtract)
    return place


def most_of_cores(value):
    """The larger of the cores' values [1, 1], so that their loops make equally many trips."""
    if nl.num_programs(0) == 1:
        return value
    shared = nl.ndarray((1, 2), dtype=nl.float32, buffer=nl.shared_hbm)
    core = nl.program_id(0)
    nisa.dma_copy(dst=shared[:, core : core + 1], src=value)
    nisa.core_barrier(data=shared, cores=(0, 1))
    both = floats((1, 2))
    nisa.dma_copy(dst=both, src=shared)
    most = floats((1, 1))
    nisa.tensor_reduce(dst=most, op=nl.maximum, data=both, axis=1)
    return most


@dataclass
class RowGroups(nl.NKIObject):
    """Which partitions hold parts of the same row: `count` equal groups of them."""

    count: int
    members: object  # [128, count] bf16, 1 where a partition belongs to a group
    together: object  # [128, 128], 1 between partitions of a group
    ones: object  # [128, 1]


def row_groups(count):
    row = floats((NUM_GROUPS, NUM_GROUPS))
    nisa.iota(dst=row, pattern=[[1, count], [0, NUM_GROUPS // count]], offset=0, channel_multiplier=0)
    together = tensor_tensor(row, transpose(row), nl.equal)
    members = nl.ndarray((NUM_GROUPS, count), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=members, src=together[:, 0 : NUM_GROUPS : NUM_GROUPS // count])
    ones = floats((NUM_GROUPS, 1))
    nisa.memset(dst=ones, value=1.0)
    return RowGroups(count, members, together, ones)


def cut_rows(tile, masses, values, groups, num_bits):
    """(THRESHOLD, MASS, BY_K), [128, R] each: the largest of the three limits' values, what it leaves, and top-k's.

    Args:
        tile: [128, R, width] entries, one row of each of the `groups` of partitions in each of R.
        masses: exp((x - peak) / T) of them.
        values: [128, VALUES, R], the rows' values on each of their partitions.
    """
    _, num_rows, width = tile.shape
    padded = (width + NUM_GROUPS - 1) // NUM_GROUPS * NUM_GROUPS
    above = nl.ndarray((NUM_GROUPS, num_rows, padded), dtype=nl.bfloat16, buffer=nl.sbuf)
    if padded > width:
        nisa.memset(dst=above[:, :, width:padded], value=0.0)
    top_k, total = values[:, TOP_K], values[:, TOTAL]
    by_k = largest_reaching(tile, None, top_k, above, groups, num_bits)
    left = select(tensor_scalar(top_k, nl.less, OFF), mass_above(tile, masses, by_k, above, groups), total)
    goal = tensor_tensor(left, values[:, TOP_P], nl.multiply)
    by_p = largest_reaching(tile, masses, goal, above, groups, num_bits)
    threshold = tensor_tensor(values[:, PEAK], values[:, BELOW_PEAK], nl.subtract)
    nisa.tensor_tensor(dst=threshold, data1=threshold, data2=by_p, op=nl.maximum)
    nisa.tensor_tensor(dst=threshold, data1=threshold, data2=by_k, op=nl.maximum)
    mass = floats(threshold.shape)
    nisa.tensor_copy(dst=mass, src=mass_above(tile, masses, threshold, above, groups))
    return threshold, mass, by_k


def largest_reaching(tile, masses, goal, above, groups, num_bits):
    """[128, R]: the largest v such that the entries >= v have at least `goal` in mass, or number without masses.

    KEEP_ALL where all entries together do not reach it. The bits of v come from the top: first its sign, which says
    whether its other bits count up or down with v.
    """
    value = nl.ndarray(goal.shape, dtype=nl.int32, buffer=nl.sbuf)
    zero = nl.ndarray(goal.shape, dtype=nl.int32, buffer=nl.sbuf)
    reached = nl.ndarray(goal.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.memset(dst=zero, value=0)
    nisa.memset(dst=value, value=-1)
    for place in range(num_bits + 1):
        trial = zero
        if place > 0:
            trial = nl.ndarray(goal.shape, dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=trial, data=value, op0=nl.bitwise_xor, operand0=1 << (31 - place))
        bound = trial.view(nl.float32)
        if masses == None:  # noqa: E711
            weighed = number_above(tile, bound, above, groups)
        else:
            weighed = mass_above(tile, masses, bound, above, groups)
        nisa.tensor_tensor(dst=reached, data1=weighed, data2=goal, op=nl.greater_equal)
        nisa.tensor_copy_predicated(dst=value, src=trial, predicate=reached)
    found = value.view(nl.float32)
    return select(tensor_scalar(found, nl.greater_equal, KEEP_ALL), found, KEEP_ALL)


def number_above(tile, bound, above, groups):
    """[128, R] in PSUM: how many of the rows' entries are not below `bound` [128, R].

    Args:
        above: [128, R, whole 128s] bf16, 0 past the width of `tile`; overwritten.
    """
    _, num_rows, width = tile.shape
    if tile.dtype == nl.float32:
        sums = floats(bound.shape)
        for row in range(num_rows):
            column = slice(row, row + 1)
            nisa.tensor_scalar_reduce(
                dst=above[:, row, 0:width],
                data=tile[:, row],
                op0=nl.greater_equal,
                operand0=bound[:, column],
                reduce_op=nl.add,
                reduce_res=sums[:, column],
                reduce_cmd=nisa.reduce_cmd.reset_reduce,
            )
        return group_sums(sums, groups)

    # 16-bit flags take a quarter of the time without the sum, which is the Tensor engine's: over the lanes of 128
    # columns at a time, then over the columns.
    by_column = nl.ndarray((NUM_GROUPS, num_rows, groups.count), dtype=nl.float32, buffer=nl.psum)
    for row in range(num_rows):
        nisa.tensor_scalar(
            dst=above[:, row, 0:width], data=tile[:, row], op0=nl.greater_equal, operand0=bound[:, row : row + 1]
        )
        for start in range(0, above.shape[2], NUM_GROUPS):
            nisa.nc_matmul(
                dst=by_column[:, row],
                stationary=above[:, row, start : start + NUM_GROUPS],
                moving=groups.members,
                accumulate=start > 0,
            )
    # A group's column sums stand once for each of its partitions, so that each gets their sum.
    lanes = NUM_GROUPS // groups.count
    each = floats((NUM_GROUPS, num_rows, groups.count, lanes))
    nisa.tensor_copy(dst=each, src=by_column.expand_dim(3).broadcast(3, lanes), engine=nisa.engine.scalar)
    numbers = nl.ndarray(bound.shape, dtype=nl.float32, buffer=nl.psum)
    for row in range(num_rows):
        nisa.nc_matmul(
            dst=numbers[:, row : row + 1],
            stationary=each[:, row].reshape((NUM_GROUPS, NUM_GROUPS)),
            moving=groups.ones,
            accumulate=False,
        )
    return numbers


def mass_above(tile, masses, bound, above, groups):
    """[128, R] in PSUM: the mass of the rows' entries not below `bound` [128, R]; `above` as in `number_above`."""
    _, num_rows, width = tile.shape
    sums = floats(bound.shape)
    for row in range(num_rows):
        column = slice(row, row + 1)
        lane_weights(sums[:, column], tile[:, row], masses[:, row], bound[:, column], above[:, row, 0:width])
    return group_sums(sums, groups)


def group_sums(sums, groups):
    """[128, R] in PSUM: on each partition the sum over its group of `sums` [128, R]."""
    result = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=result, stationary=groups.together, moving=sums, accumulate=False)
    return result


def lane_weights(sums, entries, masses, bound, above):
    """[p, 1], written: mass, or number without masses, of the `entries` [p, width] not below `bound` [p, 1].

    Args:
        above: [p, width], overwritten.
    """
    nisa.tensor_scalar(dst=above, data=entries, op0=nl.greater_equal, operand0=bound)
    if masses != None:  # noqa: E711
        # On GpSimd and Scalar, which have less to do than the Vector engine.
        kept = floats(entries.shape)
        nisa.tensor_tensor(dst=kept, data1=masses, data2=above, op=nl.multiply, engine=nisa.engine.gpsimd)
        above = kept
    nisa.activation(
        dst=above,
        op=nl.copy,
        data=above,
        reduce_op=nl.add,
        reduce_res=sums,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def relative_masses(masses, tile, peak, scale):
    """masses = exp((tile - peak) * scale); [p, width], peak and scale [p, 1]."""
    bias = floats(peak.shape)
    nisa.scalar_tensor_tensor(dst=bias, data=peak, op0=nl.multiply, operand0=-1.0, op1=nl.multiply, operand1=scale)
    nisa.activation(dst=masses, op=nl.exp, data=tile, bias=bias, scale=scale)


def to_ranks(values, groups):
    """[1, k, m] -> [128, k, groups]: each row's values on the partitions of its ranks in a `candidate_tile`."""
    _, kinds, num_rows = values.shape
    wide = floats((1, kinds, groups * GROUP_ROWS, BEST8))
    if num_rows < groups * GROUP_ROWS:
        nisa.memset(dst=wide, value=0.0)
    spread_out = values.expand_dim(3).broadcast(3, BEST8)
    nisa.tensor_copy(dst=wide[:, :, 0:num_rows], src=spread_out, engine=nisa.engine.scalar)
    turned = nl.ndarray((NUM_GROUPS, kinds, groups), dtype=nl.float32, buffer=nl.psum)
    for kind in range(kinds):
        flat = wide[:, kind].reshape((1, groups * NUM_GROUPS))
        for group in range(groups):
            nisa.nc_transpose(
                dst=turned[:, kind, group : group + 1],
                data=flat[:, group * NUM_GROUPS : (group + 1) * NUM_GROUPS],
                engine=nisa.engine.tensor,
            )
    result = floats((NUM_GROUPS, kinds, groups))
    nisa.tensor_copy(dst=result, src=turned, engine=nisa.engine.scalar)
    return result


def of_rank(result, values, rank):
    """[128, groups] on ranks -> result [1, m]: what each row's partition of `rank` holds."""
    groups, num_rows = values.shape[1], result.shape[1]
    turned = nl.ndarray((1, groups, NUM_GROUPS), dtype=nl.float32, buffer=nl.psum)
    for group in range(groups):
        nisa.nc_transpose(dst=turned[:, group], data=values[:, group : group + 1], engine=nisa.engine.tensor)
    flat = turned.reshape((1, groups * NUM_GROUPS))
    nisa.tensor_copy(dst=result, src=flat[:, rank : num_rows * BEST8 : BEST8], engine=nisa.engine.scalar)


def put_threshold(fact, threshold):
    """Writes a threshold [n, 1], or one that everything passes where it is None."""
    if threshold == None:  # noqa: E711
        nisa.memset(dst=fact, value=FILL)
    else:
        nisa.tensor_copy(dst=fact, src=threshold)


def drop_below(row, threshold):
    """Entries of `row` [128, width] below the threshold [128, 1] become FILL or -inf, which have no mass."""
    below = nl.ndarray(row.shape, dtype=row.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=below, data=row, op0=nl.less, operand0=threshold, op1=nl.multiply, operand1=FILL)
    nisa.tensor_tensor(dst=row, data1=row, data2=below, op=nl.add, engine=nisa.engine.gpsimd)
