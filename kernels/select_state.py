"""select_state: the recurrent state after the last accepted row."""

import nki

from .select_rows import select_rows


@nki.jit
def select_state(checkpoints, num_accepted):
    """checkpoints [B, T, ...], num_accepted [B] int32 -> [B, ...], 0 for an empty slot."""
    return select_rows(checkpoints, num_accepted)
