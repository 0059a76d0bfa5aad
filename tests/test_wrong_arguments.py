"""Whatever an operation cannot take is refused by an argument's name, of arrays and of tensors alike."""

import inspect

import numpy as np
import pytest

pytest.importorskip("torch")

from draft_verify import arrays
from tests.test_torch_ops import CASES, each, sample

WRONG = {
    "a word": lambda array: "word",
    "a dictionary": lambda array: {},
    "objects": lambda array: array.astype(object),
    "complex numbers": lambda array: array.astype(np.complex64),
    "two dimensions more": lambda array: array[None, None],
    "no entries": lambda array: array[..., :0],
    "no sequences": lambda array: array[:0],
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name, i", CASES)
def test_every_array_that_does_not_fit_is_refused_by_name(name, i, kind):
    function, *made = sample(name, i)
    signature = inspect.signature(function)
    args, kwargs = made[kind == "torch"]
    given = signature.bind(*args, **kwargs).arguments
    for argument, value in given.items():
        if not hasattr(value, "dtype"):
            continue
        for what, change in WRONG.items():
            wrong = change(np.asarray(arrays.to_numpy(value)))
            if kind == "torch" and what != "objects":
                wrong = each(wrong, arrays.to_torch)
            with pytest.raises(ValueError, match="^(" + "|".join(signature.parameters) + "): got ") as refused:
                function(**{**given, argument: wrong})
                pytest.fail(f"{argument} was taken: {what}")
            assert ", expected " in str(refused.value)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name, i", CASES)
def test_arrays_may_lie_in_memory_as_they_like(name, i, kind):
    """Every second element of a larger array; what is written goes there."""

    def scattered(value):
        if not hasattr(value, "dtype"):
            return value
        whole = np.repeat(arrays.to_numpy(value)[..., None], 2, -1).copy()
        return arrays.to_torch(whole)[..., 0] if kind == "torch" else whole[..., 0]

    function, *made = sample(name, i)
    args, kwargs = made[kind == "torch"]
    apart = [tuple(map(scattered, value)) if isinstance(value, tuple) else scattered(value) for value in args]
    result = function(*apart, **{key: scattered(value) for key, value in kwargs.items()}, backend="emulator")
    expected = function(*args, **kwargs, backend="emulator")
    for got, want in zip(arrays.leaves([result]), arrays.leaves([expected])):
        assert np.asarray(arrays.to_numpy(got)).tobytes() == np.asarray(arrays.to_numpy(want)).tobytes()
