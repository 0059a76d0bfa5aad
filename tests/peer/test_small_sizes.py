"""Kernels of nki-library whose own fast cases are too large for an emulator, at small sizes, against plain NumPy."""

from __future__ import annotations

import importlib
import os

import ml_dtypes
import numpy as np
import pytest

from draft_verify.reference import emulator

from . import standins

CHECKOUT = os.environ.get("NKI_LIBRARY")
if not CHECKOUT:
    pytest.skip("set NKI_LIBRARY to a checkout of aws-neuron/nki-library", allow_module_level=True)

standins.install(os.path.abspath(CHECKOUT))


def kernel(path: str, lnc: int):
    module, _, name = path.rpartition(".")
    return emulator.jit(getattr(importlib.import_module(f"nkilib_src.nkilib.{module}"), name))[lnc]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy(reduction):
    rng, float32 = np.random.default_rng(0), emulator.modules()["nki.language"].float32
    logits, targets = rng.standard_normal((16, 3000), dtype=np.float32), rng.integers(0, 3000, 16, dtype=np.int32)
    forward = kernel("experimental.loss.cross_entropy.cross_entropy_forward", 2)
    loss, log_sum = forward(logits, targets, positions_per_batch=8, chunk_size=1024, dtype=float32)
    expected = np.log(np.exp(logits, dtype=np.float64).sum(axis=1))
    np.testing.assert_allclose(log_sum, expected, rtol=1e-6)
    np.testing.assert_allclose(loss, expected - logits[np.arange(16), targets], rtol=1e-5)
    backward = kernel("experimental.loss.cross_entropy.cross_entropy_backward", 2)
    gradient = backward(logits.copy(), targets, log_sum, reduction, 8, 1024, float32, False)
    probabilities = np.exp(logits - expected[:, None]) - (np.arange(3000) == targets[:, None])
    np.testing.assert_allclose(gradient, probabilities / (16 if reduction == "mean" else 1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "lnc, rows, causal, transposed, options",
    [
        (1, 512, True, (False, True), {"tp_q": True, "tp_k": False}),
        (2, 1024, False, (False, True), {"tp_q": True, "tp_k": False}),
        (2, 512, True, (True, True), {"tp_q": False, "tp_k": False}),
        (2, 512, True, (False, False), {"tp_q": True, "tp_k": True, "tp_out": True}),
        (2, 512, True, (False, True), {"tp_q": True, "tp_k": False, "cache_softmax": True}),
    ],
)
def test_attention_of_a_prompt(lnc, rows, causal, transposed, options):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, rows, 64), dtype=np.float32).astype(ml_dtypes.bfloat16) for _ in range(3))
    given = [np.ascontiguousarray(x.transpose(0, 2, 1)) if swap else x for x, swap in zip((q, k), transposed)]
    result = kernel("core.attention.attention_cte.attention_cte", lnc)(*given, v, 0.125, causal, **options)
    result = (result[0] if isinstance(result, tuple) else result).astype(np.float64)
    scores = np.einsum("bqd,bkd->bqk", q.astype(np.float64), k.astype(np.float64)) * 0.125
    if causal:
        scores[:, ~np.tri(rows, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = weights / weights.sum(axis=-1, keepdims=True) @ v.astype(np.float64)
    if options.get("tp_out"):
        expected = expected.transpose(0, 2, 1)
    np.testing.assert_allclose(result, expected, rtol=2e-2, atol=2e-2)
