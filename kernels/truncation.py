"""top-k, top-p and min-p as one threshold a row: the ids that stay are those whose logit is not below it.

top-k and top-p both ask for the largest value v such that the entries not below v weigh at least a goal: their number
k, or the share p of the mass. v is built bit by bit; nothing is sorted. The search looks at the candidates of all rows
at once, the 8 largest entries of each segment of each lane. What it finds is a row's own answer where it lies above
every entry that is no candidate. Rows where it does not are deep: they are read again and searched whole, one at a
time, in a loop that makes no trip when there are none.
"""

import nki.isa as nisa
import nki.language as nl

from .chain import at_row, over_rows, row_numbers, select, to_int
from .vocabulary import (
    BIG_ID,
    FILL,
    LOWEST_PEAK,
    NUM_GROUPS,
    SEGMENTS,
    floats,
    group_size,
    load_row_at,
    spread,
    tensor_scalar,
    tensor_tensor,
    transpose,
)

SMALLEST_MIN_P = 2.0**-60  # 0 switches min-p off; ln is defined above 2^-64
OFF = -FILL  # instead of k, p or what lies below the peak: nothing reaches it
KEEP_ALL = FILL / 2  # a threshold that every logit passes, and lanes without an id do not
TOP_K, TOP_P, BELOW_PEAK, PARAMETERS = 0, 1, 2, 3
SCALE, PEAK, TOTAL, LAW_ROW, VALUES = 3, 4, 5, 6, 7  # of a row, after its parameters
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


def allocate_candidates(arrays, num_rows, cut):
    """[128, SEGMENTS, 8 m] for the candidates of all arrays' rows, searched at once, and the part of each array.

    None and no part where nothing is cut.
    """
    if not cut:
        return None, []
    largest = nl.ndarray((NUM_GROUPS, SEGMENTS, len(arrays) * num_rows * BEST8), dtype=widest(arrays), buffer=nl.sbuf)
    parts = []
    for i in range(len(arrays)):
        parts.append(largest[:, :, i * num_rows * BEST8 : (i + 1) * num_rows * BEST8])
    return largest, parts


def widest(arrays):
    """bf16 if all arrays are, else fp32."""
    for array in arrays:
        if array.dtype == nl.float32:
            return nl.float32
    return nl.bfloat16


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


