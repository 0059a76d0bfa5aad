"""Merging attention over disjoint sets of keys by their log-sum-exps (2501.01005, section 2.2)."""

from __future__ import annotations

import numpy as np


def merge_attention(outputs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row of outputs [n, B, Hq, T, D] counts by exp(its log-sum-exp in lses [n, B, Hq, T]).

    Returns output [B, Hq, T, D] of outputs' dtype and lse [B, Hq, T] fp32. A shard whose log-sum-exp is -inf saw
    nothing and weighs nothing, whatever its output holds.
    """
    output = np.zeros(outputs.shape[1:], outputs.dtype)
    lse = np.full(lses.shape[1:], -np.inf, np.float32)
    for row in np.ndindex(lse.shape):
        shards = [shard for shard in range(len(lses)) if lses[shard][row] != -np.inf]
        if not shards:
            continue
        logs = np.array([lses[shard][row] for shard in shards], np.float64)
        weights = np.exp(logs - logs.max())
        rows = np.array([outputs[shard][row] for shard in shards], np.float64)
        output[row] = weights @ rows / weights.sum()
        lse[row] = logs.max() + np.log(weights.sum())
    return output, lse
