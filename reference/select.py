"""What the next step starts from, taken from what each window row left behind: states, hidden states, conv inputs."""

from __future__ import annotations

import numpy as np


def select_state(checkpoints: np.ndarray, num_accepted: np.ndarray) -> np.ndarray:
    """checkpoints[b, num_accepted[b]] (checkpoints[b, i] is the state after row i); 0 for an empty slot (-1)."""
    selected = np.zeros((checkpoints.shape[0], *checkpoints.shape[2:]), checkpoints.dtype)
    for b in np.flatnonzero(num_accepted >= 0):
        selected[b] = checkpoints[b, num_accepted[b]]
    return selected


def select_hidden(hidden: np.ndarray, num_accepted: np.ndarray) -> np.ndarray:
    """hidden[b, num_accepted[b]]; 0 for an empty slot."""
    return select_state(hidden, num_accepted)


def shift_conv_window(history: np.ndarray, num_accepted: np.ndarray, num_rows: int) -> np.ndarray:
    """history[b, :, n + 1 .. n + W - 1], the W - 1 inputs up to row n = num_accepted[b]; 0 for an empty slot."""
    width = history.shape[2] - num_rows
    shifted = np.zeros((*history.shape[:2], width), history.dtype)
    for b in np.flatnonzero(num_accepted >= 0):
        first = num_accepted[b] + 1
        shifted[b] = history[b, :, first : first + width]
    return shifted
