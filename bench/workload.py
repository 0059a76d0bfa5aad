"""What speculation gives on each kind of work: a real model over prompts grouped by kind, plain and speculative.

Each kind is decoded greedily with prompt lookup, with the model drafting for itself through fewer layers as a chain and
as the best tree of T rows, and compared: acceptance by position, tokens a step, modelled speedup, best window.
Acceptance is measured; speedup is modelled from it and a step cost of v0 + beta K + c K plain steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from draft_verify.acceptance_stats import AcceptanceStats

from . import smollm2
from .arguments import not_negative, positive, whole
from .decode import Cache, Sampling, plain_decode, speculative_decode
from .demo import NUM_DRAFT_TOKENS, SKIPPED_LAYERS, compare_with_plain
from .drafts import Draft, LayerSkip, PromptLookup, chain
from .llama import Llama, PlainSequence
from .speedup import StepCost, Tree, Tuning, best_tree, conditional, tune
from .synthetic import synthetic_rates
from .table import Table
from .window import verdict

SCHEMA = "draft_verify.workload/1"
PROMPTS = Path(__file__).parent / "prompts.jsonl"
TREE_ROWS = 16
MAX_RANK = 4
SLOTS = 256


class Prompt(NamedTuple):
    kind: str
    prompt: str


@dataclass(frozen=True)
class Variant:
    """One way to draft: how to make a draft for a sequence, the rows it fills, and what a step of it costs."""

    name: str
    make_draft: Callable[[], Draft]
    num_draft_tokens: int
    cost: StepCost
    tree: Tree | None = None
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Result:
    """A variant on one kind of prompts; `as_plain` of `num_prompts` texts are the plain decode's (None: not greedy)."""

    kind: str
    variant: Variant
    stats: AcceptanceStats
    num_prompts: int
    as_plain: int | None

    @property
    def speedup(self) -> float:
        """Modelled, with the window or tree that was run."""
        depth = max(self.variant.tree.shape.depths) if self.variant.tree else self.variant.num_draft_tokens
        return self.stats.tokens_per_step / self.variant.cost.of(self.variant.num_draft_tokens, depth)

    @property
    def tuning(self) -> Tuning | None:
        """Every chain window up to the one that was run; None for trees, or where nothing was drafted."""
        if self.variant.tree is not None or not self.stats.drafted.any():
            return None
        return tune(rates_per_step(self.stats), self.variant.cost, self.variant.num_draft_tokens)

    def to_dict(self) -> dict:
        tuning = self.tuning
        return {
            "kind": self.kind,
            "draft": self.variant.name,
            "num_draft_tokens": self.variant.num_draft_tokens,
            "parents": list(self.variant.tree.shape.parents) if self.variant.tree else None,
            "cost": {name: getattr(self.variant.cost, name) for name in ("v0", "beta", "c")},
            "stats": self.stats.to_dict(),
            "num_prompts": self.num_prompts,
            "as_plain": self.as_plain,
            "speedup": self.speedup,
            "best_num_draft_tokens": tuning and tuning.best.num_draft_tokens,
            "best_speedup": tuning and tuning.best.speedup,
        }


def rates_per_step(stats: AcceptanceStats) -> list[float]:
    """Conditional rates by position over all steps: a position that a short draft left empty counts as rejected."""
    return conditional((stats.accepted / stats.steps).tolist())


