"""Qwen3-32B drafted by Qwen3-1.7B on NxD Inference, from stock to draft-verify: the two lines marked <- are all.

    python examples/nxdi_qwen3.py Qwen3-32B/ Qwen3-1.7B/ compiled/ "Write a CSV file of ten planets."

Runs on a trn2 instance with the Neuron SDK. `python -m draft_verify.check_pair Qwen3-32B/ Qwen3-1.7B/` says first
whether the two fit.
"""

import copy
import sys

from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig, OnDeviceSamplingConfig
from neuronx_distributed_inference.models.qwen3.modeling_qwen3 import NeuronQwen3ForCausalLM
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

from draft_verify import nxdi  # <-

NeuronQwen3ForCausalLM = nxdi.apply(NeuronQwen3ForCausalLM)  # <-

NUM_DRAFT_TOKENS = 7


def configure(target_path, draft_path, **overrides):
    """The target's configuration with the draft's inside. NxDI's speculation_length counts the last token too."""
    config_cls = NeuronQwen3ForCausalLM.get_config_cls()
    settings = {
        "batch_size": 1,
        "seq_len": 4096,
        "tp_degree": 64,
        "speculation_length": NUM_DRAFT_TOKENS + 1,
        "enable_fused_speculation": True,
        # do_sample with a separate draft model: stock NxDI cannot, this library verifies the draft's whole law.
        "on_device_sampling_config": OnDeviceSamplingConfig(do_sample=True, dynamic=True),
        **overrides,
    }
    neuron_config = config_cls.get_neuron_config_cls()(**settings)
    draft_neuron_config = copy.deepcopy(neuron_config)
    draft_neuron_config.speculation_length = 0
    draft_neuron_config.enable_fused_speculation = False
    config = config_cls(neuron_config, load_config=load_pretrained_config(target_path))
    config.fused_spec_config = FusedSpecNeuronConfig(
        NeuronQwen3ForCausalLM._model_cls,
        draft_config=config_cls(draft_neuron_config, load_config=load_pretrained_config(draft_path)),
        draft_model_path=draft_path,
    )
    return config


def main(target_path, draft_path, compiled_path, prompt):
    from neuronx_distributed_inference.utils.accuracy import get_generate_outputs
    from transformers import AutoTokenizer, GenerationConfig

    model = NeuronQwen3ForCausalLM(target_path, configure(target_path, draft_path))
    model.compile(compiled_path)
    model.load(compiled_path)
    tokenizer = AutoTokenizer.from_pretrained(target_path, padding_side="right")
    generation = GenerationConfig.from_pretrained(target_path, max_length=1024, pad_token_id=tokenizer.eos_token_id)
    _, outputs = get_generate_outputs(model, [prompt], tokenizer, is_hf=False, generation_config=generation)
    print(outputs[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
