"""Hypothesis profiles, registered once (larger under HYPOTHESIS_PROFILE=full), and the models tests decode with."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from draft_verify.bench import smollm2 as smollm2_module
from draft_verify.bench.llama import Config, Layer, Llama
from draft_verify.reference import emulator

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("ci", max_examples=25, derandomize=True, **_COMMON)
settings.register_profile("full", max_examples=300, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
emulator.set_strict(True)  # our own kernels do nothing that is merely tolerated


@pytest.fixture(scope="session")
def smollm2():
    """The demo's model; 540 MB and ten seconds, once a process."""
    try:
        return smollm2_module.load()
    except smollm2_module.MissingModel as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def tiny_llama() -> Llama:
    """A random Llama of three layers and 50 tokens, for the logic around a model."""
    config = Config(
        num_layers=3,
        hidden_size=32,
        feed_forward_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        vocab_size=50,
    )
    rng = np.random.default_rng(0)

    def matrix(out: int, inner: int) -> np.ndarray:
        return (rng.standard_normal((out, inner)) * inner**-0.5).astype(np.float32)

    ones = np.ones(config.hidden_size, np.float32)
    width, kv_width = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    layers = [
        Layer(
            attention_norm=ones,
            query=3 * matrix(width, config.hidden_size),  # sharp attention, so that the text matters
            key=matrix(kv_width, config.hidden_size),
            value=matrix(kv_width, config.hidden_size),
            output=2 * matrix(config.hidden_size, width),
            feed_forward_norm=ones,
            gate=matrix(config.feed_forward_size, config.hidden_size),
            up=matrix(config.feed_forward_size, config.hidden_size),
            down=2 * matrix(config.hidden_size, config.feed_forward_size),
        )
        for _ in range(config.num_layers)
    ]
    return Llama(config, matrix(config.vocab_size, config.hidden_size), layers, ones)


@pytest.fixture(scope="session")
def tiny_llama_windowed(tiny_llama) -> Llama:
    """The same with a sliding window of 5."""
    return replace(tiny_llama, config=replace(tiny_llama.config, sliding_window=5))
