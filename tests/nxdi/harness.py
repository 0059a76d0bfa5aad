"""Small NxD Inference fused-speculation models, instantiated directly and decoded on a CPU.

NxDI's own `to_cpu()` refuses speculation, but its model classes run: the caller plays the runtime and writes the
returned keys and values back into the caches.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.nxdi import stubs

CHECKOUTS = ("neuronx-distributed-inference", "neuronx-distributed")


def install(folder: str | Path) -> None:
    """Puts the checkouts in `folder` on the path, stubs in place of Neuron's wheels, and one-process groups up."""
    os.environ["NXD_CPU_MODE"] = "1"
    for name in CHECKOUTS:
        source = Path(folder) / name / "src"
        if not source.is_dir():
            raise FileNotFoundError(f"{source}: NXDI names a folder with checkouts of {' and '.join(CHECKOUTS)}")
        sys.path.insert(0, str(source))
    stubs.install()
    from neuronx_distributed.parallel_layers import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    parallel_state.initialize_speculative_draft_group(1)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 48,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "pad_token_id": 0,
}


def fused_model(
    fused_cls: type,
    *,
    batch: int,
    speculation_length: int,
    model_cls: type | None = None,
    seq_len: int = 64,
    do_sample: bool = False,
    noise: float = 0.0,
    eagle: bool = False,
    sizes: dict | None = None,
    seed: int = 0,
    **neuron,
):
    """A fused model of two-layer target and draft; the draft is the target with `noise` added to its weights."""
    from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig, NeuronConfig
    from neuronx_distributed_inference.models.llama.modeling_llama import LlamaInferenceConfig, NeuronLlamaModel

    vocab_size = {**SIZES, **(sizes or {})}["vocab_size"]

    def config(overrides, values):
        neuron_config = NeuronConfig(
            **{
                "batch_size": batch,
                "seq_len": seq_len,
                "speculation_length": speculation_length,
                "enable_fused_speculation": True,
                "on_device_sampling_config": {"do_sample": do_sample, "dynamic": do_sample, "global_topk": vocab_size},
                "torch_dtype": torch.float32,
                "attn_kernel_enabled": False,
                "on_cpu": True,
                **neuron,
                **overrides,
            }
        )
        values = {**SIZES, "num_hidden_layers": 2, **(values or {})}
        return LlamaInferenceConfig(neuron_config, load_config=lambda config: vars(config).update(values))

    target_config = config({"enable_eagle_speculation": eagle}, sizes)
    overrides = {"enable_fused_speculation": False, "enable_eagle_speculation": eagle, "is_eagle_draft": eagle}
    if not eagle:
        overrides["speculation_length"] = 0
    draft_config = config(overrides, {**(sizes or {}), **({"num_hidden_layers": 1} if eagle else {})})
    draft_config.neuron_config.enable_fused_speculation = False  # EAGLE turns it on
    # As NxDI's applications do: the draft's caches are tiled exactly when the target's are.
    draft_config.neuron_config.kv_cache_tiling = target_config.neuron_config.kv_cache_tiling
    model_cls = model_cls or NeuronLlamaModel
    target_config.fused_spec_config = FusedSpecNeuronConfig(model_cls, draft_config=draft_config)
    model = fused_cls(target_config).eval()

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.target_model.named_parameters():
        if parameter.is_floating_point() and "past_key_values" not in name:
            ones = 1.0 if name.endswith("norm.weight") else 0.0
            scale = 0.1 if ones else (1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
            weights[name] = ones + scale * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(weights[name])
    for name, parameter in model.draft_model.named_parameters():
        if not parameter.is_floating_point() or "past_key_values" in name:
            continue
        if name in weights and parameter.shape == weights[name].shape:
            std = weights[name].std()
            parameter.data.copy_(weights[name] + noise * std * torch.randn(parameter.shape, generator=generator))
        else:  # an EAGLE head's own layers
            parameter.data.copy_(parameter.shape[-1] ** -0.5 * torch.randn(parameter.shape, generator=generator))
    return model


class Decoder:
    """Plays NxDI's runtime for one fused model: prefill, then steps, feeding every output back as the next input."""

    def __init__(self, model, sampling_params=None):
        self.model = model
        self.batch = model.batch_size
        self.seq_len = model.neuron_config.seq_len
        params = [1.0, 1.0, 1.0] if sampling_params is None else sampling_params
        self.sampling_params = torch.tensor(params, dtype=torch.float32).expand(self.batch, 3).clone()
        self.seq_ids = torch.arange(self.batch, dtype=torch.int32)

    def _run(self, input_ids, attention_mask, position_ids):
        with torch.no_grad():
            outputs = self.model(input_ids, attention_mask, position_ids, self.seq_ids, self.sampling_params)
        accepted, self.input_ids, self.attention_mask, self.position_ids = outputs[:4]
        caches = [
            *self.model.draft_model.kv_mgr.past_key_values,
            *self.model.target_model.kv_mgr.past_key_values,
        ]
        if self.model.neuron_config.enable_eagle_speculation:
            caches.append(self.model.hidden_state_rolling_buffer.hidden_states)
        for parameter, value in zip(caches, outputs[-len(caches) :], strict=True):
            parameter.data.copy_(value.reshape(parameter.shape))
        return accepted

    def prefill(self, prompts):
        input_ids, attention_mask, position_ids = context_inputs(prompts, self.seq_len)
        return self._run(input_ids, attention_mask, position_ids)

    def step(self):
        return self._run(self.input_ids, self.attention_mask, self.position_ids)

    def generate(self, prompts, num_tokens):
        """Decodes until every row has `num_tokens`; returns the rows and the number of steps each row needed."""
        rows = [[int(token)] for token in self.prefill(prompts)[:, 0]]
        steps = [0] * self.batch
        while min(map(len, rows)) < num_tokens:
            for b, tokens in enumerate(self.step()):
                kept = [int(token) for token in tokens if token >= 0]
                assert kept and tokens.tolist()[: len(kept)] == kept
                if len(rows[b]) < num_tokens:
                    steps[b] += 1
                rows[b] += kept
        return [row[:num_tokens] for row in rows], steps


def context_inputs(sequences, seq_len):
    input_ids = torch.zeros((len(sequences), seq_len), dtype=torch.int32)
    attention_mask = torch.zeros_like(input_ids)
    position_ids = torch.ones_like(input_ids)  # NxDI pads positions with 1
    for b, tokens in enumerate(sequences):
        input_ids[b, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        attention_mask[b, : len(tokens)] = 1
        position_ids[b, : len(tokens)] = torch.arange(len(tokens), dtype=torch.int32)
    return input_ids, attention_mask, position_ids


def greedy_recompute(target_model, prompts, num_tokens):
    """The target's own greedy continuation, every token from a fresh pass over the whole prefix."""
    sequences = [list(prompt) for prompt in prompts]
    batch, seq_len = len(prompts), target_model.neuron_config.seq_len
    params = torch.ones((batch, 3))
    for _ in range(num_tokens):
        inputs = context_inputs(sequences, seq_len)
        with torch.no_grad():
            tokens = target_model(*inputs, torch.arange(batch, dtype=torch.int32), params)[0]
        if tokens.is_floating_point():  # the logits, where this library asked for them
            tokens = tokens.argmax(dim=-1)
        for sequence, token in zip(sequences, tokens.reshape(-1)):
            sequence.append(int(token))
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts)]


def prompts_for(batch, seed=1, vocab_size=48):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab_size, (5 + 3 * b,), generator=generator).tolist() for b in range(batch)]
