"""The workload comparison: its prompts, what it counts, and a run with a tiny model."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from draft_verify.acceptance_stats import AcceptanceStats
from draft_verify.bench import smollm2, workload
from draft_verify.bench.llama import PlainSequence
from draft_verify.bench.speedup import StepCost


@pytest.fixture
def tiny(tiny_llama, monkeypatch):
    """The tiny model with a text side, loaded in place of the real one."""
    model = SimpleNamespace(
        model=tiny_llama, encode=lambda prompt: [ord(letter) % 50 for letter in prompt], decode=str, stop=None
    )
    monkeypatch.setattr(smollm2, "load", lambda: model)
    monkeypatch.setattr(workload, "SKIPPED_LAYERS", (1,))
    return model


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    entries = [("code", "def"), ("code", "class"), ("story", "once upon")]
    path.write_text("\n".join(json.dumps({"kind": kind, "prompt": prompt}) for kind, prompt in entries) + "\n\n")
    return path


def test_twenty_four_prompts_of_six_kinds_come_with_it():
    prompts = workload.read_prompts(workload.PROMPTS)
    assert len(prompts) == 24 and len({prompt.prompt for prompt in prompts}) == 24
    assert set(Counter(prompt.kind for prompt in prompts).values()) == {4}


def test_a_limit_keeps_the_first_prompts_of_each_kind():
    prompts = workload.read_prompts(workload.PROMPTS)
    kept = workload.first_of_each_kind(prompts, 1)
    assert [prompt.kind for prompt in kept] == list(dict.fromkeys(prompt.kind for prompt in prompts))
    assert kept == [next(p for p in prompts if p.kind == prompt.kind) for prompt in kept]
    assert workload.first_of_each_kind(prompts, None) == prompts


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"kind": "a", "prompt": "b"}\n{"kind": "a"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:2: expected"):
        workload.read_prompts(path)


def test_rates_by_rank_count_paths_that_stay_among_the_ranks():
    rates = workload.rank_rates([np.array([0, 1, 7, 0])], max_depth=2, max_rank=2)
    # Starts at ranks 0, 1, 7, 0: half are rank 0, a quarter rank 1. Second tokens reached: 1 after 0, 7 after 1.
    assert rates == [[0.5, 0.25], [0.0, 0.5]]


def test_ranks_are_those_of_the_models_own_ordering(tiny_llama):
    prompt, text = [1, 2, 3], [4, 5, 6]
    ranks = workload.ranks_under(tiny_llama, [0, 2], prompt, text)
    for i, token in enumerate(text):
        logits = PlainSequence(tiny_llama, [0, 2]).follow(prompt + text[:i])
        assert ranks[i] == np.argsort(-logits).tolist().index(token)


def test_positions_that_a_short_draft_left_empty_count_as_rejected():
    stats = AcceptanceStats(2)
    stats.steps, stats.drafted[:], stats.reached[:], stats.accepted[:] = 10, [5, 2], [5, 2], [5, 1]
    assert workload.rates_per_step(stats) == [0.5, 0.2]


def test_it_compares_chains_and_trees_by_kind(tiny, prompts, tmp_path, capsys):
    results = tmp_path / "new" / "results.json"
    report = tmp_path / "report"
    arguments = [str(prompts), "--tokens", "12", "--window", "3", "--tree-rows", "6"]
    assert workload.main([*arguments, "--json", str(results), "--report", str(report)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(results.read_text())
    assert document["schema"] == "draft_verify.workload/1"
    assert all(len(by_rank) == workload.MAX_RANK and 0 < sum(by_rank) <= 1 for by_rank in document["rank_rates"])
    rows = {(result["kind"], result["draft"]): result for result in document["results"]}
    assert len(rows) == 6
    for (kind, draft), result in rows.items():
        assert result["as_plain"] == result["num_prompts"] == {"code": 2, "story": 1}[kind]
        assert AcceptanceStats.from_dict(result["stats"]).emitted == 12 * result["num_prompts"]
        assert f"{result['speedup']:.2f}x" in printed
        assert (result["parents"] is not None) == draft.endswith("tree")
        if result["parents"] is None and result["best_num_draft_tokens"] is not None:
            assert result["best_speedup"] >= 1
    assert "all kinds, layers skipped, chain: Speculation" in printed
    assert "story" in (report / "index.html").read_text()


def test_every_rule_can_be_compared_at_a_temperature(tiny, prompts, capsys):
    assert workload.main([str(prompts), "--tokens", "8", "--window", "3", "--tree-rows", "5", "--rules", "0.7"]) == 0
    printed = capsys.readouterr().out
    for rule in ("chain, token", "chain, block", "tree, without_replacement", "tree, target_only", "tree, typical"):
        assert rule in printed


def test_forced_acceptance_has_the_length_asked_for(tiny, prompts, capsys):
    assert workload.main([str(prompts), "--tokens", "64", "--window", "3", "--synthetic", "2.5"]) == 0
    lengths = [
        float(line.split("|")[3])
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|") and "synthetic" in line
    ]
    assert np.mean(lengths) == pytest.approx(2.5, abs=0.4)


def test_a_draft_that_costs_nothing_pays_by_what_is_accepted():
    stats = AcceptanceStats(1)
    stats.steps, stats.emitted, stats.drafted[:], stats.reached[:], stats.accepted[:] = 10, 15, 10, 10, 5
    variant = workload.Variant("free", lambda: None, 1, StepCost())
    result = workload.Result("kind", variant, stats, 1, 1)
    assert result.speedup == 1.5 and result.tuning.best.num_draft_tokens == 1


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (None, [], "prompts.jsonl"),
        ("", [], "no prompts"),
        ('{"kind": "code", "prompt": "a"}\n{"prompt": "b"}\n', [], "prompts.jsonl:2: expected .*'kind'"),
        ("nothing\n", [], "prompts.jsonl:1: expected"),
        ('{"kind": "code", "prompt": "a"}', ["--synthetic", "20"], "mean length 20"),
    ],
)
def test_a_mistake_is_answered_before_anything_is_decoded(text, arguments, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        workload.main([str(path), *arguments])


def test_a_prompt_that_the_cache_cannot_hold_is_named(tiny, prompts):
    with pytest.raises(SystemExit, match="expected 1 to 2 beside the new ones"):
        workload.main([str(prompts), "--tokens", "238"])


@pytest.mark.parametrize("option", ["--tokens", "--limit", "--window", "--tree-rows"])
def test_a_count_of_nothing_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        workload.main([option, "0"])
    assert f"argument {option}: invalid number (1, 2, ...)" in capsys.readouterr().err
