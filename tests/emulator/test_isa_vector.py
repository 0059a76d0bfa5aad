"""Arithmetic, reductions, scans and statistics of the Vector engine against plain NumPy."""

import operator

import numpy as np
import pytest

from .tiles import bf16, fp8, in_psum, nisa, nl, normal, rng, run

BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
COMMANDS = nisa.reduce_cmd


def small_integers(*shape, dtype=np.float32, seed=0):
    """Values that collide and hit zero, exact in every dtype."""
    return rng(seed).integers(-3, 4, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, bf16, fp8, np.int8])
@pytest.mark.parametrize("name", sorted(BINARY))
def test_tensor_tensor_computes_every_operator_in_float32(name, dtype):
    x, y = small_integers(37, 6, dtype=dtype), small_integers(37, 6, dtype=dtype, seed=1)
    emit = lambda dst, a, b: nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=getattr(nl, name))  # noqa: E731
    expected = BINARY[name](x.astype(np.float32), y.astype(np.float32)).astype(np.float32)
    np.testing.assert_array_equal(run(emit, x, y, out=((37, 6), nl.float32)), expected)


def test_operands_may_differ_in_shape_where_their_elements_per_partition_agree():
    x, y = normal(9, 12), normal(9, 3, 4, seed=1)
    emit = lambda dst, a, b: nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=nl.add)  # noqa: E731
    np.testing.assert_array_equal(run(emit, x, y, out=((9, 2, 6), nl.float32)), (x + y.reshape(9, 12)).reshape(9, 2, 6))


@pytest.mark.parametrize("dtypes", [("int32", "int32"), ("uint32", "uint32"), ("int32", "uint32")])
@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "maximum", "greater", "equal"])
def test_32_bit_integers_are_exact_on_gpsimd_and_wrap(name, dtypes):
    left, right = (rng(seed).integers(0, 2**32, (5, 8), np.uint32).view(dtype) for seed, dtype in enumerate(dtypes))
    emit = lambda dst, a, b: nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=getattr(nl, name))  # noqa: E731
    python = {
        "add": operator.add,
        "subtract": operator.sub,
        "multiply": operator.mul,
        "maximum": max,
        "greater": operator.gt,
        "equal": operator.eq,
    }[name]
    expected = [[python(int(a), int(b)) % 2**32 for a, b in zip(*rows)] for rows in zip(left, right)]
    result = run(emit, left, right, out=((5, 8), getattr(nl, dtypes[0])))
    np.testing.assert_array_equal(result.view(np.uint32), np.array(expected, np.uint32))


@pytest.mark.parametrize("placed", ["vector", "psum"])
def test_32_bit_integers_go_through_float32_on_the_vector_engine(placed):
    x, y = np.array([[2**24, 7]], np.int32), np.array([[1, 1]], np.int32)

    def emit(dst, a, b):
        if placed == "psum":
            nisa.tensor_tensor(dst=dst, data1=in_psum(a), data2=b, op=nl.add)
        else:
            nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=nl.add, engine=nisa.engine.vector)

    np.testing.assert_array_equal(run(emit, x, y, out=((1, 2), nl.int32), strict=False), [[2**24, 8]])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "uint32"])
@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"])
def test_bitvec_operators_work_on_bit_patterns_and_shift_logically(name, dtype):
    bits = 8 * np.dtype(dtype).itemsize
    x = rng().integers(0, 256, (4, 6, bits // 8), np.uint8).view(dtype)[..., 0]
    y = rng(1).integers(0, bits, (4, 6)).astype(dtype)
    python = {
        "bitwise_and": operator.and_,
        "bitwise_or": operator.or_,
        "bitwise_xor": operator.xor,
        "left_shift": operator.lshift,
        "right_shift": operator.rshift,
    }[name]
    unsigned = np.dtype(f"u{bits // 8}")
    expected = [[python(int(a), int(b)) % 2**bits for a, b in zip(*rows)] for rows in zip(x.view(unsigned), y)]
    emit = lambda dst, a, b: nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=getattr(nl, name))  # noqa: E731
    result = run(emit, x, y, out=((4, 6), getattr(nl, dtype)))
    np.testing.assert_array_equal(result.view(unsigned), np.array(expected, unsigned))


def test_power_runs_on_gpsimd():
    x, y = np.abs(normal(5, 7)), normal(5, 7, seed=1)
    emit = lambda dst, a, b: nisa.tensor_tensor(dst=dst, data1=a, data2=b, op=nl.power)  # noqa: E731
    np.testing.assert_allclose(run(emit, x, y, out=((5, 7), nl.float32)), x**y, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, bf16, np.int32])
