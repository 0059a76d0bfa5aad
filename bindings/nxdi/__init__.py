"""NxD Inference models that draft, verify and accept through this library.

    from draft_verify import nxdi
    NeuronQwen3ForCausalLM = nxdi.apply(NeuronQwen3ForCausalLM)

`apply` returns the class with mixins in; everything else of the model, its configuration and its checkpoints stays.
"""

from __future__ import annotations

from typing import Any

try:
    from neuronx_distributed_inference.models.model_base import (
        NeuronBaseForCausalLM,
        NeuronBaseModel,
        NeuronFusedSpecModel,
    )
    from neuronx_distributed_inference.modules.attention.attention_base import NeuronAttentionBase
except ImportError as error:
    raise ImportError(
        f"draft_verify.nxdi needs NxD Inference ({error}). It comes from AWS's own package index: "
        "pip install neuronx-distributed-inference --extra-index-url https://pip.repos.neuron.amazonaws.com "
        "(the packages of its dependencies' names on PyPI are empty placeholders)."
    ) from error

from draft_verify.nxdi.attention import AttentionMixin
from draft_verify.nxdi.models import FusedSpecMixin, ModelMixin, combined

__all__ = ["AttentionMixin", "FusedSpecMixin", "ModelMixin", "apply", "register"]


class _CausalLMMixin:
    """Goes before a NeuronBaseForCausalLM class, which picks its model classes while it is being built."""

    def enable_context_encoding(self, *args: Any, **kwargs: Any) -> None:
        if self._model_cls is NeuronFusedSpecModel:
            self._model_cls = combined(FusedSpecMixin, NeuronFusedSpecModel)
        super().enable_context_encoding(*args, **kwargs)


def apply(model_cls: type) -> type:
    """The NxDI class with this library in: attention, and under fused speculation drafting and acceptance too.

    Args:
        model_cls: a NeuronBaseForCausalLM class (NeuronQwen3ForCausalLM, ...), or one of the classes below it: a
            NeuronBaseModel, NeuronFusedSpecModel or NeuronAttentionBase class.

    Returns:
        A subclass of it, of the same name.

    Raises:
        TypeError: any other class.
    """
    if issubclass(model_cls, NeuronBaseForCausalLM):
        result = combined(_CausalLMMixin, model_cls)
        if model_cls._model_cls is not None:
            result._model_cls = combined(ModelMixin, model_cls._model_cls)
        return result
    for base, mixin in (
        (NeuronBaseModel, ModelMixin),
        (NeuronFusedSpecModel, FusedSpecMixin),
        (NeuronAttentionBase, AttentionMixin),
    ):
        if issubclass(model_cls, base):
            return combined(mixin, model_cls)
    raise TypeError(f"model_cls: got {model_cls.__name__}, expected a class of NxD Inference's models")


def register(*model_types: str) -> None:
    """Puts this library into models of NxDI's own registry, from which vLLM's plugin for NxDI takes its classes.

    Args:
        model_types: "qwen3", "llama", ...

    Raises:
        ValueError: a type that NxDI does not know.
    """
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES

    for model_type in model_types:
        if model_type not in MODEL_TYPES:
            raise ValueError(f"model_types: got {model_type!r}, expected one of {', '.join(sorted(MODEL_TYPES))}")
    for model_type in model_types:
        MODEL_TYPES[model_type]["causal-lm"] = apply(MODEL_TYPES[model_type]["causal-lm"])
