"""The decode loop: whatever is drafted and however the cache is laid out, greedy output is the plain decode's."""

from __future__ import annotations

import numpy as np
import pytest

from draft_verify.bench import drafts
from draft_verify.bench.decode import Cache, Sampling, plain_decode, speculative_decode
from draft_verify.bench.llama import PlainSequence

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]]
NUM_TOKENS = 20
K = 4


class Wrong:
    """Drafts that the target never emits, to see that nothing of them stays."""

    def __init__(self, model, num_draft_tokens=K):
        self.model, self.num_draft_tokens = model, num_draft_tokens

    def propose(self, tokens, limit, temperature, uniforms):
        count = min(limit, self.num_draft_tokens)
        right = plain_decode(self.model, tokens, count)[0] if count else []
        return drafts.Proposal([(token + 1) % 50 for token in right], list(range(count)))


class Mixed:
    """Right for as many drafts as the length of the text says, wrong after, and sometimes short of the limit."""

    def __init__(self, model):
        self.model = model

    def propose(self, tokens, limit, temperature, uniforms):
        count = min(limit, (len(tokens) * 7) % (K + 1))
        right = plain_decode(self.model, tokens, count)[0] if count else []
        good = len(tokens) % (K + 1)
        return drafts.Proposal(
            [token if i < good else (token + 1) % 50 for i, token in enumerate(right)], list(range(count))
        )


def make_draft(kind, model):
    return {
        "wrong": lambda: Wrong(model),
        "mixed": lambda: Mixed(model),
        "layers skipped": lambda: drafts.LayerSkip(model, [0, 2], drafts.chain(K)),
        "prompt lookup": lambda: drafts.PromptLookup(K + 1),
    }[kind]()


def make_cache(kind, config, batch, slots):
    return {
        "BHSD": lambda: Cache.contiguous(config, batch, slots),
        "BHDS": lambda: Cache.contiguous(config, batch, slots, "BHDS"),
        "NHPD": lambda: Cache.paged(config, batch, slots),
        "NPHD": lambda: Cache.paged(config, batch, slots, cache_layout="NPHD"),
    }[kind]()


