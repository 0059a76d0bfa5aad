"""Decoding with draft_verify: draft, verify, accept, commit, until every sequence has its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import draft_verify

from .drafts import Draft, Proposal
from .llama import Config, Llama, PlainSequence
from .synthetic import synthetic_acceptance

EMPTY_SLOT = -1
PADDING_ROW = -2


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else drawn with `seed`.

    `rule` is one of rejection_sampling's for chains, one of tree_acceptance's for trees, "typical" for either, or
    "synthetic": chains accepted with `synthetic_rates`, conditional and by position, whatever the logits say.
    """

    temperature: float = 0.0
    rule: str = "token"
    seed: int = 0
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    synthetic_rates: tuple[float, ...] = ()


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer for B sequences, in one of the library's layouts.

    `layout` holds what both verify_attention and commit_window are told of it. Slots start as NaN: whatever is read
    before it was committed shows.
    """

    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    layout: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def contiguous(cls, config: Config, batch: int, slots: int, cache_layout: str = "BHSD") -> Cache:
        """`slots` a sequence; "BHDS" stores keys transposed."""
        value = (batch, config.num_kv_heads, slots, config.head_size)
        key = (batch, config.num_kv_heads, config.head_size, slots) if cache_layout == "BHDS" else value
        return cls(_unwritten(config, key), _unwritten(config, value), {"cache_layout": cache_layout})

    @classmethod
    def paged(
        cls, config: Config, batch: int, slots: int, block_size: int = 16, cache_layout: str = "NHPD", seed: int = 0
    ) -> Cache:
        """Room for `slots` a sequence in blocks of `block_size` tokens, shuffled so that no two need be neighbours."""
        per_sequence = -(-slots // block_size)
        blocks = np.random.default_rng(seed).permutation(batch * per_sequence).astype(np.int32)
        shape = (
            (len(blocks), config.num_kv_heads, block_size, config.head_size)
            if cache_layout == "NHPD"
            else (len(blocks), block_size, config.num_kv_heads, config.head_size)
        )
        layout = {"cache_layout": cache_layout, "block_table": blocks.reshape(batch, per_sequence)}
        return cls(_unwritten(config, shape), _unwritten(config, shape), layout)

    @classmethod
    def ring(cls, config: Config, batch: int, num_draft_tokens: int) -> Cache:
        """The fewest slots that a model with a sliding window needs when only accepted rows are ever written."""
        slots = draft_verify.ring_slots(config.sliding_window, num_draft_tokens, "accepted_only")
        shape = (batch, config.num_kv_heads, slots, config.head_size)
        return cls(_unwritten(config, shape), _unwritten(config, shape), {"ring": True})


@dataclass
class Decoded:
    """What a decode produced: `tokens` per sequence, `stats` over all its verify steps, prompts not counted."""

    tokens: list[list[int]]
    stats: draft_verify.AcceptanceStats


def plain_decode(model: Llama, prompt: Sequence[int], num_tokens: int, stop: int | None = None):
    """Greedy decode without speculation, in NumPy: its tokens, and how far apart the two best logits were for each."""
    sequence, text = PlainSequence(model), list(prompt)
    margins = []
    while len(text) < len(prompt) + num_tokens and (not margins or text[-1] != stop):
        logits = sequence.follow(text)
        second, best = np.partition(logits, -2)[-2:]
        margins.append(float(best - second))
        text.append(int(logits.argmax()))
    return text[len(prompt) :], margins


def speculative_decode(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Draft],
    cache: Cache,
    *,
    num_tokens: int,
    num_draft_tokens: int,
    tree: bool = False,
    sampling: Sampling = Sampling(),
    stop: int | None = None,
    backend: str = "reference",
    on_step: Callable[[int], None] = lambda emitted: None,
) -> Decoded:
    """Decode `prompts` by drafting and verifying; every attention, acceptance and commit goes through `backend`.

    Args:
        drafts: one a sequence; they propose chains, or trees if `tree`.
        num_tokens: new tokens a sequence; fewer where `stop` is emitted first.
        num_draft_tokens: K; windows have T = K + 1 rows, and the prompts are processed in windows of the same shape.
        on_step: called after each verify step with the number of tokens it emitted, all sequences together.
    """
    batch = len(prompts)
    texts = [list(prompt) for prompt in prompts]
    stats = draft_verify.AcceptanceStats(num_draft_tokens, [] if stop is None else [stop])
    seeds = np.arange(sampling.seed, sampling.seed + batch, dtype=np.uint32)

    def remaining(sequence: int) -> int:
        text, prompt = texts[sequence], prompts[sequence]
        ended = len(text) > len(prompt) and text[-1] == stop
        return 0 if ended else len(prompt) + num_tokens - len(text)

    def propose(sequence: int, uniforms: np.ndarray) -> Proposal | None:
        left = remaining(sequence)
        if left == 0:
            return None
        return drafts[sequence].propose(
            texts[sequence], min(num_draft_tokens, left - 1), sampling.temperature, uniforms[:num_draft_tokens]
        )

    seq_lens = _process_prompts(model, prompts, cache, num_draft_tokens + 1, backend)
    while any(remaining(b) > 0 for b in range(batch)):
        draft_uniforms = draft_verify.uniforms_for(seeds, seq_lens, num_draft_tokens, purpose="draft")
        proposals = [propose(b, draft_uniforms[b]) for b in range(batch)]
        window = _Window([text[-1] for text in texts], proposals, seq_lens, num_draft_tokens + 1, tree)
        logits = window.forward(model, cache, backend)
        uniforms = draft_verify.uniforms_for(seeds, seq_lens, num_draft_tokens)
        acceptance = window.accept(logits, uniforms, sampling, backend)
        window.commit(cache, acceptance.num_accepted, acceptance.path if tree else None, backend)
        stats.update(acceptance, draft_lens=window.depths())
        before = sum(map(len, texts))
        for text, emitted, accepted in zip(texts, acceptance.tokens.tolist(), acceptance.num_accepted):
            emitted = emitted[: accepted + 1]
            text.extend(emitted[: emitted.index(stop) + 1] if stop in emitted else emitted)
        seq_lens += acceptance.num_accepted + 1
        on_step(sum(map(len, texts)) - before)
    return Decoded([text[len(prompt) :] for text, prompt in zip(texts, prompts)], stats)


def _process_prompts(
    model: Llama, prompts: Sequence[Sequence[int]], cache: Cache, rows: int, backend: str
) -> np.ndarray:
    """All but each prompt's last token into the cache, in windows accepted whole: the lengths [B] then committed."""
    seq_lens = np.zeros(len(prompts), np.int32)
    while any(length < len(prompt) - 1 for length, prompt in zip(seq_lens, prompts)):
        pieces = [list(prompt[:-1][length : length + rows]) for length, prompt in zip(seq_lens, prompts)]
        proposals = [Proposal(piece[1:], list(range(len(piece) - 1))) if piece else None for piece in pieces]
        window = _Window([piece[0] if piece else 0 for piece in pieces], proposals, seq_lens, rows, tree=False)
        window.forward(model, cache, backend)
        window.commit(cache, window.draft_lens, None, backend)
        seq_lens += window.draft_lens + 1
    return seq_lens


