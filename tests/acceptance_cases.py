"""Inputs for the acceptance rules, and what a kernel may answer to them given fp32 rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import draft_verify
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.rejection_sampling import (
    Pair,
    block_probabilities,
    draft_law_at,
    leading_pairs,
    residual_law,
)
from draft_verify.reference.sampling import best_token, group_size, has_law, sampling_law

LARGEST_UNIFORM = np.nextafter(np.float32(1), np.float32(0))
SMALLEST_UNIFORM = np.finfo(np.float32).tiny


@dataclass
class Tally:
    """How many decisions were compared, and how many lay too close to a threshold to compare."""

    decisions: int = 0
    undecided: int = 0
    draws: int = 0
    other_token: int = 0  # allowed by rounding, but not the reference's

    def __str__(self) -> str:
        return (
            f"{self.decisions} decisions, {self.undecided} within fp32 rounding of a threshold; "
            f"{self.draws} draws, {self.other_token} of them a neighbouring token within rounding"
        )


def drawn_from(law: np.ndarray, rng: np.random.Generator) -> int:
    return int(min(np.searchsorted(np.cumsum(law), rng.random(), side="right"), len(law) - 1))


def chain_case(
    rng: np.random.Generator,
    batch: int,
    num_drafts: int,
    vocab_size: int,
    dtype: Any,
    draft: str = "logits",
    spread: float = 3.0,
    padding: int = 0,
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0, 1.7),
    cut: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of rejection_sampling: drafts from their own law, ragged lengths, NaN wherever none looks."""
    width = vocab_size + padding
    target = (rng.standard_normal((batch, num_drafts + 1, width)) * spread).astype(dtype)
    noise = rng.standard_normal((batch, num_drafts, width)) * spread * 0.3
    draft_logits = (target[:, :num_drafts].astype(np.float32) + noise).astype(dtype)
    temperature = rng.choice(np.array(temperatures, np.float32), batch)
    draft_lens = rng.integers(-1, num_drafts + 1, batch).astype(np.int32)
    parameters = {}
    if cut:
        parameters["top_k"] = rng.choice(np.array([-1, 0, 1, 2, 5, vocab_size, vocab_size + 9], np.int32), batch)
        parameters["top_p"] = rng.choice(np.array([1.0, 0.95, 0.6, 1e-6], np.float32), batch)
        parameters["min_p"] = rng.choice(np.array([0.0, 0.02, 1.0], np.float32), batch)
    tokens = np.zeros((batch, num_drafts), np.int32)
    probs = np.zeros((batch, num_drafts, width), np.float64)
    for b in range(batch):
        for row in range(num_drafts):
            logits = draft_logits[b, row, :vocab_size].astype(np.float64)
            law = sampling_law(logits, temperature[b] or 1.0, **{name: float(v[b]) for name, v in parameters.items()})
            probs[b, row, :vocab_size] = law
            tokens[b, row] = best_token(logits) if temperature[b] == 0 else drawn_from(law, rng)
    if num_drafts and rng.random() < 0.3:
        tokens[rng.integers(batch), rng.integers(num_drafts)] = rng.choice([-1, vocab_size, vocab_size + 7])
    case = {
        "draft_tokens": tokens,
        "target_logits": target,
        "uniforms": rng.uniform(1e-7, 1, (batch, num_drafts + 2)).astype(np.float32).clip(max=LARGEST_UNIFORM),
        "temperature": temperature,
        "draft_lens": draft_lens,
        "vocab_size": vocab_size,
        **parameters,
    }
    probs = probs.astype(dtype)
    for array in (target, draft_logits, probs):
        array[..., vocab_size:] = np.nan
        for b in range(batch):
            array[b, max(draft_lens[b] + (array is target), 0) :] = np.nan
    if draft == "logits":
        case["draft_logits"] = draft_logits
    elif draft == "probs":
        case["draft_probs"] = probs
    return case


def rounding(logits: np.ndarray, temperature: float) -> float:
    """Relative error of an fp32 mass exp((x - peak) / T) over its total: (x - peak) / T is rounded twice."""
    finite = np.abs(logits[np.isfinite(logits)])
    return float(2.0**-22 * (8 + finite.max(initial=0) / (temperature or 1)))


