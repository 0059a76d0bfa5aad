"""Caches, windows and outcomes for the rollback tests: every kind of cache, awkward sizes, poison all around."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from draft_verify.reference.cache import PAGED, key_at, num_slots

# The kernels' own executor; DRAFT_VERIFY_TEST_BACKEND=simulator runs the same tests on an installed `nki`.
BACKEND = os.environ.get("DRAFT_VERIFY_TEST_BACKEND", "emulator")
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


@dataclass
class Case:
    """One step of a batch: caches and windows with one entry a layer, lengths, outcome, and the keyword arguments."""

    key_caches: tuple
    value_caches: tuple
    keys: tuple
    values: tuple
    seq_lens: np.ndarray
    num_accepted: np.ndarray
    path: np.ndarray | None
    block_table: np.ndarray | None
    cache_layout: str
    ring: bool
    scales: dict
    whole_block_table: np.ndarray | None = None

    @property
    def num_slots(self) -> int:
        return num_slots(self.value_caches[0], self.cache_layout, self.block_table)

    def token(self, caches: tuple, sequence: int, position: int) -> list[bytes]:
        """What one position holds in each layer's keys."""
        place = {"cache_layout": self.cache_layout, "block_table": self.block_table, "ring": self.ring}
        return [key_at(cache, sequence, int(position), **place).tobytes() for cache in caches]

    @property
    def options(self) -> dict:
        return {"block_table": self.block_table, "cache_layout": self.cache_layout, "ring": self.ring, **self.scales}

    def cache_copies(self) -> tuple[tuple, tuple]:
        return tuple(cache.copy() for cache in self.key_caches), tuple(cache.copy() for cache in self.value_caches)


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return (rng.standard_normal(shape) * 8).astype(dtype)


def random_path(rng: np.random.Generator, num_accepted: np.ndarray, rows: int) -> np.ndarray:
    """Row 0 and a rising choice of num_accepted later rows, then -1, as an Acceptance holds it."""
    path = np.full((len(num_accepted), rows), -1, np.int32)
    for b, accepted in enumerate(num_accepted):
        if accepted >= 0:
            path[b, 0] = 0
            path[b, 1 : accepted + 1] = np.sort(rng.choice(np.arange(1, rows), accepted, replace=False))
    return path


def make_case(
    seed: int,
    *,
    batch: int = 3,
    heads: int = 2,
    rows: int = 5,
    head_dim: int = 8,
    slots: int = 37,
    layers: int = 1,
    dtype: np.dtype = FLOAT32,
    fp8: bool = False,
    cache_layout: str = "BHSD",
    block_size: int = 4,
    ring: bool = False,
    tree: bool = False,
) -> Case:
    """A random step. Rejected window rows are NaN; table entries that nothing is written through are -1."""
    rng = np.random.default_rng(seed)
    block_table = None
    if cache_layout in PAGED:
        entries = -(-slots // block_size)
        slots = entries * block_size
        num_blocks = batch * entries + 1
        block_table = rng.permutation(num_blocks)[: batch * entries].reshape(batch, entries).astype(np.int32)
    shape = {
        "BHSD": (batch, heads, slots, head_dim),
        "BHDS": (batch, heads, slots, head_dim),
        "NHPD": (0 if block_table is None else num_blocks, heads, block_size, head_dim),
        "NPHD": (0 if block_table is None else num_blocks, block_size, heads, head_dim),
    }[cache_layout]
    key_shape = (batch, heads, head_dim, slots) if cache_layout == "BHDS" else shape
    cache_dtype = FLOAT8 if fp8 else dtype

    num_accepted = rng.integers(-1, min(rows, slots) if not ring else rows, batch).astype(np.int32)
    highest = [3 * slots if ring else slots - accepted - 1 for accepted in num_accepted]
    seq_lens = rng.integers(0, highest, endpoint=True).astype(np.int32)
    path = random_path(rng, num_accepted, rows) if tree else None
    keys = tuple(random_array(rng, (batch, heads, rows, head_dim), dtype) for _ in range(layers))
    values = tuple(random_array(rng, (batch, heads, rows, head_dim), dtype) for _ in range(layers))
    whole_block_table = None if block_table is None else block_table.copy()
    for b, accepted in enumerate(num_accepted):
        kept = range(accepted + 1) if path is None else path[b, : accepted + 1]
        rejected = np.setdiff1d(np.arange(rows), kept)
        for window in keys + values:
            window[b, :, rejected] = np.nan
        if block_table is not None and not ring:
            block_table[b, -(-(seq_lens[b] + accepted + 1) // block_size) :] = -1
            block_table[b, : seq_lens[b] // block_size] = -1
    scales = {}
    if fp8:
        # Powers of two, so that dividing by them and multiplying by their reciprocal are the same.
        powers = np.exp2(rng.integers(-2, 3, (2, layers, heads))).astype(np.float32)
        scales = {"key_scale": powers[0], "value_scale": powers[1]}
    return Case(
        tuple(random_array(rng, key_shape, cache_dtype) for _ in range(layers)),
        tuple(random_array(rng, shape, cache_dtype) for _ in range(layers)),
        keys,
        values,
        seq_lens,
        num_accepted,
        path,
        block_table,
        cache_layout,
        ring,
        scales,
        whole_block_table,
    )


@st.composite
def cases(draw, ring: bool | None = None, tree: bool | None = None, sizes: tuple = (), many: bool = False) -> Case:
    """Any kind of cache; `sizes` are the (batch, heads, rows) to choose from, all combinations by default.

    many: with heads so large, and so many layers, that the rows of a chain move in runs.
    """
    sizes = sizes or tuple(itertools.product([1, 2, 3, 5], [1, 2, 3, 8], [1, 2, 5, 8, 17]))
    batch, heads, rows = draw(st.sampled_from(sizes))
    dtype = draw(st.sampled_from([FLOAT32, BFLOAT16]))
    return make_case(
        draw(st.integers(0, 2**32 - 1)),
        batch=batch,
        heads=heads,
        rows=rows,
        head_dim=128 if many else draw(st.sampled_from([4, 16, 64])),
        slots=draw(st.sampled_from([3, 16, 33])),
        layers=16 // dtype.itemsize if many else draw(st.sampled_from([1, 2, 3])),
        dtype=dtype,
        fp8=draw(st.booleans()),
        cache_layout=draw(st.sampled_from(["BHSD", "BHDS", "NHPD", "NPHD"])),
        block_size=draw(st.sampled_from([1, 4, 6, 16])),
        ring=draw(st.booleans()) if ring is None else ring,
        tree=draw(st.booleans()) if tree is None else tree,
    )


def same_bytes(actual: tuple, expected: tuple) -> bool:
    return all(a.tobytes() == e.tobytes() for a, e in zip(actual, expected, strict=True))