class _Window:
    """One verify step of B sequences; a proposal of None is an empty slot."""

    def __init__(self, roots: list[int], proposals: list[Proposal | None], seq_lens: np.ndarray, rows: int, tree: bool):
        batch = len(roots)
        self.tree = tree
        self.seq_lens = seq_lens.copy()
        self.draft_lens = np.full(batch, EMPTY_SLOT, np.int32)
        self.tokens = np.zeros((batch, rows), np.int32)
        self.parents = np.full((batch, rows), PADDING_ROW, np.int32)
        self.row_depths = np.zeros((batch, rows), np.int32)
        self.tokens[:, 0] = roots
        self.parents[:, 0] = -1
        for b, proposal in enumerate(proposals):
            if proposal is None:
                continue
            self.draft_lens[b] = count = len(proposal.tokens)
            self.tokens[b, 1 : count + 1] = proposal.tokens
            self.parents[b, 1 : count + 1] = proposal.parents
            for row in range(1, count + 1):
                self.row_depths[b, row] = self.row_depths[b, self.parents[b, row]] + 1
        self.laws = [proposal and proposal.laws for proposal in proposals]

    def depths(self) -> np.ndarray:
        """[B] the longest path of drafts; -1 in an empty slot."""
        return np.where(self.draft_lens == EMPTY_SLOT, EMPTY_SLOT, self.row_depths.max(axis=1))

    def forward(self, model: Llama, cache: Cache, backend: str) -> np.ndarray:
        """Logits [B,T,V] of the target; keeps every layer's keys and values of the window for the commit."""
        self.keys, self.values = [], []

        def attend(layer: int, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
            self.keys.append(key)
            self.values.append(value)
            return draft_verify.verify_attention(
                query,
                key,
                value,
                cache.keys[layer],
                cache.values[layer],
                self.seq_lens,
                draft_lens=self.draft_lens,
                tree=self.parents if self.tree else None,
                sliding_window=model.config.sliding_window,
                backend=backend,
                **cache.layout,
            )

        return model.forward(self.tokens, self.seq_lens[:, None] + self.row_depths, attend)

    def accept(
        self, logits: np.ndarray, uniforms: np.ndarray, sampling: Sampling, backend: str
    ) -> draft_verify.Acceptance:
        drafts = self.tokens[:, 1:]
        if sampling.rule == "synthetic":
            return synthetic_acceptance(
                drafts, logits.argmax(axis=-1), sampling.synthetic_rates, uniforms, self.draft_lens
            )
        options = {"draft_lens": self.draft_lens, "backend": backend}
        if sampling.temperature == 0 and sampling.rule != "typical":
            if self.tree:
                return draft_verify.tree_acceptance(self.parents, drafts, logits, rule="greedy", **options)
            return draft_verify.greedy_acceptance(drafts, logits, **options)
        options["temperature"] = np.full(len(drafts), sampling.temperature, np.float32)
        if sampling.rule == "typical":
            return draft_verify.typical_acceptance(
                drafts,
                logits,
                uniforms,
                posterior_threshold=sampling.posterior_threshold,
                posterior_alpha=sampling.posterior_alpha,
                tree=self.parents if self.tree else None,
                **options,
            )
        options["rule"] = sampling.rule
        options["draft_probs"] = self._draft_laws(logits.shape)
        if self.tree:
            return draft_verify.tree_acceptance(self.parents, drafts, logits, uniforms, **options)
        return draft_verify.rejection_sampling(drafts, logits, uniforms, **options)

    def commit(self, cache: Cache, num_accepted: np.ndarray, path: np.ndarray | None, backend: str) -> None:
        """Write the accepted rows of all layers, in one launch."""
        draft_verify.commit_window(
            cache.keys,
            cache.values,
            tuple(self.keys),
            tuple(self.values),
            self.seq_lens,
            num_accepted,
            path=path,
            backend=backend,
            **cache.layout,
        )

    def _draft_laws(self, shape: tuple[int, int, int]) -> np.ndarray | None:
        """Trees [B,T,V], chains [B,K,V]; None when no draft was drawn from a law."""
        if all(laws is None for laws in self.laws):
            return None
        batched = np.zeros(shape, np.float32)
        for b, laws in enumerate(self.laws):
            if laws is not None:
                batched[b, : len(laws)] = laws
        return batched if self.tree else np.ascontiguousarray(batched[:, :-1])


def _unwritten(config: Config, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.full(shape, np.nan, np.float32) for _ in range(config.num_layers))
