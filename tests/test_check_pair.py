"""check_pair: every way in which a draft does not fit its target is found, and said with its consequence."""

import copy
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from draft_verify.check_pair import ERROR, OK, WARNING, check_pair
from draft_verify.check_pair.__main__ import main

TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 12,
    "hidden_size": 5120,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "max_position_embeddings": 40960,
    "eos_token_id": 8,
    "bos_token_id": 9,
    "sliding_window": None,
    "use_sliding_window": False,
}
DRAFT = {**TARGET, "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 28}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            "id": 8 + i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in enumerate(["<end>", "<begin>"])
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": None,
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "cd": 5, "abc": 6, "abcd": 7},
        "merges": ["a b", "c d", "ab c", "ab cd"],
    },
}


def changed(base, **changes):
    return {**copy.deepcopy(base), **changes}


def check(target=TARGET, draft=DRAFT, target_tokenizer=TOKENIZER, draft_tokenizer=TOKENIZER, **kwargs):
    return check_pair(target, draft, target_tokenizer=target_tokenizer, draft_tokenizer=draft_tokenizer, **kwargs)


def of(report, subject):
    return [finding for finding in report.findings if finding.subject == subject]


def test_a_fitting_pair_has_no_complaint_and_names_the_padding_columns():
    report = check()
    assert report.ok and report.kind == "model"
    assert {finding.level for finding in report.findings} == {OK}
    assert "vocab_size=10" in of(report, "vocabulary padding")[0].consequence
    assert all(finding.consequence for finding in report.findings)


@pytest.mark.parametrize(
    "target, draft, subject, level, words",
    [
        ({}, {"model_type": "llama"}, "architecture", WARNING, "draft_model_cls"),
        ({"is_encoder_decoder": True}, {}, "architecture", ERROR, "Only decoders"),
        ({}, {"model_type": "qwen3_next"}, "architecture", WARNING, "select_state"),
        ({"model_type": "deepseek_v3"}, {}, "architecture", WARNING, "latent"),
        ({"head_dim": 288}, {}, "head size", WARNING, "up to 256"),
        ({}, {"vocab_size": 16}, "vocabulary size", WARNING, "vocab_size=10"),
        ({"vocab_size": 9}, {"vocab_size": 9}, "vocabulary size", ERROR, "not of one model"),
        ({}, {"eos_token_id": [7, 8]}, "eos_token_id", WARNING, "target's ids"),
        ({}, {"bos_token_id": None}, "bos_token_id", WARNING, "beginning"),
        ({"pad_token_id": 8}, {}, "pad_token_id", WARNING, "num_accepted"),
        ({}, {"max_position_embeddings": 4096}, "maximum length", WARNING, "Past 4096"),
        ({}, {"sliding_window": 512, "use_sliding_window": True}, "sliding window", WARNING, "ring"),
    ],
)
def test_a_config_that_does_not_fit_is_found(target, draft, subject, level, words):
    report = check(changed(TARGET, **target), changed(DRAFT, **draft))
    hits = [finding for finding in of(report, subject) if finding.level == level]
    assert hits and any(words in finding.fact + finding.consequence for finding in hits)
    assert report.ok == (level != ERROR)


def test_every_head_size_that_the_kernel_serves_passes():
    for head_size in (16, 64, 80, 112, 256):
        assert not of(check(changed(TARGET, head_dim=head_size)), "head size")


def test_sizes_of_two_tokenizers_are_an_error_and_no_advice_cuts_the_targets_law():
    for sizes in ((151_936, 32_000), (32_000, 151_936)):
        target, draft = (changed(TARGET, vocab_size=size) for size in sizes)
        for tokenizers in ((None, None), (TOKENIZER, None), (None, TOKENIZER)):
            report = check(target, draft, *tokenizers)
            (finding,) = of(report, "vocabulary size")
            assert finding.level == ERROR and not report.ok and "vocab_size=" not in finding.consequence
        assert "cannot serve" in str(report)
    # A draft of the same tokenizer that knows fewer of its ids: the target's own ids are what counts.
    (finding,) = of(check(draft=changed(DRAFT, vocab_size=6)), "vocabulary size")
    assert finding.level == WARNING and "vocab_size=10" in finding.consequence
    fewer = changed(TOKENIZER, added_tokens=[])
    (finding,) = of(check(draft=changed(DRAFT, vocab_size=8), draft_tokenizer=fewer), "vocabulary size")
    assert finding.level == WARNING and "vocab_size=10" in finding.consequence


def test_padding_of_one_tokenizer_is_no_error_where_none_is_given():
    target, draft = (changed(TARGET, vocab_size=size) for size in (152_064, 151_936))
    report = check(target, draft, None, None)
    (finding,) = of(report, "vocabulary size")
    assert report.ok and finding.level == WARNING and "ids of the target's tokenizer" in finding.consequence


def tokenizer(**model):
    return changed(TOKENIZER, model={**TOKENIZER["model"], **model})


