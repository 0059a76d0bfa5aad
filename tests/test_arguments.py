"""How numbers may be given: NumPy's count as Python's, and what does not fit is named."""

import contextlib
import importlib

import numpy as np
import pytest

from draft_verify import (
    blocks_needed,
    blocks_to_free,
    commit_window,
    draft_cache_lens,
    invert_draft_to_target,
    rejection_sampling,
    ring_slots,
    save_ring,
    state_slots,
    tree_acceptance,
    uniforms_for,
    verify_attention,
    verify_step,
)

DRAFTS = np.array([[1], [2]], np.int32)
LOGITS = np.random.default_rng(0).standard_normal((2, 2, 8)).astype(np.float32)
SEED = np.array([1], np.int32)
UNIFORMS = np.full((2, 3), 0.5, np.float32)


def sampled(**options):
    return rejection_sampling(DRAFTS, LOGITS, UNIFORMS, **options).tokens


def attended(slots=4, **options):
    def arrays(*shape):
        return np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    window, cache = arrays(1, 1, 1, 16), arrays(1, 1, slots, 16)
    return verify_attention(arrays(1, 3, 1, 16), window, window, cache, cache, np.zeros(1, np.int32), **options)


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_numbers_of_numpy_are_numbers(backend):
    temperature, top_k, vocab_size = np.float32(0.7), np.int64(3), np.int64(7)
    np.testing.assert_array_equal(
        sampled(temperature=temperature, top_k=top_k, vocab_size=vocab_size, backend=backend),
        sampled(temperature=float(temperature), top_k=3, vocab_size=7, backend=backend),
    )
    np.testing.assert_array_equal(
        attended(scale=np.float32(0.5), softcap=np.float64(30), sliding_window=np.int64(4), backend=backend),
        attended(scale=0.5, softcap=30.0, sliding_window=4, backend=backend),
    )
    cache = np.ones((1, 1, 4, 2), np.float32)
    saved = save_ring(cache, cache, np.array([5], np.int32), np.int64(2), backend=backend)
    assert [array.shape for array in saved] == [(1, 1, 2, 2)] * 2
    np.testing.assert_array_equal(uniforms_for(SEED, SEED, np.int64(3)), uniforms_for(SEED, SEED, 3))


def kinds():
    """What makes an array: NumPy's own, and tensors, where there is torch."""
    yield "numpy", lambda array: array
    with contextlib.suppress(ImportError):
        yield "torch", importlib.import_module("torch").from_numpy


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in kinds()])
@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_lists_of_numbers_are_arrays(make, backend):
    expected = rejection_sampling(
        make(DRAFTS),
        make(LOGITS),
        make(UNIFORMS),
        draft_lens=make(np.array([1, 0], np.int32)),
        temperature=make(np.array([1, 0], np.float32)),
        top_k=make(np.array([3, 2], np.int32)),
        backend=backend,
    )
    listed = rejection_sampling(
        DRAFTS.tolist(),
        make(LOGITS),
        UNIFORMS.tolist(),
        draft_lens=[1, 0],
        temperature=(1, 0),
        top_k=[3, np.int64(2)],
        backend=backend,
    )
    assert type(listed.tokens) is type(expected.tokens)
    np.testing.assert_array_equal(listed.tokens, expected.tokens)
    tree = tree_acceptance([-1], make(DRAFTS[:, :0]), make(LOGITS[:, :1]), backend=backend)
    empty = tree_acceptance([-1], [[], []], make(LOGITS[:, :1]), backend=backend)
    np.testing.assert_array_equal(tree.tokens, empty.tokens)


def test_bookkeeping_takes_lists_too():
    assert blocks_needed([3, 16], 5, 16).tolist() == [0, 1]
    assert blocks_to_free([15, 3], [0, 1], [5, 3], 16).tolist() == [1, 0]
    assert draft_cache_lens([3, 4], [1, 2], [2, 2]).tolist() == [5, 6]
    assert state_slots([1, -1], 4).tolist() == [1, -1]
    assert invert_draft_to_target([1, 0, 1], 3).tolist() == [[1, 0, -1], [-1, 2, -1]]