def allowed_tokens(masses: np.ndarray, group_uniform: float, token_uniform: float, error: float) -> set[int]:
    """Ids that the two-step draw may give when cumulative masses are off by `error` of the total."""
    size = group_size(len(masses))
    allowed = set()

    def within(parts: np.ndarray, uniform: float) -> np.ndarray:
        edges = np.concatenate([[0.0], np.cumsum(parts)]) / parts.sum()
        return np.flatnonzero((edges[:-1] <= uniform + error) & (edges[1:] >= uniform - error) & (parts > 0))

    groups = [masses[start : start + size] for start in range(0, len(masses), size)]
    for group in within(np.array([part.sum() for part in groups]), group_uniform):
        for column in within(groups[group], token_uniform):
            allowed.add(int(group) * size + int(column))
    return allowed


def cut_undecided(logits: np.ndarray, temperature: float, parameters: dict[str, float], error: float) -> bool:
    """Whether rounding may move an id across the edge of top-p or min-p."""
    supports = [
        sampling_law(
            logits,
            temperature,
            parameters.get("top_k", 0),
            parameters.get("top_p", 1.0) * (1 + side) if parameters.get("top_p", 1.0) < 1 else 1.0,
            min(1.0, parameters.get("min_p", 0.0) * (1 + side)),
        )
        > 0
        for side in (-error, error)
    ]
    return bool((supports[0] != supports[1]).any())


def assert_chain_agrees(actual: Acceptance, case: dict[str, Any], tally: Tally) -> None:
    """Every decision is the reference's unless its threshold lies within rounding; every draw is an allowed one."""
    expected = draft_verify.rejection_sampling(**case, backend="reference")
    tokens, target, uniforms = case["draft_tokens"], case["target_logits"], case["uniforms"]
    vocab_size = case.get("vocab_size") or target.shape[2]
    for b in range(len(tokens)):
        limit = int(case["draft_lens"][b]) if case.get("draft_lens") is not None else tokens.shape[1]
        temperature = float(case["temperature"][b]) if case.get("temperature") is not None else 1.0
        accepted = int(actual.num_accepted[b])
        rows = accepted + 1
        assert list(actual.path[b]) == list(range(rows)) + [-1] * (target.shape[1] - rows), (b, actual)
        assert list(actual.tokens[b, : max(accepted, 0)]) == list(tokens[b, : max(accepted, 0)])
        assert (actual.tokens[b, rows:] == -1).all()
        if temperature == 0 or limit < 0:
            for mine, theirs in zip(actual, expected):
                np.testing.assert_array_equal(mine[b], theirs[b])
            tally.decisions += rows
            continue
        parameters = {name: float(case[name][b]) for name in ("top_k", "top_p", "min_p") if case.get(name) is not None}
        for row in range(rows):
            logits = np.asarray(target[b, row, :vocab_size], np.float64)
            last = row == accepted
            if not has_law(logits):
                assert last and actual.tokens[b, row] == best_token(logits) and actual.invalid[b]
                break
            target_law = sampling_law(logits, temperature, **parameters)
            error = rounding(logits, temperature)
            if cut_undecided(logits, temperature, parameters, error):
                tally.undecided += 1
                break
            draft = int(tokens[b, row]) if row < limit else -1
            if not 0 <= draft < vocab_size:
                assert last and not actual.invalid[b]
                check_draw(actual.tokens[b, row], target_law, uniforms[b], error, tally)
                break
            draft_law = draft_law_at(
                case.get("draft_logits"),
                case.get("draft_probs"),
                draft,
                (b, row),
                vocab_size,
                {"temperature": temperature, **parameters},
            )
            if draft_law is None:
                assert last and actual.invalid[b]
                check_draw(actual.tokens[b, row], target_law, uniforms[b], error, tally)
                break
            if case.get("draft_logits") is not None:
                draft_logits = np.asarray(case["draft_logits"][b, row, :vocab_size], np.float64)
                if cut_undecided(draft_logits, temperature, parameters, rounding(draft_logits, temperature)):
                    tally.undecided += 1
                    break
                error += rounding(np.asarray(case["draft_logits"][b, row, :vocab_size], np.float64), temperature)
            left, right = uniforms[b, row] * draft_law[draft], target_law[draft]
            tally.decisions += 1
            if abs(left - right) <= error * (left + right) + 1e-36:
                tally.undecided += 1
                break
            assert (left < right) != last, (b, row, left, right)
            if last:
                assert not actual.invalid[b]
                excess = np.maximum(target_law - draft_law, 0).sum()
                check_draw(
                    actual.tokens[b, row],
                    residual_law(target_law, draft_law),
                    uniforms[b],
                    error * 2 / max(excess, error),
                    tally,
                )


