"""Sequences join, propose, are verified with any outcome and leave: every cache stays a plain decoder's.

What a token leaves in a cache is a function of the token and its position, so a plain decoder's cache is known without
running one. After every step everything that a later read can reach is compared bit for bit with it, and everything
else is poisoned, so that whatever was left over or read by mistake would show in the steps after.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import draft_verify as dv
from draft_verify.reference.cache import PAGED, key_at, value_at
from tests.cache_cases import BACKEND

BATCH, LAYERS, HEADS, SIZE, SLOTS, BLOCK = 3, 2, 2, 4, 24, 4
K = 4
WINDOW = 6  # the sliding window of the rings
VOCABULARY = 50
FLOAT32, FLOAT8 = np.dtype(np.float32), np.dtype(ml_dtypes.float8_e4m3)


def content(token: int, position: int, layer: int) -> np.ndarray:
    """[Hkv, D] small integers, exact in every dtype and under every scale used here."""
    entries = np.arange(HEADS * SIZE).reshape(HEADS, SIZE)
    return ((31 * token + 7 * position + 3 * entries + layer) % 15 - 7).astype(np.float32)


@dataclass
class Step:
    """What one step of the batch is about; empty slots have length 0, and -1 in draft_lens and num_accepted."""

    lengths: np.ndarray
    tokens: np.ndarray  # [B, T] of the window
    depths: np.ndarray  # [B, T] of each row below row 0
    draft_lens: np.ndarray
    path: np.ndarray
    num_accepted: np.ndarray


class KeyValueCache:
    """One kind of key/value cache in the hands of an engine that drafts."""

    def __init__(self, cache_layout="BHSD", *, ring=False, write="commit", fp8=False, scrub=False, lnc=1):
        self.ring, self.write, self.scrub, self.lnc = ring, write, scrub, lnc
        mode = "write_first" if write == "compact" else "accepted_only"
        self.slots = dv.ring_slots(WINDOW, K, mode) if ring else SLOTS
        self.paged = cache_layout in PAGED
        dtype = FLOAT8 if fp8 else FLOAT32
        num_blocks = BATCH * SLOTS // BLOCK
        shape = {"NHPD": (num_blocks, HEADS, BLOCK, SIZE), "NPHD": (num_blocks, BLOCK, HEADS, SIZE)}.get(
            cache_layout, (BATCH, HEADS, self.slots, SIZE)
        )
        keys = (BATCH, HEADS, SIZE, self.slots) if cache_layout == "BHDS" else shape
        self.keys = tuple(np.full(keys, np.nan, dtype) for _ in range(LAYERS))
        self.values = tuple(np.full(shape, np.nan, dtype) for _ in range(LAYERS))
        self.scale = np.array([0.5, 2.0], np.float32) if fp8 else None
        self.table = np.full((BATCH, SLOTS // BLOCK), -1, np.int32)
        self.free = list(range(num_blocks))
        self.place = {"cache_layout": cache_layout, "block_table": self.table if self.paged else None}

    def join(self, sequence: int, tokens: list[int]) -> None:
        self.allocate(sequence, 0, -(-len(tokens) // BLOCK))
        for position in self.reachable(len(tokens)):
            for layer, key, value in self.at(sequence, position):
                key[:] = self.stored(content(tokens[position], position, layer), key.dtype)
                value[:] = self.stored(-content(tokens[position], position, layer), value.dtype)

    def leave(self, sequence: int) -> None:
        self.release(sequence, np.count_nonzero(self.table[sequence] >= 0))

    def step(self, step: Step) -> None:
        before = np.count_nonzero(self.table >= 0, axis=1)
        if self.paged:
            for b, count in enumerate(dv.blocks_needed(step.lengths, step.draft_lens, BLOCK)):
                self.allocate(b, before[b], count)
        getattr(self, self.write)(step)
        if self.paged:
            freed = dv.blocks_to_free(step.lengths, step.num_accepted, step.draft_lens, BLOCK)
            for b, count in enumerate(freed):
                self.release(b, count)

    def commit(self, step: Step) -> None:
        """This library's way: attention takes the window from elsewhere, and only accepted rows reach the cache."""
        rejected = np.ones(step.tokens.shape, bool)
        for b, accepted in enumerate(step.num_accepted):
            rejected[b, step.path[b, : accepted + 1]] = False
        dv.commit_window(
            self.keys, self.values, *self.windows(step, rejected), step.lengths, step.num_accepted, path=step.path,
            ring=self.ring, **self.place, **self.scales(), backend=BACKEND, lnc=self.lnc,
        )  # fmt: skip

    def compact(self, step: Step) -> None:
        """The whole window is written before it is verified; then the accepted rows are made contiguous."""
        unwritten = np.arange(K + 1) > step.draft_lens[:, None]
        self.write_whole(step, self.windows(step, unwritten))
        dv.compact_window(
            self.keys, self.values, step.lengths, step.path, step.num_accepted, draft_lens=step.draft_lens,
            scrub=self.scrub, ring=self.ring, **self.place, backend=BACKEND, lnc=self.lnc,
        )  # fmt: skip

    def restore(self, step: Step) -> None:
        """The whole window is written into a ring that is too small for it; what it pushed out comes back."""
        lengths = np.where(step.num_accepted >= 0, step.lengths, -1).astype(np.int32)
        saved = dv.save_ring(self.keys, self.values, lengths, K + 1, **self.place, backend=BACKEND, lnc=self.lnc)
        unwritten = np.arange(K + 1) > step.draft_lens[:, None]
        self.write_whole(step, self.windows(step, unwritten))
        dv.restore_ring(
            self.keys, self.values, *saved, lengths, step.num_accepted, **self.place, backend=BACKEND, lnc=self.lnc
        )

    def write_whole(self, step: Step, windows: tuple) -> None:
        dv.commit_window(
            self.keys, self.values, *windows, step.lengths, step.draft_lens, ring=self.ring, **self.place,
            **self.scales(), backend="reference",
        )  # fmt: skip

    def windows(self, step: Step, poisoned: np.ndarray) -> tuple:
        """Keys and values [B, Hkv, T, D] a layer; NaN in the poisoned rows [B, T]."""
        keys = tuple(np.full((BATCH, HEADS, K + 1, SIZE), np.nan, np.float32) for _ in range(LAYERS))
        for layer, window in enumerate(keys):
            for b, row in np.argwhere(~poisoned & (step.num_accepted >= 0)[:, None]):
                position = step.lengths[b] + step.depths[b, row]
                window[b, :, row] = content(step.tokens[b, row], position, layer)
        return keys, tuple(-window for window in keys)

    def check(self, sequence: int, tokens: list[int]) -> None:
        for position in self.reachable(len(tokens)):
            for layer, key, value in self.at(sequence, position):
                expected = content(tokens[position], position, layer)
                assert key.tobytes() == self.stored(expected, key.dtype).tobytes(), (sequence, position)
                assert value.tobytes() == self.stored(-expected, value.dtype).tobytes(), (sequence, position)

    def poison(self, lengths: dict[int, int]) -> None:
        """NaN in every slot and block that no live sequence can reach."""
        for caches, at in ((self.keys, key_at), (self.values, value_at)):
            for layer, cache in enumerate(caches):
                fresh = np.full_like(cache, np.nan)
                for sequence, length in lengths.items():
                    for position in self.reachable(length):
                        place = (sequence, position)
                        at(fresh, *place, ring=self.ring, **self.place)[:] = at(
                            caches[layer], *place, ring=self.ring, **self.place
                        )
                cache[:] = fresh

    def check_blocks(self, lengths: dict[int, int]) -> None:
        if self.paged:
            owned = self.table[self.table >= 0].tolist()
            assert sorted(owned + self.free) == list(range(BATCH * SLOTS // BLOCK)), "a block leaked or is owned twice"
            for b in range(BATCH):
                assert np.count_nonzero(self.table[b] >= 0) == -(-lengths.get(b, 0) // BLOCK)

    def reachable(self, length: int) -> range:
        return range(max(0, length - (WINDOW - 1)) if self.ring else 0, length)

    def at(self, sequence: int, position: int):
        for layer in range(LAYERS):
            place = {"ring": self.ring, **self.place}
            yield (
                layer,
                key_at(self.keys[layer], sequence, position, **place),
                value_at(self.values[layer], sequence, position, **place),
            )

    def stored(self, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return rows.astype(dtype) if self.scale is None else (rows / self.scale[:, None]).astype(dtype)

    def scales(self) -> dict:
        return {} if self.scale is None else {"key_scale": self.scale, "value_scale": self.scale}

    def allocate(self, sequence: int, owned: int, count: int) -> None:
        if self.paged:
            self.table[sequence, owned : owned + count] = [self.free.pop(0) for _ in range(count)]

    def release(self, sequence: int, count: int) -> None:
        if self.paged and count:
            owned = np.count_nonzero(self.table[sequence] >= 0)
            self.free += self.table[sequence, owned - count : owned].tolist()
            self.table[sequence, owned - count : owned] = -1


class RecurrentState:
    """A short convolution and a decaying sum: one rejected token would spoil the state for good."""

    write = "commit"  # takes trees as if each path were a chain of its own

    def __init__(self, lnc=1):
        self.lnc = lnc
        self.conv = np.full((BATCH, SIZE, 2), np.nan, np.float32)
        self.state = np.full((BATCH, SIZE), np.nan, np.float32)

    def join(self, sequence: int, tokens: list[int]) -> None:
        self.conv[sequence], self.state[sequence] = self.decode(tokens)

    def leave(self, sequence: int) -> None:
        self.conv[sequence] = self.state[sequence] = np.nan

    def step(self, step: Step) -> None:
        # Only row path[j] = j exists for a recurrence: it has no tree.
        history = np.full((BATCH, SIZE, 2 + K + 1), np.nan, np.float32)
        checkpoints = np.full((BATCH, K + 1, SIZE), np.nan, np.float32)
        for b in np.flatnonzero(step.num_accepted >= 0):
            history[b, :, :2] = self.conv[b]
            state = self.state[b]
            for row in range(step.draft_lens[b] + 1):
                token = step.tokens[b, step.path[b, row] if row <= step.num_accepted[b] else row]
                history[b, :, 2 + row] = content(token, 0, 0)[0]
                state = self.advance(state, history[b, :, row : row + 3])
                checkpoints[b, row] = state
        conv = dv.shift_conv_window(history, step.num_accepted, K + 1, backend=BACKEND, lnc=self.lnc)
        state = dv.select_state(checkpoints, step.num_accepted, backend=BACKEND, lnc=self.lnc)
        stepped = step.num_accepted >= 0  # a sequence that sits the step out keeps what it has
        self.conv[stepped], self.state[stepped] = conv[stepped], state[stepped]

    @staticmethod
    def advance(state: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        return np.float32(0.7) * state + inputs.sum(axis=1)

    def decode(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        inputs, state = np.zeros((SIZE, 2), np.float32), np.zeros(SIZE, np.float32)
        for token in tokens:
            inputs = np.concatenate([inputs[:, -2:], content(token, 0, 0)[:1].T], axis=1)
            state = self.advance(state, inputs)
        return inputs[:, -2:], state

    def check(self, sequence: int, tokens: list[int]) -> None:
        conv, state = self.decode(tokens)
        assert self.conv[sequence].tobytes() == np.ascontiguousarray(conv).tobytes()
        assert self.state[sequence].tobytes() == state.tobytes()

    def poison(self, lengths: dict[int, int]) -> None:
        empty = [b for b in range(BATCH) if b not in lengths]
        self.conv[empty] = self.state[empty] = np.nan

    def check_blocks(self, lengths: dict[int, int]) -> None:
        pass


KINDS = {
    "contiguous": lambda: KeyValueCache(),
    "transposed keys, two cores": lambda: KeyValueCache("BHDS", lnc=2),
    "fp8": lambda: KeyValueCache(fp8=True),
    "paged by head": lambda: KeyValueCache("NHPD", lnc=2),
    "paged by token": lambda: KeyValueCache("NPHD"),
    "paged fp8": lambda: KeyValueCache("NPHD", fp8=True),
    "ring": lambda: KeyValueCache(ring=True),
    "ring of transposed keys": lambda: KeyValueCache("BHDS", ring=True),
    "ring written whole, then restored": lambda: KeyValueCache(ring=True, write="restore"),
    "written first, compacted": lambda: KeyValueCache(write="compact"),
    "written first, transposed keys, scrubbed": lambda: KeyValueCache("BHDS", write="compact", scrub=True),
    "written first, paged, scrubbed": lambda: KeyValueCache("NHPD", write="compact", scrub=True),
    "written first, paged fp8, two cores": lambda: KeyValueCache("NPHD", write="compact", fp8=True, lnc=2),
    "ring written first, compacted": lambda: KeyValueCache(ring=True, write="compact"),
    "ring of transposed keys, scrubbed": lambda: KeyValueCache("BHDS", ring=True, write="compact", scrub=True, lnc=2),
    "recurrent": lambda: RecurrentState(),
    "recurrent, two cores": lambda: RecurrentState(lnc=2),
}


class Batch(RuleBasedStateMachine):
    def __init__(self, kind: str):
        super().__init__()
        self.cache = KINDS[kind]()
        self.committed: dict[int, list[int]] = {}  # tokens with keys in the cache
        self.pending: dict[int, int] = {}  # row 0 of the next window

    @rule(sequence=st.integers(0, BATCH - 1), prompt=st.lists(st.integers(0, VOCABULARY - 1), max_size=9))
    def join(self, sequence, prompt):
        if sequence not in self.committed:
            self.committed[sequence], self.pending[sequence] = prompt, len(prompt)
            self.cache.join(sequence, prompt)

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def leave(self, data):
        sequence = data.draw(st.sampled_from(sorted(self.committed)))
        del self.committed[sequence], self.pending[sequence]
        self.cache.leave(sequence)

    @rule(seed=st.integers(0, 2**32 - 1), all_or_nothing=st.booleans())
    def verify(self, seed, all_or_nothing):
        rng = np.random.default_rng(seed)
        step = Step(
            lengths=np.zeros(BATCH, np.int32),
            tokens=rng.integers(0, VOCABULARY, (BATCH, K + 1)).astype(np.int32),
            depths=np.tile(np.arange(K + 1, dtype=np.int32), (BATCH, 1)),
            draft_lens=np.full(BATCH, -1, np.int32),
            path=np.full((BATCH, K + 1), -1, np.int32),
            num_accepted=np.full(BATCH, -1, np.int32),
        )
        for b, tokens in self.committed.items():
            most = K if getattr(self.cache, "ring", False) else min(K, SLOTS - 1 - len(tokens))
            if most < 0:
                continue  # the context is full: this sequence sits the step out
            drafts = int(rng.integers(0, most + 1))
            accepted = int(rng.choice([0, drafts]) if all_or_nothing else rng.integers(0, drafts + 1))
            rows = np.arange(1, drafts + 1)
            if self.cache.write != "restore":  # trees do not fit a ring that is written whole
                rows = np.sort(rng.permutation(rows)[:accepted])
            step.lengths[b], step.draft_lens[b], step.num_accepted[b] = len(tokens), drafts, accepted
            step.tokens[b, 0] = self.pending[b]
            step.path[b, : accepted + 1] = [0, *rows[:accepted]]
            step.depths[b, step.path[b, : accepted + 1]] = np.arange(accepted + 1)
        self.cache.step(step)
        for b in np.flatnonzero(step.num_accepted >= 0):
            self.committed[b] = [
                *self.committed[b],
                *step.tokens[b, step.path[b, : step.num_accepted[b] + 1]].tolist(),
            ]
            self.pending[b] = int(rng.integers(VOCABULARY))

    @invariant()
    def every_reachable_byte_is_a_plain_decoders(self):
        for sequence, tokens in self.committed.items():
            self.cache.check(sequence, tokens)

    @invariant()
    def no_block_leaks(self):
        self.cache.check_blocks({b: len(tokens) for b, tokens in self.committed.items()})

    @invariant()
    def what_cannot_be_reached_is_poisoned_for_the_next_step(self):
        self.cache.poison({b: len(tokens) for b, tokens in self.committed.items()})


def run(kind: str, max_examples: int, steps: int) -> None:
    run_state_machine_as_test(
        lambda: Batch(kind), settings=settings(max_examples=max_examples, stateful_step_count=steps)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_after_any_history_the_cache_is_a_plain_decoders(kind):
    run(kind, max_examples=8, steps=12)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_long_history_the_cache_is_a_plain_decoders(kind):
    run(kind, max_examples=150, steps=40)
