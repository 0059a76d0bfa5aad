"""Can this draft serve this target? Read from the two models' configs and tokenizers, before anything is compiled.

    python -m draft_verify.check_pair TARGET DRAFT

The rules come from the exactness of acceptance itself (verification is exact whatever the draft, so most mismatches
cost acceptance, not correctness) and from what NxD Inference and vLLM Neuron ask of a draft: the feature guide's EAGLE
and Medusa sections (aws-neuron-sdk, nxd-inference developer guides) and the vLLM Neuron EAGLE3 design page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draft_verify.checks.attention import MAX_HEAD_DIM

ERROR, WARNING, OK = "error", "warning", "ok"

# Columns by which published models of one tokenizer differ, padded to multiples of their own, are fewer: 128 in Qwen2.5
# (151,936 and 152,064), 943 in phi-2 (51,200 for 50,257 ids).
MAX_PADDING = 1024

# Families whose layers keep a running state, for which rollback means checkpoints (select_state).
RECURRENT = (
    "mamba",
    "mamba2",
    "jamba",
    "bamba",
    "falcon_mamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "qwen3_next",
    "qwen3_5",
    "rwkv",
    "zamba2",
    "recurrent_gemma",
    "lfm2",
    "minimax",
)
LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa", "longcat_flash")


class Finding(NamedTuple):
    """One thing that was looked at: `level` error, warning or ok; what is so; and what follows from it."""

    level: str
    subject: str
    fact: str
    consequence: str


@dataclass(frozen=True)
class PairReport:
    """What `check_pair` found. `ok` says that nothing keeps the draft from serving the target."""

    kind: str  # "model", "eagle", "eagle3" or "medusa"
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.level != ERROR for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"draft kind: {self.kind}"]
        for finding in self.findings:
            lines.append(f"{finding.level.upper():<8}{finding.subject}: {finding.fact}")
            lines.append(f"        {finding.consequence}")
        lines.append("The draft can serve the target." if self.ok else "The draft cannot serve the target.")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "kind": self.kind, "findings": [finding._asdict() for finding in self.findings]}


def check_pair(
    target: Any,
    draft: Any,
    *,
    target_tokenizer: Any = None,
    draft_tokenizer: Any = None,
    num_draft_tokens: int | None = None,
) -> PairReport:
    """Says whether `draft` can propose tokens for `target`, each finding with its consequence.

    Args:
        target, draft: a Hugging Face model folder, a config.json file, a dict, or an object with `to_dict()`.
        target_tokenizer, draft_tokenizer: tokenizer.json as a path or dict, a `tokenizers.Tokenizer`, or a transformers
            tokenizer; default: the folder's tokenizer.json if there is one.
        num_draft_tokens: K, checked against what the draft's heads can propose.

    Returns:
        PairReport: all findings, `ok` if none is an error; as text by `str`, for JSON by `to_dict()`.

    Raises:
        ValueError: a config or tokenizer that cannot be read.
    """
    target_config, target_vocabulary = _load(target, target_tokenizer, "target")
    draft_config, draft_vocabulary = _load(draft, draft_tokenizer, "draft")
    kind = _draft_kind(draft_config)
    findings = [*_check_architecture(target_config, draft_config, kind)]
    findings += _check_tokenizers(target_vocabulary, draft_vocabulary, kind)
    findings += _check_vocabulary(target_config, draft_config, target_vocabulary, draft_vocabulary, kind)
    findings += _check_special_ids(target_config, draft_config, kind)
    findings += _check_length(target_config, draft_config)
    findings += _check_heads(target_config, draft_config, kind, num_draft_tokens)
    return PairReport(kind, tuple(findings))


# --- what the files say ---


class _Vocabulary(NamedTuple):
    ids: dict[str, int]  # token text -> id, added tokens included
    rules: dict[str, Any] | None  # merges, normaliser, pre-tokeniser; None where only the ids are known


def _load(model: Any, tokenizer: Any, name: str) -> tuple[dict[str, Any], _Vocabulary | None]:
    folder = None
    if isinstance(model, str | Path):
        path = Path(model)
        folder = path if path.is_dir() else path.parent
        config = _read_json(path / "config.json" if path.is_dir() else path, name)
    elif isinstance(model, Mapping):
        config = dict(model)
    elif hasattr(model, "to_dict"):
        config = model.to_dict()
    else:
        raise ValueError(f"{name}: got {type(model).__name__}, expected a model folder, a config or a dict")
    # A multimodal model decodes text with the text part of its config.
    config = {**config, **(config.get("text_config") or {})}
    if folder is not None and (folder / "generation_config.json").exists():
        generation = _read_json(folder / "generation_config.json", name)
        config.update((key, generation[key]) for key in ("eos_token_id", "pad_token_id") if key in generation)
    if "vocab_size" not in config and _draft_kind(config) != "medusa":
        raise ValueError(f"{name}: the config has no vocab_size, expected a Hugging Face language model's")
    if tokenizer is None and folder is not None and (folder / "tokenizer.json").exists():
        tokenizer = folder / "tokenizer.json"
    return config, None if tokenizer is None else _vocabulary(tokenizer, name)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name}: {path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _vocabulary(tokenizer: Any, name: str) -> _Vocabulary:
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if isinstance(tokenizer, str | Path):
        tokenizer = _read_json(Path(tokenizer), f"{name}_tokenizer")
    elif hasattr(tokenizer, "to_str"):
        tokenizer = json.loads(tokenizer.to_str())
    elif hasattr(tokenizer, "get_vocab"):
        return _Vocabulary(dict(tokenizer.get_vocab()), None)
    if not isinstance(tokenizer, Mapping) or "model" not in tokenizer:
        raise ValueError(f"{name}_tokenizer: got {type(tokenizer).__name__}, expected the content of a tokenizer.json")
    model = dict(tokenizer["model"])
    vocab = model.pop("vocab")
    if not isinstance(vocab, Mapping):  # Unigram: [piece, score] pairs in id order
        model["scores"] = [score for _, score in vocab]
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
    ids = dict(vocab)
    ids.update((token["content"], token["id"]) for token in tokenizer.get("added_tokens") or [])
    # Merges are written "a b" by older and ["a", "b"] by newer versions of the library.
    model["merges"] = [" ".join(merge) if isinstance(merge, list) else merge for merge in model.get("merges") or []]
    model = {key: value for key, value in model.items() if value}  # versions differ in which defaults they write out
    rules = {"model": model, "normalizer": tokenizer.get("normalizer"), "pre_tokenizer": tokenizer.get("pre_tokenizer")}
    return _Vocabulary(ids, rules)


def _draft_kind(config: Mapping[str, Any]) -> str:
    name = " ".join([*(config.get("architectures") or []), str(config.get("model_type"))]).lower()
    if "medusa" in name or "medusa_num_heads" in config:
        return "medusa"
    if "eagle3" in name or "draft_vocab_size" in config:
        return "eagle3"
    if "eagle" in name:
        return "eagle"
    return "model"


def _ids(value: Any) -> list[int]:
    return [] if value is None else sorted(value) if isinstance(value, list | tuple) else [value]


# --- the checks ---


def _check_architecture(target: Mapping, draft: Mapping, kind: str) -> Iterator[Finding]:
    subject = "architecture"
    family, draft_family = target.get("model_type"), draft.get("model_type")
    for name, config in (("target", target), ("draft", draft)):
        if config.get("is_encoder_decoder"):
            yield Finding(ERROR, subject, f"the {name} is an encoder-decoder", "Only decoders are verified here.")
    if family in LATENT_ATTENTION:
        yield Finding(
            WARNING,
            subject,
            f"the target ({family}) keeps latent keys and values",
            "verify_attention reads ordinary K/V caches: verify with the model's own attention; acceptance and "
            "rollback of its cache rows serve it as they are.",
        )
    for name, config in (("target", target), ("draft", draft)):
        if config.get("model_type") in RECURRENT:
            yield Finding(
                WARNING,
                subject,
                f"the {name} ({config['model_type']}) has recurrent layers",
                "Its state cannot be cut back by length: keep K + 1 checkpoints a step, roll back with select_state.",
            )
    if kind == "model" and family != draft_family:
        yield Finding(
            WARNING,
            subject,
            f"target {family}, draft {draft_family}",
            "Another family works where the tokenizers agree. NxD Inference builds the draft from the target's class "
            "unless FusedSpecNeuronConfig gets draft_model_cls.",
        )
    elif kind == "model":
        yield Finding(OK, subject, f"both {family}", "One model class serves both.")
    head_size = target.get("head_dim") or _quotient(target.get("hidden_size"), target.get("num_attention_heads"))
    if head_size and family not in LATENT_ATTENTION and head_size > MAX_HEAD_DIM:
        yield Finding(
            WARNING,
            "head size",
            f"the target's is {head_size}",
            f"verify_attention serves sizes up to {MAX_HEAD_DIM}: verify with another attention.",
        )


def _check_tokenizers(target: _Vocabulary | None, draft: _Vocabulary | None, kind: str) -> Iterator[Finding]:
    subject = "tokenizer"
    if target is None or draft is None:
        missing = " and ".join(name for name, it in (("target", target), ("draft", draft)) if it is None)
        if kind == "model":
            yield Finding(
                WARNING,
                subject,
                f"none given for the {missing}",
                "Whether one id means one token in both models is not known: compare their tokenizer.json.",
            )
        else:  # heads are trained on the target's ids and come without a tokenizer
            yield Finding(OK, subject, f"none given for the {missing}", "The heads work on the target's own ids.")
        return
    meaning = {token: (target.ids.get(token), draft.ids.get(token)) for token in target.ids.keys() | draft.ids.keys()}
    moved = sorted(token for token, (a, b) in meaning.items() if a is not None and b is not None and a != b)
    target_only = sorted(token for token, (_, b) in meaning.items() if b is None)
    draft_only = sorted(token for token, (a, _) in meaning.items() if a is None)
    if moved:
        share = len(moved) / len(target.ids)
        token = moved[0]
        yield Finding(
            ERROR,
            subject,
            f"{len(moved)} tokens ({share:.1%}) have different ids, {token!r} for instance {meaning[token][0]} in the "
            f"target and {meaning[token][1]} in the draft",
            "Draft ids mean other text to the target: output stays exact, but nearly every draft is rejected. Choose a "
            "draft with the target's tokenizer.",
        )
    if draft_only:
        yield Finding(
            WARNING,
            subject,
            f"{len(draft_only)} tokens only in the draft's, {draft_only[0]!r} for instance",
            "Such a draft is never accepted: an id the target does not know ends the drafts of that step.",
        )
    if target_only:
        yield Finding(
            WARNING,
            subject,
            f"{len(target_only)} tokens only in the target's, {target_only[0]!r} for instance",
            "The draft never proposes them and reads them as ids it was not trained on: acceptance drops around them.",
        )
    if not moved and target.rules is not None and draft.rules is not None and target.rules != draft.rules:
        parts = [part for part in target.rules if target.rules[part] != draft.rules[part]]
        yield Finding(
            WARNING,
            subject,
            f"same ids, different {', '.join(parts)}",
            "Prompts may be split differently from the draft's training: tokenise with the target's only; acceptance "
            "may suffer.",
        )
    elif not (moved or draft_only or target_only):
        yield Finding(OK, subject, f"the same {len(target.ids)} tokens", "An id means the same to both models.")


def _check_vocabulary(
    target: Mapping, draft: Mapping, target_tokens: _Vocabulary | None, draft_tokens: _Vocabulary | None, kind: str
) -> Iterator[Finding]:
    subject = "vocabulary size"
    size = target.get("vocab_size")
    head_size = draft.get("draft_vocab_size") or draft.get("vocab_size")
    if kind == "eagle3" and head_size != size:
        yield Finding(
            WARNING,
            subject,
            f"target {size}, draft head {head_size}",
            "Pass the checkpoint's d2t table as draft_to_target, on a device through invert_draft_to_target: tokens "
            "outside it are never proposed, only recovered. (EAGLE-3's d2t holds offsets: "
            "draft_to_target[i] = i + d2t[i].)",
        )
        return
    draft_size = draft.get("vocab_size", size)
    if draft_size == size:
        yield Finding(OK, subject, f"both {size}", "Logits of both models have the same columns.")
    else:
        fact = f"target {size}, draft {draft_size} columns"
        # Never the draft's columns: ids that only the target has would be cut from its law.
        limit = "the number of ids of the target's tokenizer"
        if target_tokens is not None:
            limit = min(size, max(target_tokens.ids.values()) + 1)
        if (target_tokens is None or draft_tokens is None) and abs(size - draft_size) > MAX_PADDING:
            yield Finding(
                ERROR,
                subject,
                fact,
                "More than padding: these are the columns of two tokenizers, and draft ids mean other text to the "
                "target. If they are not, give both tokenizers.",
            )
        else:
            yield Finding(
                WARNING,
                subject,
                fact,
                f"Pass vocab_size={limit}, and hand over draft logits as wide as the target's (cut, or padded with "
                "-inf).",
            )
    if target_tokens is not None:
        largest = max(target_tokens.ids.values())
        if largest >= size:
            yield Finding(
                ERROR,
                subject,
                f"the target's tokenizer has id {largest}, its logits {size} columns",
                "The config and the tokenizer are not of one model.",
            )
        elif largest + 1 < size and draft_size == size:
            yield Finding(
                OK,
                "vocabulary padding",
                f"ids up to {largest}, {size} columns",
                f"Columns from {largest + 1} on are padding: pass vocab_size={largest + 1} so that none is ever read.",
            )


def _check_special_ids(target: Mapping, draft: Mapping, kind: str) -> Iterator[Finding]:
    consequences = {
        "eos_token_id": "The target's ends the text. A draft that stops elsewhere proposes rubbish behind the end, "
        "which costs time, not correctness: stop on the target's ids.",
        "bos_token_id": "Feed the draft the target's prompt ids as they are, its beginning included.",
    }
    for key, consequence in consequences.items():
        ours, theirs = _ids(target.get(key)), _ids(draft.get(key))
        if kind != "model" and not theirs:
            continue
        same = ours == theirs
        fact = f"both {ours}" if same else f"target {ours}, draft {theirs}"
        yield Finding(OK if same else WARNING, key, fact, "Both models end and begin alike." if same else consequence)
    pad = _ids(target.get("pad_token_id"))
    shared = set(pad) & set(_ids(target.get("eos_token_id")))
    if shared:
        yield Finding(
            WARNING,
            "pad_token_id",
            f"{sorted(shared)} is also an end-of-sequence id",
            "Never count accepted tokens by looking for padding: use num_accepted (this library pads with -1).",
        )


def _check_length(target: Mapping, draft: Mapping) -> Iterator[Finding]:
    subject = "maximum length"
    ours, theirs = target.get("max_position_embeddings"), draft.get("max_position_embeddings")
    if ours is None or theirs is None:
        return
    if theirs < ours:
        yield Finding(
            WARNING,
            subject,
            f"target {ours}, draft {theirs} positions",
            f"Past {theirs} tokens the draft is outside its training: stop drafting there (draft_lens 0).",
        )
    else:
        yield Finding(OK, subject, f"target {ours}, draft {theirs} positions", "The draft reaches as far.")
    windows = [config.get("use_sliding_window", True) and config.get("sliding_window") for config in (target, draft)]
    if windows[1] and not windows[0]:
        yield Finding(
            WARNING,
            "sliding window",
            f"the draft sees {windows[1]} tokens, the target all",
            "Acceptance drops on long prompts; the draft's cache may be a ring (ring=True, ring_slots).",
        )


def _check_heads(target: Mapping, draft: Mapping, kind: str, num_draft_tokens: int | None) -> Iterator[Finding]:
    if kind == "model":
        return
    subject = {"eagle": "EAGLE head", "eagle3": "EAGLE-3 head", "medusa": "Medusa heads"}[kind]
    ours = target.get("hidden_size")
    theirs = draft.get("target_hidden_size", draft.get("hidden_size"))
    if theirs is not None and theirs != ours:
        yield Finding(
            ERROR,
            subject,
            f"made for hidden size {theirs}, the target's is {ours}",
            "The heads read the target's hidden states: they belong to another target.",
        )
    elif theirs is not None:
        yield Finding(OK, subject, f"hidden size {ours} is the target's", "The heads fit the target's hidden states.")
    if kind == "medusa":
        heads = draft.get("medusa_num_heads")
        if heads is None:
            yield Finding(WARNING, subject, "medusa_num_heads is not given", "num_medusa_heads must be set by hand.")
        elif num_draft_tokens is not None and num_draft_tokens > heads:
            yield Finding(
                ERROR,
                subject,
                f"{heads} heads, {num_draft_tokens} draft tokens asked for",
                f"Each head proposes one depth: at most {heads} (a tree may have more rows, not more depth).",
            )
        return
    layers = draft.get("num_hidden_layers", 1)
    if layers != 1:
        yield Finding(
            ERROR, subject, f"{layers} layers", "NxD Inference and the vLLM plugin build EAGLE drafts of one layer."
        )
    if kind == "eagle":
        yield Finding(
            WARNING,
            subject,
            "the public checkpoints come without lm_head",
            "NxD Inference needs the target's lm_head.weight copied into the draft's checkpoint; a draft with input "
            "norms also needs enable_eagle_draft_input_norm=True.",
        )
        return
    captured = draft.get("eagle_aux_hidden_state_layer_ids")
    if captured is None:
        yield Finding(
            OK,
            subject,
            "eagle_aux_hidden_state_layer_ids is not given",
            "The framework captures its own default: three target layers, early, middle and late.",
        )
    elif len(captured) != 3 or max(captured) > target.get("num_hidden_layers", max(captured)):
        yield Finding(
            ERROR,
            subject,
            f"captures target layers {captured} of {target.get('num_hidden_layers')}",
            "An EAGLE-3 head concatenates the states of three layers of its own target.",
        )


def _quotient(whole: int | None, parts: int | None) -> int | None:
    return whole // parts if whole and parts else None
