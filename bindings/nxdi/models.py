"""NxDI's models with this library in them: one decoder model, and the fused draft and target."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch

from draft_verify.greedy_acceptance import greedy_acceptance
from draft_verify.nxdi import conventions
from draft_verify.nxdi.attention import AttentionMixin
from draft_verify.nxdi.eagle import EagleMixin
from draft_verify.reference.acceptance import Acceptance
from draft_verify.rejection_sampling import rejection_sampling
from draft_verify.sample_tokens import sample_tokens
from draft_verify.uniforms_for import uniforms_for


@functools.cache
def combined(mixin: type, base: type) -> type:
    """`base` with `mixin` before it, under base's own name (NxDI saves classes by module and name)."""
    if issubclass(base, mixin):
        return base
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__qualname__": base.__qualname__})


def gathered(tensor: torch.Tensor, dim: int, config: Any) -> torch.Tensor:
    """The tensor-parallel ranks' tensors, one after the other along `dim`."""
    from neuronx_distributed.parallel_layers.mappings import _gather_along_dim
    from neuronx_distributed_inference.utils.distributed import get_tp_group

    return _gather_along_dim(tensor, partition_dim=dim, process_group=get_tp_group(config))


class ModelMixin:
    """Goes before a NeuronBaseModel class: its attention verifies here, and its logits can be had whole."""

    wants_logits = False  # set by the fused model where acceptance or drafting needs the law, not a token

    def __init__(self, *args: Any, **kwargs: Any):
        from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase

        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, NeuronAttentionBase):  # each model family builds a class of its own
                module.__class__ = combined(AttentionMixin, type(module))

    def _sample_on_device(
        self,
        logits: torch.Tensor,
        sampling_params: torch.Tensor,
        is_for_speculation: bool,
        is_for_context_encoding: bool,
    ) -> torch.Tensor:
        """logits [B, T, V / tp] fp32; all of them, [B, T, V], where the fused model wants them."""
        if self.wants_logits:
            return self.whole_logits(logits)
        return super()._sample_on_device(logits, sampling_params, is_for_speculation, is_for_context_encoding)

    def whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, T, V] from the ranks' [B, T, V / tp]."""
        return gathered(logits, 2, self.config)