def test_tensor_scalar_applies_two_operators_with_numbers_and_vectors(dtype):
    data, vector = small_integers(33, 3, 5, dtype=dtype), normal(33, 1)

    def emit(dst, data, vector):
        nisa.tensor_scalar(
            dst=dst, data=data, op0=nl.subtract, operand0=vector, reverse0=True, op1=nl.multiply, operand1=0.1
        )

    expected = (vector[:, :, None] - data.astype(np.float32)) * np.float32(0.1)
    np.testing.assert_array_equal(run(emit, data, vector, out=((33, 3, 5), nl.float32)), expected)


def test_tensor_scalar_reverses_its_second_operator():
    data = normal(3, 4)
    emit = lambda dst, x: nisa.tensor_scalar(dst, x, nl.add, 1.0, op1=nl.less, operand1=0.5, reverse1=True)  # noqa: E731
    result = run(emit, data, out=((3, 4), nl.uint8))
    np.testing.assert_array_equal(result, np.float32(0.5) < data + np.float32(1))


def test_tensor_scalar_counts_integers_in_float32_but_bits_exactly():
    data = np.array([[2**24 + 1, 2**31 - 1]], np.int32)
    added = run(lambda dst, x: nisa.tensor_scalar(dst, x, nl.add, 0.0), data, out=((1, 2), nl.int32))
    np.testing.assert_array_equal(added, [[2**24, 2**31 - 1]])
    masked = run(lambda dst, x: nisa.tensor_scalar(dst, x, nl.bitwise_and, -1), data, out=((1, 2), nl.int32))
    np.testing.assert_array_equal(masked, data)


def test_tensor_scalar_takes_unary_operators():
    data = normal(6, 5)
    absolute = run(lambda dst, x: nisa.tensor_scalar(dst, x, nl.abs, None), data, out=((6, 5), nl.float32))
    np.testing.assert_array_equal(absolute, np.abs(data))
    inverse = run(lambda dst, x: nisa.tensor_scalar(dst, x, nl.rsqrt, 0.0), data**2, out=((6, 5), nl.float32))
    np.testing.assert_allclose(inverse, 1 / np.abs(data), rtol=1e-6)
    bits = rng().integers(0, 256, (6, 5), np.uint8)
    inverted = run(lambda dst, x: nisa.tensor_scalar(dst, x, nl.invert, None), bits, out=((6, 5), nl.uint8))
    np.testing.assert_array_equal(inverted, 255 - bits)


def test_scalar_tensor_tensor_keeps_float32_between_its_operators():
    data, scale, other = normal(50, 6, dtype=bf16), normal(50, 1), normal(50, 6, dtype=bf16, seed=2)

    def emit(dst, data, scale, other):
        nisa.scalar_tensor_tensor(dst, data, nl.multiply, scale, nl.subtract, other, reverse1=True)

    expected = (other.astype(np.float32) - data.astype(np.float32) * scale).astype(bf16)
    np.testing.assert_array_equal(run(emit, data, scale, other, out=((50, 6), nl.bfloat16)), expected)


@pytest.mark.parametrize("axis, kept", [(3, (4, 5)), ((2, 3), (4,)), ([1, 2, 3], ()), (-1, (4, 5))])
@pytest.mark.parametrize(
    "name, reduce", [("add", np.sum), ("maximum", np.max), ("minimum", np.min), ("multiply", np.prod)]
)
def test_tensor_reduce_folds_trailing_axes(name, reduce, axis, kept):
    data = small_integers(7, 4, 5, 3) / 2
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else (axis,)
    shape = (7, *kept) if kept else (7, 1)
    emit = lambda dst, x: nisa.tensor_reduce(dst=dst, op=getattr(nl, name), data=x, axis=axis)  # noqa: E731
    np.testing.assert_array_equal(run(emit, data, out=(shape, nl.float32)), reduce(data, axis=axes).reshape(shape))


def test_tensor_reduce_negates_and_reads_strided_views():
    data = normal(5, 6, 8)
    emit = lambda dst, x: nisa.tensor_reduce(dst, nl.maximum, x.permute((0, 2, 1)), axis=2, negate=True)  # noqa: E731
    np.testing.assert_array_equal(run(emit, data, out=((5, 8), nl.float32)), -data.max(axis=1))


@pytest.mark.parametrize(
    "name, fold", [("bitwise_or", np.bitwise_or), ("bitwise_and", np.bitwise_and), ("bitwise_xor", np.bitwise_xor)]
)
def test_tensor_reduce_folds_bits(name, fold):
    data = rng().integers(0, 2**32, (3, 9), np.uint32)
    emit = lambda dst, x: nisa.tensor_reduce(dst, getattr(nl, name), x, axis=1)  # noqa: E731
    np.testing.assert_array_equal(run(emit, data, out=((3, 1), nl.uint32))[:, 0], fold.reduce(data, axis=1))


