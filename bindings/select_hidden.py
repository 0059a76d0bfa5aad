"""select_hidden: what an EAGLE-style draft model starts from."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch
from draft_verify.checks.general import FLOATS, array
from draft_verify.reference import select as reference


@public
def select_hidden(hidden: Any, num_accepted: Any, *, backend: str = "auto", lnc: int | None = None) -> Any:
    """The target's hidden state at the last accepted row: the one that predicted the recovered or bonus token.

    Args:
        hidden: [B, T, H] fp32 or bf16, a hidden state a window row.
        num_accepted: [B] int32, accepted drafts, 0..T-1; -1 is an empty slot.
        backend, lnc: see the package.

    Returns:
        [B, H]: hidden[b, num_accepted[b]], 0 for an empty slot (on a device also for a value out of range).

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    array("hidden", hidden, ("B", "T", "H"), FLOATS)
    checks.caches.select_rows("hidden", hidden, num_accepted)
    if backend == "reference":
        return reference.select_hidden(hidden, num_accepted)
    return launch("select_hidden", hidden, num_accepted, backend=backend, lnc=lnc)[0]