class FusedSpecMixin(EagleMixin):
    """Goes before NeuronFusedSpecModel: drafts with their full laws, exact acceptance, per-row masks.

    Vanilla fused speculation works with `do_sample` (stock NxDI's does not): drafts are drawn from the draft model's
    processed law and verified against the target's. The random numbers are the device's own generator's; `forward` also
    takes `sampling_params` with a fourth column, a seed a sequence (NxDI's application class traces and admits three).
    """

    def __init__(self, config: Any):
        config = copy.copy(config)
        config.fused_spec_config = copy.copy(config.fused_spec_config)
        fused = config.fused_spec_config
        fused.worker_cls = combined(ModelMixin, fused.worker_cls)
        if fused.draft_model_cls:
            model_cls = combined(ModelMixin, fused.draft_model_cls._model_cls)
            fused.draft_model_cls = type(
                fused.draft_model_cls.__name__, (fused.draft_model_cls,), {"_model_cls": model_cls}
            )
        super().__init__(config)
        if config.neuron_config.enable_eagle_speculation:
            self.init_eagle()
        else:
            # Greedy over several ranks: NxDI's argmax over shards gathers a few numbers, not the logits.
            self.target_model.wants_logits = not self.greedy or config.neuron_config.tp_degree == 1
            self.draft_model.wants_logits = not self.greedy

    def _context_encoding_forward(self, input_ids, attention_mask, position_ids, seq_ids, sampling_params, **paging):
        outputs = super()._context_encoding_forward(
            input_ids, attention_mask, position_ids, seq_ids, sampling_params, **paging
        )
        if not self.target_model.wants_logits:
            return outputs
        logits = outputs[1][:, -1]  # outputs[0] is the draft's token, which nobody reads
        if self.greedy:
            no_drafts = torch.zeros((logits.shape[0], 0), dtype=torch.int32, device=logits.device)
            acceptance = greedy_acceptance(no_drafts, logits[:, None], vocab_size=self.config.vocab_size)
            outputs[1] = acceptance.tokens[:, 0]
        else:
            last = attention_mask.sum(dim=1).to(torch.int32) - 1
            outputs[1] = self._draw(logits, self._uniforms(sampling_params, last, 2, "verify"), sampling_params)
        return outputs

    def _token_gen_forward(
        self,
        input_ids,
        attention_mask,
        position_ids,
        seq_ids,
        sampling_params,
        slot_mapping=None,
        active_block_table=None,
        num_queries=None,
        computed_context_lens=None,
    ):
        rows = self.neuron_config.speculation_length
        num_slots = attention_mask.shape[1]
        first = position_ids[:, :1]
        # Rows past the cache's end are padding, whose keys nobody reads: a full sequence takes no further step.
        positions = torch.cat([(first + i).clamp(max=num_slots - 1) for i in range(rows)], dim=1)
        num_outputs = 2 if self.neuron_config.output_logits else 1
        paged = self.is_prefix_caching
        if paged:
            block_size = self.neuron_config.pa_block_size
            slot_mapping = conventions.slots_of(positions, active_block_table, block_size, slot_mapping)

        window, mask, draft_cache = input_ids, attention_mask, None
        draft_logits, logits_out = [], []
        uniforms = None if self.greedy else self._uniforms(sampling_params, first[:, 0], 2 * (rows - 1), "draft")
        for i in range(rows):  # the last run only brings the last draft's keys into the cache
            paging = {}
            if paged:
                paging = {
                    "slot_mapping": slot_mapping[:, i : i + 1],
                    "active_block_table": active_block_table,
                    "num_queries": num_queries,
                    "computed_context_lens": computed_context_lens + i,
                }
            outputs = self.draft_model(
                window[:, -1:], mask, positions[:, i : i + 1], seq_ids, sampling_params, kv_cache=draft_cache, **paging
            )
            draft_cache = outputs[num_outputs:]
            logits_out.append(outputs[1])
            if i == rows - 1:
                break
            token = outputs[0]
            if not self.greedy:
                draft_logits.append(outputs[0])
                token = self._draw(outputs[0][:, -1], uniforms[:, 2 * i : 2 * i + 2], sampling_params)
            window = torch.cat((window, token.view(-1, 1).to(window.dtype)), dim=1)
            mask = mask.scatter(1, positions[:, i : i + 1].to(torch.int64), 1)

        paging = {}
        if paged:
            paging = {
                "slot_mapping": slot_mapping,
                "active_block_table": active_block_table,
                "num_queries": num_queries + rows - 1,
                "computed_context_lens": computed_context_lens,
            }
        outputs = self.target_model(window, attention_mask, positions, seq_ids, sampling_params, **paging)
        draft_tokens = window[:, 1:].to(torch.int32)
        draft_lens = conventions.draft_lens(first[:, 0], num_slots, rows)
        if not self.target_model.wants_logits:
            acceptance = conventions.accepted_tokens(draft_tokens, outputs[0], draft_lens)
        elif self.greedy:
            acceptance = greedy_acceptance(
                draft_tokens, outputs[0], draft_lens=draft_lens, vocab_size=self.config.vocab_size
            )
        else:
            acceptance = rejection_sampling(
                draft_tokens,
                outputs[0],
                self._uniforms(sampling_params, first[:, 0], rows + 1, "verify"),
                draft_logits=torch.cat(draft_logits, dim=1),
                draft_lens=draft_lens,
                vocab_size=self.config.vocab_size,
                **conventions.sampling_parameters(sampling_params),
            )
        logits = [torch.cat(logits_out, dim=1), outputs[1]] if self.neuron_config.output_logits else []
        return [window, acceptance, *logits, *draft_cache, *outputs[num_outputs:]]

    def _tkg_postprocessor(self, token_gen_outs, attention_mask, position_ids):
        drafts, result = token_gen_outs[:2]
        if not isinstance(result, Acceptance):  # NxDI's own EAGLE chain hands over the target's tokens
            result = conventions.accepted_tokens(drafts[:, 1:], result) if self.greedy else self._acceptance
        return conventions.fused_outputs(result, position_ids, attention_mask)

    def _uniforms(self, sampling_params, positions, columns, purpose):
        """[B, columns] in (0, 1), from the sequences' seeds if there are any."""
        if self.neuron_config.on_device_sampling_config.deterministic:
            return torch.full((len(positions), columns), 0.5, device=positions.device)
        if sampling_params.shape[1] > 3:
            seeds = sampling_params[:, 3].to(torch.int32)
            return uniforms_for(seeds, positions.to(torch.int32), columns - 2, purpose)
        zeros = torch.zeros((len(positions), columns), dtype=torch.float32, device=positions.device)
        if positions.device.type == "cpu":
            uniforms = torch.rand_like(zeros)
        else:
            from neuronx_distributed_inference.modules.generation.sampling import rand_like

            uniforms = rand_like(zeros)
        # The first rank's, on every rank: ranks that accept differently wait for each other for ever.
        uniforms = gathered(uniforms, 0, self.config)[: len(positions)]
        return conventions.open_interval(uniforms)

    def _draw(self, logits, uniforms, sampling_params):
        """[B] tokens drawn from logits [B, V] under NxDI's sampling parameters."""
        parameters = conventions.sampling_parameters(sampling_params)
        return sample_tokens(logits, uniforms, vocab_size=self.config.vocab_size, **parameters).tokens
