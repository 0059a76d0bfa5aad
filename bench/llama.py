"""A Llama in plain NumPy float32, with the attention of every layer left to the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# attend(layer, query [B,Hq,T,D], key [B,Hkv,T,D], value [B,Hkv,T,D]) -> output [B,Hq,T,D]
Attend = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama; `sliding_window` W lets a row at position p see positions p - W + 1 .. p (None: all)."""

    num_layers: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5
    sliding_window: int | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, float32; matrices are [out, in]."""

    attention_norm: np.ndarray
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    output: np.ndarray
    feed_forward_norm: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True)
class Llama:
    """The model: its embedding [V,H] is also its output projection."""

    config: Config
    embedding: np.ndarray
    layers: list[Layer]
    output_norm: np.ndarray

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, attend: Attend, layers: list[int] | None = None
    ) -> np.ndarray:
        """Logits [B,T,V] float32 of `tokens` [B,T] at `positions` [B,T], through `layers` (default: all, in order)."""
        config = self.config
        batch, rows = tokens.shape
        rotation = _rotation(positions, config)
        hidden = self.embedding[tokens]
        for index in range(config.num_layers) if layers is None else layers:
            layer = self.layers[index]
            normed = _rms_norm(hidden, layer.attention_norm, config.norm_epsilon)
            query = _rotate(_heads(normed @ layer.query.T, config.num_heads), rotation)
            key = _rotate(_heads(normed @ layer.key.T, config.num_kv_heads), rotation)
            value = _heads(normed @ layer.value.T, config.num_kv_heads)
            attended = attend(index, query, key, value)
            hidden = hidden + attended.swapaxes(1, 2).reshape(batch, rows, -1) @ layer.output.T
            normed = _rms_norm(hidden, layer.feed_forward_norm, config.norm_epsilon)
            hidden = hidden + (_silu(normed @ layer.gate.T) * (normed @ layer.up.T)) @ layer.down.T
        return _rms_norm(hidden, self.output_norm, config.norm_epsilon) @ self.embedding.T


class PlainSequence:
    """One sequence decoded plainly, in NumPy: the tokens processed so far, with their keys and values.

    The plain decode and the draft models run on it; the verify step is compared with it, and shares with it nothing
    but the model's weights and projections.
    """

    def __init__(self, model: Llama, layers: list[int] | None = None):
        config = model.config
        self.model = model
        self.layers = list(range(config.num_layers)) if layers is None else layers
        self.tokens: list[int] = []
        self.positions = np.zeros(0, int)
        self.keys = {layer: np.zeros((config.num_kv_heads, 0, config.head_size), np.float32) for layer in self.layers}
        self.values = dict(self.keys)

    def follow(self, tokens: list[int]) -> np.ndarray:
        """Make `tokens` the sequence, keeping the keys of the prefix it shares: logits [V] after its last token."""
        shared = 0
        limit = min(len(self.tokens), len(tokens) - 1)
        while shared < limit and self.tokens[shared] == tokens[shared]:
            shared += 1
        self.truncate(shared)
        return self.append(tokens[shared:])[-1]

    def append(
        self, tokens: list[int], positions: np.ndarray | None = None, ancestors: np.ndarray | None = None
    ) -> np.ndarray:
        """Process `tokens` after the sequence: logits [T,V].

        For nodes of a tree: their `positions` [T], and `ancestors` [T, length + T] bool, what each of them sees.
        """
        start, count = len(self.tokens), len(tokens)
        if positions is None:
            positions = np.arange(start, start + count)
        self.tokens.extend(tokens)
        self.positions = np.concatenate([self.positions, positions])
        distance = positions[:, None] - self.positions[None, :]
        visible = distance >= 0 if ancestors is None else ancestors
        if self.model.config.sliding_window is not None:
            visible = visible & (distance < self.model.config.sliding_window)

        def attend(layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
            self.keys[layer] = np.concatenate([self.keys[layer], key[0]], axis=1)
            self.values[layer] = np.concatenate([self.values[layer], value[0]], axis=1)
            return _attention(query[0], self.keys[layer], self.values[layer], visible)[None]

        return self.model.forward(np.array([tokens]), positions[None], attend, self.layers)[0]

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.tokens[length:]
        self.positions = self.positions[:length]
        for cache in (self.keys, self.values):
            for layer in self.layers:
                cache[layer] = cache[layer][:, :length]


def _attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Softmax attention of query [Hq,T,D] over keys and values [Hkv,S,D], where `visible` [T,S]."""
    num_heads, rows, head_size = query.shape
    grouped = query.reshape(len(keys), -1, head_size)
    scores = (grouped @ keys.swapaxes(1, 2)).reshape(num_heads, rows, -1) * head_size**-0.5
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights.reshape(len(keys), -1, keys.shape[1]) @ values).reshape(query.shape)


def _heads(projected: np.ndarray, num_heads: int) -> np.ndarray:
    """[B,T,H*D] -> [B,H,T,D]."""
    batch, rows, width = projected.shape
    return projected.reshape(batch, rows, num_heads, width // num_heads).swapaxes(1, 2)


def _rotation(positions: np.ndarray, config: Config) -> np.ndarray:
    """Rotary embedding (Su et al. 2104.09864, equation 13) as complex numbers [B,1,T,D/2]."""
    frequencies = config.rope_base ** (-np.arange(0, config.head_size, 2) / config.head_size)
    return np.exp(1j * positions[:, None, :, None] * frequencies).astype(np.complex64)


def _rotate(heads: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Rotate heads [B,H,T,D]; interleaved: components 2i and 2i + 1 are one complex number."""
    return (np.ascontiguousarray(heads).view(np.complex64) * rotation).view(np.float32)


def _rms_norm(hidden: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return hidden / np.sqrt(np.mean(hidden * hidden, axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def _silu(gate: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate))
