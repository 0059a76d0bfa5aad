"""select_state, shift_conv_window, select_hidden: what the next step starts from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.select_hidden import select_hidden
from draft_verify.select_state import select_state, shift_conv_window, state_slots
from tests.cache_cases import BACKEND, BFLOAT16, FLOAT32

dtypes = st.sampled_from([FLOAT32, BFLOAT16])
lncs = st.sampled_from([1, 2])
backends = pytest.mark.parametrize("backend", ["reference", BACKEND])


def poisoned(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, num_accepted: np.ndarray) -> np.ndarray:
    """Random rows; NaN in every row but the selected one."""
    rows = rng.standard_normal(shape).astype(dtype)
    for b, accepted in enumerate(num_accepted):
        rows[b, np.arange(shape[1]) != accepted] = np.nan
    return rows


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.sampled_from([1, 2, 5, 17]),
    rows=st.sampled_from([1, 2, 8, 17]),
    state=st.sampled_from([(1,), (7, 3), (2, 16, 33), (1021,), (2048,), (6, 1024), (9, 8193)]),
    dtype=dtypes,
    lnc=lncs,
)
def test_the_state_after_the_last_accepted_row_is_copied_bit_for_bit(seed, batch, rows, state, dtype, lnc):
    rng = np.random.default_rng(seed)
    num_accepted = rng.integers(-1, rows, batch).astype(np.int32)
    checkpoints = poisoned(rng, (batch, rows, *state), dtype, num_accepted)
    expected = select_state(checkpoints, num_accepted, backend="reference")
    actual = select_state(checkpoints, num_accepted, backend=BACKEND, lnc=lnc)
    assert actual.tobytes() == expected.tobytes()
    assert not np.isnan(expected.astype(np.float32)).any()
    assert not expected[num_accepted < 0].any()


@backends
def test_a_state_of_two_mebibytes_is_selected(backend):
    checkpoints = np.zeros((1, 3, 128, 4096), np.float32)
    checkpoints[0, 1] = np.arange(128 * 4096).reshape(128, 4096)
    selected = select_state(checkpoints, np.array([1], np.int32), backend=backend)
    np.testing.assert_array_equal(selected, checkpoints[:, 1])


def test_state_slots_name_the_same_rows_without_a_copy():
    num_accepted = np.array([2, -1, 0, 3], np.int32)
    checkpoints = np.random.default_rng(0).standard_normal((4, 4, 5)).astype(np.float32)
    slots = state_slots(num_accepted, 4)
    assert slots.dtype == np.int32 and slots.tolist() == [2, -1, 8, 15]
    live = slots >= 0
    np.testing.assert_array_equal(
        checkpoints.reshape(16, 5)[slots[live]], select_state(checkpoints, num_accepted)[live]
    )
    torch = pytest.importorskip("torch")
    tensor = state_slots(torch.from_numpy(num_accepted), 4)
    assert tensor.dtype == torch.int32 and tensor.tolist() == slots.tolist()


@given(
    seed=st.integers(0, 2**32 - 1),
    batch=st.sampled_from([1, 2, 9]),
    channels=st.sampled_from([1, 7, 96, 128, 260]),
    width=st.sampled_from([1, 3, 5]),
    rows=st.sampled_from([1, 2, 8]),
    dtype=dtypes,
    lnc=lncs,
)
def test_the_convolution_window_ends_at_the_last_accepted_row(seed, batch, channels, width, rows, dtype, lnc):
    rng = np.random.default_rng(seed)
    num_accepted = rng.integers(-1, rows, batch).astype(np.int32)
    history = rng.standard_normal((batch, channels, width + rows)).astype(dtype)
    for b, accepted in enumerate(num_accepted):
        history[b, :, width + accepted + 1 :] = np.nan
    expected = shift_conv_window(history, num_accepted, rows, backend="reference")
    actual = shift_conv_window(history, num_accepted, rows, backend=BACKEND, lnc=lnc)
    assert actual.tobytes() == expected.tobytes()
    assert not np.isnan(expected.astype(np.float32)).any()


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1, 64, 5120, 3079]), dtype=dtypes, lnc=lncs)
def test_the_hidden_state_of_the_last_accepted_row_is_copied_bit_for_bit(seed, size, dtype, lnc):
    rng = np.random.default_rng(seed)
    num_accepted = rng.integers(-1, 5, 3).astype(np.int32)
    hidden = poisoned(rng, (3, 5, size), dtype, num_accepted)
    expected = select_hidden(hidden, num_accepted, backend="reference")
    assert select_hidden(hidden, num_accepted, backend=BACKEND, lnc=lnc).tobytes() == expected.tobytes()


class GatedRecurrence:
    """A convolution over three inputs, then a gated sum: a state that a rejected token would spoil for good."""

    def __init__(self):
        self.conv = np.zeros((1, 2, 2), np.float32)
        self.state = np.zeros((1, 2), np.float32)

    @staticmethod
    def rows(conv: np.ndarray, state: np.ndarray, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Inputs [1, 2, 2 + T] and states [1, T, 2] after each token."""
        inputs = np.array([[[np.sin(t), np.cos(t)] for t in tokens]], np.float32).swapaxes(1, 2)
        history = np.concatenate([conv, inputs], axis=2)
        states = []
        for row in range(len(tokens)):
            state = np.float32(0.5) * state + history[:, :, row : row + 3].sum(axis=2)
            states.append(state)
        return history, np.stack(states, axis=1)

    def step(self, window: list[int], num_accepted: int, backend: str) -> None:
        history, states = self.rows(self.conv, self.state, window)
        accepted = np.array([num_accepted], np.int32)
        self.conv = shift_conv_window(history, accepted, len(window), backend=backend)
        self.state = select_state(states, accepted, backend=backend)


