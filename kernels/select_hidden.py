"""select_hidden: the hidden state of the last accepted row."""

import nki

from .select_rows import select_rows


@nki.jit
def select_hidden(hidden, num_accepted):
    """hidden [B, T, H], num_accepted [B] int32 -> [B, H], 0 for an empty slot."""
    return select_rows(hidden, num_accepted)
