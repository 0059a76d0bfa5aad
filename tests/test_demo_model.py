"""The demo's model: the plain decode against llama.cpp's tokens, and the draft models against the plain decode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draft_verify.bench import drafts
from draft_verify.bench.decode import plain_decode
from draft_verify.bench.llama import PlainSequence

CASES = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES)
def test_plain_decode_reproduces_the_greedy_tokens_of_llama_cpp(smollm2, case):
    prompt, expected = CASES[case]["prompt_ids"], CASES[case]["greedy_ids"]
    assert smollm2.encode(CASES[case]["prompt"]) == prompt
    tokens, margins = plain_decode(smollm2.model, prompt, len(expected))
    assert tokens == expected
    assert len(margins) == len(tokens) and min(margins) > 0


def test_one_token_at_a_time_gives_the_logits_of_the_whole_text_at_once(tiny_llama):
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = PlainSequence(tiny_llama).append(text)
    stepwise = PlainSequence(tiny_llama)
    for length in range(1, len(text) + 1):
        np.testing.assert_allclose(stepwise.follow(text[:length]), whole[length - 1], rtol=1e-4, atol=1e-4)


def test_following_another_text_forgets_what_is_not_shared(tiny_llama):
    sequence = PlainSequence(tiny_llama)
    sequence.follow([3, 1, 4, 1, 5])
    after = sequence.follow([3, 1, 9, 2])
    np.testing.assert_allclose(after, PlainSequence(tiny_llama).follow([3, 1, 9, 2]), rtol=1e-4, atol=1e-4)
    assert sequence.tokens == [3, 1, 9, 2]


def test_a_sliding_window_forgets_what_is_further_back(tiny_llama_windowed):
    window = tiny_llama_windowed.config.sliding_window
    layers = tiny_llama_windowed.config.num_layers
    reach = layers * (window - 1) + 1  # each layer looks window - 1 tokens further back
    text = np.random.default_rng(0).integers(0, 50, reach + 3).tolist()
    np.testing.assert_allclose(
        PlainSequence(tiny_llama_windowed).follow([49, *text]),
        PlainSequence(tiny_llama_windowed).follow([0, *text]),
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_draft_of_all_layers_proposes_the_plain_decode(tiny_llama):
    draft = drafts.LayerSkip(tiny_llama, list(range(tiny_llama.config.num_layers)), drafts.chain(5))
    proposal = draft.propose([1, 2, 3], 5, 0.0, np.zeros(5))
    assert proposal.tokens == plain_decode(tiny_llama, [1, 2, 3], 5)[0]
    assert proposal.parents == [0, 1, 2, 3, 4]
    assert proposal.laws is None


def test_a_draft_stops_at_the_limit(tiny_llama):
    draft = drafts.LayerSkip(tiny_llama, [0], drafts.chain(5))
    assert len(draft.propose([1, 2, 3], 2, 0.0, np.zeros(5)).tokens) == 2
    assert draft.propose([1, 2, 3], 0, 0.0, np.zeros(5)).tokens == []


def path_before(parents, tokens, row):
    """The tokens of a row's ancestors, the root left out, and its own."""
    path = []
    while row > 0:
        path.insert(0, tokens[row])
        row = parents[row]
    return path


def test_tree_rows_are_the_best_tokens_after_their_own_ancestors(tiny_llama):
    shape = drafts.Shape([-1, 0, 0, 1, 1, 2, 4], [0, 0, 1, 0, 1, 0, 0])
    draft = drafts.LayerSkip(tiny_llama, [0, 2], shape)
    text = [1, 2, 3]
    for _ in range(2):  # the second time the text's keys are there already
        tokens = [text[-1], *draft.propose(text, 6, 0.0, np.zeros(6)).tokens]
        for row in range(1, len(shape.parents)):
            before = path_before(shape.parents, tokens, shape.parents[row])
            logits = PlainSequence(tiny_llama, [0, 2]).follow(text + before)
            assert tokens[row] == np.argsort(-logits, kind="stable")[shape.ranks[row]]


def test_the_law_of_a_tree_row_depends_on_its_ancestors_alone(tiny_llama):
    shape = drafts.Shape([-1, 0, 0, 1, 1, 2, 4, 5], [0, 0, 1, 0, 1, 0, 0, 0])
    text, uniforms = [1, 2, 3], np.linspace(0.1, 0.9, 7)
    proposal = drafts.LayerSkip(tiny_llama, [0, 2], shape).propose(text, 7, 1.0, uniforms)
    tokens = [text[-1], *proposal.tokens]
    for row in (0, 1, 2, 4, 5):
        logits = PlainSequence(tiny_llama, [0, 2]).follow(text + path_before(shape.parents, tokens, row))
        law = np.exp(logits.astype(np.float64) - logits.max())
        np.testing.assert_allclose(proposal.laws[row], law / law.sum(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("siblings", ["without_replacement", "independent"])
def test_sampled_drafts_come_with_the_law_they_were_drawn_from(tiny_llama, siblings):
    shape = drafts.Shape([-1, 0, 0, 0, 1], [0, 0, 1, 2, 0])
    draft = drafts.LayerSkip(tiny_llama, [0], shape, siblings)
    uniforms = np.full(4, 0.4)
    tokens, parents, laws = draft.propose([1, 2], 3, 0.7, uniforms)
    assert parents == [0, 0, 0, 1]
    logits = PlainSequence(tiny_llama, [0]).follow([1, 2]).astype(np.float64) / 0.7
    law = np.exp(logits - logits.max())
    np.testing.assert_allclose(laws[0], law / law.sum(), rtol=1e-4, atol=1e-7)
    remaining = laws[0].astype(np.float64)
    for token in tokens[:3]:
        below = remaining[:token].sum()
        assert below <= 0.4 * remaining.sum() < below + remaining[token]
        if siblings == "without_replacement":
            remaining[token] = 0
    assert (len(set(tokens[:3])) == 1) == (siblings == "independent")
    assert laws[1].sum() == pytest.approx(1, abs=1e-5) and not laws[2:].any()


def test_prompt_lookup_continues_the_latest_longest_match():
    lookup = drafts.PromptLookup(num_rows=8)
    text = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 1, 2, 3]
    assert lookup.propose(text, 2, 0.0, None) == ([4, 9], [0, 1], None)  # 1 2 3 wins over the later 2 3
    assert lookup.propose([8, 9], 2, 0.0, None) == ([], [], None)


def test_prompt_lookup_merges_the_continuations_of_several_matches_into_a_tree():
    lookup = drafts.PromptLookup(num_rows=6, branches=2)
    text = [1, 2, 3, 7, 0, 1, 2, 3, 4, 0, 1, 2]
    assert lookup.propose(text, 3, 0.0, None) == ([3, 4, 0, 7, 0], [0, 1, 2, 1, 4], None)
    assert lookup.propose(text, 1, 0.0, None) == ([3], [0], None)
