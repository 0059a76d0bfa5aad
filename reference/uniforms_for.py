"""uniforms_for: the random numbers of a verify step, as a function of seed and position only.

Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants of Random123.
"""

from __future__ import annotations

import numpy as np

PURPOSES = {"verify": 0, "draft": 1}
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1
ROUNDS = 10
_MASK = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Counters [..., 4] and keys [..., 2] uint32 -> [..., 4] uint32, ten rounds."""
    c0, c1, c2, c3 = (np.asarray(counter)[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (np.asarray(key)[..., i].astype(np.uint64) for i in range(2))
    for _ in range(ROUNDS):
        low = c0 * np.uint64(MULTIPLIERS[0])
        high = c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (high >> _WORD) ^ c1 ^ k0, high & _MASK, (low >> _WORD) ^ c3 ^ k1, low & _MASK
        k0, k1 = (k0 + np.uint64(KEY_STEPS[0])) & _MASK, (k1 + np.uint64(KEY_STEPS[1])) & _MASK
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniforms_for(seeds: np.ndarray, positions: np.ndarray, K: int, purpose: str = "verify") -> np.ndarray:
    """See `draft_verify.uniforms_for`."""
    seeds = np.asarray(seeds).astype(np.uint64)
    columns = np.arange(K + 2)
    counter = np.zeros((len(seeds), K + 2, 4), np.uint32)
    counter[..., 0] = np.asarray(positions).astype(np.uint32)[:, None]
    counter[..., 1] = columns
    counter[..., 2] = PURPOSES[purpose]
    key = np.stack([seeds & _MASK, seeds >> _WORD], axis=-1).astype(np.uint32)[:, None, :]
    random = philox4x32(counter, key)[..., 0]
    # 23 bits and a half: every value is exact in float32 and strictly between 0 and 1.
    return ((random >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