def assert_block_agrees(actual: Acceptance, case: dict[str, Any], tally: Tally) -> None:
    """As `assert_chain_agrees` for the block rule; a sequence with any prefix within rounding is left out."""
    tokens, target, uniforms = case["draft_tokens"], case["target_logits"], case["uniforms"]
    vocab_size = case["vocab_size"]
    expected = draft_verify.rejection_sampling(**case, rule="block", backend="reference")
    for b in range(len(tokens)):
        temperature = float(case["temperature"][b])
        parameters = {name: float(case[name][b]) for name in ("top_k", "top_p", "min_p") if name in case}
        limit = int(case["draft_lens"][b])
        if limit < 0 or temperature == 0:
            for mine, theirs in zip(actual, expected):
                np.testing.assert_array_equal(mine[b], theirs[b])
            continue
        logits = np.asarray(target[b, :, :vocab_size], np.float64)
        drafts = [int(x) if 0 <= x < vocab_size else None for x in tokens[b, :limit]] + [None]
        laws = [case.get(name) for name in ("draft_logits", "draft_probs")]
        pairs = leading_pairs(logits, drafts, *laws, b, vocab_size, {"temperature": temperature, **parameters})
        rows = [logits[row] for row in range(len(pairs) + 1) if has_law(logits[row])]
        if laws[0] is not None:
            rows += [np.asarray(laws[0][b, row, :vocab_size], np.float64) for row in range(len(pairs))]
        error = sum(rounding(row, temperature) for row in rows) + 2.0**-20
        weights, passes = block_probabilities(pairs)
        margins = [abs(uniforms[b, i - 1] - passes[i]) for i in range(1, len(passes))]
        # A weight near 1 makes both sides of S / (S + 1 - w) small.
        slack = [
            error / max(min(1.0, excess_of(pairs[i], weights[i]) + 1 - weights[i]), error) for i in range(1, len(pairs))
        ]
        if any(cut_undecided(row, temperature, parameters, error) for row in rows) or any(
            margin <= max(near, error) for margin, near in zip(margins, [*slack, error])
        ):
            tally.undecided += 1
            continue
        tally.decisions += max(len(pairs), 1)
        accepted = int(expected.num_accepted[b])
        assert actual.num_accepted[b] == accepted
        assert actual.invalid[b] == expected.invalid[b]
        np.testing.assert_array_equal(actual.path[b], expected.path[b])
        np.testing.assert_array_equal(actual.tokens[b, :accepted], expected.tokens[b, :accepted])
        if not has_law(logits[accepted]):
            assert actual.tokens[b, accepted] == expected.tokens[b, accepted]
            continue
        law = sampling_law(logits[accepted], temperature, **parameters)
        if accepted < len(pairs):
            excess = excess_of(pairs[accepted], weights[accepted])
            law = residual_law(law, pairs[accepted][1], weights[accepted])
            error = 2 * error / max(excess, error)
        check_draw(expected.tokens[b, accepted], law, uniforms[b], 1e-9, Tally())
        check_draw(actual.tokens[b, accepted], law, uniforms[b], error, tally)


def excess_of(pair: Pair, weight: float) -> float:
    return float(np.maximum(weight * pair[0] - pair[1], 0).sum())


def check_draw(token: int, law: np.ndarray, uniforms: np.ndarray, error: float, tally: Tally) -> None:
    tally.draws += 1
    if error > 1e-2:  # a residual of almost nothing is all rounding
        tally.undecided += 1
        return
    exact = allowed_tokens(law, float(uniforms[-2]), float(uniforms[-1]), 0.0)
    if int(token) not in exact:
        tally.other_token += 1
        near = allowed_tokens(law, float(uniforms[-2]), float(uniforms[-1]), error)
        assert int(token) in near, (token, exact, near, error)