@pytest.mark.parametrize(
    "other, level, words",
    [
        (
            tokenizer(vocab={**TOKENIZER["model"]["vocab"], "a": 1, "b": 0}),
            ERROR,
            "2 tokens (20.0%) have different ids, 'a'",
        ),
        (tokenizer(vocab={**TOKENIZER["model"]["vocab"], "zz": 10}), WARNING, "1 tokens only in the draft's, 'zz'"),
        (changed(TOKENIZER, added_tokens=TOKENIZER["added_tokens"][:1]), WARNING, "only in the target's, '<begin>'"),
        (tokenizer(merges=["c d", "a b", "ab c", "ab cd"]), WARNING, "different model"),
        (changed(TOKENIZER, normalizer=None), WARNING, "different normalizer"),
    ],
)
def test_a_tokenizer_that_differs_is_found(other, level, words):
    report = check(draft_tokenizer=other)
    hits = [finding for finding in of(report, "tokenizer") if finding.level == level]
    assert hits and any(words in finding.fact for finding in hits)
    assert report.ok == (level != ERROR)


def test_a_tokenizer_is_the_same_in_every_form_it_comes_in(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER))
    pairs = changed(TOKENIZER)
    pairs["model"]["merges"] = [merge.split() for merge in pairs["model"]["merges"]]
    pairs["model"]["fuse_unk"] = False
    real = Tokenizer.from_file(str(path))
    ids_only = SimpleNamespace(get_vocab=real.get_vocab)
    for form in (path, str(path), pairs, real, SimpleNamespace(backend_tokenizer=real), ids_only):
        findings = of(check(draft_tokenizer=form), "tokenizer")
        assert [finding.level for finding in findings] == [OK], findings
    assert of(check(draft_tokenizer=None), "tokenizer")[0].level == WARNING
    with pytest.raises(ValueError, match="draft_tokenizer"):
        check(draft_tokenizer=3)


EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 5120,
    "num_hidden_layers": 1,
    "vocab_size": 12,
    "draft_vocab_size": 6,
    "max_position_embeddings": 40960,
}
MEDUSA = {"architectures": ["MedusaModel"], "medusa_num_heads": 4, "hidden_size": 5120}


@pytest.mark.parametrize(
    "draft, level, words",
    [
        (EAGLE3, OK, "hidden size 5120"),
        (changed(EAGLE3, hidden_size=4096), ERROR, "another target"),
        (changed(EAGLE3, target_hidden_size=5120, hidden_size=4096), OK, "fit"),
        (changed(EAGLE3, num_hidden_layers=2), ERROR, "one layer"),
        (changed(EAGLE3, eagle_aux_hidden_state_layer_ids=[2, 32, 90]), ERROR, "three layers"),
        (MEDUSA, ERROR, "at most 4"),
        (changed(MEDUSA, medusa_num_heads=7), OK, "fit"),
        (EAGLE3, WARNING, "i + d2t[i]"),
        (changed(EAGLE3, draft_vocab_size=12), OK, "both 12"),
    ],
)
def test_heads_are_checked_against_the_target_they_were_made_for(draft, level, words):
    report = check(draft=draft, draft_tokenizer=None, num_draft_tokens=7)
    assert report.kind in ("eagle3", "medusa")
    assert any(finding.level == level and words in finding.fact + finding.consequence for finding in report.findings)
    assert not [finding for finding in of(report, "tokenizer") if finding.level != OK]


def test_a_plain_eagle_head_needs_the_targets_lm_head():
    draft = {key: value for key, value in EAGLE3.items() if key != "draft_vocab_size"}
    report = check(draft=changed(draft, architectures=["EagleLlamaForCausalLM"]), draft_tokenizer=None)
    assert report.kind == "eagle" and report.ok
    assert any("lm_head" in finding.consequence for finding in report.findings)


def folder(path, config, tokenizer=TOKENIZER, generation=None):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return str(path)


def test_a_folder_is_read_whole_and_its_generation_config_decides_the_end(tmp_path):
    target = folder(tmp_path / "target", {"text_config": TARGET}, generation={"eos_token_id": [7, 8]})
    draft = folder(tmp_path / "draft", DRAFT)
    report = check_pair(target, draft)
    assert of(report, "eos_token_id")[0].fact == "target [7, 8], draft [8]"
    assert of(report, "tokenizer")[0].level == OK
    assert report == check_pair(target, draft + "/config.json")


def test_the_command_prints_the_findings_and_exits_by_them(tmp_path, capsys):
    target, draft = folder(tmp_path / "target", TARGET), folder(tmp_path / "draft", DRAFT)
    wrong = folder(tmp_path / "wrong", changed(DRAFT, is_encoder_decoder=True))
    assert main([target, draft]) == 0
    assert "The draft can serve the target." in capsys.readouterr().out
    assert main([target, wrong, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert main([target, str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    run = subprocess.run([sys.executable, "-m", "draft_verify.check_pair", target, draft], capture_output=True)
    assert run.returncode == 0 and not run.stderr


@pytest.mark.parametrize("config", [3, {"hidden_size": 4}, {"model_type": "llama"}])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ValueError, match="draft"):
        check(draft=config)
