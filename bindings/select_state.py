"""select_state, shift_conv_window: recurrent models, rolled back to the last accepted row."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from draft_verify import checks
from draft_verify.arrays import from_lists, is_torch, public
from draft_verify.backends import launch
from draft_verify.checks.general import array, in_range, whole_number
from draft_verify.reference import select as reference


@public
def select_state(checkpoints: Any, num_accepted: Any, *, backend: str = "auto", lnc: int | None = None) -> Any:
    """The recurrent state after the last accepted row, copied out of one checkpoint a row.

    For SSM and delta-rule states of any shape. `state_slots` gives the same row's place instead, without a copy.

    Args:
        checkpoints: [B, T, ...] fp32 or bf16; checkpoints[b, i] is the state after window row i; T = 1 where nothing
            was drafted. Up to 2 MiB a state is what the kernel is meant for.
        num_accepted: [B] int32, accepted drafts, 0..T-1; -1 is an empty slot.
        backend, lnc: see the package.

    Returns:
        [B, ...]: checkpoints[b, num_accepted[b]], 0 for an empty slot (on a device also for a value out of range).

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    checks.caches.select_rows("checkpoints", checkpoints, num_accepted)
    if backend == "reference":
        return reference.select_state(checkpoints, num_accepted)
    return launch("select_state", checkpoints, num_accepted, backend=backend, lnc=lnc)[0]


def state_slots(num_accepted: Any, num_rows: int) -> Any:
    """Where select_state's rows are: index b * T + num_accepted[b] among checkpoints seen as [B * T, ...].

    A kernel or an engine that reads states through an index needs no copy; with one bank of T states a slot, step n
    writes where the state it starts from does not live.

    Args:
        num_accepted: [B] int32, a NumPy array or a tensor anywhere; -1 is an empty slot.
        num_rows: T.

    Returns:
        [B] int32, -1 for an empty slot.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    num_accepted = from_lists("num_accepted", num_accepted)
    whole_number("num_rows", num_rows, 1, 2**31 - 1)
    array("num_accepted", num_accepted, ("B",), ("int32",))
    in_range("num_accepted", num_accepted, -1, num_rows - 1, f"-1 (empty slot) to T - 1 = {num_rows - 1}")
    if is_torch(num_accepted):
        torch = sys.modules["torch"]
        first = num_rows * torch.arange(len(num_accepted), dtype=torch.int32, device=num_accepted.device)
        return torch.where(num_accepted >= 0, first + num_accepted, -1)
    first = num_rows * np.arange(len(num_accepted), dtype=np.int32)
    return np.where(num_accepted >= 0, first + num_accepted, np.int32(-1))


@public
def shift_conv_window(
    history: Any, num_accepted: Any, num_rows: int, *, backend: str = "auto", lnc: int | None = None
) -> Any:
    """The inputs that a causal convolution of width W holds after the last accepted row.

    A model with a short convolution before its recurrence (Mamba, gated delta rule) has this state to roll back too.

    Args:
        history: [B, C, W - 1 + T] fp32 or bf16, the W - 1 inputs before the step, then those of the T window rows.
        num_accepted: [B] int32, accepted drafts, 0..T-1; -1 is an empty slot.
        num_rows: T.
        backend, lnc: see the package.

    Returns:
        [B, C, W - 1]: history[b, :, n + 1 : n + W] with n = num_accepted[b], 0 for an empty slot.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    checks.caches.shift_conv_window(history, num_accepted, num_rows)
    if backend == "reference":
        return reference.shift_conv_window(history, num_accepted, num_rows)
    return launch("shift_conv_window", history, num_accepted, num_rows, backend=backend, lnc=lnc)[0]
