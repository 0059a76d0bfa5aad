"""How many drafts a model accepts: counters that merge across ranks and export as JSON or Prometheus text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SCHEMA = "draft_verify.acceptance_stats/1"


class AcceptanceStats:
    """Counters over verify steps; every rate is derived from them.

    Position i (0-based) is the i-th draft of a chain, or depth i + 1 of a tree. One step of one sequence adds

    - `steps` 1, `emitted` the tokens it handed out (accepted drafts, then one recovered or bonus token);
    - `drafted[i]` 1 if a draft was proposed at position i;
    - `reached[i]` 1 if, besides, all drafts before it were accepted, so that it was judged at all;
    - `accepted[i]` 1 if it and all before it were accepted (a prefix: a match after a rejection counts nothing).

    A step is cut after its first stop token: what lies behind it is neither drafted, accepted nor emitted, so the end
    of a text is no rejection. Empty slots (num_accepted -1) count nothing.

    Args:
        num_draft_tokens: K, the positions to count.
        stop_token_ids: ids that end a sequence.
    """

    def __init__(self, num_draft_tokens: int, stop_token_ids: Iterable[int] = ()):
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}, expected 0 or more")
        self.stop_token_ids = frozenset(int(token) for token in stop_token_ids)
        self.steps = 0
        self.emitted = 0
        self.drafted = np.zeros(num_draft_tokens, np.int64)
        self.reached = np.zeros(num_draft_tokens, np.int64)
        self.accepted = np.zeros(num_draft_tokens, np.int64)

    @property
    def num_draft_tokens(self) -> int:
        return len(self.drafted)

    def update(self, acceptance: Any, *, draft_lens: Any = None, num_emitted: Any = None) -> None:
        """Counts one verify step.

        Args:
            acceptance: Acceptance, or anything with `tokens` [B, T] and `num_accepted` [B]; arrays or CPU tensors.
            draft_lens: [B] drafts proposed for each sequence (the depth of its tree); default K. -1 is an empty slot.
            num_emitted: [B] tokens really handed out where the engine cut the step itself (`verify_step` returns it),
                for instance at the maximum length; 0 for a sequence that had already ended.

        Raises:
            ValueError: shapes that do not fit, or num_accepted beyond draft_lens; nothing is counted then.
        """
        tokens = np.asarray(acceptance.tokens)
        num_accepted = np.asarray(acceptance.num_accepted)
        if tokens.ndim != 2 or num_accepted.shape != tokens.shape[:1]:
            raise ValueError(
                f"acceptance has tokens {tokens.shape} and num_accepted {num_accepted.shape}, expected [B, T] and [B]"
            )
        batch = len(tokens)
        draft_lens = np.full(batch, self.num_draft_tokens) if draft_lens is None else np.asarray(draft_lens)
        limits = num_accepted + 1 if num_emitted is None else np.asarray(num_emitted)
        for name, array in (("draft_lens", draft_lens), ("num_emitted", limits)):
            if array.shape != (batch,):
                raise ValueError(f"{name} has shape {array.shape}, expected {(batch,)}")
        live = num_accepted >= 0
        if np.any(live & ((num_accepted > draft_lens) | (draft_lens > self.num_draft_tokens))):
            raise ValueError(
                f"num_accepted {num_accepted} and draft_lens {draft_lens}: expected "
                f"num_accepted <= draft_lens <= {self.num_draft_tokens} in every live sequence"
            )

        for row, accepted, drafted, limit in zip(tokens, num_accepted, draft_lens, limits):
            if accepted < 0 or limit <= 0:
                continue
            emitted = min(int(accepted) + 1, int(limit))
            stop = next((i for i in range(emitted) if int(row[i]) in self.stop_token_ids), None)
            if stop is not None:
                emitted = stop + 1
            if emitted <= accepted:  # cut among the accepted drafts: what was proposed behind the cut was not judged
                accepted = drafted = emitted
            self.steps += 1
            self.emitted += emitted
            self.drafted[:drafted] += 1
            self.reached[: min(accepted + 1, drafted)] += 1
            self.accepted[:accepted] += 1

    def merge(self, other: AcceptanceStats) -> AcceptanceStats:
        """Adds another rank's or run's counters to these and returns self; K grows to the larger of the two."""
        self.steps += other.steps
        self.emitted += other.emitted
        for name in ("drafted", "reached", "accepted"):
            mine, theirs = getattr(self, name), getattr(other, name)
            total = np.zeros(max(len(mine), len(theirs)), np.int64)
            total[: len(mine)] += mine
            total[: len(theirs)] += theirs
            setattr(self, name, total)
        self.stop_token_ids |= other.stop_token_ids
        return self

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / proposed drafts; NaN before the first draft."""
        return _ratio(self.accepted.sum(), self.drafted.sum())

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts a step, without the recovered or bonus token."""
        return _ratio(self.accepted.sum(), self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens a step, with it: the figure that speed follows."""
        return _ratio(self.emitted, self.steps)

    @property
    def unconditional_rates(self) -> list[float]:
        """[K] P(drafts 0..i accepted | a draft was proposed at i); never rises with i for chains of one length."""
        return [_ratio(a, d) for a, d in zip(self.accepted, self.drafted)]

    @property
    def conditional_rates(self) -> list[float]:
        """[K] P(draft i accepted | drafts 0..i-1 accepted and a draft was proposed at i)."""
        return [_ratio(a, r) for a, r in zip(self.accepted, self.reached)]

    def to_dict(self) -> dict[str, Any]:
        """Counters and derived rates as plain numbers; a rate without a single trial is None."""
        return {
            "schema": SCHEMA,
            "num_draft_tokens": self.num_draft_tokens,
            "stop_token_ids": sorted(self.stop_token_ids),
            "steps": self.steps,
            "emitted": self.emitted,
            "drafted_by_position": self.drafted.tolist(),
            "reached_by_position": self.reached.tolist(),
            "accepted_by_position": self.accepted.tolist(),
            "acceptance_rate": _number(self.acceptance_rate),
            "mean_accepted": _number(self.mean_accepted),
            "tokens_per_step": _number(self.tokens_per_step),
            "unconditional_rates": [_number(rate) for rate in self.unconditional_rates],
            "conditional_rates": [_number(rate) for rate in self.conditional_rates],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AcceptanceStats:
        """Rebuilds the counters of `to_dict`; the derived rates in `data` are ignored."""
        schema = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        if schema != SCHEMA:
            raise ValueError(f"schema is {schema!r}, expected {SCHEMA!r}")
        try:
            stats = cls(data["num_draft_tokens"], data["stop_token_ids"])
            stats.steps, stats.emitted = int(data["steps"]), int(data["emitted"])
            counters = {
                name: np.array(data[f"{name}_by_position"], np.int64) for name in ("drafted", "reached", "accepted")
            }
        except (KeyError, TypeError) as error:
            raise ValueError(f"no statistics as to_dict gives them: {error}") from None
        for name, counts in counters.items():
            if counts.shape != (stats.num_draft_tokens,):
                raise ValueError(f"{name}_by_position has {counts.size} entries, expected {stats.num_draft_tokens}")
            setattr(stats, name, counts)
        return stats

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> AcceptanceStats:
        return cls.from_dict(json.loads(text))

    def to_prometheus(self, labels: Mapping[str, str] | None = None, prefix: str = "draft_verify") -> str:
        """Counters in the Prometheus text exposition format 0.0.4, `labels` on every sample.

        Rates are left to the query (accepted / drafted over a time range), as Prometheus advises.
        """
        labels = dict(labels or {})
        lines = []

        def counter(name: str, help_text: str, samples: Iterable[tuple[dict[str, str], int]]) -> None:
            lines.append(f"# HELP {prefix}_{name} {help_text}")
            lines.append(f"# TYPE {prefix}_{name} counter")
            lines.extend(f"{prefix}_{name}{_labels({**labels, **extra})} {value}" for extra, value in samples)

        counter("steps_total", "Verify steps, one per sequence and step.", [({}, self.steps)])
        counter(
            "emitted_tokens_total",
            "Tokens handed out: accepted drafts and one recovered or bonus token a step.",
            [({}, self.emitted)],
        )
        for name, help_text in (
            ("drafted", "Drafts proposed at this position, up to the end of the sequence."),
            ("reached", "Drafts at this position whose predecessors were all accepted."),
            ("accepted", "Drafts accepted at this position with all their predecessors."),
        ):
            counts = getattr(self, name)
            counter(f"{name}_tokens_total", help_text, [({"position": str(i)}, int(n)) for i, n in enumerate(counts)])
        return "\n".join(lines) + "\n"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceptanceStats) and self.to_dict() == other.to_dict()

    __hash__ = None  # mutable

    def __repr__(self) -> str:
        return (
            f"AcceptanceStats(steps={self.steps}, tokens_per_step={self.tokens_per_step:.3f}, "
            f"acceptance_rate={self.acceptance_rate:.3f})"
        )


def _ratio(part: int, whole: int) -> float:
    return int(part) / int(whole) if whole else float("nan")


def _number(rate: float) -> float | None:
    return None if rate != rate else rate


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""

    def escape(text: str) -> str:
        return str(text).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escape(value)}"' for name, value in labels.items()) + "}"
