"""nki.collectives: names that kernels import; collectives between chips are not emulated."""

from __future__ import annotations

from .instruction import Refusal
from .launch import NKIObject


class ReplicaGroup(NKIObject):
    """A group of ranks."""

    def __init__(self, groups):
        super().__init__(groups=groups)


def _refused(name: str):
    def refuse(*args, **kwargs):
        raise Refusal(f"nki.collectives.{name}: collectives are not emulated")

    return refuse


_NAMES = """all_reduce all_gather reduce_scatter all_to_all collective_permute collective_permute_implicit
collective_permute_implicit_reduce all_gather_v all_to_all_v rank_id"""

EXPORTS = {"ReplicaGroup": ReplicaGroup} | {name: _refused(name) for name in _NAMES.split()}
