"""The tile helpers of nki.language against NumPy."""

import ml_dtypes
import numpy as np
import pytest

from draft_verify.reference import emulator
from tests.emulator.tiles import normal, run

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
X, Y = normal(128, 40), normal(128, 40, seed=1)


def into(result):
    """Copies what a helper returns into the output tile."""
    return lambda dst, *tiles: nisa.tensor_copy(dst, result(*tiles))


BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": np.equal,
    "less": np.less,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_helpers_take_tiles_and_scalars_on_either_side(name):
    helper, expected = getattr(nl, name), BINARY[name]
    x, y = np.round(X), np.round(Y)
    np.testing.assert_array_equal(run(into(helper), x, y, out=(X.shape, nl.float32)), expected(x, y))
    np.testing.assert_array_equal(run(into(lambda a: helper(a, 0.5)), X, out=(X.shape, nl.float32)), expected(X, 0.5))
    np.testing.assert_array_equal(run(into(lambda a: helper(0.5, a)), X, out=(X.shape, nl.float32)), expected(0.5, X))


UNARY = {"exp": np.exp, "tanh": np.tanh, "square": np.square, "abs": np.abs, "sign": np.sign, "negative": np.negative}


@pytest.mark.parametrize("name", UNARY)
def test_unary_helpers(name):
    result = run(into(getattr(nl, name)), X, out=(X.shape, nl.float32))
    np.testing.assert_allclose(result, UNARY[name](X), rtol=1e-6)


@pytest.mark.parametrize("name, expected", [("sum", np.sum), ("max", np.max), ("min", np.min), ("mean", np.mean)])
def test_reductions_keep_or_drop_the_axis(name, expected):
    helper = getattr(nl, name)
    kept = run(into(lambda a: helper(a, axis=1, keepdims=True)), X, out=((128, 1), nl.float32))
    np.testing.assert_allclose(kept, expected(X, axis=1, keepdims=True), rtol=1e-5, atol=1e-6)
    cube = X.reshape(128, 8, 5)
    dropped = run(into(lambda a: helper(a, axis=2)), cube, out=((128, 8), nl.float32))
    np.testing.assert_allclose(dropped, expected(cube, axis=2), rtol=1e-5, atol=1e-6)


def test_the_result_has_the_dtype_asked_for():
    result = run(into(lambda a: nl.add(a, 1.0, dtype=nl.bfloat16)), X, out=(X.shape, nl.bfloat16))
    np.testing.assert_array_equal(result, (X + np.float32(1)).astype(ml_dtypes.bfloat16))


def test_allocation_helpers():
    def emit(dst):
        total = nl.add(nl.zeros((128, 40), nl.float32), nl.ones((128, 40), nl.float32))
        nisa.tensor_copy(dst, nl.add(total, nl.full((128, 40), 2.5, nl.float32)))

    assert (run(emit, out=((128, 40), nl.float32)) == 3.5).all()
    assert (run(into(lambda a: nl.zeros_like(a)), X, out=(X.shape, nl.float32), strict=False) == 0).all()
    integers = run(into(lambda: nl.full((4, 4), 7, nl.int32)), out=((4, 4), nl.int32))
    assert integers.dtype == np.int32 and (integers == 7).all()


def test_softmax_and_where():
    exponentials = np.exp(X - X.max(axis=1, keepdims=True))
    expected = exponentials / exponentials.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(run(into(nl.softmax), X, out=(X.shape, nl.float32)), expected, rtol=1e-5)
    chosen = run(into(lambda a, b: nl.where(nl.greater(a, 0.0), a, b)), X, Y, out=(X.shape, nl.float32))
    np.testing.assert_array_equal(chosen, np.where(X > 0, X, Y))
    filled = run(into(lambda a: nl.where(nl.greater(a, 0.0), a, 3.0)), X, out=(X.shape, nl.float32))
    np.testing.assert_array_equal(filled, np.where(X > 0, X, 3))


@pytest.mark.parametrize("transpose_x", [False, True])
def test_matmul(transpose_x):
    left = X if transpose_x else np.ascontiguousarray(X[:, :40].T)
    right = Y
    expected = X.T @ Y
    result = run(into(lambda a, b: nl.matmul(a, b, transpose_x)), left, right, out=((40, 40), nl.float32))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def test_transpose_is_exact():
    np.testing.assert_array_equal(run(into(nl.transpose), X, out=((40, 128), nl.float32)), X.T)


