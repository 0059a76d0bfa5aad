"""Masks of written elements, places and runs of bytes against plain NumPy arrays of flags."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_verify.reference import emulator
from draft_verify.reference.emulator import dtypes, hazards, initialisation
from draft_verify.reference.emulator.memory import Place, Written

SHAPE = (4, 3, 8)


@st.composite
def views(draw, tensor):
    """A strided part of a tensor, under its own dtype or another one."""
    key = []
    for size in tensor.shape:
        start = draw(st.integers(0, size - 1))
        key.append(slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3))))
    if draw(st.booleans()):
        tensor = tensor.view(draw(st.sampled_from([dtypes.uint8, dtypes.int16, dtypes.bfloat16])))
        key[-1] = slice(key[-1].start, key[-1].stop, key[-1].step)
    return tensor[tuple(key)]


def whole(buffer="shared_hbm"):
    return emulator.NkiTensor.whole(emulator.Storage(SHAPE, dtypes.int32, buffer, "x"))


def flags_of(tensor, flags):
    """The flags, one a byte, of what a tensor addresses."""
    size = tensor.itemsize
    strides = [stride * size for stride in tensor.strides]
    return np.ndarray((*tensor.shape, size), bool, flags, tensor.offset * size, [*strides, 1])


@given(st.data())
def test_written_elements_are_those_of_every_view_added(data):
    tensor = whole()
    state, flags = Written(tensor.storage), np.zeros(tensor.storage.nbytes, bool)
    for _ in range(data.draw(st.integers(1, 8))):
        view = data.draw(views(tensor))
        state.add(view)
        flags_of(view, flags)[...] = True
        asked = data.draw(views(tensor))
        assert state.covers(asked) == flags_of(asked, flags).all()
        if not state.covers(asked):
            first = state.first_missing(asked)
            assert not flags_of(asked, flags)[first].all()
            assert flags_of(asked, flags).reshape(asked.size, -1)[: np.ravel_multi_index(first, asked.shape)].all()
    assert state.everything == flags.all()


@given(st.data())
def test_a_copy_of_the_state_stays_as_it_was(data):
    tensor = whole()
    state = Written(tensor.storage)
    state.add(data.draw(views(tensor)))
    kept, asked = state.copy(), data.draw(views(tensor))
    before = kept.covers(asked)
    state.add(tensor)
    assert kept.covers(asked) == before and state.covers(asked)


@given(st.data())
def test_runs_are_the_bytes_of_a_view_and_meet_where_views_share_one(data):
    tensor = whole()
    one, other = data.draw(views(tensor)), data.draw(views(tensor))
    touched = []
    for view in (one, other):
        flags = np.zeros(tensor.storage.nbytes, bool)
        flags_of(view, flags)[...] = True
        starts, length = hazards.runs(view, 0, None)
        mine = np.zeros_like(flags)
        for start in starts:
            assert not mine[start : start + length].any()
            mine[start : start + length] = True
        np.testing.assert_array_equal(mine, flags)
        touched.append(flags)
    meet = hazards.meet(hazards.runs(one, 0, None), hazards.runs(other, 0, None))
    assert meet == (touched[0] & touched[1]).any()


@given(st.data())
def test_a_place_gets_and_puts_the_bytes_of_a_view(data):
    tensor = whole()
    view = data.draw(views(tensor))
    flags = np.random.default_rng(0).random(tensor.storage.nbytes) < 0.5
    place, expected = Place(view, 0, None, 0), flags_of(view, flags).copy()
    np.testing.assert_array_equal(place.get(flags), expected)
    twin = flags.copy()
    flags_of(view, twin)[...] = ~expected
    place.put(flags, ~expected)
    np.testing.assert_array_equal(flags, twin)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 8), st.booleans(), st.integers(0, 4))))
@settings(max_examples=100)
def test_states_of_psum_regions_are_those_of_their_elements(steps):
    """Against an array with a state for each element: regions come and go, overlap and repeat."""
    tensor = emulator.NkiTensor.whole(emulator.Storage((4, 8), dtypes.float32, "psum", "t"))
    states, expected = initialisation.PsumStates(tensor.storage), np.zeros((4, 8), np.uint8)
    for partition, column, width, read, state in steps:
        at = slice(partition, 4), slice(column, min(column + width, 8))
        assert states.of(tensor[at]) == set(expected[at].ravel())
        if read:
            states.replace(tensor[at], initialisation.GROUP, initialisation.GROUP_READ)
            expected[at][expected[at] == initialisation.GROUP] = initialisation.GROUP_READ
        else:
            states.put(tensor[at], state)
            expected[at] = state
    np.testing.assert_array_equal(states.settled().reshape(4, 8, 4)[..., 0], expected)
