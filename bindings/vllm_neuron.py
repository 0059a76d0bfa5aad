"""Rejection sampling with the vLLM Neuron plugin's contract, on the device, for greedy and sampled drafts.

The plugin hands over a flat batch: request b's n_b draft rows and its bonus row stand one after the other in `logits`,
and `SpecDecodeMetadata` says where (vLLM, v1/spec_decode/metadata.py; the plugin's speculative decoding design page).
Here that becomes windows [B, K + 1] with `draft_lens`, without looking at a value, so that
torch.compile(fullgraph=True) traces it; the verification is one operator, `torch.ops.draft_verify.rejection_sampling`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from draft_verify.checks.general import expect
from draft_verify.rejection_sampling import rejection_sampling
from draft_verify.uniforms_for import uniforms_for


class Windows(NamedTuple):
    """A flat batch as windows. `rows` [B, K + 1] index the flat logits, `slots` [B, K] the flat drafts; both repeat a
    valid index past draft_lens, where nothing is looked at."""

    draft_tokens: torch.Tensor  # [B, K] int32, -1 past draft_lens
    draft_lens: torch.Tensor  # [B] int32
    rows: torch.Tensor
    slots: torch.Tensor


def windows(metadata: Any) -> Windows:
    """A flat batch as windows, no value looked at.

    Args:
        metadata: SpecDecodeMetadata: `draft_token_ids` [n], `cu_num_draft_tokens` [B], `max_spec_len` K,
            `target_logits_indices` [n], `bonus_logits_indices` [B]. Arrays [n] may be padded, each by itself.

    Returns:
        Windows.
    """
    drafts = metadata.draft_token_ids.to(torch.int32)
    ends = metadata.cu_num_draft_tokens.to(torch.int64)
    targets, bonus = (
        indices.to(torch.int64) for indices in (metadata.target_logits_indices, metadata.bonus_logits_indices)
    )
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    draft_lens = ends - starts
    index = torch.arange(metadata.max_spec_len + 1, device=ends.device)
    is_draft = index < draft_lens[:, None]
    flat_size = min(drafts.shape[0], targets.shape[0])  # each may have been padded by itself
    if flat_size == 0:  # no request drafted: the shape says so, no value does
        slots = torch.zeros_like(is_draft[:, :-1], dtype=torch.int64)
        return Windows(
            slots.to(torch.int32) - 1, draft_lens.to(torch.int32), bonus[:, None].expand(is_draft.shape), slots
        )
    flat = (starts[:, None] + index).clamp(max=flat_size - 1)
    slots = flat[:, :-1]
    return Windows(
        draft_tokens=torch.where(is_draft[:, :-1], drafts[slots], -1),
        draft_lens=draft_lens.to(torch.int32),
        rows=torch.where(is_draft, targets[flat], bonus[:, None]),
        slots=slots,
    )


class RejectionSampler(torch.nn.Module):
    """vLLM's rejection sampler interface; `forward(metadata, draft_probs, logits, sampling_metadata)`.

    Args:
        rule: "token", or "block" for block verification (never fewer accepted on average, the same law).
        vocab_size: columns of the logits that count; default all.
        backend: where the verification runs; "emulator" tries the kernel on a CPU.
    """

    def __init__(self, rule: str = "token", vocab_size: int | None = None, backend: str = "auto"):
        super().__init__()
        self.rule = rule
        self.vocab_size = vocab_size
        self.backend = backend

    def forward(
        self,
        metadata: Any,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: Any,
        *,
        uniforms: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tokens of one step.

        Args:
            metadata: SpecDecodeMetadata of the flat batch (see `windows`).
            draft_probs: [n, V] the laws the drafts were drawn from; None for greedy drafts.
            logits: [n + B, V] fp32 or bf16, raw; not modified. Rows that the metadata does not name are not read.
            sampling_metadata: vLLM's: `all_greedy`, `temperature`, `top_k`, `top_p` and `min_p` ([B] or None; min_p
                also from `logitsprocs`), and `generators`.
            uniforms: [B, K + 2] in (0, 1); or
            seeds, positions: [B] int, from which they are computed in the graph (`uniforms_for`; the position is that
                of a request's last emitted token). With neither they are drawn from a request's generator, or torch's.

        Returns:
            [B, K + 1] int32: accepted drafts, then the recovered or bonus token, then -1. At least one token a request.

        Raises:
            ValueError: a request asks for what is not done here: penalties, bad words, allowed ids, logit biases, a
                minimum of tokens, other logits processors; or arguments that do not fit.
        """
        expect(seeds is None or uniforms is None, "uniforms", "seeds as well", "one of the two")
        given = "none" if positions is None else "some"
        expect((positions is None) == (seeds is None), "positions", given, "some with seeds, none without")
        parameters = _parameters(sampling_metadata)
        batch = windows(metadata)
        num_requests, num_drafts = batch.draft_tokens.shape
        if draft_probs is not None:
            num_laws = draft_probs.shape[0]
            draft_probs = draft_probs[batch.slots.clamp(max=num_laws - 1)] if num_laws else None
        if uniforms is None:
            generators = getattr(sampling_metadata, "generators", None) or {}
            uniforms = _uniforms(seeds, positions, generators, (num_requests, num_drafts + 2), logits.device)
        return rejection_sampling(
            batch.draft_tokens,
            logits[batch.rows],
            uniforms,
            draft_probs=draft_probs,
            draft_lens=batch.draft_lens,
            rule=self.rule,
            vocab_size=self.vocab_size,
            backend=self.backend,
            **parameters,
        ).tokens


