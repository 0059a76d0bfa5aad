"""NxDI's EAGLE speculation: sampled chains verified against the whole law, and token trees of any shape.

Stock NxDI verifies sampled EAGLE chains inside the target's 256 largest logits and derives the accepted count by
comparing tokens; its token trees are greedy and right only when all leaves are equally deep.
"""

from __future__ import annotations

import torch

from draft_verify.nxdi import conventions
from draft_verify.rejection_sampling import rejection_sampling
from draft_verify.tree_acceptance import tree_acceptance


class GreedyDrafts(torch.nn.Module):
    """Takes the place of the draft's sampler: the best token of logits [B, 1, V / tp]; its probability counts as 1."""

    def forward(self, token_logits, sampling_params, return_values=False, rank_id=None):
        from neuronx_distributed.operators.argmax import argmax

        tokens = argmax(tensor=token_logits, dim=2, gather_dim=2, keepdim=False)
        return (tokens, torch.ones_like(tokens, dtype=token_logits.dtype)) if return_values else tokens


class WholeLogits(torch.nn.Module):
    """Takes the place of the target's sampler: hands on the logits, for `_speculative_token_selection` to verify."""

    def __init__(self, gather):
        super().__init__()
        self.gather = gather

    def forward(self, token_logits, sampling_params, return_values=False, rank_id=None):
        logits = self.gather(token_logits)
        return logits, logits

    def _multinomial(self, probs, dim, num_samples=1):
        """NxDI draws every row's replacement here; the verification draws the one that is needed."""
        return torch.zeros((*probs.shape[:-1], num_samples), dtype=torch.int64, device=probs.device)


