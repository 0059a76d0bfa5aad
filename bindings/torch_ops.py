"""Every public operation as a torch.library operator, `torch.ops.draft_verify.<name>`.

torch.compile(fullgraph=True), torch.export and fake tensors see one opaque operator with a schema that says what it
reads and writes. `arrays.public` comes here whenever a torch tensor is among the arguments; calling the public function
is how the operators are meant to be used.

The schemas follow the public functions' own signatures: an argument is a tensor unless `_TYPES` says otherwise,
optional if its default is None, and keyword-only where the function says so. Functional operators return a list of
tensors; in-place ones return nothing and declare what they write.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from draft_verify import arrays, backends
from draft_verify.caches import expect_tensors
from draft_verify.checks.general import expect
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.sample_tokens import SampledTokens
from draft_verify.reference.token_logprobs import Logprobs

_TYPES = {
    "backend": "str",
    "lnc": "int?",
    "cache_layout": "str",
    "purpose": "str",
    "ring": "bool",
    "rule": "str",
    "return_lse": "bool",
    "return_law": "bool",
    "truncated": "bool",
    "by_mass": "bool",
    "scrub": "bool",
    "scale": "float?",
    "softcap": "float?",
    "posterior_threshold": "float",
    "posterior_alpha": "float",
    "sliding_window": "int?",
    "vocab_size": "int?",
    "K": "int",
    "shard": "int",
    "num_shards": "int",
    "draft": "str",
    "num_rows": "int",
}
# What an in-place operation writes, and what may be a tuple with one entry a layer.
_WRITTEN = {
    "commit_window": ("key_cache", "value_cache"),
    "compact_window": ("key_cache", "value_cache"),
    "restore_ring": ("key_cache", "value_cache"),
}
_LAYERED = {
    "commit_window": ("key_cache", "value_cache", "key", "value"),
    "compact_window": ("key_cache", "value_cache"),
    "save_ring": ("key_cache", "value_cache"),
    "restore_ring": ("key_cache", "value_cache", "saved_key", "saved_value"),
}
_OPTIONAL = {"verify_attention": ("key", "value")}  # may be None, but must be said

# Results with names, by their annotation; entries that are None are left out of an operator's list, and come last.
_NAMED_RESULTS = {"Acceptance": Acceptance, "Logprobs": Logprobs, "SampledTokens": SampledTokens}

_library = torch.library.Library("draft_verify", "DEF")
_functions: dict[str, Callable] = {}


def call(name: str, arguments: dict[str, Any]) -> Any:
    """Runs a public operation whose arguments hold torch tensors; returns what the public function returns."""
    device = next(leaf for leaf in arrays.leaves(arguments.values()) if isinstance(leaf, torch.Tensor)).device
    written = _WRITTEN.get(name, ())
    if device.type == "xla" and not torch.compiler.is_compiling():
        # XLA records lazy tensors itself: the kernel becomes a custom call in its graph. It writes to a parameter's
        # data, and what it returns is the written cache from here on (UNVERIFIED on a device; NxDI's own convention).
        for argument in written:
            arguments[argument] = _each(arguments[argument], lambda cache: cache.data)
        for argument, value in arguments.items():
            if arrays.numbers_in(value) is not None:
                arguments[argument] = _tensor(argument, value, device)
        return arrays.run(_functions[name], arguments)

    inputs = {}
    for argument, value in arguments.items():
        if argument in written:
            expect_tensors(argument, value)
        if argument in _LAYERED.get(name, ()):
            expect(all(entry is not None for entry in _layers(value)), argument, None, "a tensor")
            inputs[argument] = [_tensor(argument, entry, device) for entry in _layers(value)]
        elif argument in _TYPES:
            _expect_kind(argument, value)
            inputs[argument] = value
        elif isinstance(value, tuple | list) and any(isinstance(entry, torch.Tensor) for entry in value):
            raise ValueError(f"{argument}: got a {type(value).__name__} of tensors, expected one tensor")
        else:
            inputs[argument] = _tensor(argument, value, device)
    results = getattr(torch.ops.draft_verify, name)(**inputs)
    if written:
        return tuple(_each(arguments[argument], lambda cache: cache) for argument in written)
    named = _NAMED_RESULTS.get(inspect.signature(_functions[name]).return_annotation)
    if named is not None:
        return named(*results)
    if name in _LAYERED and isinstance(arguments["key_cache"], tuple | list):
        return tuple(results[: len(results) // 2]), tuple(results[len(results) // 2 :])
    return results[0] if len(results) == 1 else tuple(results)


def _each(value: Any, change: Callable) -> Any:
    return tuple(change(entry) for entry in value) if isinstance(value, tuple | list) else change(value)


def _expect_kind(argument: str, value: Any) -> None:
    """Words, flags and numbers, which may be symbolic under tracing: the dispatcher would not name what it refuses."""
    fits, expected = {
        "str": (isinstance(value, str), "a word"),
        "bool": (isinstance(value, bool | torch.SymBool), "True or False"),
        "int": (hasattr(value, "__index__"), "a whole number"),
        "float": (hasattr(value, "__float__"), "a number"),
    }[_TYPES[argument].rstrip("?")]
    expect(fits or (value is None and _TYPES[argument].endswith("?")), argument, repr(value), expected)


def _tensor(argument: str, value: Any, device: torch.device) -> torch.Tensor | None:
    """NumPy arrays, numbers and lists of numbers among tensors."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        expect(value.dtype.kind not in "OUS", argument, f"dtype {value.dtype}", "a tensor")
        return arrays.to_torch(value).to(device)
    numbers = arrays.numbers_in([value])
    expect(numbers is not None, argument, type(value).__name__, "a tensor")
    try:
        return torch.tensor(value, dtype=getattr(torch, arrays.dtype_of(argument, numbers)), device=device)
    except (ValueError, RuntimeError):
        expected = "lists of one length, of numbers that a tensor holds"
        raise ValueError(f"{argument}: got {value}, expected {expected}") from None