@pytest.mark.parametrize("name, fold", [("logical_or", np.any), ("logical_and", np.all)])
def test_tensor_reduce_folds_truth(name, fold):
    data = rng().integers(0, 2, (6, 2, 3)).astype(np.float32)
    emit = lambda dst, x: nisa.tensor_reduce(dst, getattr(nl, name), x, axis=(1, 2))  # noqa: E731
    np.testing.assert_array_equal(run(emit, data, out=((6, 1), nl.float32))[:, 0], fold(data, axis=(1, 2)))


def test_tensor_scalar_reduce_counts_in_the_pass_that_compares():
    data, bound = normal(20, 4, 5), normal(20, 1, seed=1)

    def emit(dst, count, data, bound):
        nisa.tensor_scalar_reduce(
            dst=dst,
            data=data,
            op0=nl.less,
            operand0=bound,
            reduce_op=nl.add,
            reduce_res=count,
            reduce_cmd=COMMANDS.reset_reduce,
            reduce_res_negate=True,
        )

    mask, count = run(emit, data, bound, out=[((20, 4, 5), nl.uint8), ((20, 1), nl.float32)])
    np.testing.assert_array_equal(mask, data < bound[:, :, None])
    np.testing.assert_array_equal(count[:, 0], -(data < bound[:, :, None]).sum(axis=(1, 2)))


def test_accumulators_continue_and_start_from_a_given_value():
    data, start = normal(8, 6), normal(8, 1, seed=1)

    def emit(dst, first, second, data, start):
        options = {"op0": nl.add, "operand0": 0.0, "reduce_op": nl.maximum}
        nisa.tensor_scalar_reduce(
            dst, data, reduce_cmd=COMMANDS.load_reduce, reduce_init=start, reduce_res=first, **options
        )
        nisa.tensor_scalar_reduce(dst, data, reduce_cmd=COMMANDS.reset_reduce, **options)
        nisa.tensor_scalar(dst, data, nl.multiply, -1.0)
        nisa.tensor_scalar_reduce(dst, dst, reduce_cmd=COMMANDS.reduce, reduce_res=second, **options)

    out = [((8, 6), nl.float32), ((8, 1), nl.float32), ((8, 1), nl.float32)]
    _, first, second = run(emit, data, start, out=out, strict=False)
    np.testing.assert_array_equal(first[:, 0], np.maximum(data.max(axis=1), start[:, 0]))
    np.testing.assert_array_equal(second[:, 0], np.abs(data).max(axis=1))


def test_an_idle_instruction_poisons_the_vector_accumulators():
    data = normal(4, 6)

    def emit(dst, total, data):
        nisa.tensor_scalar_reduce(dst, data, nl.add, 0.0, nl.add)
        predicate = nl.full((4, 6), 1, nl.uint8)
        nisa.select_reduce(dst, predicate, data, 0.0)
        nisa.tensor_scalar_reduce(dst, data, nl.add, 0.0, nl.add, reduce_cmd=COMMANDS.reduce, reduce_res=total)

    out = [((4, 6), nl.float32), ((4, 1), nl.float32)]
    assert np.isnan(run(emit, data, out=out, strict=False)[1]).all()


@pytest.mark.parametrize(
    "op1, step", [("add", operator.add), ("subtract", operator.sub), ("maximum", max), ("multiply", operator.mul)]
)
def test_tensor_scalar_cumulative_runs_along_the_free_dimensions(op1, step):
    data = small_integers(5, 2, 4)
    emit = lambda dst, x: nisa.tensor_scalar_cumulative(dst, x, nl.multiply, getattr(nl, op1), 0.5)  # noqa: E731
    start = {"add": 0.0, "subtract": 0.0, "maximum": -np.inf, "multiply": 1.0}[op1]
    expected = np.empty((5, 8), np.float32)
    for row, values in enumerate(data.reshape(5, 8)):
        state = start
        for column, value in enumerate(values):
            state = expected[row, column] = step(value * 0.5, state)
    np.testing.assert_array_equal(run(emit, data, out=((5, 2, 4), nl.float32)).reshape(5, 8), expected)


def test_a_chunked_cumulative_sum_continues_in_the_accumulator():
    data = small_integers(6, 10)

    def emit(dst, x):
        options = {"op0": nl.add, "op1": nl.add, "imm0": 0.0}
        nisa.tensor_scalar_cumulative(dst[:, :4], x[:, :4], imm1=3.0, reduce_cmd=COMMANDS.load_reduce, **options)
        nisa.tensor_scalar_cumulative(dst[:, 4:], x[:, 4:], reduce_cmd=COMMANDS.reduce, **options)

    result = run(emit, data, out=((6, 10), nl.float32), strict=False)
    np.testing.assert_array_equal(result, 3 + np.cumsum(data, axis=1))


