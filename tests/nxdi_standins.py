"""Small stand-ins for the classes of NxD Inference that draft_verify.nxdi plugs into: its signatures and shapes.

`tests/nxdi/test_standins.py` holds the signatures against the real classes.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch


class NeuronAttentionBase(torch.nn.Module):
    """What the attention hook reads, and a plain masked softmax in its place."""

    def __init__(self, num_heads=4, num_key_value_heads=2, head_dim=8, k_cache_transposed=False, sinks=None, **config):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.softmax_scale = head_dim**0.5
        self.k_cache_transposed = k_cache_transposed
        self.logical_nc_config = 1
        self.sliding_window = self.attention_chunk_size = None
        self.flash_decoding_enabled = False
        self.sinks = sinks
        self.neuron_config = SimpleNamespace(
            **{
                "padding_side": "right",
                "is_medusa": False,
                "is_eagle_draft": False,
                "enable_token_tree": False,
                **config,
            }
        )

    def get_learned_sinks(self):
        return self.sinks

    def compute_for_token_gen(
        self, Q, K, V, position_ids, past_key_value, attention_mask, active_mask, is_prefix_caching=False
    ):
        key_cache, value_cache = past_key_value
        if self.k_cache_transposed:
            key_cache = key_cache.transpose(2, 3)
        keys = torch.cat([key_cache, K], dim=2).repeat_interleave(self.num_key_value_groups, dim=1)
        values = torch.cat([value_cache, V], dim=2).repeat_interleave(self.num_key_value_groups, dim=1)
        rows = Q.shape[2]
        if active_mask is None:
            active_mask = torch.ones((1, 1, rows, rows), dtype=torch.bool).tril()
        mask = torch.cat([attention_mask.expand(-1, 1, rows, -1), active_mask.expand(Q.shape[0], 1, -1, -1)], dim=3)
        scores = (Q @ keys.transpose(2, 3) / self.softmax_scale).masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            return torch.softmax(torch.cat([scores, sinks], dim=3), dim=3)[..., :-1] @ values
        return torch.softmax(scores, dim=3) @ values


class NeuronBaseModel(torch.nn.Module):
    """A language model that is a table: the logits after a token, whatever came before it."""

    def __init__(self, config, optimize_inference=True):
        super().__init__()
        self.config, self.neuron_config = config, config.neuron_config
        self.speculation_length = config.neuron_config.speculation_length
        self.table = torch.nn.Parameter(config.table, requires_grad=False)
        self.self_attn = NeuronAttentionBase()
        self.calls = []

    def _sample_on_device(self, logits, sampling_params, is_for_speculation, is_for_context_encoding):
        tokens = logits.argmax(dim=-1).to(torch.int32)
        return tokens if is_for_speculation else tokens[:, -1]

    def forward(
        self,
        input_ids,
        attention_mask,
        position_ids,
        seq_ids,
        sampling_params,
        *placeholders,
        slot_mapping=None,
        active_block_table=None,
        num_queries=None,
        computed_context_lens=None,
        kv_cache=None,
    ):
        is_for_speculation = input_ids.shape[1] == self.speculation_length
        is_for_context_encoding = input_ids.shape[1] > 1 and not is_for_speculation
        logits = self.table[input_ids.long()]
        if is_for_context_encoding:
            last = position_ids.max(dim=1, keepdim=True).indices
            logits = logits.gather(1, last[..., None].expand(-1, -1, logits.shape[2]))
        self.calls.append((input_ids, attention_mask, position_ids, slot_mapping))
        result = self._sample_on_device(logits, sampling_params, is_for_speculation, is_for_context_encoding)
        cache = [torch.zeros(1)] * 2
        return [result, logits, *cache] if self.neuron_config.output_logits else [result, *cache]


class NeuronFusedSpecModel(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.neuron_config = config, config.neuron_config
        fused = config.fused_spec_config
        draft_cls = fused.draft_model_cls._model_cls if fused.draft_model_cls else fused.worker_cls
        self.draft_model = draft_cls(fused.draft_config)
        self.target_model = fused.worker_cls(config)
        self.batch_size = config.neuron_config.batch_size
        self.greedy = not config.neuron_config.on_device_sampling_config.do_sample
        self.is_prefix_caching = config.neuron_config.is_prefix_caching

    def _context_encoding_forward(
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
        draft = self.draft_model(input_ids, attention_mask, position_ids, seq_ids, sampling_params)
        target = self.target_model(input_ids, attention_mask, position_ids, seq_ids, sampling_params)
        return [draft[0], target[0], *draft[1:], *target[1:]]

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
        raise AssertionError("the mixin drafts and verifies")

    def _cte_postprocessor(
        self,
        context_outs,
        input_ids,
        attention_mask,
        position_ids,
        speculation_length,
        num_queries=None,
        computed_context_lens=None,
    ):
        token = context_outs[1].reshape(-1, 1).to(torch.int32)
        padding = torch.full((len(token), speculation_length - 1), -1, dtype=torch.int32)
        length = attention_mask.sum(dim=1, keepdim=True).to(torch.int32)
        mask = (torch.arange(attention_mask.shape[1]) < length).to(position_ids.dtype)
        return [torch.cat([token, padding], dim=1), token, mask, length]

    def _tkg_postprocessor(self, token_gen_outs, attention_mask, position_ids):
        raise AssertionError("the mixin knows what was accepted")

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, seq_ids=None, sampling_params=None):
        inputs = input_ids, attention_mask, position_ids, seq_ids, sampling_params
        if input_ids.shape[1] > 1:
            outs = self._context_encoding_forward(*inputs, slot_mapping=None)
            return self._cte_postprocessor(outs, *inputs[:3], self.neuron_config.speculation_length) + outs[2:]
        outs = self._token_gen_forward(*inputs, slot_mapping=None)
        return self._tkg_postprocessor(outs, attention_mask, position_ids) + outs[2:]


class NeuronBaseForCausalLM:
    _model_cls = None

    def __init__(self, config):
        self.config, self.neuron_config = config, config.neuron_config
        if self.neuron_config.enable_fused_speculation:
            self._model_cls = NeuronFusedSpecModel
        self.enable_context_encoding()

    def enable_context_encoding(self, **model_init_kwargs):
        self.context_encoding_model = self._model_cls(self.config)


def _gather_along_dim(tensor, partition_dim, process_group=None):
    return tensor


def get_tp_group(config):
    return None


def rand_like(tensor):
    return torch.rand_like(tensor)


MODULES = {
    "neuronx_distributed_inference.models.model_base": (NeuronBaseModel, NeuronFusedSpecModel, NeuronBaseForCausalLM),
    "neuronx_distributed_inference.modules.attention.attention_base": (NeuronAttentionBase,),
    "neuronx_distributed_inference.modules.generation.sampling": (rand_like,),
    "neuronx_distributed_inference.utils.distributed": (get_tp_group,),
    "neuronx_distributed.parallel_layers.mappings": (_gather_along_dim,),
}


def install(monkeypatch) -> None:
    """Puts the stand-ins where NxDI's modules would be, until the test module is done with them."""
    for name, members in MODULES.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        for member in members:
            setattr(sys.modules[name], member.__name__, member)


def fused_config(target_table, draft_table, *, batch, speculation_length, do_sample=False, **neuron):
    """A configuration as NxDI's, reduced to what is read here."""

    def config(table, length):
        neuron_config = SimpleNamespace(
            batch_size=batch,
            speculation_length=length,
            on_device_sampling_config=SimpleNamespace(do_sample=do_sample, deterministic=False),
            **{
                "output_logits": False,
                "enable_eagle_speculation": False,
                "enable_fused_speculation": True,
                "enable_token_tree": False,
                "is_prefix_caching": False,
                "tp_degree": 1,
                **neuron,
            },
        )
        return SimpleNamespace(neuron_config=neuron_config, table=table, vocab_size=table.shape[1])

    target = config(target_table, speculation_length)
    target.fused_spec_config = SimpleNamespace(
        worker_cls=NeuronBaseModel, draft_config=config(draft_table, 0), draft_model_cls=None
    )
    return target