@pytest.mark.parametrize("cache", ["BHSD", "BHDS", "NHPD", "NPHD", "ring"])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_the_kernels_decode_like_the_plain_model(tiny_llama, tiny_llama_windowed, kind, cache):
    model = tiny_llama_windowed if cache == "ring" else tiny_llama
    shape = drafts.Shape([-1, 0, 0, 1, 2], [0, 0, 1, 0, 0]) if kind == "tree" else None
    decoded = speculative_decode(
        model,
        PROMPTS,
        [drafts.LayerSkip(model, [0, 2], shape) if shape else Mixed(model) for _ in PROMPTS],
        Cache.ring(model.config, len(PROMPTS), K) if cache == "ring" else make_cache(cache, model.config, 3, 40),
        num_tokens=8,
        num_draft_tokens=K,
        tree=kind == "tree",
        backend="emulator",
    )
    assert decoded.tokens == [plain_decode(model, prompt, 8)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("cache", ["BHSD", "BHDS", "NHPD", "NPHD"])
@pytest.mark.parametrize("draft", ["wrong", "mixed", "layers skipped", "prompt lookup"])
def test_greedy_output_is_the_plain_decodes(tiny_llama, draft, cache):
    plain = [plain_decode(tiny_llama, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]
    decoded = speculative_decode(
        tiny_llama,
        PROMPTS,
        [make_draft(draft, tiny_llama) for _ in PROMPTS],
        make_cache(cache, tiny_llama.config, len(PROMPTS), 40),
        num_tokens=NUM_TOKENS,
        num_draft_tokens=K,
    )
    assert decoded.tokens == plain
    assert decoded.stats.emitted == NUM_TOKENS * len(PROMPTS)
    if draft == "wrong":
        assert decoded.stats.accepted.sum() == 0
    if draft == "mixed":
        assert decoded.stats.tokens_per_step > 1.2


def test_a_right_draft_is_accepted_whole(tiny_llama):
    decoded = speculative_decode(
        tiny_llama,
        PROMPTS[:1],
        [drafts.LayerSkip(tiny_llama, [0, 1, 2], drafts.chain(K))],
        Cache.contiguous(tiny_llama.config, 1, 40),
        num_tokens=NUM_TOKENS,
        num_draft_tokens=K,
    )
    assert decoded.tokens == [plain_decode(tiny_llama, PROMPTS[0], NUM_TOKENS)[0]]
    assert decoded.stats.steps == NUM_TOKENS // (K + 1)
    assert decoded.stats.acceptance_rate == 1.0


def test_a_ring_no_longer_than_the_window_decodes_like_the_plain_model(tiny_llama_windowed):
    plain = [plain_decode(tiny_llama_windowed, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]
    cache = Cache.ring(tiny_llama_windowed.config, len(PROMPTS), K)
    assert cache.keys[0].shape[2] == tiny_llama_windowed.config.sliding_window - 1
    decoded = speculative_decode(
        tiny_llama_windowed,
        PROMPTS,
        [Mixed(tiny_llama_windowed) for _ in PROMPTS],
        cache,
        num_tokens=NUM_TOKENS,
        num_draft_tokens=K,
    )
    assert decoded.tokens == plain


@pytest.mark.parametrize("cache", ["BHSD", "NHPD"])
def test_trees_decode_like_the_plain_model_and_accept_more_than_their_own_chain(tiny_llama, cache):
    shape = drafts.Shape([-1, 0, 0, 0, 1, 1, 2, 4], [0, 0, 1, 2, 0, 1, 0, 0])
    options = {"num_tokens": NUM_TOKENS, "num_draft_tokens": len(shape.parents) - 1}
    plain = [plain_decode(tiny_llama, prompt, NUM_TOKENS)[0] for prompt in PROMPTS]

    def decode(shape, tree):
        return speculative_decode(
            tiny_llama,
            PROMPTS,
            [drafts.LayerSkip(tiny_llama, [0, 2], shape) for _ in PROMPTS],
            make_cache(cache, tiny_llama.config, len(PROMPTS), 48),
            tree=tree,
            **options,
        )

    tree, chain = decode(shape, True), decode(drafts.chain(3), False)
    assert tree.tokens == chain.tokens == plain
    assert tree.stats.tokens_per_step > chain.stats.tokens_per_step


def test_decoding_ends_with_the_stop_token_and_forgets_what_came_after(tiny_llama):
    """traps.md T61 (koboldcpp#1276): text after the end of a sequence."""
    plain, _ = plain_decode(tiny_llama, PROMPTS[0], NUM_TOKENS)
    stop = plain[7]
    expected = plain[: plain.index(stop) + 1]
    assert plain_decode(tiny_llama, PROMPTS[0], NUM_TOKENS, stop)[0] == expected
    decoded = speculative_decode(
        tiny_llama,
        PROMPTS[:1],
        [drafts.LayerSkip(tiny_llama, [0, 1, 2], drafts.chain(K))],
        Cache.contiguous(tiny_llama.config, 1, 40),
        num_tokens=NUM_TOKENS,
        num_draft_tokens=K,
        stop=stop,
    )
    assert decoded.tokens == [expected]
    assert decoded.stats.emitted == len(expected)


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_no_more_tokens_come_than_asked_for(tiny_llama, num_tokens):
    """traps.md T61 (ferrox#311, hf#47912): 6 tokens asked for, several committed a step, 9 returned."""
    decoded = speculative_decode(
        tiny_llama,
        PROMPTS,
        [drafts.LayerSkip(tiny_llama, [0, 1, 2], drafts.chain(K)) for _ in PROMPTS],
        Cache.contiguous(tiny_llama.config, len(PROMPTS), 40),
        num_tokens=num_tokens,
        num_draft_tokens=K,
    )
    assert decoded.tokens == [plain_decode(tiny_llama, prompt, num_tokens)[0] for prompt in PROMPTS]
    assert decoded.stats.emitted == num_tokens * len(PROMPTS)


@pytest.mark.parametrize(
    ("rule", "tree"),
    [("token", False), ("block", False), ("without_replacement", True), ("target_only", True), ("typical", False)],
)
def test_sampled_decoding_repeats_with_its_seed_and_never_depends_on_the_batch(tiny_llama, rule, tree):
    shape = drafts.Shape([-1, 0, 0, 1, 1], [0, 0, 1, 0, 1]) if tree else drafts.chain(K)

    def decode(prompts, seed):
        return speculative_decode(
            tiny_llama,
            prompts,
            [
                drafts.PromptLookup(K + 1, branches=2)
                if rule == "target_only"
                else drafts.LayerSkip(tiny_llama, [0, 2], shape)
                for _ in prompts
            ],
            Cache.contiguous(tiny_llama.config, len(prompts), 40),
            num_tokens=12,
            num_draft_tokens=K,
            tree=tree,
            sampling=Sampling(temperature=0.7, rule=rule, seed=seed),
        ).tokens

    together = decode(PROMPTS, 1)
    assert decode(PROMPTS, 1) == together
    assert decode(PROMPTS[:1], 1) == together[:1]
    assert decode(PROMPTS, 2) != together
    assert all(len(tokens) == 12 for tokens in together)


def test_sampled_decoding_follows_the_targets_law(tiny_llama):
    """The first token over many seeds, by chi-square against the plain model's law."""
    prompt, batch, seeds = [3, 1, 4], 60, range(0, 300, 60)
    first = [
        tokens[0]
        for seed in seeds
        for tokens in speculative_decode(
            tiny_llama,
            [prompt] * batch,
            [drafts.LayerSkip(tiny_llama, [0, 2], drafts.chain(2)) for _ in range(batch)],
            Cache.contiguous(tiny_llama.config, batch, 8),
            num_tokens=2,
            num_draft_tokens=2,
            sampling=Sampling(temperature=2.0, seed=seed),
        ).tokens
    ]
    logits = PlainSequence(tiny_llama).follow(prompt).astype(np.float64) / 2.0
    law = np.exp(logits - logits.max())
    law /= law.sum()
    counts = np.bincount(first, minlength=50)
    likely = law * len(first) >= 5
    expected = np.append(law[likely], law[~likely].sum()) * len(first)
    observed = np.append(counts[likely], counts[~likely].sum())
    chi_squared = float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    degrees = len(expected) - 1
    assert chi_squared < degrees + 5 * np.sqrt(2 * degrees)