def read_prompts(path: Path) -> list[Prompt]:
    """One JSON object a line with `kind` and `prompt`; raises ValueError naming the line."""
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompts.append(Prompt(entry["kind"], entry["prompt"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{path}:{number}: expected {{"kind": ..., "prompt": ...}}: {error}') from error
    if not prompts:
        raise ValueError(f"{path}: no prompts")
    return prompts


def first_of_each_kind(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts of every kind, in order; all of them for None."""
    taken = Counter()
    kept = []
    for prompt in prompts:
        taken[prompt.kind] += 1
        if limit is None or taken[prompt.kind] <= limit:
            kept.append(prompt)
    return kept


def rank_rates(ranks: Sequence[np.ndarray], max_depth: int, max_rank: int = MAX_RANK) -> list[list[float]]:
    """[depth][rank] P(the target's token is the draft's of that rank | those before it were of some rank).

    `ranks` holds for each text the rank of each of its tokens under the draft; a step may start at any of them.
    """
    counts = np.zeros((max_depth, max_rank))
    reached = np.zeros(max_depth)
    for text in ranks:
        for start in range(len(text)):
            for depth, rank in enumerate(text[start : start + max_depth]):
                reached[depth] += 1
                if rank >= max_rank:
                    break
                counts[depth, rank] += 1
    return [(counts[d] / reached[d]).tolist() for d in range(max_depth) if reached[d] > 0]


def ranks_under(model: Llama, layers: list[int], prompt: list[int], text: list[int]) -> np.ndarray:
    """Rank (0 is the best) of each token of `text` after `prompt`, under the model run through `layers`."""
    logits = PlainSequence(model, layers).append(prompt + text[:-1])[len(prompt) - 1 :]
    chosen = logits[np.arange(len(text)), text]
    return (logits > chosen[:, None]).sum(axis=1)


def variants_for(
    model: Llama, layers: list[int], tree: Tree, cost: StepCost, num_draft_tokens: int, synthetic: float | None
) -> list[Variant]:
    """Greedy: prompt lookup, and layers skipped as chain and tree. With `synthetic`, a chain of that mean length."""
    free = StepCost(cost.v0, cost.beta, 0.0, cost.step_ms)
    shape = chain(num_draft_tokens)
    if synthetic is not None:
        rates = tuple(conditional(synthetic_rates(synthetic, num_draft_tokens)))
        sampling = Sampling(rule="synthetic", synthetic_rates=rates)
        make = lambda: LayerSkip(model, layers, shape)  # noqa: E731
        return [Variant(f"synthetic, {synthetic:g} a step", make, num_draft_tokens, cost, sampling=sampling)]
    return [
        Variant("prompt lookup", lambda: PromptLookup(num_draft_tokens + 1), num_draft_tokens, free),
        Variant("layers skipped, chain", lambda: LayerSkip(model, layers, shape), num_draft_tokens, cost),
        Variant(
            "layers skipped, tree",
            lambda: LayerSkip(model, layers, tree.shape),
            len(tree.shape.parents) - 1,
            cost,
            tree,
        ),
    ]


def rule_variants(
    model: Llama, layers: list[int], tree: Tree, cost: StepCost, num_draft_tokens: int, temperature: float
) -> list[Variant]:
    """Every acceptance rule at one temperature, with the same draft model."""
    chains = [(rule, "without_replacement") for rule in ("token", "block", "typical")]
    trees = [
        ("without_replacement", "without_replacement"),
        ("independent", "independent"),
        ("target_only", "best"),
        ("typical", "best"),
    ]

    def variant(rule: str, siblings: str, tree: Tree | None) -> Variant:
        shape = chain(num_draft_tokens) if tree is None else tree.shape
        return Variant(
            f"{'chain' if tree is None else 'tree'}, {rule}",
            lambda: LayerSkip(model, layers, shape, siblings),
            len(shape.parents) - 1,
            cost,
            tree,
            Sampling(temperature, rule, seed=1),
        )

    return [variant(*rule, None) for rule in chains] + [variant(*rule, tree) for rule in trees]


def run_kind(
    model: smollm2.SmolLM2,
    kind: str,
    prompts: list[list[int]],
    plain: list[tuple[list[int], list[float]]],
    variant: Variant,
    num_tokens: int,
    backend: str,
    on_step: Callable[[int], None],
) -> Result:
    """Decode one kind's prompts together, in one batch."""
    decoded = speculative_decode(
        model.model,
        prompts,
        [variant.make_draft() for _ in prompts],
        Cache.contiguous(model.model.config, len(prompts), SLOTS),
        num_tokens=num_tokens,
        num_draft_tokens=variant.num_draft_tokens,
        tree=variant.tree is not None,
        sampling=variant.sampling,
        stop=model.stop,
        backend=backend,
        on_step=on_step,
    )
    greedy = variant.sampling.temperature == 0 and variant.sampling.rule == "token"
    same = sum(compare_with_plain(tokens, *expected)[0] for tokens, expected in zip(decoded.tokens, plain))
    return Result(kind, variant, decoded.stats, len(prompts), same if greedy else None)


def results_table(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        rates = [f"{rate:.2f}" for rate in result.stats.conditional_rates if rate == rate]
        best = result.tuning.best if result.tuning else None
        rows.append(
            [
                result.kind,
                result.variant.name,
                f"{result.stats.tokens_per_step:.2f}",
                " ".join(rates[:NUM_DRAFT_TOKENS]) or "nothing drafted",
                f"{result.speedup:.2f}x",
                best.num_draft_tokens if best else "-",
                f"{best.speedup:.2f}x" if best else "-",
                "sampled" if result.as_plain is None else f"{result.as_plain}/{result.num_prompts}",
            ]
        )
    return Table(
        ["kind", "draft", "tokens/step", "accepted where reached", "speedup", "best K", "there", "as plain"], rows
    )


def to_json(results: Sequence[Result], rates: list[list[float]]) -> str:
    """Schema draft_verify.workload/1: `rank_rates` [depth][rank], and one entry a kind and draft."""
    document = {"schema": SCHEMA, "rank_rates": rates, "results": [result.to_dict() for result in results]}
    return json.dumps(document, indent=2, allow_nan=False)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m draft_verify.bench workload", description=__doc__)
    parser.add_argument("prompts", type=Path, nargs="?", default=PROMPTS, help="JSONL; default: 24 of six kinds")
    parser.add_argument("--backend", default="reference", choices=["reference", "emulator", "simulator"])
    parser.add_argument("--tokens", type=whole, default=32, help="new tokens a prompt (default 32)")
    parser.add_argument("--limit", type=whole, metavar="N", help="only the first N prompts of each kind")
    parser.add_argument("--window", type=whole, default=NUM_DRAFT_TOKENS, metavar="K", help="drafts a step (default 7)")
    parser.add_argument("--tree-rows", type=whole, default=TREE_ROWS, metavar="T", help="rows of the tree (default 16)")
    parser.add_argument("--v0", type=positive, default=1.0, help="cost of verifying, fixed part, in plain steps")
    parser.add_argument("--beta", type=not_negative, default=0.02, help="and each further row (default 0.02)")
    parser.add_argument(
        "--c",
        type=not_negative,
        default=0.1,
        help="cost of drafting a token (default 0.1, a small draft model's; skipping layers itself costs far more)",
    )
    parser.add_argument("--synthetic", type=float, metavar="L", help="force a mean of L tokens a step, any drafts")
    parser.add_argument("--rules", type=positive, metavar="T", help="compare every acceptance rule at temperature T")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results, schema " + SCHEMA)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write pictures and an HTML page there")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        prompts = first_of_each_kind(read_prompts(arguments.prompts), arguments.limit)
        if arguments.synthetic is not None:
            synthetic_rates(arguments.synthetic, arguments.window)
        if arguments.json is not None:  # a run of half an hour must not end for want of a folder
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    try:
        model = smollm2.load()
    except smollm2.MissingModel as missing:
        print(missing, file=sys.stderr)
        return 2
    from tqdm import tqdm

    layers = [layer for layer in range(model.model.config.num_layers) if layer not in SKIPPED_LAYERS]
    cost = StepCost(arguments.v0, arguments.beta, arguments.c)
    encoded = [model.encode(prompt.prompt) for prompt in prompts]
    room = SLOTS - arguments.tokens - max(arguments.window + 1, arguments.tree_rows)
    for prompt, tokens in zip(prompts, encoded):
        if not 0 < len(tokens) <= room:
            raise SystemExit(f"{prompt.prompt[:40]!r}: {len(tokens)} tokens, expected 1 to {room} beside the new ones")
    plain = [
        plain_decode(model.model, prompt, arguments.tokens, model.stop)
        for prompt in tqdm(encoded, desc="plain decode", unit="prompt", disable=None)
    ]
    ranks = [ranks_under(model.model, layers, prompt, text) for prompt, (text, _) in zip(encoded, plain)]
    rates = rank_rates(ranks, max_depth=arguments.window)
    tree = best_tree(rates, arguments.tree_rows, cost)
    if arguments.rules is not None:
        variants = rule_variants(model.model, layers, tree, cost, arguments.window, arguments.rules)
    else:
        variants = variants_for(model.model, layers, tree, cost, arguments.window, arguments.synthetic)

    results = []
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    with tqdm(total=len(variants) * sum(len(text) for text, _ in plain), unit="token", disable=None) as bar:
        for kind in kinds:
            members = [index for index, prompt in enumerate(prompts) if prompt.kind == kind]
            for variant in variants:
                bar.set_description(f"{kind}, {variant.name}")
                results.append(
                    run_kind(
                        model,
                        kind,
                        [encoded[index] for index in members],
                        [plain[index] for index in members],
                        variant,
                        arguments.tokens,
                        arguments.backend,
                        bar.update,
                    )
                )
                # Said as it comes: a run of half an hour that is stopped has not been for nothing.
                bar.write(f"{kind}, {variant.name}: {results[-1].stats.tokens_per_step:.2f} tokens a step")
    print(f"step cost: {cost.v0:g} + {cost.beta:g} K + {cost.c:g} K plain steps (prompt lookup: c = 0)")
    print(f"tree of {len(tree.shape.parents)} rows, parents {' '.join(map(str, tree.shape.parents))}\n")
    print(results_table(results))
    for variant in variants:
        total = AcceptanceStats(0)
        for result in results:
            if result.variant is variant:
                total.merge(result.stats)
        if variant.tree is None and total.drafted.any():
            print(
                f"\nall kinds, {variant.name}: {verdict(tune(rates_per_step(total), variant.cost, arguments.window))}"
            )
    if arguments.json:
        arguments.json.write_text(to_json(results, rates) + "\n")
    if arguments.report:
        from . import report

        print(f"\n{report.workload_report(arguments.report, json.loads(to_json(results, rates)))}")
    stand = all(result.as_plain in (None, result.num_prompts) for result in results)
    return 0 if stand or arguments.synthetic is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