def test_whole_numbers_that_int32_does_not_hold_keep_their_bits():
    seeds = np.array([1 << 40, 2], np.int64)
    np.testing.assert_array_equal(uniforms_for(seeds.tolist(), [3, 4], 2), uniforms_for(seeds, [3, 4], 2))


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in kinds()])
def test_an_array_of_no_dimension_is_a_number(make):
    tokens = [
        rejection_sampling(make(DRAFTS), make(LOGITS), make(UNIFORMS), temperature=number).tokens
        for number in (1, 1.0, np.float32(1), np.array(1.0, np.float32), np.array(1, np.int32))
    ]
    for own in tokens[1:]:
        np.testing.assert_array_equal(own, tokens[0])


def committed(cache):
    window = np.zeros((1, 1, 1, 2), np.float32)
    return commit_window(cache, cache, window, window, [0], [0])


WRONG = {
    "a list of too few numbers": ("temperature", lambda: sampled(temperature=[1.0])),
    "lists of different lengths": ("draft_lens", lambda: sampled(draft_lens=[[1], [1, 1]])),
    "a number that takes more than int32": ("top_k", lambda: sampled(top_k=[1 << 40, 1])),
    "fractions for tokens": ("top_k", lambda: sampled(top_k=[2.5, 1])),
    "words": ("top_p", lambda: sampled(top_p=["most", "all"])),
    "a list to be written in place": ("value_cache", lambda: committed([[[[0.0, 0.0]]]])),
    "a temperature that is none": ("temperature", lambda: sampled(temperature=float("nan"))),
    "a fraction of a token": ("top_k", lambda: sampled(top_k=2.5)),
    "not a number of tokens": ("top_k", lambda: sampled(top_k=float("nan"))),
    "a word": ("temperature", lambda: sampled(temperature="hot")),
    "columns that are no whole number": ("vocab_size", lambda: sampled(vocab_size=7.0)),
    "drafts that are no whole number": ("K", lambda: uniforms_for(SEED, SEED, 3.0)),
    "a window that is no whole number": ("sliding_window", lambda: attended(sliding_window=4.0)),
    "one slot for two cores": ("key_cache", lambda: attended(slots=1, backend="emulator", lnc=2)),
}


def stepped(**options):
    inputs = {"draft_tokens": DRAFTS, "target_logits": LOGITS, "seq_lens": [3, 4]}
    return verify_step(**{**inputs, **options})


WRONG |= {
    "arrays in place of caches": ("caches", lambda: stepped(caches=(LOGITS, LOGITS, LOGITS, LOGITS))),
    "no caches": ("caches", lambda: stepped(caches=None)),
    "too few seeds": ("seeds", lambda: stepped(seeds=[1])),
    "a word that stops": ("stop_token_ids", lambda: stepped(stop_token_ids="2")),
    "a fraction that stops": ("stop_token_ids", lambda: stepped(stop_token_ids=[2.5])),
    "a longest sequence of fractions": ("max_length", lambda: stepped(max_length=4.5)),
    "a longest sequence without tokens": ("max_length", lambda: stepped(max_length=0)),
    "blocks of nothing": ("block_size", lambda: blocks_needed([3], 5, 0)),
    "blocks of fractions": ("block_size", lambda: blocks_to_free([3], [1], 5, 2.5)),
    "fractions of lengths": ("seq_lens", lambda: blocks_needed([3.5], 5, 16)),
    "lengths of two batches": ("num_accepted", lambda: draft_cache_lens([3], [1, 2, 3], [2])),
    "more accepted than there are rows": ("num_accepted", lambda: state_slots([9, 1], 4)),
    "rows in words": ("num_rows", lambda: state_slots([1, 1], "x")),
    "a window in words": ("window", lambda: ring_slots("x", 3)),
    "a vocabulary in words": ("vocab_size", lambda: invert_draft_to_target([1, 2], "x")),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name):
    argument, call = WRONG[name]
    with pytest.raises(ValueError, match=f"^{argument}: got "):
        call()


def test_one_slot_serves_one_core_and_the_reference():
    np.testing.assert_allclose(attended(slots=1, backend="emulator"), attended(slots=1, lnc=2), rtol=1e-5)