def random_tree(rng: np.random.Generator, rows: int, depth: int) -> list[int]:
    """Parents of `rows` rows, none deeper than `depth`, in no particular order."""
    parents, depths = [-1], [0]
    for _ in range(1, rows):
        parent = int(rng.choice([row for row, d in enumerate(depths) if d < depth]))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def tree_case(
    rng: np.random.Generator,
    batch: int,
    rows: int,
    vocab_size: int,
    dtype: Any,
    rule: str,
    draft: str = "probs",
    spread: float = 2.0,
    cut: bool = False,
    depth: int = 4,
) -> dict[str, Any]:
    """Keyword arguments of tree_acceptance: siblings as the rule wants them, NaN in every column and row not live."""
    tree = np.array([random_tree(rng, rows, depth) for _ in range(batch)], np.int32)
    lens = rng.integers(-1, rows, batch).astype(np.int32)
    width = vocab_size + 2
    target = (rng.standard_normal((batch, rows, width)) * spread).astype(dtype)
    draft_logits = (target.astype(np.float32) + rng.standard_normal(target.shape) * spread / 2).astype(dtype)
    temperature = rng.choice(np.array([0.0, 0.7, 1.0], np.float32), batch)
    parameters = {}
    if cut:
        parameters["top_k"] = rng.choice(np.array([0, 3, 20], np.int32), batch)
        parameters["top_p"] = rng.choice(np.array([1.0, 0.7], np.float32), batch)
    tokens = np.zeros((batch, rows - 1), np.int32)
    probs = np.zeros(target.shape, np.float64)
    for b in range(batch):
        own = {name: float(value[b]) for name, value in parameters.items()}
        laws = [sampling_law(row, float(temperature[b]) or 1.0, **own) for row in draft_logits[b, :, :vocab_size]]
        probs[b, :, :vocab_size] = laws
        for row in range(1, rows):
            parent = tree[b, row]
            logits = target[b, parent, :vocab_size].astype(np.float64)
            if rule in ("greedy", "target_only") and rng.random() < 0.4:
                tokens[b, row - 1] = best_token(logits)
            elif laws[parent].sum() > 0:
                tokens[b, row - 1] = drawn_from(laws[parent] / laws[parent].sum(), rng)
            if rule == "without_replacement":
                laws[parent] = np.where(np.arange(vocab_size) == tokens[b, row - 1], 0, laws[parent])
    if rows > 1 and rng.random() < 0.3:
        tokens[rng.integers(batch), rng.integers(rows - 1)] = rng.choice([-1, vocab_size, vocab_size + 1])
    probs = probs.astype(dtype)
    for array in (target, draft_logits, probs):
        array[..., vocab_size:] = np.nan
        for b in range(batch):
            array[b, lens[b] + 1 :] = np.nan
    for b in range(batch):
        tree[b, lens[b] + 1 :] = -2 if lens[b] >= 0 else tree[b, lens[b] + 1 :]
    case = {
        "tree": tree,
        "draft_tokens": tokens,
        "target_logits": target,
        "rule": rule,
        "uniforms": rng.uniform(1e-6, 1 - 1e-6, (batch, rows + 1)).astype(np.float32),
        "draft_lens": lens,
        "vocab_size": vocab_size,
    }
    if rule != "greedy":
        case |= {"temperature": temperature, **parameters}
    if rule in ("without_replacement", "independent"):
        case["draft_" + draft] = draft_logits if draft == "logits" else probs
    return case


def assert_agrees_unless_rounding_decides(
    operation: Any, actual: Acceptance, case: dict[str, Any], tally: Tally
) -> None:
    """The reference's answer exactly, but for sequences whose answer changes when uniforms move by fp32 rounding."""
    error = sum(
        max(rounding(np.asarray(row, np.float64), 0.5) for row in array.reshape(-1, array.shape[-1]))
        for name, array in case.items()
        if name in ("target_logits", "draft_logits")
    )
    expected = operation(**case, backend="reference")
    moved = []
    for side in (-4 * error, 4 * error):
        uniforms = case["uniforms"].astype(np.float64)
        uniforms[:, :-2] *= 1 + side
        uniforms[:, -2:] += side
        moved.append(
            operation(
                **{**case, "uniforms": np.clip(uniforms, 1e-7, LARGEST_UNIFORM).astype(np.float32)}, backend="reference"
            )
        )
    for b in range(len(expected.tokens)):
        tally.decisions += max(int(expected.num_accepted[b]), 0) + 1
        if any((entry[b] != mine[b]).any() for other in moved for entry, mine in zip(other, expected)):
            tally.undecided += 1
            continue
        for mine, theirs in zip(actual, expected):
            np.testing.assert_array_equal(mine[b], theirs[b])
