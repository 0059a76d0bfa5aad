"""NxDI's real fused model classes with and without this library, decoded on a CPU."""

import functools
import importlib
import math

import pytest
import torch

from tests.nxdi import harness
from tests.nxdi.statistics import sample_and_compare

KINDS = {
    "plain": {"seq_len": 96},
    "transposed": {"seq_len": 96, "k_cache_transposed": True},
    "tiled": {"seq_len": 256},
}
NUM_TOKENS = 24


def classes():
    from neuronx_distributed_inference.models.model_base import NeuronFusedSpecModel

    from draft_verify import nxdi

    return NeuronFusedSpecModel, nxdi.apply(NeuronFusedSpecModel)


def decode(fused_cls, prompts, num_tokens=NUM_TOKENS, **options):
    model = harness.fused_model(fused_cls, batch=len(prompts), **options)
    return harness.Decoder(model).generate(prompts, num_tokens), model


@functools.cache
def steps_alone(row, speculation_length, kind, noise):
    """Steps that stock NxDI needs for one prompt in a batch of its own, where its masks are right."""
    prompt = harness.prompts_for(row + 1)[row]
    (_, steps), _ = decode(classes()[0], [prompt], speculation_length=speculation_length, noise=noise, **KINDS[kind])
    return steps[0]


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speculation_length", [2, 4, 7])
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_greedy_tokens_are_the_targets_own_and_no_step_is_wasted(batch, speculation_length, kind, noise):
    stock, ours = classes()
    prompts = harness.prompts_for(batch)
    options = {"speculation_length": speculation_length, "noise": noise, **KINDS[kind]}
    (tokens, steps), model = decode(ours, prompts, **options)
    assert tokens == harness.greedy_recompute(model.target_model, prompts, NUM_TOKENS)
    (stock_tokens, stock_steps), _ = decode(stock, prompts, **options)
    assert tokens == stock_tokens
    assert max(steps) <= max(stock_steps)
    # A row needs what it needs alone: others' positions are not in its mask.
    assert steps == [steps_alone(row, speculation_length, kind, noise) for row in range(batch)]
    if noise == 0:
        assert steps == [math.ceil((NUM_TOKENS - 1) / speculation_length)] * batch
        assert all(mine <= theirs for mine, theirs in zip(steps, stock_steps))


def test_a_sequence_fills_its_cache_to_the_last_slot():
    _, ours = classes()
    prompts = harness.prompts_for(2)
    seq_len = 32
    num_tokens = seq_len - len(prompts[1]) + 1
    (tokens, _), model = decode(ours, prompts, num_tokens, speculation_length=4, noise=0.2, seq_len=seq_len)
    assert tokens == harness.greedy_recompute(model.target_model, prompts, num_tokens)


def test_stock_sampling_fails_where_ours_follows_the_targets_law():
    stock, ours = classes()
    vocab_size, rows, batch, rounds = 6, 4, 64, 20
    options = {
        "batch": batch,
        "speculation_length": rows,
        "noise": 0.6,
        "do_sample": True,
        "sizes": {"vocab_size": vocab_size},
        "seq_len": 32,
    }
    prompt = [1, 4, 2]
    params = [4.0, 0.95, 0.9]  # top_k, top_p, temperature
    with pytest.raises(IndexError):
        decoder = harness.Decoder(harness.fused_model(stock, **options), params)
        decoder.prefill([prompt] * batch)
        decoder.step()

    model = harness.fused_model(ours, **options)
    accepted = sample_and_compare(model, prompt, params, rounds)
    assert accepted > 0.3 * rounds * batch  # the drafts are really used


def test_a_temperature_of_zero_is_greedy_row_by_row():
    _, ours = classes()
    prompts = harness.prompts_for(2)
    model = harness.fused_model(ours, batch=2, speculation_length=4, noise=0.2, do_sample=True)
    decoder = harness.Decoder(model)
    decoder.sampling_params = torch.tensor([[0.0, 1.0, 0.0, 5.0], [0.0, 1.0, 1.5, 6.0]])
    tokens, _ = decoder.generate(prompts, NUM_TOKENS)
    greedy = harness.greedy_recompute(model.target_model, prompts, NUM_TOKENS)
    assert tokens[0] == greedy[0] and tokens[1] != greedy[1]


@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_a_real_model_decodes_through_the_kernels_on_the_emulator(kind, monkeypatch):
    from draft_verify import backends

    launched = set()
    launch = backends.launch

    def recording(operation, *arguments, **keywords):
        launched.add(operation)
        return launch(operation, *arguments, **keywords)

    monkeypatch.setattr(backends, "resolve", lambda backend, on_device: "emulator")
    for module in (backends, importlib.import_module("draft_verify.verify_attention")):
        monkeypatch.setattr(module, "launch", recording)
    _, ours = classes()
    prompts = harness.prompts_for(2)
    (tokens, _), model = decode(ours, prompts, 10, speculation_length=4, noise=0.2, **KINDS[kind])
    assert tokens == harness.greedy_recompute(model.target_model, prompts, 10)
    assert launched == {"verify_attention", "greedy_acceptance"}