def test_shapes_are_changed_by_views():
    wide = run(into(lambda a: nl.broadcast_to(a, (128, 40))), X[:, :1].copy(), out=((128, 40), nl.float32))
    np.testing.assert_array_equal(wide, np.broadcast_to(X[:, :1], (128, 40)))
    np.testing.assert_array_equal(
        run(into(lambda a: nl.expand_dims(a, 1)), X, out=((128, 1, 40), nl.float32)), X[:, None, :]
    )


def test_gather_flattened_takes_elements_of_each_partition():
    index = np.random.default_rng(0).integers(0, 40, (128, 8)).astype(np.uint32)
    result = run(into(nl.gather_flattened), X, index, out=((128, 8), nl.float32))
    np.testing.assert_array_equal(result, np.take_along_axis(X, index.astype(int), axis=1))


def test_constants():
    table = np.arange(40, dtype=np.float32).reshape(4, 10)
    np.testing.assert_array_equal(
        run(into(lambda: nl.load(nl.shared_constant(table))), out=((4, 10), nl.float32)), table
    )
    identity = run(into(lambda: nl.shared_identity_matrix(8, nl.float32)), out=((8, 8), nl.float32))
    np.testing.assert_array_equal(identity, np.eye(8))


def test_random_numbers_lie_in_the_unit_interval_and_differ():
    result = run(into(lambda: nl.rand((128, 64), nl.float32)), out=((128, 64), nl.float32))
    assert (result >= 0).all() and (result < 1).all() and len(np.unique(result)) > 8000


def test_device_print_prints_while_running(capsys):
    run(lambda dst, a: (nl.device_print("tile:", a), nisa.tensor_copy(dst, a)), np.full((1, 2), 7, np.float32),
        out=((1, 2), nl.float32))  # fmt: skip
    assert "tile: [[7. 7.]]" in capsys.readouterr().out


REFUSED = {
    "broadcast": lambda a: nl.add(a, nl.zeros((128, 1), nl.float32)),
    "divide": lambda a: nl.divide(a, a),
    "mod": lambda a: nl.mod(a, 2.0),
    "trn3 operator": lambda a: nl.abs_max(a, a),
    "two numbers": lambda a: nl.add(1.0, 2.0),
    "one operand": lambda a: nl.add(a),
    "no instruction": lambda a: nl.floor(a),
    "softmax over part": lambda a: nl.softmax(a.reshape((128, 8, 5)), axis=2),
    "filled hbm": lambda a: nl.zeros((4, 4), nl.float32, buffer=nl.shared_hbm),
    "a run-time bound": lambda a: list(nl.affine_range(nisa.register_alloc(3))),
    "unknown buffer": lambda a: nl.ndarray((4, 4), nl.float32, buffer="sbuf"),
    "unknown dtype": lambda a: nl.ndarray((4, 4), np.float32),
    "trn3 dtype": lambda a: nl.ndarray((4, 4), nl.float4_e2m1fn_x4),
    "one dimension": lambda a: nl.ndarray((4,), nl.float32),
    "no size": lambda a: nl.ndarray((4, 0), nl.float32),
    "64-bit constant": lambda a: nl.shared_constant(np.zeros((4, 4))),
}


@pytest.mark.parametrize("helper", REFUSED.values(), ids=REFUSED)
def test_what_the_documentation_rules_out_is_refused(helper):
    with pytest.raises(emulator.Refusal):
        run(into(helper), X, out=(X.shape, nl.float32))


def test_tile_sizes_are_the_documented_ones():
    sizes = nl.tile_size
    assert (sizes.pmax, sizes.psum_bank_fmax, sizes.psum_bank_fmax_bytes, sizes.psum_num_banks) == (128, 512, 2048, 8)
    assert (sizes.gemm_stationary_fmax, sizes.gemm_moving_fmax, sizes.bn_stats_fmax) == (128, 512, 512)
    assert sizes.sbuf_fmax_bytes == 212_984 and sizes.sbuf_fmax == 53_246