def truncate(arrays, laws, largest, limits, row_scale, first, count, vocab_size):
    """Puts the threshold of every row into the laws, and into their totals what it leaves.

    Args:
        arrays: [B, law rows, V], of one or two laws.
        laws: what `combine_rows` knows of their n = count * rows rows, changed: threshold, total.
        largest: of `allocate_candidates`, filled.
        limits: [1, PARAMETERS, n] of `row_parameters`.
        row_scale: [n, 1], 1 / T.
        first, count: the chunk's sequences.
    """
    num_rows, num_laws = row_scale.shape[0], len(arrays)
    values = floats((1, VALUES, num_laws, num_rows))
    for i in range(num_laws):
        put_values(values[:, :, i], laws[i], limits, row_scale)
        law_rows = arrays[i].shape[1]
        nisa.iota(
            dst=values[:, LAW_ROW, i],
            pattern=[[law_rows, count], [1, num_rows // count]],
            offset=first * law_rows,
            channel_multiplier=0,
        )
    by_row = values.reshape((1, VALUES, num_laws * num_rows))
    cuts = floats((1, CUTS, num_laws * num_rows))
    deep = floats((1, num_laws * num_rows))
    for low in range(0, num_laws * num_rows, SEARCHED_ROWS):
        high = min(low + SEARCHED_ROWS, num_laws * num_rows)
        tile = candidate_tile(largest[:, :, low * BEST8 : high * BEST8])
        cut_candidates(cuts[:, :, low:high], deep[:, low:high], tile, by_row[:, :, low:high], bits_of(largest.dtype))
    for i in range(num_laws):
        own = slice(i * num_rows, (i + 1) * num_rows)
        if group_size(vocab_size) > SEGMENTS * BEST8:  # else all entries are candidates
            cut_deep_rows(arrays[i], values[:, :, i], cuts[:, :, own], deep[:, own], vocab_size)
        laws[i]["threshold"] = transpose(cuts[:, THRESHOLD, own])
        laws[i]["total"] = transpose(cuts[:, MASS, own])


def put_values(values, law, limits, row_scale):
    """Writes all but LAW_ROW of the rows' values [1, VALUES, n]; the arguments are `truncate`'s."""
    nisa.tensor_copy(dst=values[:, 0:PARAMETERS], src=limits)
    for pair in ((SCALE, row_scale), (PEAK, law["peak"]), (TOTAL, law["total"])):
        kind, column = pair
        turned = nl.ndarray((1, column.shape[0]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=column, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=values[:, kind], src=turned, engine=nisa.engine.scalar)


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
    on_ranks = to_ranks(values[:, 0:LAW_ROW], groups)
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
    found = cut_rows(tile, masses, on_ranks, same_row(), num_bits)
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


def cut_deep_rows(law, values, cuts, deep, vocab_size):
    """Corrects `cuts` [1, CUTS, n] of the rows of `law` [B, law rows, V] that `deep` [1, n] flags, searched whole."""
    num_rows = values.shape[2]
    ones = floats((NUM_GROUPS, NUM_GROUPS))
    nisa.memset(dst=ones, value=1.0)

    def search(trip):
        here, tile, masses, lanes = next_deep_row(law, values, deep, vocab_size)
        found = cut_rows(tile, masses, lanes, ones, bits_of(law.dtype))
        chosen = flags_of(here, nl.greater, 0.0)
        for kind in (THRESHOLD, MASS):
            nisa.tensor_copy_predicated(
                dst=cuts[:, kind], src=found[kind][0:1].broadcast(1, num_rows), predicate=chosen
            )

    nl.fori_loop(0, deep_trips(deep), search)


def deep_trips(deep):
    """A register: the flags set in `deep` [1, n], or on the other core, if more."""
    total = floats((1, 1))
    nisa.tensor_reduce(dst=total, op=nl.add, data=deep, axis=1)
    trips = nisa.register_alloc()
    nisa.register_load(trips, to_int(most_of_cores(total)))
    return trips


def next_deep_row(law, values, deep, vocab_size, shard=()):
    """Loads the first row flagged in `deep` [1, n] and clears its flag; some row without effect where there is none.

    Returns:
        its flag [1, n], the row's entries [128, 1, size] and masses, and its values [128, VALUES, 1] on lanes.
    """
    row_number = row_numbers(1, values.shape[2])[:, 0]
    row = floats((1, 1))
    nisa.tensor_reduce(dst=row, op=nl.minimum, data=select(deep, row_number, BIG_ID), axis=1)
    here = tensor_scalar(row_number, nl.equal, row)
    nisa.tensor_tensor(dst=deep, data1=deep, data2=here, op=nl.subtract)
    picked = at_row(values.expand_dim(2), here.expand_dim(1))
    lanes = spread(transpose(picked[:, :, 0])).expand_dim(2)
    tile = nl.ndarray((NUM_GROUPS, 1, group_size(vocab_size)), dtype=law.dtype, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=FILL)
    load_row_at(tile[:, 0], law, to_int(picked[:, LAW_ROW]), vocab_size, shard)
    masses = floats(tile.shape)
    relative_masses(masses[:, 0], tile[:, 0], lanes[:, PEAK], lanes[:, SCALE])
    return here, tile, masses, lanes


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


def cut_rows(tile, masses, values, ones, num_bits):
    """(THRESHOLD, MASS, BY_K), [p, R] each: the largest of the three limits' values, what it leaves, and top-k's.

    Args:
        tile: [p, R, width] entries of rows that are spread over partitions; masses: exp((x - peak) / T) of them.
        values: [p, >= LAW_ROW, R], the rows' values on each of their partitions.
        ones: [p, p], 1 between partitions of the same rows.
    """
    top_k, total = values[:, TOP_K], values[:, TOTAL]
    by_k = largest_reaching(tile, None, top_k, ones, num_bits)
    left = select(tensor_scalar(top_k, nl.less, OFF), weight(tile, masses, by_k, ones), total)
    goal = tensor_tensor(left, values[:, TOP_P], nl.multiply)
    by_p = largest_reaching(tile, masses, goal, ones, num_bits)
    threshold = tensor_tensor(values[:, PEAK], values[:, BELOW_PEAK], nl.subtract)
    nisa.tensor_tensor(dst=threshold, data1=threshold, data2=by_p, op=nl.maximum)
    nisa.tensor_tensor(dst=threshold, data1=threshold, data2=by_k, op=nl.maximum)
    mass = floats(threshold.shape)
    nisa.tensor_copy(dst=mass, src=weight(tile, masses, threshold, ones))
    return threshold, mass, by_k


def largest_reaching(tile, masses, goal, ones, num_bits):
    """[p, R]: the largest value v such that the entries >= v have at least `goal` in mass, or number without masses.

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
        weighed = weight(tile, masses, trial.view(nl.float32), ones)
        nisa.tensor_tensor(dst=reached, data1=weighed, data2=goal, op=nl.greater_equal)
        nisa.tensor_copy_predicated(dst=value, src=trial, predicate=reached)
    found = value.view(nl.float32)
    return select(tensor_scalar(found, nl.greater_equal, KEEP_ALL), found, KEEP_ALL)


def weight(tile, masses, bound, ones):
    """[p, R] in PSUM: mass, or number without masses, of the rows' entries not below `bound` [p, R]."""
    sums = floats(bound.shape)
    for row in range(bound.shape[1]):
        lane_weights(
            sums[:, row : row + 1],
            tile[:, row],
            masses[:, row] if masses != None else None,  # noqa: E711
            bound[:, row : row + 1],
        )
    together = nl.ndarray(bound.shape, dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=together, stationary=ones, moving=sums, accumulate=False)
    return together


def lane_weights(sums, entries, masses, bound):
    """[p, 1], written: mass, or number without masses, of the `entries` [p, width] not below `bound` [p, 1]."""
    above = nl.ndarray(entries.shape, dtype=entries.dtype, buffer=nl.sbuf)
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


def same_row():
    """[128, 128]: 1 between partitions that hold ranks of the same row of a `candidate_tile`."""
    row = floats((NUM_GROUPS, NUM_GROUPS))
    nisa.iota(dst=row, pattern=[[1, GROUP_ROWS], [0, BEST8]], offset=0, channel_multiplier=0)
    return tensor_tensor(row, transpose(row), nl.equal)


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
