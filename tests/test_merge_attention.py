"""merge_attention: the kernel against its reference, and both against attention over all keys at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_verify.merge_attention import merge_attention
from draft_verify.reference.tolerances import ATTENTION, scaled_error
from tests.attention_cases import make_case
from tests.cache_cases import BACKEND, BFLOAT16, FLOAT32

BACKENDS = ["reference", BACKEND]


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    shards=st.sampled_from([1, 2, 5]),
    shape=st.sampled_from([(1, 1, 1, 16), (2, 3, 5, 64), (3, 8, 16, 80), (1, 1, 129, 8), (2, 5, 26, 8)]),
    dtype=st.sampled_from([FLOAT32, BFLOAT16]),
    lnc=st.sampled_from([1, 2]),
)
def test_the_kernel_agrees_with_the_reference_whatever_empty_shards_hold(seed, shards, shape, dtype, lnc):
    rng = np.random.default_rng(seed)
    outputs = rng.standard_normal((shards, *shape)).astype(dtype)
    lses = (rng.standard_normal((shards, *shape[:3])) * 30).astype(np.float32)
    empty = rng.random(lses.shape) < 0.4
    lses[empty], outputs[empty] = -np.inf, np.nan
    expected, expected_lse = merge_attention(outputs, lses, backend="reference")
    output, lse = merge_attention(outputs, lses, backend=BACKEND, lnc=lnc)
    assert output.dtype == dtype
    assert scaled_error(output, expected) <= ATTENTION[str(np.dtype(dtype))]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shards_weigh_by_the_exponential_of_their_lse(backend):
    outputs = np.array([6.0, 9.0, np.nan], np.float32).reshape(3, 1, 1, 1, 1)
    lses = np.array([np.log(1.0), np.log(2.0), -np.inf], np.float32).reshape(3, 1, 1, 1)
    output, lse = merge_attention(outputs, lses, backend=backend)
    assert output.item() == pytest.approx(8.0) and lse.item() == pytest.approx(np.log(3.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [0, 1, 60, 90])
def test_splitting_the_cache_in_two_and_merging_equals_the_whole(backend, split):
    """The first shard holds `split` slots, the second the rest and the window."""
    case = make_case(11, batch=2, heads=2, group=2, rows=4, slots=100, seq_lens=[90, 75], draft_lens=[3, 2])
    expected, expected_lse = case.run("reference")
    front = np.minimum(case.seq_lens, split).astype(np.int32)
    shards = [
        case.changed(key=None, value=None, seq_lens=front).run(backend, query_positions=case.seq_lens),
        case.changed(
            key_cache=np.ascontiguousarray(case.key_cache[:, :, split:]),
            value_cache=np.ascontiguousarray(case.value_cache[:, :, split:]),
            seq_lens=case.seq_lens - front,
        ).run(backend, cache_start=np.full(2, split, np.int32), query_positions=case.seq_lens),
    ]
    output, lse = merge_attention(*(np.stack(parts) for parts in zip(*shards)), backend=backend)
    assert scaled_error(output, expected) <= ATTENTION["float32"]
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "argument, outputs, lses",
    [
        ("outputs", np.zeros((2, 1, 1, 4), np.float32), np.zeros((2, 1, 1), np.float32)),
        ("outputs", np.zeros((0, 1, 1, 1, 4), np.float32), np.zeros((0, 1, 1, 1), np.float32)),
        ("outputs", np.zeros((2, 1, 1, 1, 4), np.float64), np.zeros((2, 1, 1, 1), np.float32)),
        ("lses", np.zeros((2, 1, 1, 1, 4), np.float32), np.zeros((2, 1, 1, 2), np.float32)),
        ("lses", np.zeros((2, 1, 1, 1, 4), np.float32), np.zeros((2, 1, 1, 1), BFLOAT16)),
    ],
)
def test_bad_input_is_refused_by_name(argument, outputs, lses):
    with pytest.raises(ValueError, match=argument):
        merge_attention(outputs, lses)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_shards_in_a_list_are_refused_by_name(kind):
    arrays = [np.zeros((1, 1, 1, 4), np.float32)] * 2, [np.zeros((1, 1, 1), np.float32)] * 2
    if kind == "torch":
        torch = pytest.importorskip("torch")
        arrays = [[torch.from_numpy(array) for array in entry] for entry in arrays]
    with pytest.raises(ValueError, match=r"^outputs: got .*list"):
        merge_attention(*arrays)
