"""The demo: what it prints, when it fails, and the real model through the kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import draft_verify
from draft_verify.bench import demo, smollm2

CASES = [
    demo.Case("first", True, "one two three", "prompt lookup", 0.0),
    demo.Case("second", False, "four five", "layers skipped", 0.0),
    demo.Case("third", False, "four five", "layers skipped", 0.7),
]


@pytest.fixture
def tiny(tiny_llama, monkeypatch):
    """The tiny model with a text side: a token for each letter."""
    monkeypatch.setattr(demo, "SKIPPED_LAYERS", (1,))
    return SimpleNamespace(
        model=tiny_llama,
        encode=lambda prompt: [ord(letter) % 50 for letter in prompt],
        decode=lambda tokens: " ".join(map(str, tokens)),
        stop=None,
    )


def test_it_prints_each_text_and_one_table(tiny, capsys):
    assert demo.run(tiny, CASES, backend="reference", num_tokens=10)
    printed = capsys.readouterr().out
    assert printed.count("tokens a step") == 3
    assert printed.count("token for token the plain decode's: yes") == 2
    table = [line.split("|") for line in printed.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in table[2:]] == ["first", "second", "third"]
    assert [row[-2].strip() for row in table[2:]] == ["yes", "yes", "sampled"]


def test_it_fails_when_a_draft_is_accepted_that_the_target_would_not_have_emitted(tiny, capsys, monkeypatch):
    right = draft_verify.greedy_acceptance

    def accepts_everything(draft_tokens, target_logits, *, draft_lens, backend):
        acceptance = right(draft_tokens, target_logits, draft_lens=draft_lens, backend=backend)
        for b, count in enumerate(draft_lens):
            acceptance.tokens[b, :count] = draft_tokens[b, :count]
            acceptance.tokens[b, count] = target_logits[b, count].argmax()
            acceptance.num_accepted[b] = count
        return acceptance

    monkeypatch.setattr(draft_verify, "greedy_acceptance", accepts_everything)
    assert not demo.run(tiny, CASES[1:2], backend="reference", num_tokens=10)
    assert "NO, from token" in capsys.readouterr().out


def test_only_a_near_tie_excuses_a_difference():
    plain, margins = [5, 6, 7], [1.0, 5e-4, 1.0]
    assert demo.compare_with_plain([5, 6, 7], plain, margins) == (True, "yes")
    stands, said = demo.compare_with_plain([5, 9, 7], plain, margins)
    assert stands and "near tie at token 1" in said and "5.0e-04" in said
    assert not demo.compare_with_plain([5, 6, 8], plain, margins)[0]
    assert not demo.compare_with_plain([5, 6], plain, margins)[0]
    assert not demo.compare_with_plain([5, 6, 7, 8], plain, margins)[0]


def test_it_says_what_to_install_where_the_model_is_missing(monkeypatch, capsys):
    def missing(sliding_window):
        raise smollm2.MissingModel("the wheel is not installed: pip install it")

    monkeypatch.setattr(smollm2, "load", missing)
    assert demo.main([]) == 2
    assert "pip install it" in capsys.readouterr().err


def test_its_exit_code_says_whether_greedy_output_stood(tiny, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "load", lambda sliding_window: tiny)
    monkeypatch.setattr(demo, "run", lambda *args, **kwargs: False)
    assert demo.main([]) == 1
    assert "differs from the plain decode" in capsys.readouterr().err


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_the_real_model_decodes_through_the_kernels_as_plainly(smollm2, cache, capsys):
    assert demo.run(smollm2, demo.CASES[:1], backend="emulator", cache=cache, num_tokens=16)
    assert "token for token the plain decode's: yes" in capsys.readouterr().out


def test_rings_give_the_tokens_of_the_plain_model_with_the_same_sliding_window(tiny, tiny_llama_windowed, capsys):
    windowed = SimpleNamespace(**{**vars(tiny), "model": tiny_llama_windowed})
    assert demo.run(windowed, CASES[:2], backend="reference", cache="ring", num_tokens=10)
    assert demo.run(tiny, CASES[:1], backend="reference", cache="paged", num_tokens=10)
    assert "plain decode's: yes" in capsys.readouterr().out
