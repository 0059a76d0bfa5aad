"""The kernels of the public Neuron documentation, its tutorials and the code on its pages, read from a checkout
(NEURON_SDK), against plain NumPy."""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import sys
import textwrap

import numpy as np
import pytest

from draft_verify.reference import emulator

CHECKOUT = os.environ.get("NEURON_SDK")
if not CHECKOUT:
    pytest.skip("set NEURON_SDK to a checkout of aws-neuron/aws-neuron-sdk", allow_module_level=True)


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    """One tutorial sets the platform when it is imported."""
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


def tutorial(path: str):
    """A tutorial's module, imported on the emulator."""
    emulator.install()
    spec = importlib.util.spec_from_file_location(os.path.basename(path), f"{CHECKOUT}/nki/examples/{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def from_page(path: str, name: str) -> list[dict]:
    """The namespace of each code block of a page that defines `name`, in order."""
    emulator.install()
    with open(f"{CHECKOUT}/nki/{path}") as page:
        text = page.read()
    found = []
    for block in re.finditer(r"^( *)\.\. code-block:: python\n((?:\1 +.*\n|\s*\n)+)", text, re.MULTILINE):
        code = textwrap.dedent(block[2])
        if f"def {name}(" in code:
            place = f"{path}:{text[: block.start(2)].count(chr(10)) + 1}"
            linecache.cache[place] = (len(code), None, code.splitlines(keepends=True), place)
            modules = {short: sys.modules[long] for short, long in MODULES.items()}
            exec(compile(code, place, "exec"), modules)
            found.append(modules)
    return found


MODULES = {"nki": "nki", "nl": "nki.language", "nisa": "nki.isa"}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(
    "kernel, rows, inner, columns",
    [
        ("basic_", 64, 128, 512),
        ("tiled_", 256, 256, 512),
        ("hoist_load_", 128, 384, 1024),
        ("block_free_dimension_", 256, 256, 1024),
        ("fully_optimized_", 2048, 1024, 1024),
    ],
)
def test_matrix_multiplication(kernel, rows, inner, columns):
    left, right = normal(inner, rows), normal(inner, columns, seed=1)
    module = tutorial("matrix_multiplication/matrix_multiplication_nki_kernels")
    result = getattr(module, f"nki_matmul_{kernel}")(left, right)
    np.testing.assert_allclose(result, left.T.astype(np.float64) @ right, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_transpose_of_flattened_matrices(dtype):
    data = np.arange(5 * 3 * 4).astype(dtype).reshape(5, 12)
    kernel = tutorial("transpose2d/transpose2d_nki_kernels").tensor_transpose2D_kernel_
    np.testing.assert_array_equal(kernel(data, (3, 4)), data.reshape(5, 3, 4).transpose(0, 2, 1).reshape(5, 12))


@pytest.mark.parametrize("pool, dtype", [(2, np.float16), (3, np.float32)])
def test_average_pooling(pool, dtype):
    data = np.arange(2 * 6 * 6).astype(dtype).reshape(2, 6, 6)
    kernel = tutorial("average_pool2d/average_pool2d_nki_kernels").tensor_avgpool_kernel
    size = 6 // pool
    expected = data.reshape(2, size, pool, size, pool).mean(axis=(2, 4), dtype=np.float32)
    np.testing.assert_allclose(kernel(data, pool), expected, rtol=2**-10 if dtype is np.float16 else 1e-6)


@pytest.mark.parametrize("version, length", [("v1", 300), ("v2", 300), ("v3", 1024)])
def test_mamba(version, length):
    batch, channels, states = 1, 256, 4
    delta, u = np.abs(normal(batch, channels, length)), normal(batch, channels, length, seed=1)
    a = -np.abs(normal(channels, states, seed=2))
    b, c = normal(batch, states, length, seed=3), normal(batch, states, length, seed=4)
    kernel = getattr(tutorial("fused_mamba/mamba_nki_kernels"), f"mamba_{version}")
    state, expected = np.zeros((batch, channels, states)), np.empty((batch, channels, length))
    for step in range(length):
        decay = np.exp(delta[:, :, step, None].astype(np.float64) * a)
        state = decay * state + (delta * u)[:, :, step, None] * b[:, None, :, step]
        expected[:, :, step] = (state * c[:, None, :, step]).sum(axis=-1)
    np.testing.assert_allclose(kernel(delta, u, a, b, c), expected, rtol=1e-3, atol=1e-3)


def test_tensor_addition():
    left, right = normal(256, 1024), normal(256, 1024, seed=1)
    kernel = tutorial("tensor_addition/tensor_addition_nki_kernels").nki_tensor_add
    np.testing.assert_array_equal(kernel(left, right), left + right)


def test_the_simulator_guide():
    tutorial("simulate/nki_simulate_example")  # runs its kernel through nki.simulate and compares


@pytest.mark.parametrize(
    "version, rows, inner, columns",
    [(0, 128, 128, 512), (1, 256, 512, 512), (2, 256, 512, 1024), (3, 256, 512, 1024), (4, 2048, 1024, 1024)],
)
def test_the_kernel_optimization_guide(version, rows, inner, columns):
    kernel = from_page("guides/tutorials/kernel-optimization.rst", "matrix_multiply_kernel")[version]
    left, right = normal(inner, rows), normal(inner, columns, seed=1)
    result = kernel["matrix_multiply_kernel"](left, right)
    np.testing.assert_allclose(result, left.T.astype(np.float64) @ right, rtol=1e-4, atol=1e-2)


def test_the_scheduling_guide():
    page, x = "guides/how-to-scheduling-apis.rst", normal(64, 64)
    edges, chained = from_page(page, "kernel")
    np.testing.assert_allclose(edges["scheduled"](x), 1 / x + x + 1, rtol=1e-5)
    in_order, in_a_helper = from_page(page, "loop")
    for kernel in (chained["scheduled"], in_order["loop"], in_a_helper["loop"]):
        np.testing.assert_allclose(kernel(x, x + 1, x + 2), np.exp([x, x + 1, x + 2]), rtol=1e-5)


def test_the_language_guide_composes_kernels():
    module, x, out = (
        from_page("get-started/nki-language-guide.rst", "relu_kernel")[0],
        normal(256, 512),
        normal(256, 512),
    )
    module["relu_kernel"](x, out)
    np.testing.assert_array_equal(out, np.maximum(x, 0))


def test_the_examples_of_gathers_and_scatters():
    page, rows = "api/nki/isa/__init__.py", np.random.default_rng(0).permutation(300).astype(np.uint32)
    table, one, two = normal(300, 128), rows[:128, None], rows[:256].reshape(2, 128).T.copy()
    kernels = {
        name: from_page(page, name)[0][name]
        for name in ("indirect_gather_kernel", "indirect_scatter_kernel", "gather_transpose_kernel",
                     "gather_transpose_2d_kernel", "gather_transpose_4d_kernel")
    }  # fmt: skip
    np.testing.assert_array_equal(kernels["indirect_gather_kernel"](table, one), table[rows[:128]])
    scattered = kernels["indirect_scatter_kernel"](table[:128].copy(), one, np.zeros_like(table))
    np.testing.assert_array_equal(scattered[rows[:128]], table[:128])
    half = table.astype(np.float16)
    np.testing.assert_array_equal(kernels["gather_transpose_kernel"](half, one), half[rows[:128]].T)
    np.testing.assert_array_equal(kernels["gather_transpose_2d_kernel"](half, two), half[rows[:256]].T)
    deep = normal(300, 2, 1, 128).astype(np.float16)
    expected = deep[rows[:256]].transpose(3, 1, 2, 0)
    np.testing.assert_array_equal(kernels["gather_transpose_4d_kernel"](deep, two), expected)


def test_the_examples_of_layout_and_indexing():
    tile, row, image = normal(128, 512), normal(4, 5), normal(2, 6, 6)
    np.testing.assert_allclose(tutorial("layout-pass").tensor_exp_kernel_(tile), np.exp(tile), rtol=1e-5)
    even, odd = tutorial("index-case-1").tensor_split_kernel_(row)
    np.testing.assert_array_equal(even, row[:, 0::2])
    np.testing.assert_array_equal(odd, row[:, 1::2])
    pooled = tutorial("index-case-3").tensor_maxpool_kernel_(image, 2)
    np.testing.assert_array_equal(pooled, image.reshape(2, 3, 2, 3, 2).max(axis=(2, 4)))
