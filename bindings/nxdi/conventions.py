"""NxD Inference's conventions in this library's terms, both ways, and nowhere else.

| NxD Inference                                | here                                                  |
|---|---|
| speculation_length                           | T, the window: K = T - 1 drafts                       |
| slot_mapping [B, T]                          | block_table and positions                             |
| position_ids [B, T] or [B, 1]                | seq_lens = the first column                           |
| attention_mask, ones below the position      | not needed: a length says it                          |
| active_mask [B, 1, T, T], ancestor or self   | tree: parents [B, T]                                  |
| token_tree_config {"0": ["1", "2"], ...}     | tree: parents [T]                                     |
| scores divided by softmax_scale              | scale = 1 / softmax_scale                             |
| k_cache_transposed                           | cache_layout "BHDS"                                   |
| sampling_params [B, 3]: top_k, top_p, temperature | the arguments of those names |
| accepted tokens [B, T], -1 after the last    | Acceptance.tokens                                     |
| next position, next mask                     | seq_lens + num_accepted + 1, ones below it            |

Everything is traceable: no value is looked at in Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draft_verify.reference.acceptance import Acceptance

# Where XLA's generator may return 0 or 1 and the uniforms must lie strictly between.
_SMALLEST, _LARGEST = 2.0**-24, 1.0 - 2.0**-24


def seq_lens(position_ids: torch.Tensor) -> torch.Tensor:
    """[B] int32 committed lengths from the window's positions [B, T].

    The positions are right where the mask is not: NxDI's vanilla draft loop sets every row's position in every row's
    mask (index_fill_ over the whole batch), which the lengths undo.
    """
    return position_ids[:, 0].to(torch.int32)


def draft_lens(lengths: torch.Tensor, num_slots: int, rows: int) -> torch.Tensor:
    """[B] int32 drafts for which there is room, at most rows - 1; -1 where a sequence has filled its cache."""
    return (num_slots - 1 - lengths).clamp(min=-1, max=rows - 1).to(torch.int32)


def slots_of(
    positions: torch.Tensor, block_table: torch.Tensor, block_size: int, slot_mapping: torch.Tensor
) -> torch.Tensor:
    """[B, T] cache slots of the positions, from the block table [B, M]; -1 for sequences without slots.

    The host's mapping [B, T] counts up from the first slot, past the end of a block into somebody else's; what holds of
    it is only which sequences are active.
    """
    blocks = block_table.gather(1, (positions // block_size).to(torch.int64))
    active = (slot_mapping >= 0).any(dim=1, keepdim=True)
    return torch.where(active, blocks * block_size + positions % block_size, -1).to(slot_mapping.dtype)


def parents_from_mask(active_mask: torch.Tensor) -> torch.Tensor:
    """Parents [B, T] int32 from the ancestor-or-self mask [B, 1, T, T] of rows in breadth-first order.

    A row's parent is its last ancestor: ancestors come before their descendants.
    """
    rows = active_mask.shape[-1]
    index = torch.arange(rows, device=active_mask.device, dtype=torch.int32)
    before = index[None, :] < index[:, None]
    ancestors = torch.where(active_mask[:, 0].to(torch.bool) & before, index, -1)
    return ancestors.amax(dim=-1).to(torch.int32)


def parents_from_config(token_tree_config: Mapping[Any, Sequence[Any]]) -> list[int]:
    """Parents of the nodes 0, 1, ... from NxDI's adjacency list; leaves may be left out, trees may be unbalanced.

    Raises:
        ValueError: ids that are not 0..N-1 in an order that puts parents first, or a node with two parents.
    """
    children = {int(node): [int(child) for child in entries] for node, entries in token_tree_config.items()}
    nodes = sorted({0, *children, *(child for entries in children.values() for child in entries)})
    if nodes != list(range(len(nodes))):
        raise ValueError(f"token_tree_config: got node ids {nodes}, expected 0 to {len(nodes) - 1}")
    parents = [-1] * len(nodes)
    for node, entries in children.items():
        for child in entries:
            if child == 0 or parents[child] != -1:
                raise ValueError(
                    f"token_tree_config: got a second parent for node {child}, expected a tree with root 0"
                )
            if child <= node:
                raise ValueError(f"token_tree_config: got child {child} of node {node}, expected parents first")
            parents[child] = node
    orphans = [node for node in nodes[1:] if parents[node] == -1]
    if orphans:
        raise ValueError(f"token_tree_config: got nodes {orphans} without a parent, expected one root, 0")
    return parents


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, the root's 0."""
    result: list[int] = []
    for parent in parents:
        result.append(0 if parent < 0 else result[parent] + 1)
    return result


def sampling_parameters(sampling_params: torch.Tensor) -> dict[str, torch.Tensor]:
    """`temperature`, `top_k` and `top_p` [B] from NxDI's [B, 3]; top_k 0 or -1 means off, as in vLLM."""
    return {
        "top_k": sampling_params[:, 0].to(torch.int32).contiguous(),
        "top_p": sampling_params[:, 1].to(torch.float32).contiguous(),
        "temperature": sampling_params[:, 2].to(torch.float32).contiguous(),
    }


def open_interval(uniforms: torch.Tensor) -> torch.Tensor:
    """Uniforms moved off 0 and 1, which a generator may return and an inverse CDF must not see."""
    return uniforms.clamp(_SMALLEST, _LARGEST)


def fused_outputs(
    acceptance: Acceptance, position_ids: torch.Tensor, attention_mask: torch.Tensor
) -> list[torch.Tensor]:
    """What NeuronFusedSpecModel returns after a step: accepted tokens, next input, next mask, next position.

    A slot that had no room left (num_accepted -1) emits nothing and stays where it is.
    """
    num_emitted = acceptance.num_accepted + 1
    last = acceptance.num_accepted.clamp(min=0).to(torch.int64)
    next_input_ids = acceptance.tokens.gather(1, last[:, None]).clamp(min=0)
    next_position_ids = (position_ids[:, :1] + num_emitted[:, None]).to(torch.int32)
    slots = torch.arange(attention_mask.shape[1], device=position_ids.device)
    next_attention_mask = (slots[None, :] < next_position_ids).to(position_ids.dtype)
    return [acceptance.tokens, next_input_ids, next_attention_mask, next_position_ids]


def accepted_tokens(
    draft_tokens: torch.Tensor, target_tokens: torch.Tensor, lengths: torch.Tensor | None = None
) -> Acceptance:
    """Greedy acceptance where the target's choices [B, T] are tokens already (NxDI's argmax over sharded logits)."""
    batch, rows = target_tokens.shape
    index = torch.arange(rows, dtype=torch.int32, device=target_tokens.device)
    matches = (draft_tokens == target_tokens[:, :-1]).to(torch.int32)
    num_accepted = matches.cumprod(dim=1).sum(dim=1).to(torch.int32)
    if lengths is not None:
        num_accepted = torch.minimum(num_accepted, lengths)
    kept = index[None, :] <= num_accepted[:, None]
    return Acceptance(
        tokens=torch.where(kept, target_tokens, -1).to(torch.int32),
        num_accepted=num_accepted,
        path=torch.where(kept, index, -1),
        invalid=torch.zeros(batch, dtype=torch.bool, device=target_tokens.device),
    )
