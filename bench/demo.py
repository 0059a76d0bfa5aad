"""A real language model decoding through the kernels: SmolLM2-135M-Instruct, drafted, verified, accepted, committed.

Every layer's attention, the acceptance and the commit of each verify step run on `--backend`; greedy output is held
against the plain NumPy decode, token for token.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import NamedTuple

from . import smollm2
from .arguments import whole
from .decode import Cache, Decoded, Sampling, plain_decode, speculative_decode
from .drafts import Draft, LayerSkip, PromptLookup, chain
from .table import Table

NUM_DRAFT_TOKENS = 7
TILE = 128  # cache slots are a multiple of it, so that all prompts share one traced kernel
RING_WINDOW = 32
NEAR_TIE = 1e-3  # two logits this close may change places with the order of a float32 sum

# Leaving these out costs the model's greedy choices least: found by trying each layer over five prompts.
SKIPPED_LAYERS = (3, 25)
DRAFTS = ("prompt lookup", "layers skipped")
TEMPERATURES = (0.0, 0.7)


class Case(NamedTuple):
    name: str
    predictable: bool
    prompt: str
    draft: str
    temperature: float


CASES = [
    Case(
        "list",
        True,
        "Say this list again and again: apple, pear, plum, cherry, apple, pear, plum, cherry, apple, pear, plum,",
        "prompt lookup",
        0.0,
    ),
    Case(
        "code",
        True,
        "Write a Python class Point with attributes x and y, with a getter and a setter for each.",
        "layers skipped",
        0.0,
    ),
    Case("story", False, "Tell me a surprising story about a lighthouse keeper.", "layers skipped", 0.7),
    Case("advice", False, "What should I think about before I move to another country?", "prompt lookup", 0.0),
]


def make_draft(kind: str, model: smollm2.Llama, num_draft_tokens: int) -> Draft:
    """One draft of a kind in DRAFTS, for one sequence."""
    if kind == "prompt lookup":
        return PromptLookup(num_draft_tokens + 1)
    layers = [layer for layer in range(model.config.num_layers) if layer not in SKIPPED_LAYERS]
    return LayerSkip(model, layers, chain(num_draft_tokens))


def make_cache(kind: str, config: smollm2.Config, batch: int, length: int, num_draft_tokens: int) -> Cache:
    """Room for `length` tokens a sequence."""
    slots = -(-length // TILE) * TILE
    if kind == "paged":
        return Cache.paged(config, batch, slots)
    if kind == "ring":
        return Cache.ring(config, batch, num_draft_tokens)
    return Cache.contiguous(config, batch, slots, "BHDS" if kind == "transposed" else "BHSD")


def first_difference(tokens: list[int], plain: list[int]) -> int | None:
    """Index of the first token that is not the plain decode's, None if there is none."""
    for index, (token, expected) in enumerate(itertools.zip_longest(tokens, plain)):
        if token != expected:
            return index
    return None


def compare_with_plain(tokens: list[int], plain: list[int], margins: list[float]) -> tuple[bool, str]:
    """Whether greedy output stands, and what to say of it."""
    index = first_difference(tokens, plain)
    if index is None:
        return True, "yes"
    if index < len(margins) and margins[index] <= NEAR_TIE:
        return True, f"up to a near tie at token {index}: the plain decode's best logits are {margins[index]:.1e} apart"
    return False, f"NO, from token {index} on"


def describe(decoded: Decoded) -> str:
    stats = decoded.stats
    rates = " ".join("  - " if rate != rate else f"{rate:4.2f}" for rate in stats.conditional_rates)
    counts = " ".join(f"{count:4d}" for count in stats.reached)
    return (
        f"  {stats.emitted} tokens in {stats.steps} steps, {stats.tokens_per_step:.2f} tokens a step\n"
        f"  accepted where reached, by position  {rates}\n"
        f"  times reached                        {counts}"
    )


def run(
    model: smollm2.SmolLM2,
    cases: list[Case],
    *,
    backend: str,
    cache: str = "contiguous",
    num_tokens: int = 48,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> bool:
    """Decode every case, print what it did and a table of all; False if greedy output was ever not the plain one's."""
    from tqdm import tqdm

    prompts = {case.prompt: model.encode(case.prompt) for case in cases}
    length = max(map(len, prompts.values())) + num_tokens
    plain, rows, all_stand = {}, [], True
    started = time.perf_counter()
    for number, case in enumerate(cases, 1):
        prompt = prompts[case.prompt]
        print(f"[{number}/{len(cases)}] {case.name}: {case.draft}, temperature {case.temperature:g}\n  > {case.prompt}")
        with tqdm(total=num_tokens, desc=f"  {case.name}", unit="token", leave=False, disable=None) as bar:
            decoded = speculative_decode(
                model.model,
                [prompt],
                [make_draft(case.draft, model.model, num_draft_tokens)],
                make_cache(cache, model.model.config, 1, length, num_draft_tokens),
                num_tokens=num_tokens,
                num_draft_tokens=num_draft_tokens,
                sampling=Sampling(case.temperature),
                stop=model.stop,
                backend=backend,
                on_step=bar.update,
            )
        tokens = decoded.tokens[0]
        print("  " + model.decode(tokens).strip().replace("\n", "\n  ") + f"\n{describe(decoded)}")
        same = "sampled"
        if case.temperature == 0:
            if case.prompt not in plain:
                plain[case.prompt] = plain_decode(model.model, prompt, num_tokens, model.stop)
            stands, same = compare_with_plain(tokens, *plain[case.prompt])
            all_stand &= stands
            print(f"  token for token the plain decode's: {same}")
        print()
        rows.append(
            [
                case.name,
                "predictable" if case.predictable else "open-ended",
                case.draft,
                f"{case.temperature:g}",
                len(tokens),
                f"{decoded.stats.tokens_per_step:.2f}",
                " ".join("-" if rate != rate else f"{rate:.2f}" for rate in decoded.stats.unconditional_rates),
                same,
            ]
        )
    print(
        Table(
            ["prompt", "kind", "draft", "T", "tokens", "tokens/step", "accepted up to position 1, 2, ...", "as plain"],
            rows,
        )
    )
    print(f"\nK = {num_draft_tokens}, backend {backend}, {cache} cache, {time.perf_counter() - started:.0f} s")
    return all_stand


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m draft_verify.bench demo", description=__doc__)
    parser.add_argument("--backend", default="emulator", choices=["emulator", "reference", "simulator"])
    parser.add_argument(
        "--cache",
        default="contiguous",
        choices=["contiguous", "transposed", "paged", "ring"],
        help=f"layout of the cache; ring gives both decoders a sliding window of {RING_WINDOW}",
    )
    parser.add_argument("--all", action="store_true", help="every draft and temperature for every prompt")
    parser.add_argument("--tokens", type=whole, default=48, help="new tokens a prompt (default 48)")
    arguments = parser.parse_args(argv)
    cases = CASES
    if arguments.all:
        cases = [
            case._replace(draft=draft, temperature=temperature)
            for case in CASES
            for draft in DRAFTS
            for temperature in TEMPERATURES
        ]
    print("reading SmolLM2-135M-Instruct ...", flush=True)
    try:
        model = smollm2.load(sliding_window=RING_WINDOW if arguments.cache == "ring" else None)
    except smollm2.MissingModel as missing:
        print(missing, file=sys.stderr)
        return 2
    stands = run(model, cases, backend=arguments.backend, cache=arguments.cache, num_tokens=arguments.tokens)
    if not stands:
        print("greedy output differs from the plain decode", file=sys.stderr)
    return 0 if stands else 1


if __name__ == "__main__":
    raise SystemExit(main())
