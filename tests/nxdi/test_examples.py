"""The two examples, as far as a CPU carries them: their configurations build models that decode."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.nxdi import harness

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 24,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_nxdi_examples_configuration_decodes_qwen3(tmp_path):
    from neuronx_distributed_inference.models.model_base import NeuronFusedSpecModel

    from draft_verify import nxdi

    for name, layers in (("target", 2), ("draft", 1)):
        (tmp_path / name).mkdir()
        config = {**QWEN3, "num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    example = load("nxdi_qwen3")
    config = example.configure(
        str(tmp_path / "target"),
        str(tmp_path / "draft"),
        batch_size=2,
        seq_len=64,
        tp_degree=1,
        torch_dtype=torch.float32,
        attn_kernel_enabled=False,
        on_cpu=True,
    )
    torch.manual_seed(0)
    model = nxdi.apply(NeuronFusedSpecModel)(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and "past_key_values" not in name and not name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter.data, std=parameter.shape[-1] ** -0.5)
    prompts = harness.prompts_for(2, vocab_size=24)
    decoder = harness.Decoder(model, [0.0, 1.0, 0.0])  # temperature 0: greedy
    tokens, _ = decoder.generate(prompts, 20)
    assert tokens == harness.greedy_recompute(model.target_model, prompts, 20)
    assert model.neuron_config.speculation_length == example.NUM_DRAFT_TOKENS + 1


def test_the_vllm_examples_classes_come_from_the_registry(monkeypatch):
    from neuronx_distributed_inference.models.qwen3.modeling_qwen3 import NeuronQwen3ForCausalLM

    from draft_verify import nxdi

    # NxDI's registry itself imports every image model, and with them packages that are not installed here.
    registry = SimpleNamespace(MODEL_TYPES={"qwen3": {"causal-lm": NeuronQwen3ForCausalLM}})
    monkeypatch.setitem(sys.modules, "neuronx_distributed_inference.utils.constants", registry)
    seen = {}

    class LLM:
        def __init__(self, **config):
            seen.update(config)

        def generate(self, prompts, params):
            return [SimpleNamespace(outputs=[SimpleNamespace(text=prompt.upper())]) for prompt in prompts]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=lambda **values: values))
    load("vllm_neuron_qwen3").main("hello")
    assert seen["speculative_config"]["num_speculative_tokens"] == 8
    assert issubclass(registry.MODEL_TYPES["qwen3"]["causal-lm"]._model_cls, nxdi.ModelMixin)
    with pytest.raises(ValueError, match="gpt2"):
        nxdi.register("gpt2")
