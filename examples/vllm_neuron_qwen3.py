"""Qwen3-32B drafted by Qwen3-1.7B behind vLLM on Neuron (the plugin that runs NxD Inference models), 7 draft tokens.

    python examples/vllm_neuron_qwen3.py "Write a CSV file of ten planets."

Runs on a trn2 instance with the Neuron SDK and vLLM's Neuron plugin.
"""

import os
import sys

os.environ["VLLM_NEURON_FRAMEWORK"] = "neuronx-distributed-inference"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process, where the next line counts

from vllm import LLM, SamplingParams

from draft_verify import nxdi

nxdi.register("qwen3")  # the plugin takes its model classes from NxDI's registry

NUM_DRAFT_TOKENS = 7

CONFIG = {
    "model": "Qwen/Qwen3-32B",
    "tensor_parallel_size": 64,
    "max_num_seqs": 4,
    "max_model_len": 4096,
    "speculative_config": {
        "model": "Qwen/Qwen3-1.7B",
        # The plugin hands this number to NxDI as the rows to verify, the last token among them: one more than drafts.
        "num_speculative_tokens": NUM_DRAFT_TOKENS + 1,
        "max_model_len": 4096,
    },
    "additional_config": {
        "override_neuron_config": {
            "enable_fused_speculation": True,
            "on_device_sampling_config": {"do_sample": True, "dynamic": True},
        }
    },
}


def main(prompt):
    llm = LLM(**CONFIG)
    for output in llm.generate([prompt], SamplingParams(temperature=0.7, top_p=0.95, max_tokens=512)):
        print(output.outputs[0].text)


if __name__ == "__main__":
    main(*sys.argv[1:])
