"""How far a kernel may be from its float64 reference, with the reason, in one place."""

from __future__ import annotations

import numpy as np

# Largest error as a share of the largest reference value of the array.
ATTENTION = {
    "bfloat16": 1e-2,  # probabilities and outputs are rounded to 8 bits: 2^-8 = 4e-3 each
    "float8_e4m3": 3e-2,  # scaled keys and values are rounded to bfloat16 on the way to the Tensor engine
    "float32": 1e-4,  # exp and the sums of 32k terms in fp32
}

# Log-sum-exp is returned in fp32 whatever the cache holds; absolute, in nats, on top of the relative one.
LSE_ABSOLUTE = 1e-3  # fp32 sums of up to 131,072 terms; bf16 products are exact in fp32

MAX_UNDECIDED_SHARE = 1e-3  # of decisions whose threshold is so near that fp32 may fall either way
MIN_SAME_TOKEN_SHARE = 0.995  # of drawn tokens


def scaled_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference divided by the largest expected magnitude; NaN anywhere gives infinity."""
    difference = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
    if difference.size == 0:
        return 0.0
    if np.isnan(difference).any():
        return float("inf")
    return float(difference.max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))