@pytest.mark.parametrize("op0", ["multiply", "maximum", "subtract", "less"])
@pytest.mark.parametrize("op1", ["add", "multiply", "subtract"])
@pytest.mark.parametrize("reverse", [False, True])
def test_tensor_tensor_scan_keeps_a_float32_state(op0, op1, reverse):
    data0, data1, initial = small_integers(4, 7), small_integers(4, 7, seed=1), small_integers(4, 1, seed=2)

    def emit(dst, a, b, initial):
        nisa.tensor_tensor_scan(
            dst, a, b, initial, getattr(nl, op0), getattr(nl, op1), reverse0=reverse, reverse1=reverse
        )

    expected, state = np.empty((4, 7), np.float32), initial[:, 0]
    for step in range(7):
        pair = (state, data0[:, step]) if reverse else (data0[:, step], state)
        inner = BINARY[op0](*pair).astype(np.float32)
        pair = (data1[:, step], inner) if reverse else (inner, data1[:, step])
        state = expected[:, step] = BINARY[op1](*pair)
    np.testing.assert_array_equal(run(emit, data0, data1, initial, out=((4, 7), nl.float32)), expected)


def test_a_narrow_dst_does_not_round_the_state_of_a_scan():
    decay, x = np.full((3, 50), 0.99, np.float32), np.ones((3, 50), np.float32)
    emit = lambda dst, a, b: nisa.tensor_tensor_scan(dst, a, b, 10.0, nl.multiply, nl.add)  # noqa: E731
    state, expected = np.float32(10), np.empty((3, 50), np.float32)
    for step in range(50):
        expected[:, step] = state = np.float32(0.99) * state + np.float32(1)
    np.testing.assert_array_equal(run(emit, decay, x, out=((3, 50), nl.bfloat16)), expected.astype(bf16))
    drifting = np.float32(10)
    for _ in range(50):
        drifting = (np.float32(0.99) * drifting + np.float32(1)).astype(bf16).astype(np.float32)
    assert drifting != np.float32(bf16(expected[0, -1])), "the rounded state would show"


@pytest.mark.parametrize("op0, fold", [("multiply", np.cumsum), ("maximum", np.maximum.accumulate)])
def test_the_usual_scans_are_exact_prefix_operations(op0, fold):
    x = normal(40, 300, dtype=bf16)
    neutral = np.ones((40, 300), np.float32) if op0 == "multiply" else np.zeros((40, 300), np.float32)
    operands = (neutral, x) if op0 == "multiply" else (x, neutral)
    initial = 0.0 if op0 == "multiply" else -3e38
    emit = lambda dst, a, b: nisa.tensor_tensor_scan(dst, a, b, initial, getattr(nl, op0), nl.add)  # noqa: E731
    expected = fold(x.astype(np.float32), axis=1)
    np.testing.assert_array_equal(run(emit, *operands, out=((40, 300), nl.float32)), expected)


def test_reciprocal_divides_in_float32():
    data = normal(5, 6, dtype=bf16)
    result = run(lambda dst, x: nisa.reciprocal(dst, x), data, out=((5, 6), nl.float32))
    np.testing.assert_array_equal(result, np.float32(1) / data.astype(np.float32))


@pytest.mark.parametrize("sizes", [(512,), (500, 13), (1, 7)])
def test_batch_statistics_aggregate_to_mean_and_variance(sizes):
    data = normal(9, sum(sizes)) * 3 + 1

    def emit(dst, x):
        stats = nl.ndarray((9, 6 * len(sizes)), dtype=nl.float32)
        start = 0
        for number, size in enumerate(sizes):
            nisa.bn_stats(stats[:, 6 * number : 6 * number + 6], x[:, start : start + size])
            start += size
        nisa.bn_aggr(dst, stats)

    result = run(emit, data, out=((9, 2), nl.float32))
    np.testing.assert_allclose(result, np.stack([data.mean(axis=1), data.var(axis=1)], 1), rtol=1e-5, atol=1e-6)


def test_batch_statistics_list_even_elements_before_odd_ones():
    data = normal(3, 7)
    result = run(lambda dst, x: nisa.bn_stats(dst, x), data, out=((3, 6), nl.float32))
    halves = [data[:, 0::2], data[:, 1::2]]
    expected = np.concatenate(
        [np.stack([np.full(3, h.shape[1]), h.mean(1), h.var(1) * h.shape[1]], 1) for h in halves], 1
    )
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
