"""Where drafts come from: the target model with layers skipped, and the text so far (prompt lookup).

Every draft serves one sequence and remembers it between steps. `propose(tokens, limit, temperature, uniforms)`
continues `tokens` by at most `limit` drafts in a row; `uniforms` [T-1] in (0,1) draw the sampled ones, window row r
by entry r - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from .llama import Llama, PlainSequence

ROOT = -1


class Proposal(NamedTuple):
    """Drafts for rows 1..n of a window: their `tokens`, each one's `parents` row, and the law of each row's children.

    `laws` [n + 1, V] float32 holds in row i the law the children of window row i were drawn from; None when the drafts
    were chosen, not drawn, so that their law is one-hot.
    """

    tokens: list[int]
    parents: list[int]
    laws: np.ndarray | None = None


class Shape(NamedTuple):
    """A tree: `parents` [T], row 0 the root, in order of depth; row r its parent's `ranks[r]`-th best (from 0)."""

    parents: Sequence[int]
    ranks: Sequence[int]

    @property
    def depths(self) -> list[int]:
        depths = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        return depths


def chain(num_draft_tokens: int) -> Shape:
    """The tree without branches: K drafts in a row."""
    return Shape(range(-1, num_draft_tokens), [0] * (num_draft_tokens + 1))


class Draft(Protocol):
    def propose(self, tokens: list[int], limit: int, temperature: float, uniforms: np.ndarray) -> Proposal: ...


class LayerSkip:
    """The target model itself, run through some of its layers only, with a cache of its own.

    At temperature 0 the children of a row are its most probable tokens, by rank. Above, `siblings` says how they come
    about: "without_replacement" or "independent", drawn from the draft's law; "best", the most probable ones still.
    """

    def __init__(self, model: Llama, layers: list[int], shape: Shape, siblings: str = "without_replacement"):
        self.sequence = PlainSequence(model, layers)
        self.shape = shape
        self.siblings = siblings

    def propose(self, tokens: list[int], limit: int, temperature: float, uniforms: np.ndarray) -> Proposal:
        parents, depths = self.shape.parents, self.shape.depths
        rows = sum(depth <= limit for depth in depths)
        length = len(tokens)
        drafted = [tokens[-1]] + [0] * (rows - 1)
        slots = [length - 1] + [0] * (rows - 1)  # where each row's key lies in the draft's sequence
        drawn = temperature > 0 and self.siblings != "best"
        laws = np.zeros((rows, self.sequence.model.config.vocab_size), np.float32) if drawn else None
        level, logits = [0], self.sequence.follow(tokens)[None]
        while level:
            for row, row_logits in zip(level, logits):
                children = [r for r in range(1, rows) if parents[r] == row]
                if drawn:
                    laws[row] = _softmax(row_logits, temperature)
                    for child, token in zip(children, self._draw(laws[row], uniforms[[r - 1 for r in children]])):
                        drafted[child] = token
                else:
                    ranked = np.argsort(-row_logits, kind="stable")
                    for child in children:
                        drafted[child] = int(ranked[self.shape.ranks[child]])
            depth = depths[level[0]] + 1
            level = [r for r in range(rows) if depths[r] == depth and r in parents[:rows]]
            if level:
                logits = self._extend(level, drafted, slots, length, depth)
        self.sequence.truncate(length)
        return Proposal(drafted[1:], list(parents[1:rows]), laws)

    def _extend(self, level: list[int], drafted: list[int], slots: list[int], length: int, depth: int) -> np.ndarray:
        """Process the rows of one `level`, each seeing the text and its ancestors: logits [len(level),V]."""
        start = len(self.sequence.tokens)
        ancestors = np.zeros((len(level), start + len(level)), bool)
        ancestors[:, :length] = True
        for index, row in enumerate(level):
            slots[row] = start + index
            while row != 0:
                ancestors[index, slots[row]] = True
                row = self.shape.parents[row]
        positions = np.full(len(level), length - 1 + depth)
        return self.sequence.append([drafted[row] for row in level], positions, ancestors)

    def _draw(self, law: np.ndarray, uniforms: np.ndarray) -> list[int]:
        """One token for each uniform, by inverse CDF in float64."""
        remaining = law.astype(np.float64)
        drawn = []
        for uniform in uniforms:
            cumulative = np.cumsum(remaining)
            token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
            drawn.append(token)
            if self.siblings == "without_replacement":
                remaining[token] = 0
        return drawn


class PromptLookup:
    """What followed the last tokens when they occurred before (Saxena, github.com/apoorvumang/prompt-lookup-decoding).

    The longest match of at most `ngram` tokens wins, the latest first. With `branches` > 1 the continuations of several
    matches share one tree of at most `num_rows` rows.
    """

    def __init__(self, num_rows: int, ngram: int = 3, branches: int = 1):
        self.num_rows = num_rows
        self.ngram = ngram
        self.branches = branches

    def propose(self, tokens: list[int], limit: int, temperature: float, uniforms: np.ndarray) -> Proposal:
        nodes = [(ROOT, tokens[-1])]
        for start in self._continuations(tokens):
            row = 0
            for token in tokens[start : start + limit]:
                if (row, token) not in nodes:
                    if len(nodes) == self.num_rows:
                        break
                    nodes.append((row, token))
                row = nodes.index((row, token))
        return Proposal([token for _, token in nodes[1:]], [parent for parent, _ in nodes[1:]])

    def _continuations(self, tokens: list[int]) -> list[int]:
        """Where the text goes on after the best matches, best first."""
        found = []
        for size in range(min(self.ngram, len(tokens) - 1), 0, -1):
            for start in range(len(tokens) - size - 1, -1, -1):
                if tokens[start : start + size] == tokens[-size:] and start + size not in found:
                    found.append(start + size)
                    if len(found) == self.branches:
                        return found
        return found


def _softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(scaled)
    return (weights / weights.sum()).astype(np.float32)