def _uniforms(
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    generators: dict[int, torch.Generator],
    shape: tuple[int, int],
    device: torch.device,
) -> torch.Tensor:
    if seeds is not None:
        return uniforms_for(seeds, positions, shape[1] - 2)
    uniforms = torch.rand(shape, device=device)
    for request, generator in generators.items():
        uniforms[request] = torch.rand(shape[1], generator=generator, device=device)
    # torch's generators may return 0, which no inverse CDF must see.
    return uniforms.clamp(2.0**-24, 1.0 - 2.0**-24)


def _parameters(sampling_metadata: Any) -> dict[str, Any]:
    """vLLM's parameters here: greedy requests have a temperature of 0 (-1 in older versions), a top_k of V is off."""
    min_p = _min_p(sampling_metadata)
    if sampling_metadata.all_greedy or sampling_metadata.temperature is None:
        return {"temperature": 0.0}
    parameters = {"temperature": sampling_metadata.temperature.to(torch.float32).clamp(min=0.0)}
    if sampling_metadata.top_k is not None:
        parameters["top_k"] = sampling_metadata.top_k.to(torch.int32)
    if sampling_metadata.top_p is not None:
        parameters["top_p"] = sampling_metadata.top_p.to(torch.float32)
    if min_p is not None:
        parameters["min_p"] = min_p.reshape(-1).to(torch.float32)
    return parameters


def _min_p(sampling_metadata: Any) -> torch.Tensor | None:
    """min_p, a field of older and a logits processor of newer versions (vLLM, v1/sample). Nothing else that changes
    logits is done here, and what a request asks for is not dropped without a word."""
    asked = {
        "penalties": not getattr(sampling_metadata, "no_penalties", True),
        "allowed_token_ids_mask": getattr(sampling_metadata, "allowed_token_ids_mask", None) is not None,
        "bad_words_token_ids": bool(getattr(sampling_metadata, "bad_words_token_ids", None)),
    }
    min_p = getattr(sampling_metadata, "min_p", None)
    for processor in getattr(getattr(sampling_metadata, "logitsprocs", None), "all", ()):
        if hasattr(processor, "min_p_count"):
            min_p = processor.min_p if processor.min_p_count else min_p
        else:  # vLLM's others know their requests by a dict
            requests = getattr(processor, "biases", getattr(processor, "min_toks", True))
            asked[type(processor).__name__] = bool(requests)
    for name, is_asked in asked.items():
        expect(not is_asked, "sampling_metadata", name, "requests without it: it is not applied to drafts here")
    return min_p


def rejection_sampler(metadata: Any, sampled_tokens: torch.Tensor) -> torch.Tensor:
    """Takes the place of the plugin's function of this name, which its models call on the tokens they sampled.

    A draft is kept while it equals the target's token at its row: exact for greedy decoding. Where temperatures are
    above 0, call `RejectionSampler` on the logits instead.

    Args:
        metadata: SpecDecodeMetadata of the flat batch.
        sampled_tokens: [n + B] (or [n + B, 1]) the target's token of every row.

    Returns:
        [B, K + 1] int32, -1 after the last token.
    """
    batch = windows(metadata)
    target_tokens = sampled_tokens.reshape(-1)[batch.rows].to(torch.int32)
    index = torch.arange(target_tokens.shape[1], dtype=torch.int32, device=target_tokens.device)
    # Past draft_lens the draft is -1, which no target token is.
    matches = (batch.draft_tokens == target_tokens[:, :-1]).to(torch.int32)
    num_accepted = matches.cumprod(dim=1).sum(dim=1)
    return torch.where(index <= num_accepted[:, None], target_tokens, -1).to(torch.int32)
