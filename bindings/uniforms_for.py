"""uniforms_for: the random numbers of a verify step, as a function of seed and position only."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import is_torch, public
from draft_verify.backends import TRACING, Traced
from draft_verify.reference.uniforms_for import PURPOSES
from draft_verify.reference.uniforms_for import uniforms_for as reference


@public
def uniforms_for(
    seeds: Any, positions: Any, K: int, purpose: str = "verify", backend: str = "auto", lnc: int | None = None
) -> Any:
    """Philox4x32-10 (Salmon et al., SC 2011): the same numbers whoever else is in the batch.

    Key = seed, counter = (position of row 0, column, purpose, 0), u = ((x >> 9) + 0.5) * 2^-23 of the first word.

    Args:
        seeds: [B] uint32, int32, uint64 or int64, one a sequence.
        positions: [B] int, the position of row 0, which no two steps of a sequence share.
        K: drafts a window.
        purpose: "verify", or "draft" for an independent stream to draw the drafts with.
        backend, lnc: taken for uniformity; the numbers are computed on the host, or for device tensors by
            ordinary operations of the device's graph.

    Returns:
        [B, K + 2] fp32 strictly within (0, 1).

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    checks.acceptance.uniforms_for(seeds, positions, K, purpose, tuple(PURPOSES))
    if backend == TRACING:
        raise Traced
    if is_torch(seeds):  # on a device
        from draft_verify import philox  # only who has a tensor has torch

        return philox.uniforms(seeds, positions, K, purpose)
    return reference(seeds, positions, K, purpose)
