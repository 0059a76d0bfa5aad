"""NxDI's token-generation attention through verify_attention."""

from __future__ import annotations

from typing import Any

import torch

from draft_verify.nxdi import conventions
from draft_verify.verify_attention import verify_attention


class AttentionMixin:
    """Goes before a NeuronAttentionBase class; overrides its hook for the attention of one or more generated tokens.

    What NxDI keeps in another form than a prefix of the cache (sliding and chunked windows, flash decoding, left
    padding, the levels of an EAGLE token tree while it is drafted) stays with NxDI's own attention.
    """

    def compute_for_token_gen(
        self,
        Q: torch.Tensor,
        K: torch.Tensor,
        V: torch.Tensor,
        position_ids: torch.Tensor | None,
        past_key_value: Any,
        attention_mask: torch.Tensor,
        active_mask: torch.Tensor | None,
        is_prefix_caching: bool = False,
    ) -> torch.Tensor:
        """Q [B, Hq, T, D]; K, V [B, Hkv, T, D]; caches [B, Hkv, S, D], keys [B, Hkv, D, S] if k_cache_transposed."""
        if position_ids is None or not self._reads_a_prefix():
            return super().compute_for_token_gen(
                Q, K, V, position_ids, past_key_value, attention_mask, active_mask, is_prefix_caching
            )
        key_cache, value_cache = past_key_value
        lengths = conventions.seq_lens(position_ids)
        rows = Q.shape[2]
        sinks = self.get_learned_sinks()
        tree = None
        if rows > 1 and getattr(self.neuron_config, "enable_token_tree", False):
            tree = conventions.parents_from_mask(active_mask)
        return verify_attention(
            Q,
            K,
            V,
            key_cache,
            value_cache,
            lengths,
            draft_lens=conventions.draft_lens(lengths, value_cache.shape[2], rows),
            tree=tree,
            cache_layout="BHDS" if self.k_cache_transposed else "BHSD",
            scale=1.0 / self.softmax_scale,
            sinks=None if sinks is None else sinks.to(torch.float32),
            lnc=self.logical_nc_config,
        )

    def _reads_a_prefix(self) -> bool:
        config = self.neuron_config
        drafts_a_tree = getattr(config, "enable_token_tree", False) and config.is_eagle_draft
        return not (
            self.sliding_window
            or self.attention_chunk_size
            or self.flash_decoding_enabled
            or config.padding_side == "left"
            or config.is_medusa
            or drafts_a_tree
        )
