"""merge_attention: attention over shards of the keys, or over a shared prefix and the rest, put together."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch
from draft_verify.reference.merge_attention import merge_attention as reference


@public
def merge_attention(outputs: Any, lses: Any, *, backend: str = "auto", lnc: int | None = None) -> tuple[Any, Any]:
    """Merges attention over disjoint sets of keys; each row counts by the exponential of its log-sum-exp.

    Args:
        outputs: [n, B, Hq, T, D] fp32 or bf16, one entry a shard.
        lses: [n, B, Hq, T] fp32, natural log-sum-exps; -inf where a shard saw nothing: its output does not matter.
        backend, lnc: see the package.

    Returns:
        (output [B, Hq, T, D] of outputs' dtype, lse [B, Hq, T] fp32); 0 and -inf where no shard saw anything.

    Raises:
        ValueError: a shape or dtype that does not fit.
    """
    checks.attention.merge_attention(outputs, lses)
    if backend == "reference":
        return reference(outputs, lses)
    return launch("merge_attention", outputs, lses, backend=backend, lnc=lnc)
