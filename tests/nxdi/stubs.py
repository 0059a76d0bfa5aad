"""Lets NxD Inference's Python import and run on a CPU without any Neuron wheel.

A meta-path finder synthesises the packages that come from AWS's own index. Everything in them is an inert placeholder,
except the few functions that NxDI's CPU path really computes with.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType

import torch

PACKAGES = (
    "torch_xla",
    "torch_neuronx",
    "libneuronxla",
    "neuronxcc",
    "nki",
    "nkilib",
    "boto3",
    "botocore",
    "tenacity",
    "blobfile",
)


class _PlaceholderType(type):
    """Class of placeholders: attributes, indexing, iteration and the like give more placeholders."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, key):
        return cls

    def __iter__(cls):
        return iter(())

    def __or__(cls, other):
        return cls

    __ror__ = __or__


class Placeholder(metaclass=_PlaceholderType):
    """Stands for any class, function, decorator or constant that is imported but not computed with."""

    def __new__(cls, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # used as a decorator
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Placeholder

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


class _Function:
    """The shape of a torch.autograd.Function: only `apply` is used."""


def _function(compute):
    return type(compute.__name__, (_Function,), {"apply": staticmethod(compute)})


def _argmax(tensor, dim, keepdim=False):
    return torch.argmax(tensor, dim=dim, keepdim=keepdim)


def _topk(tensor, k, dim=-1):
    return torch.topk(tensor, k, dim=dim)


def _softmax(tensor, dim):
    return torch.softmax(tensor, dim=dim)


def _rms_norm(hidden, weight, eps, dim=-1):
    wide = hidden.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps) * weight).to(hidden.dtype)


def _concatenate(*tensors, dim=0):
    return torch.cat(tensors, dim=dim)


def _xla_hlo_call(build):
    """NxDI's only use of it that runs here is a uniform random tensor."""
    return torch.rand_like if build.__name__ == "rand_like" else build


REAL = {
    "torch_xla.core.xla_model": {"xla_device": lambda *args, **kwargs: torch.device("cpu")},
    "torch_neuronx.utils": {"get_platform_target": lambda: "trn2"},
    "torch_neuronx.utils.utils": {"get_platform_target": lambda: "trn2"},
    "torch_neuronx.xla_impl.ops": {
        "Argmax": _function(_argmax),
        "TopK": _function(_topk),
        "Softmax": _function(_softmax),
        "RmsNorm": _function(_rms_norm),
        "ConcatenateOp": _function(_concatenate),
        "xla_hlo_call": _xla_hlo_call,
    },
    "torch_neuronx.xla_impl.base": {"xla_hlo_call": _xla_hlo_call},
    "torch_xla": {"__version__": "2.9.0"},
}


class _StubModule(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StubModule(spec.name)

    def exec_module(self, module):
        vars(module).update(REAL.get(module.__name__, {}))


def install() -> None:
    sys.meta_path.insert(0, _Finder())
    torch.classes.neuron = Placeholder  # named in annotations
