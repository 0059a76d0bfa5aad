"""The tutorial kernels of the public Neuron documentation, read from a checkout (NEURON_SDK), against plain NumPy."""

from __future__ import annotations

import importlib.util
import os

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