@backends
def test_t48_t49_t50_state_and_convolution_roll_back_together_also_before_a_step_without_drafts(backend):
    """vllm#39273, #40738, #52942, #55504, #56531: a step with 2 accepted, then one with zero drafts, read state slot 0.
    vllm#50272: the convolution window kept rejected activations. mlx-swift-lm#218: the state was replayed, the
    convolution was not."""
    speculative, plain = GatedRecurrence(), GatedRecurrence()
    for window, num_accepted in (([3, 1, 4, 1], 2), ([5], 0), ([9, 2, 6], 0), ([5, 3, 5, 8], 3), ([9], 0)):
        speculative.step(window, num_accepted, backend)
        for token in window[: num_accepted + 1]:
            plain.step([token], 0, "reference")
        np.testing.assert_array_equal(speculative.state, plain.state)
        np.testing.assert_array_equal(speculative.conv, plain.conv)


@backends
def test_t56_counts_select_not_the_tokens_that_look_like_padding(backend):
    """NxDI: an accepted token equal to pad_token_id was counted as padding; here num_accepted is an argument."""
    hidden = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    selected = select_hidden(hidden, np.array([2], np.int32), backend=backend)
    assert selected.tolist() == [[4, 5]]


REFUSED = [
    (select_state, "checkpoints", (np.zeros((2, 3)), np.zeros(2, np.int32))),
    (select_state, "checkpoints", (np.zeros((2, 3, 4)), np.zeros(2, np.int32))),
    (select_state, "checkpoints", (np.zeros((2, 0, 4), np.float32), np.zeros(2, np.int32))),
    (select_state, "checkpoints", (np.zeros((129, 1, 4), np.float32), np.zeros(129, np.int32))),
    (select_state, "num_accepted", (np.zeros((2, 3, 4), np.float32), np.zeros(2, np.int64))),
    (select_state, "num_accepted", (np.zeros((2, 3, 4), np.float32), np.zeros(3, np.int32))),
    (select_state, "num_accepted", (np.zeros((2, 3, 4), np.float32), np.array([0, 3], np.int32))),
    (select_state, "num_accepted", (np.zeros((2, 3, 4), np.float32), np.array([0, -2], np.int32))),
    (select_hidden, "hidden", (np.zeros((2, 3, 4, 5), np.float32), np.zeros(2, np.int32))),
    (select_hidden, "num_accepted", (np.zeros((2, 3, 4), np.float32), np.array([0, 3], np.int32))),
    (shift_conv_window, "history", (np.zeros((2, 3), np.float32), np.zeros(2, np.int32), 1)),
    (shift_conv_window, "history", (np.zeros((2, 8191, 9), np.float32), np.zeros(2, np.int32), 5)),
    (shift_conv_window, "num_rows", (np.zeros((2, 3, 4), np.float32), np.zeros(2, np.int32), 4)),
    (shift_conv_window, "num_rows", (np.zeros((2, 3, 4), np.float32), np.zeros(2, np.int32), 0)),
    (shift_conv_window, "num_accepted", (np.zeros((2, 3, 4), np.float32), np.array([0, 2], np.int32), 2)),
]


@pytest.mark.parametrize("function, argument, arguments", REFUSED)
def test_bad_input_is_refused(function, argument, arguments):
    with pytest.raises(ValueError, match=argument):
        function(*arguments)


@pytest.mark.parametrize("accepted", [3, 2**31 - 1, -2, -(2**31)])
def test_on_the_device_a_value_out_of_range_selects_zero(accepted):
    from draft_verify.backends import launch

    rows = np.full((2, 3, 5), 7, np.float32)
    num_accepted = np.array([accepted, 1], np.int32)
    for operation, arguments in (
        ("select_state", (rows, num_accepted)),
        ("shift_conv_window", (rows, num_accepted, 3)),
    ):
        (selected,) = launch(operation, *arguments, backend=BACKEND, lnc=1)
        assert not selected[0].any() and (selected[1] == 7).all()
