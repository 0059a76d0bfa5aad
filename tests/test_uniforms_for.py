"""uniforms_for: Philox4x32-10 to the bit, open interval, independent streams."""

from __future__ import annotations

import numpy as np
import pytest

import draft_verify
from draft_verify.reference.uniforms_for import philox4x32

# Random123, tests/kat_vectors: "philox4x32 10" counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, output):
    np.testing.assert_array_equal(philox4x32(words(counter), words(key)), words(output))


def test_counter_is_position_column_purpose_and_key_is_the_seed():
    uniforms = draft_verify.uniforms_for(np.array([7 + (9 << 32)], np.uint64), np.array([41], np.int32), 3, "draft")
    for column in range(5):
        word = philox4x32(np.array([41, column, 1, 0]), np.array([7, 9]))[0]
        assert uniforms[0, column] == ((int(word) >> 9) + 0.5) * 2.0**-23


def test_uniforms_are_float32_strictly_within_the_open_interval():
    uniforms = draft_verify.uniforms_for(np.arange(2000, dtype=np.uint32), np.zeros(2000, np.int32), 62)
    assert uniforms.shape == (2000, 64) and uniforms.dtype == np.float32
    assert 0 < uniforms.min() < 1e-4 and 1 - 1e-4 < uniforms.max() < 1
    assert abs(uniforms.mean() - 0.5) < 4 * (12 * uniforms.size) ** -0.5
    # The smallest and the largest word give the smallest and the largest value there is.
    assert np.float32(0.5) * np.float32(2.0**-23) > 0
    assert (np.float32(2**23 - 1) + np.float32(0.5)) * np.float32(2.0**-23) == np.nextafter(
        np.float32(1), np.float32(0)
    )


def test_a_sequence_has_its_own_numbers_whoever_else_is_in_the_batch():
    seeds, positions = np.array([3, 8, 3], np.uint32), np.array([5, 9, 6], np.int32)
    together = draft_verify.uniforms_for(seeds, positions, 4)
    for b in range(3):
        alone = draft_verify.uniforms_for(seeds[b : b + 1], positions[b : b + 1], 4)
        np.testing.assert_array_equal(alone[0], together[b])
    assert len(np.unique(together)) == together.size


def test_draft_and_verify_streams_share_nothing():
    seeds, positions = np.zeros(500, np.uint32), np.arange(500, dtype=np.int32)
    verify = draft_verify.uniforms_for(seeds, positions, 2)
    draft = draft_verify.uniforms_for(seeds, positions, 2, purpose="draft")
    assert abs(np.corrcoef(verify.ravel(), draft.ravel())[0, 1]) < 4 * verify.size**-0.5


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seeds", np.zeros(2, np.float32)),
        ("seeds", np.zeros((2, 1), np.uint32)),
        ("positions", np.zeros(3, np.int32)),
        ("positions", np.full(2, -1, np.int32)),
        ("K", -1),
        ("purpose", "recovery"),
    ],
)
def test_bad_input_is_refused_by_name(argument, value):
    arguments = {"seeds": np.zeros(2, np.uint32), "positions": np.zeros(2, np.int32), "K": 3, argument: value}
    with pytest.raises(ValueError, match=argument):
        draft_verify.uniforms_for(**arguments)
