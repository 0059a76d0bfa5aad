"""Windows and caches for the attention tests: every variant, awkward sizes, NaN in whatever must not be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from draft_verify.reference.cache import PAGED
from draft_verify.reference.tolerances import ATTENTION, LSE_ABSOLUTE, scaled_error
from draft_verify.verify_attention import verify_attention
from tests.cache_cases import BACKEND, BFLOAT16, FLOAT8, FLOAT32


@dataclass(repr=False)
class Case:
    """One call: positional arrays and keyword options."""

    query: np.ndarray
    key: np.ndarray | None
    value: np.ndarray | None
    key_cache: np.ndarray
    value_cache: np.ndarray
    seq_lens: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        return ATTENTION[str(self.value_cache.dtype)]

    def run(self, backend: str = BACKEND, lnc: int | None = None, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
        """Output and log-sum-exp."""
        arrays = (self.query, self.key, self.value, self.key_cache, self.value_cache, self.seq_lens)
        return verify_attention(*arrays, return_lse=True, backend=backend, lnc=lnc, **{**self.options, **changes})

    def changed(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def __repr__(self) -> str:
        shapes = f"query {self.query.shape}, values {self.value_cache.shape} {self.value_cache.dtype}"
        return f"Case({shapes}, seq_lens {self.seq_lens.tolist()}, {self.options})"


def assert_agrees(case: Case, lnc: int | None = None) -> None:
    """The kernel against the reference, output and log-sum-exp."""
    expected, expected_lse = case.run("reference")
    output, lse = case.run(lnc=lnc)
    assert output.dtype == case.query.dtype and lse.dtype == np.float32
    error = scaled_error(output, expected)
    assert error <= case.tolerance, f"error {error:.2e} in {case}"
    seen = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~seen)
    difference = np.abs(lse[seen].astype(np.float64) - expected_lse[seen])
    allowed = LSE_ABSOLUTE + 1e-5 * np.abs(expected_lse[seen])
    assert (difference <= allowed).all(), f"lse off by {difference.max():.2e} in {case}"


def random_tree(rng: np.random.Generator, rows: int, live: int) -> np.ndarray:
    """Parents of `live` rows at random, then padding."""
    parents = np.full(rows, -2, np.int32)
    parents[:live] = [-1] + [int(rng.integers(0, row)) for row in range(1, live)]
    return parents


def depths(parents: np.ndarray) -> np.ndarray:
    """[T] depth of every row; padding counts as the root."""
    result = np.zeros(len(parents), int)
    for row, parent in enumerate(parents):
        result[row] = result[parent] + 1 if parent >= 0 else 0
    return result


def make_case(
    seed: int = 0,
    *,
    batch: int = 2,
    heads: int = 1,
    group: int = 1,
    rows: int = 4,
    head_dim: int = 64,
    slots: int = 130,
    dtype: np.dtype = FLOAT32,
    fp8: bool = False,
    cache_layout: str = "BHSD",
    block_size: int = 16,
    seq_lens: Any = None,
    draft_lens: Any = None,
    sliding_window: int | None = None,
    ring: bool = False,
    tree: bool = False,
    sinks: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    cache_only: bool = False,
    logits: float = 1.0,
) -> Case:
    """A random call. Lengths not given are random; `logits` is about how large the scores get."""
    rng = np.random.default_rng(seed)
    paged = cache_layout in PAGED
    if paged:
        slots = -(-slots // block_size) * block_size
    if draft_lens is None:
        draft_lens = rng.integers(-1, rows, batch)
    draft_lens = np.asarray(draft_lens, np.int32)
    if seq_lens is None:
        room = 2 * slots + 5 if ring else slots - (0 if cache_only else rows)
        seq_lens = rng.integers(0, max(room, 0) + 1, batch)
    seq_lens = np.asarray(seq_lens, np.int32)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    query = (normal(batch, heads * group, rows, head_dim) * logits).astype(dtype)
    key, value = normal(batch, heads, rows, head_dim).astype(dtype), normal(batch, heads, rows, head_dim).astype(dtype)
    cache_dtype = FLOAT8 if fp8 else dtype
    keys, values = np.full((2, batch, heads, slots, head_dim), np.nan, cache_dtype)
    for b in range(batch):
        if draft_lens[b] >= 0:
            oldest = max(0, seq_lens[b] - sliding_window + 1) if sliding_window else 0
            live = np.arange(max(oldest, seq_lens[b] - slots if ring else 0), seq_lens[b])
            for cache in (keys, values):
                cache[b][:, live % slots] = (normal(heads, len(live), head_dim) * (8 if fp8 else 1)).astype(cache_dtype)
        for window in (query, key, value):
            window[b, :, draft_lens[b] + 1 :] = np.nan

    options: dict[str, Any] = {"draft_lens": draft_lens, "cache_layout": cache_layout}
    if tree:
        parents = np.stack([random_tree(rng, rows, max(1, n + 1)) for n in draft_lens])
        options["tree"] = parents
    if paged:
        keys, values, options["block_table"] = paginate(rng, keys, values, seq_lens, draft_lens, block_size, ring)
        if cache_layout == "NPHD":
            keys, values = (np.ascontiguousarray(cache.transpose(0, 2, 1, 3)) for cache in (keys, values))
    elif cache_layout == "BHDS":
        keys = np.ascontiguousarray(keys.transpose(0, 1, 3, 2))
    if sinks:
        options["sinks"] = normal(heads * group) * 3
    if fp8:
        options["key_scale"] = np.exp(normal(heads) / 2) / 8
        options["value_scale"] = np.exp(normal(heads) / 2) / 8
    for name, given in (("sliding_window", sliding_window), ("softcap", softcap), ("scale", scale)):
        if given is not None:
            options[name] = given
    if ring:
        options["ring"] = True
    if cache_only:
        key = value = None
    return Case(query, key, value, keys, values, seq_lens, options)


def paginate(
    rng: np.random.Generator,
    keys: np.ndarray,
    values: np.ndarray,
    seq_lens: np.ndarray,
    draft_lens: np.ndarray,
    block_size: int,
    ring: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Caches [B, Hkv, S, D] as blocks [N, Hkv, P, D] in random order with spare ones of NaN, and the block table."""
    batch, heads, slots, head_dim = keys.shape
    per_sequence = slots // block_size
    order = rng.permutation(batch * per_sequence + 3)
    table = np.full((batch, per_sequence), -1, np.int32)
    pools = np.full((2, len(order), heads, block_size, head_dim), np.nan, keys.dtype)
    for b in range(batch):
        used = 0 if draft_lens[b] < 0 else -(-min(int(seq_lens[b]), slots) // block_size)
        for entry in range(used):
            block = table[b, entry] = order[b * per_sequence + entry]
            here = slice(entry * block_size, (entry + 1) * block_size)
            pools[0, block], pools[1, block] = keys[b, :, here], values[b, :, here]
    return pools[0], pools[1], table


@st.composite
def cases(draw, **fixed: Any) -> Case:
    """Any combination of the variants, at awkward sizes."""
    choices = {
        "seed": st.integers(0, 2**20),
        "batch": st.sampled_from([1, 2, 3]),
        "heads": st.sampled_from([1, 2, 3]),
        "group": st.sampled_from([1, 2, 3, 8]),
        "rows": st.sampled_from([1, 2, 5, 8, 16]),
        "head_dim": st.sampled_from([64, 80, 96, 128, 16]),
        "slots": st.sampled_from([17, 127, 128, 129, 513, 700]),
        "dtype": st.sampled_from([FLOAT32, BFLOAT16]),
        "cache_layout": st.sampled_from(["BHSD", "BHDS", "NHPD", "NPHD"]),
        "block_size": st.sampled_from([16, 48, 128, 131, 256]),
        "ring": st.sampled_from([False, False, True]),
        "sliding_window": st.sampled_from([None, None, 1, 3, 150]),
        "softcap": st.sampled_from([None, None, 5.0]),
        "scale": st.sampled_from([None, 0.3]),
        "logits": st.sampled_from([1.0, 30.0]),
        "cache_only": st.sampled_from([False, False, False, True]),
        "sinks": st.booleans(),
        "tree": st.booleans(),
        "fp8": st.sampled_from([False, False, True]),
    }
    chosen = {name: draw(choice) for name, choice in choices.items() if name not in fixed} | fixed
    if chosen["ring"]:
        chosen["cache_only"] = False
    if chosen["fp8"]:
        chosen["dtype"] = BFLOAT16  # fp32 queries would be rounded to it
    return make_case(**chosen)