def _register(name: str, function: Callable) -> None:
    def real(**arguments: Any) -> list[torch.Tensor] | None:
        """On any device that runs eagerly."""
        result = arrays.run(function, dict(arguments))
        if name not in _WRITTEN:
            return _flat(result)
        for argument, output in zip(_WRITTEN[name], result):
            for cache, written in zip(_layers(arguments[argument]), _layers(output)):
                if written is not cache and written.device.type != "cpu":  # CPU caches were written through views
                    cache.copy_(written)
        return None

    def fake(**arguments: Any) -> list[torch.Tensor] | None:
        """Checks shapes and dtypes as the operation does, and says what comes out."""
        with contextlib.suppress(backends.Traced):
            function(**{**arguments, "backend": backends.TRACING})
        return _OUTPUTS[name](**arguments) if name not in _WRITTEN else None

    _functions[name] = function
    _library.define(_schema(name, function))
    _library.impl(name, _by_name(function, real), "CompositeExplicitAutograd")
    torch.library.register_fake(f"draft_verify::{name}", _by_name(function, fake), lib=_library)


def _by_name(function: Callable, implementation: Callable) -> Callable:
    """The dispatcher hands over arguments partly by position and leaves out defaults."""
    signature = inspect.signature(function)

    def bound(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return implementation(**arguments.arguments)

    return bound


def _flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, tuple | list):
        return [leaf for entry in result for leaf in _flat(entry)]
    return [] if result is None else [result]


def _layers(value: Any) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _schema(name: str, function: Callable) -> str:
    """`name(Tensor draft_tokens, ..., *, Tensor? draft_lens=None, ..., str backend='auto', int? lnc=None) -> ...`"""
    written, layered, optional = (table.get(name, ()) for table in (_WRITTEN, _LAYERED, _OPTIONAL))
    entries = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in entries:
            entries.append("*")
        kind = _TYPES.get(parameter.name)
        if kind is None:
            kind = f"Tensor({'ab'[written.index(parameter.name)]}!)" if parameter.name in written else "Tensor"
            if parameter.name in layered:
                kind += "[]"
            elif parameter.default is None or parameter.name in optional:
                kind += "?"
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        entries.append(f"{kind} {parameter.name}{default}")
    return f"{name}({', '.join(entries)}) -> {'()' if written else 'Tensor[]'}"


# --- shapes and dtypes of what comes out, from the public arguments ---


def _acceptance_outputs(draft_tokens: torch.Tensor, target_logits: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    batch, rows = target_logits.shape[:2]
    tokens = draft_tokens.new_empty((batch, rows), dtype=torch.int32)
    num_accepted = draft_tokens.new_empty((batch,), dtype=torch.int32)
    return [tokens, num_accepted, torch.empty_like(tokens), torch.empty_like(num_accepted, dtype=torch.bool)]


def _logprob_outputs(tokens: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tokens, dtype=torch.float32) for _ in range(2)]


def _masked_outputs(logits: torch.Tensor, vocab_size: int | None, **_: Any) -> list[torch.Tensor]:
    return [logits.new_empty((*logits.shape[:-1], logits.shape[-1] if vocab_size is None else vocab_size))]


def _projected_outputs(
    target_to_draft: torch.Tensor, draft_logits: torch.Tensor | None, draft_probs: torch.Tensor | None, **_: Any
) -> list[torch.Tensor]:
    law = draft_probs if draft_logits is None else draft_logits
    return [law.new_empty((*law.shape[:2], target_to_draft.shape[1]), dtype=torch.float32)]


