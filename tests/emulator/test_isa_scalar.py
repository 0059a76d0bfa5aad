"""Activation functions of the Scalar engine against the math library, and their domains."""

import math

import numpy as np
import pytest

from draft_verify.reference import emulator

from .tiles import bf16, kernel_of, nisa, nl, normal, run

ADD, RESET = {"reduce_op": nl.add}, nisa.reduce_cmd.reset_reduce


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def cdf(x):
    return (1 + math.erf(x / math.sqrt(2))) / 2


def derivative(function, step=1e-5):
    return lambda x: (function(x + step) - function(x - step)) / (2 * step)


def gelu(x):
    return x * cdf(x)


def silu(x, slope=1.0):
    return x * sigmoid(slope * x)


def softplus(x):
    return math.log1p(math.exp(x))


FUNCTIONS = {
    "copy": float,
    "square": lambda x: x * x,
    "sigmoid": sigmoid,
    "relu": lambda x: max(x, 0.0),
    "gelu": gelu,
    "gelu_dx": derivative(gelu),
    "gelu_apprx_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_apprx_sigmoid": lambda x: silu(x, 1.702),
    "gelu_apprx_sigmoid_dx": derivative(lambda x: silu(x, 1.702)),
    "silu": silu,
    "silu_dx": derivative(silu),
    "tanh": math.tanh,
    "softplus": softplus,
    "mish": lambda x: x * math.tanh(softplus(x)),
    "erf": math.erf,
    "erf_dx": derivative(math.erf),
    "exp": math.exp,
    "sin": math.sin,
    "sign": lambda x: math.copysign(1.0, x),
    "abs": abs,
}
POSITIVE = {"log": math.log, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "reciprocal": lambda x: 1 / x}


@pytest.mark.parametrize("name", [*FUNCTIONS, *POSITIVE, "arctan"])
def test_an_activation_function_is_what_its_name_says(name):
    data = np.clip(normal(17, 9), -1.5, 1.5)
    if name in POSITIVE:
        data = np.abs(data) + np.float32(0.01)
    function = {**FUNCTIONS, **POSITIVE, "arctan": math.atan}[name]
    result = run(lambda dst, x: nisa.activation(dst, getattr(nl, name), x), data, out=((17, 9), nl.float32))
    expected = np.vectorize(function)(data.astype(np.float64))
    np.testing.assert_allclose(result, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, bf16, np.int32])
def test_scale_and_bias_come_first_as_numbers_or_vectors(dtype):
    data, scale, bias = (4 * normal(40, 2, 5)).astype(dtype), normal(40, 1), normal(40, 1, seed=1, dtype=bf16)
    emit = lambda dst, x, s, b: nisa.activation(dst, nl.tanh, x, bias=b, scale=s)  # noqa: E731
    argument = data.astype(np.float32) * scale[:, :, None] + bias.astype(np.float32)[:, :, None]
    result = run(emit, data, scale, bias, out=((40, 2, 5), nl.float32))
    np.testing.assert_array_equal(result, np.tanh(argument))
    plain = run(
        lambda dst, x: nisa.activation(dst, nl.copy, x, bias=-0.5, scale=0.25), data, out=((40, 2, 5), nl.float32)
    )
    np.testing.assert_array_equal(plain, data.astype(np.float32) * np.float32(0.25) - np.float32(0.5))


def test_the_exponential_of_shifted_scores_comes_with_its_row_sums():
    data, shift = normal(30, 4, 6), normal(30, 1)

    def emit(dst, total, data, shift):
        nisa.activation(dst, nl.exp, data, bias=shift, reduce_res=total, reduce_cmd=RESET, **ADD)

    values, total = run(emit, data, shift, out=[((30, 4, 6), nl.bfloat16), ((30, 1), nl.float32)])
    expected = np.exp(data + shift[:, :, None])
    np.testing.assert_array_equal(values, expected.astype(bf16))
    np.testing.assert_allclose(total[:, 0], expected.astype(np.float64).sum(axis=(1, 2)), rtol=1e-6)


def test_the_scalar_accumulators_continue_and_are_read_by_a_later_call():
    data = normal(6, 7)

    def emit(dst, total, data):
        nisa.activation(dst, nl.copy, data, reduce_cmd=RESET, **ADD)
        nisa.activation(dst, nl.square, data)
        nisa.activation(dst, nl.copy, data, scale=2.0, reduce_cmd=nisa.reduce_cmd.reduce, reduce_res=total, **ADD)

    total = run(emit, data, out=[((6, 7), nl.float32), ((6, 1), nl.float32)], strict=False)[1]
    np.testing.assert_allclose(total[:, 0], 3 * data.astype(np.float64).sum(axis=1), rtol=1e-5, atol=1e-5)


def test_reduce_res_without_a_reduce_command_is_stale():
    emit = lambda dst, total, data: nisa.activation(dst, nl.copy, data, reduce_res=total)  # noqa: E731
    out = [((2, 3), nl.float32), ((2, 1), nl.float32)]
    assert np.isnan(run(emit, normal(2, 3), out=out, strict=False)[1]).all()


def test_activation_reduce_is_activation_with_reset_reduce():
    data = normal(5, 6)

    def emit(dst, total, data):
        nisa.activation_reduce(dst=dst, op=nl.square, data=data, reduce_op=nl.add, reduce_res=total)

    total = run(emit, data, out=[((5, 6), nl.float32), ((5, 1), nl.float32)])[1]
    np.testing.assert_allclose(total[:, 0], (data.astype(np.float64) ** 2).sum(axis=1), rtol=1e-6)


OUTSIDE = {
    "log": [0.0, 2.0**-65, 2.0**65, -1.0, np.inf],
    "sqrt": [0.0, 2.0**-117, 2.0**119, -1.0],
    "rsqrt": [0.0, 2.0**-88, 2.0**98],
    "reciprocal": [0.0, 2.0**-43, -(2.0**43)],
    "sin": [3.2, -9.0],
    "arctan": [1.6, -100.0],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_argument_outside_the_valid_range_gives_nan_and_a_note(name):
    inside = {"reciprocal": -(2.0**-42)}.get(name, 1.0)
    data = np.array([[*OUTSIDE[name], inside]], np.float32)
    emit = lambda dst, x: nisa.activation(dst, getattr(nl, name), x)  # noqa: E731
    program = emulator.trace(kernel_of(emit, (data.shape, nl.float32)), data)
    result = program.run(data)
    assert np.isnan(result[0, :-1]).all() and np.isfinite(result[0, -1])
    assert any(f"nl.{name}" in note and "valid range" in note for note in program.notes)


def test_the_exponential_of_minus_infinity_is_zero_and_leaves_no_note():
    data = np.array([[-np.inf, -200.0, 0.0, 200.0]], np.float32)
    emit = lambda dst, x: nisa.activation(dst, nl.exp, x)  # noqa: E731
    program = emulator.trace(kernel_of(emit, ((1, 4), nl.float32)), data, strict=True)
    np.testing.assert_array_equal(program.run(data), [[0.0, 0.0, 1.0, np.inf]])
    assert not program.notes
