"""How many tokens to draft: expected tokens a step, time a token and speedup for every window, and the best one.

The window model (Leviathan et al. 2211.17192, section 3, with any acceptance rate by position): a step that drafts K
tokens emits 1 + sum_i P_i tokens, P_i the probability that drafts 1..i are all accepted, and costs v0 + beta K + c K
plain target steps: verifying K + 1 rows, and drafting.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .drafts import ROOT, Shape

MAX_DRAFT_TOKENS = 15


@dataclass(frozen=True)
class StepCost:
    """Cost of a speculative step, in plain target steps: verifying K + 1 rows is v0 + beta K, a draft token c.

    `step_ms` is the time of one plain target step, where it is known.
    """

    v0: float = 1.0
    beta: float = 0.0
    c: float = 0.0
    step_ms: float | None = None

    def of(self, num_rows: int, draft_depth: int) -> float:
        """Cost of verifying `num_rows` drafts that took `draft_depth` draft steps; without any, a plain step."""
        return self.v0 + self.beta * num_rows + self.c * draft_depth if num_rows else 1.0


class Window(NamedTuple):
    """What drafting K tokens a step gives; cost in plain target steps, so that speedup = tokens_per_step / cost."""

    num_draft_tokens: int
    tokens_per_step: float
    cost: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_step / self.cost


class Tuning(NamedTuple):
    """Every window from K = 0, the `best` of them, and `flat` the (low, high) windows within `FLAT` of it."""

    windows: list[Window]
    best: Window
    flat: tuple[int, int]

    @property
    def pays(self) -> bool:
        return self.best.num_draft_tokens > 0


FLAT = 0.02


def conditional(unconditional: Sequence[float]) -> list[float]:
    """P(draft i accepted | those before it were) from P(drafts 1..i all accepted); 0 where nothing was reached.

    Raises ValueError if the rates rise or leave [0, 1].
    """
    rates, before = [], 1.0
    for position, rate in enumerate(unconditional, 1):
        if not 0 <= rate <= before:
            raise ValueError(
                f"unconditional rate {rate} at position {position}: expected 0..{before}, never rising with position"
            )
        rates.append(rate / before if before > 0 else 0.0)
        before = rate
    return rates


def expected_tokens(rates: Sequence[float], num_draft_tokens: int) -> float:
    """Tokens a step with K drafts: 1 + sum of products of the conditional `rates`; the last goes on for ever."""
    total = survival = 1.0
    for position in range(num_draft_tokens):
        survival *= rates[min(position, len(rates) - 1)]
        total += survival
    return total


def tune(rates: Sequence[float], cost: StepCost, max_draft_tokens: int = MAX_DRAFT_TOKENS) -> Tuning:
    """Every window from K = 0, no speculation, for conditional acceptance `rates` by position."""
    _check_rates(rates)
    windows = [
        Window(k, expected_tokens(rates, k), cost.of(num_rows=k, draft_depth=k)) for k in range(max_draft_tokens + 1)
    ]
    best = max(windows, key=lambda window: (window.speedup, -window.num_draft_tokens))
    low = high = best.num_draft_tokens
    while low > 0 and windows[low - 1].speedup >= (1 - FLAT) * best.speedup:
        low -= 1
    while high < max_draft_tokens and windows[high + 1].speedup >= (1 - FLAT) * best.speedup:
        high += 1
    return Tuning(windows, best, (low, high))


def fit_step_cost(
    num_draft_tokens: Sequence[int],
    verify_ms: Sequence[float],
    step_ms: float,
    draft_ms: Sequence[float] | None = None,
) -> StepCost:
    """Least squares of measured times against the plain step's `step_ms`.

    Without `draft_ms`, `verify_ms` is the whole step and beta holds beta + c: total times cannot tell them apart. One
    measured window fixes only the slope, from v0 = 1.
    """
    windows = np.asarray(num_draft_tokens, np.float64)
    verify = np.asarray(verify_ms, np.float64) / step_ms
    if len(windows) != len(verify) or len(windows) == 0 or np.any(windows < 1):
        raise ValueError(
            f"windows {list(num_draft_tokens)} and times {list(verify_ms)}: expected one time a window K >= 1"
        )
    if len(set(windows)) == 1:
        v0, beta = 1.0, float(np.mean(verify - 1) / windows[0])
    else:
        beta, v0 = (float(x) for x in np.polyfit(windows, verify, 1))
    c = 0.0
    if draft_ms is not None:
        draft = np.asarray(draft_ms, np.float64) / step_ms
        c = float(windows @ draft / (windows @ windows))
    return StepCost(v0, beta, c, step_ms)


class Tree(NamedTuple):
    """A draft tree with the tokens it is expected to emit a step."""

    shape: Shape
    tokens_per_step: float
    cost: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_step / self.cost


def best_tree(rates: Sequence[Sequence[float]], num_rows: int, cost: StepCost = StepCost()) -> Tree:
    """The tree of at most T = `num_rows` rows, root included, with the highest speedup; the smaller of equals.

    A node is worth the probability that its whole path is accepted, so the best tree of a given size and depth is the
    most probable nodes (Sequoia, 2402.12374, section 3.2, with rates that depend on depth). Rows and draft steps cost,
    so every size and every depth is tried.

    Args:
        rates: [depth][rank] probability that the target's token after an accepted path of that depth is the draft's
            token of that rank; the last depth goes on for ever.
    """
    for by_rank in rates:
        _check_rates(by_rank)
        if sum(by_rank) > 1 + 1e-9:
            raise ValueError(f"rates by rank {list(by_rank)} sum to {sum(by_rank)}, expected at most 1")
    best = Tree(Shape([ROOT], [0]), 1.0, 1.0)
    for max_depth in range(1, num_rows):
        nodes = _most_probable(rates, num_rows, max_depth)
        depth, tokens = 0, 1.0
        for size, node in enumerate(nodes[1:], 2):
            depth, tokens = max(depth, node.depth), tokens + node.worth
            step_cost = cost.of(size - 1, depth)
            if tokens / step_cost > best.speedup * (1 + 1e-12):
                best = Tree(_shape(nodes[:size]), tokens, step_cost)
    return best


class _Node(NamedTuple):
    parent: int
    rank: int
    depth: int
    worth: float


def _most_probable(rates: Sequence[Sequence[float]], num_rows: int, max_depth: int) -> list[_Node]:
    """Nodes by falling probability of their path, so that every prefix of the list is a tree."""
    nodes = [_Node(ROOT, 0, 0, 1.0)]
    heap: list[tuple[float, int, int]] = []
    while len(nodes) < num_rows:
        parent = nodes[-1]
        if parent.depth < max_depth:
            for rank, rate in enumerate(rates[min(parent.depth, len(rates) - 1)]):
                heapq.heappush(heap, (-parent.worth * rate, len(nodes) - 1, rank))
        if not heap:
            break
        worth, index, rank = heapq.heappop(heap)
        nodes.append(_Node(index, rank, nodes[index].depth + 1, -worth))
    return nodes


def _shape(nodes: Sequence[_Node]) -> Shape:
    """The tree with its rows in order of depth."""
    order = sorted(range(len(nodes)), key=lambda index: nodes[index].depth)
    row_of = {ROOT: ROOT} | {index: row for row, index in enumerate(order)}
    return Shape([row_of[nodes[index].parent] for index in order], [nodes[index].rank for index in order])


def tokens_per_hour(window: Window, step_ms: float, batch: int = 1) -> float:
    """Tokens that `batch` sequences decode in an hour."""
    return batch * 3_600_000 / step_ms * window.speedup


def _check_rates(rates: Sequence[float]) -> None:
    if not len(rates) or not all(0 <= rate <= 1 for rate in rates):
        raise ValueError(f"acceptance rates {list(rates)}: expected at least one, each in 0..1")