class EagleMixin:
    """The EAGLE half of FusedSpecMixin."""

    def init_eagle(self) -> None:
        config = self.config.neuron_config
        if config.enable_token_tree:
            self.tree_parents = conventions.parents_from_config(config.token_tree_config)
            self.tree_depths = conventions.depths(self.tree_parents)
            if self.tree_depths != sorted(self.tree_depths):
                raise ValueError(
                    f"token_tree_config: got node depths {self.tree_depths}, expected breadth-first node ids"
                )
            self.samples = not self.greedy  # NxDI's own tree forward turns self.greedy on
        elif not self.greedy:
            self.draft_sampler = GreedyDrafts()
            self.target_sampler = WholeLogits(self.target_model.whole_logits)

    # --- sampled chains: three hooks of `_eagle_token_gen_forward` ---

    def _eagle_token_gen_forward(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params, **paging):
        self._step = sampling_params, position_ids[:, 0]
        return super()._eagle_token_gen_forward(
            input_ids, attention_mask, position_ids, seq_ids, sampling_params, **paging
        )

    def _adjust_target_probs(self, draft_probs, draft_indices, target_probs, target_indices, k):
        self._target_logits = target_probs  # [B, T, V], all rows; the next hook gets the first K only
        return target_probs

    def _speculative_token_selection(
        self, draft_ids, target_ids, draft_probs_indices, draft_probs, target_probs_indices, target_probs
    ):
        """draft_ids [B, K]; returns tokens [B, T] and the accepted count [B, 1]."""
        sampling_params, positions = self._step
        rows = self._target_logits.shape[1]
        self._acceptance = rejection_sampling(
            draft_ids.to(torch.int32),
            self._target_logits,
            self._uniforms(sampling_params, positions, rows + 1, "verify"),
            vocab_size=self.config.vocab_size,
            **conventions.sampling_parameters(sampling_params),
        )
        return self._acceptance.tokens, self._acceptance.num_accepted[:, None].to(torch.int64)

    # --- token trees ---

    def _eagle_tree_token_gen_forward(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params):
        """Drafts the tree level by level, verifies all of it at once, and leaves both caches with the accepted path."""
        parents, depths = self.tree_parents, self.tree_depths
        rows, depth = len(parents), max(depths) + 1
        device = input_ids.device
        num_outputs = 2 if self.neuron_config.output_logits else 1
        first = position_ids[:, :1].to(torch.int64)
        slots = torch.arange(self.n_positions, device=device)
        prior = slots[None, None, None, :] < (first - 1)[:, :, None, None]  # the draft runs one position behind
        ancestors = torch.zeros((rows, rows), dtype=torch.bool)
        for row, parent in enumerate(parents):
            if parent >= 0:
                ancestors[row] = ancestors[parent]
            ancestors[row, row] = True
        own = torch.eye(rows, dtype=torch.bool)
        ancestors, before = ancestors.to(device), (ancestors & ~own).to(device)

        # 1. Draft: each level's nodes see the committed tokens and their ancestors, in slot position - 1 + node.
        root_hidden = self.hidden_state_rolling_buffer.get_state(seq_ids, position_ids[:, :1])
        tree_slots = (first - 1 + torch.arange(rows, device=device))[:, None, None, :]
        window, hidden, draft_cache, draft_logits = input_ids, root_hidden, None, []
        for level in range(depth - 1):
            nodes = [node for node in range(rows) if depths[node] == level]
            mask = prior.expand(-1, 1, len(nodes), -1).scatter(
                3, tree_slots.expand(-1, 1, len(nodes), -1), before[nodes].expand(len(input_ids), 1, -1, -1)
            )
            index = torch.tensor(nodes, device=device)
            outputs = self.draft_model(
                window[:, nodes[0] :],
                mask,
                (first - 1 + index).to(torch.int32),
                seq_ids,
                sampling_params,
                prev_hidden=hidden,
                kv_cache=draft_cache,
                rotary_position_id=(first - 1 + level).expand(-1, len(nodes)),
            )
            if self.neuron_config.output_logits:
                draft_logits.append(outputs[1])
            draft_cache, states = outputs[num_outputs:-2], outputs[-2]
            children = [[c for c in range(rows) if parents[c] == node] for node in nodes]
            best = self.draft_model.whole_logits(outputs[0]).topk(max(map(len, children)), dim=2).indices
            tokens = [best[:, i, rank] for i, own_children in enumerate(children) for rank in range(len(own_children))]
            window = torch.cat([window, torch.stack(tokens, dim=1).to(window.dtype)], dim=1)
            parent_rows = [i for i, own_children in enumerate(children) for _ in own_children]
            hidden = states[:, parent_rows]

        # 2. Verify: the target sees the cache and each row its ancestors; nothing is written yet.
        outputs = self.target_model(
            window,
            (slots < first)[:, None, None, :].expand(-1, 1, rows, -1),
            (first + torch.arange(rows, device=device)).to(torch.int32),
            seq_ids,
            sampling_params,
            active_mask=ancestors.expand(len(input_ids), 1, rows, rows),
            rotary_position_id=first + torch.tensor(depths, device=device),
        )
        logits = self.target_model.whole_logits(outputs[0])
        states, new_keys = outputs[-2], outputs[-1]
        sampling = {}
        if self.samples:
            sampling = {
                "rule": "target_only",  # the drafts are the draft's best, not drawn
                "uniforms": self._uniforms(sampling_params, first[:, 0], rows + 1, "verify"),
                **conventions.sampling_parameters(sampling_params),
            }
        acceptance = tree_acceptance(
            torch.tensor(parents, dtype=torch.int32, device=device),
            window[:, 1:].to(torch.int32),
            logits,
            vocab_size=self.config.vocab_size,
            **sampling,
        )

        # 3. Target cache: the accepted path goes to the slots after the committed tokens, the other rows behind it.
        order, place = path_first(acceptance.path)
        target_cache = self.target_model.kv_mgr.update_cache(
            is_for_context_encoding=False,
            seq_ids=seq_ids,
            position_ids=(first + place).to(torch.int32),
            new_key_values=new_keys,
            seq_len=self.n_positions,
            scatter_index=None,
        )

        # 4. Draft cache: one more run over the path, each row now with the target's state of the token before it.
        def along_path(values, index):
            return values.gather(1, index[:, :, None].expand(-1, -1, values.shape[2]))

        path = order[:, :depth]
        tokens = window.gather(1, path)
        previous = torch.cat([root_hidden, along_path(states, path[:, :-1])], dim=1)
        positions = (first - 1 + torch.arange(depth, device=device)).to(torch.int32)
        outputs = self.draft_model(
            tokens,
            prior.expand(-1, 1, depth, -1),
            positions,
            seq_ids,
            sampling_params,
            prev_hidden=previous,
            kv_cache=draft_cache,
            active_mask=torch.ones((depth, depth), dtype=torch.bool, device=device)
            .tril()
            .expand(len(tokens), 1, -1, -1),
            rotary_position_id=positions,
        )
        last = acceptance.num_accepted[:, None].to(torch.int64)
        last_hidden = along_path(states, order.gather(1, last))
        kept = acceptance._replace(tokens=acceptance.tokens[:, :depth], path=acceptance.path[:, :depth])
        extra = []
        if self.neuron_config.output_logits:
            extra = [torch.cat(draft_logits, dim=1), along_path(logits, path)]
        return [tokens, kept, *extra, *outputs[num_outputs:-2], *target_cache, last_hidden]


def path_first(path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Window rows with those of path [B, T] first, then the others: the order, and each row's place in it, [B, T]."""
    index = torch.arange(path.shape[1], device=path.device)
    is_at = path[:, :, None] == index  # [B, place, row]
    on_path = is_at.any(dim=1)
    behind = is_at.sum(dim=(1, 2))[:, None] + (~on_path).cumsum(dim=1) - 1
    place = torch.where(on_path, (is_at * index[None, :, None]).sum(dim=1), behind)
    order = ((place[:, None, :] == index[:, None]) * index).sum(dim=2)
    return order, place