def _shard_statistics(
    target_logits: torch.Tensor, draft_logits: torch.Tensor | None, num_shards: int, truncated: bool, **_: Any
) -> list[torch.Tensor]:
    lanes = 128 // num_shards
    statistics = target_logits.new_empty((*target_logits.shape[:2], 5 * lanes + 2), dtype=torch.float32)
    if not truncated:
        return [statistics]
    laws = [target_logits] if draft_logits is None else [target_logits, draft_logits]
    dtype = torch.bfloat16 if all(law.dtype == torch.bfloat16 for law in laws) else torch.float32
    return [statistics, target_logits.new_empty((len(laws), *target_logits.shape[:2], 8, 8 * lanes), dtype=dtype)]


def _shard_cuts(candidates: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    return [candidates.new_empty((*candidates.shape[1:4], 5), dtype=torch.float32)]


def _shard_weights(trials: torch.Tensor, num_shards: int, **_: Any) -> list[torch.Tensor]:
    return [trials.new_empty((128 // num_shards, *trials.shape))]


def _shard_draws(statistics: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    num_shards, batch = statistics.shape[:2]
    return [statistics.new_empty((batch, 6, 128 // num_shards))]


def _shard_excess(statistics: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    num_shards, batch, rows = statistics.shape[:3]
    return [statistics.new_empty((batch, rows, 128 // num_shards))]


def _combined_outputs(statistics: torch.Tensor, draft_tokens: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    return _acceptance_outputs(draft_tokens, statistics[0])


def _sampled_outputs(logits: torch.Tensor, return_law: bool, **_: Any) -> list[torch.Tensor]:
    batch = (logits.shape[0],)
    tokens, probs = logits.new_empty(batch, dtype=torch.int32), logits.new_empty(batch, dtype=torch.float32)
    law = [torch.empty_like(logits, dtype=torch.float32)] if return_law else []
    return [tokens, probs, torch.empty_like(tokens, dtype=torch.bool), *law]


def _attention_outputs(query: torch.Tensor, return_lse: bool, **_: Any) -> list[torch.Tensor]:
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    return [output, query.new_empty(query.shape[:3], dtype=torch.float32)] if return_lse else [output]


def _merged_outputs(outputs: torch.Tensor, lses: torch.Tensor, **_: Any) -> list[torch.Tensor]:
    return [outputs.new_empty(outputs.shape[1:]), lses.new_empty(lses.shape[1:])]


def _selected_outputs(num_accepted: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
    rows = arguments.get("checkpoints", arguments.get("hidden"))
    return [rows.new_empty((rows.shape[0], *rows.shape[2:]))]


def _uniforms_outputs(seeds: torch.Tensor, K: int, **_: Any) -> list[torch.Tensor]:
    return [seeds.new_empty((seeds.shape[0], K + 2), dtype=torch.float32)]


def _shifted_outputs(history: torch.Tensor, num_rows: int, **_: Any) -> list[torch.Tensor]:
    return [history.new_empty((*history.shape[:2], history.shape[2] - num_rows))]


def _saved_outputs(
    key_cache: list, value_cache: list, seq_lens: torch.Tensor, num_rows: int, cache_layout: str, **_: Any
) -> list[torch.Tensor]:
    heads = value_cache[0].shape[2 if cache_layout == "NPHD" else 1]
    shape = (seq_lens.shape[0], heads, num_rows, value_cache[0].shape[3])
    return [cache.new_empty(shape) for cache in (*key_cache, *value_cache)]


_OUTPUTS = {
    "greedy_acceptance": _acceptance_outputs,
    "rejection_sampling": _acceptance_outputs,
    "combine_shards": _combined_outputs,
    "sample_tokens": _sampled_outputs,
    "shard_cuts": _shard_cuts,
    "shard_draws": _shard_draws,
    "shard_excess": _shard_excess,
    "shard_statistics": _shard_statistics,
    "shard_weights": _shard_weights,
    "token_logprobs": _logprob_outputs,
    "tree_acceptance": _acceptance_outputs,
    "typical_acceptance": _acceptance_outputs,
    "verify_attention": _attention_outputs,
    "mask_logits": _masked_outputs,
    "merge_attention": _merged_outputs,
    "project_draft_law": _projected_outputs,
    "save_ring": _saved_outputs,
    "shift_conv_window": _shifted_outputs,
    "select_state": _selected_outputs,
    "select_hidden": _selected_outputs,
    "uniforms_for": _uniforms_outputs,
}

for _name, _function in arrays.OPERATIONS.items():
    _register(_name, _function)
