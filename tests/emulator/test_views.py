"""Views of tensors against NumPy's own views of the same memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.reference import emulator
from draft_verify.reference.emulator import dtypes
from draft_verify.reference.emulator.memory import Memory

nl = emulator.modules()["nki.language"]


def tensor_and_array(shape, buffer, dtype=dtypes.int32):
    """A tensor with memory behind it, that memory, and the NumPy array that has the same elements."""
    storage = emulator.Storage(shape, dtype, buffer, "x")
    array = np.arange(storage.size).astype(dtype.np).reshape(shape)
    memory = Memory()
    memory.bytes[storage] = array.reshape(-1).view(np.uint8)
    return emulator.NkiTensor.whole(storage), memory, array


def slices(size):
    return st.tuples(st.integers(0, size - 1), st.integers(1, size), st.integers(1, 3)).map(
        lambda part: slice(part[0], max(part[0] + 1, part[1]), part[2])
    )


@st.composite
def viewed(draw):
    """A tensor after some views, and what NumPy makes of them."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=2, max_size=4)))
    buffer = draw(st.sampled_from(["sbuf", "psum", "shared_hbm"]))
    on_chip = buffer != "shared_hbm"
    tensor, memory, array = tensor_and_array(shape, buffer)
    for _ in range(draw(st.integers(1, 4))):
        first = 1 if on_chip else 0
        if tensor.ndim == first:
            break
        kind = draw(st.sampled_from(["slice", "permute", "expand", "broadcast", "split", "merge", "index"]))
        dim = draw(st.integers(first, tensor.ndim - 1))
        if kind == "slice":
            part = draw(slices(tensor.shape[dim]))
            key = (slice(None),) * dim + (part,)
            tensor, array = tensor[key], array[key]
        elif kind == "index" and tensor.ndim > 2:
            index = draw(st.integers(-tensor.shape[dim], tensor.shape[dim] - 1))
            key = (slice(None),) * dim + (index,)
            tensor, array = tensor[key], array[key]
        elif kind == "permute":
            order = tuple(range(first)) + tuple(draw(st.permutations(range(first, tensor.ndim))))
            tensor, array = tensor.permute(order), array.transpose(order)
        elif kind == "expand":
            tensor, array = tensor.expand_dim(dim), np.expand_dims(array, dim)
        elif kind == "broadcast" and tensor.shape[dim] == 1:
            size = (*tensor.shape[:dim], 3, *tensor.shape[dim + 1 :])
            tensor, array = tensor.broadcast(dim, 3), np.broadcast_to(array, size)
        elif kind == "split" and tensor.shape[dim] % 2 == 0:
            tensor = tensor.reshape_dim(dim, (2, -1))
            array = array.reshape(*array.shape[:dim], 2, -1, *array.shape[dim + 1 :])
        elif kind == "merge" and tensor.is_contiguous() and dim + 1 < tensor.ndim:
            tensor = tensor.flatten_dims(dim, dim + 1)
            array = array.reshape(*array.shape[:dim], -1, *array.shape[dim + 2 :])
    return tensor, memory, array


@given(viewed())
def test_a_chain_of_views_addresses_what_numpys_does(case):
    tensor, memory, array = case
    assert tensor.shape == array.shape
    np.testing.assert_array_equal(memory.view(tensor), array)
    assert tensor.size == array.size
    assert not tensor.is_indirect()


@given(viewed(), st.data())
def test_a_reshape_is_the_same_elements_in_order_or_is_refused(case, data):
    tensor, memory, array = case
    first = 1 if tensor.is_onchip else 0
    free = int(np.prod(tensor.shape[first:]))
    factor = data.draw(st.sampled_from([n for n in range(1, free + 1) if free % n == 0]))
    shape = (*tensor.shape[:first], factor, free // factor)
    try:
        reshaped = tensor.reshape(shape)
    except emulator.Refusal:
        assert not tensor.is_contiguous()
        return
    np.testing.assert_array_equal(memory.view(reshaped), array.reshape(shape))


@given(viewed())
def test_a_pattern_given_to_ap_is_the_same_view(case):
    tensor, memory, array = case
    whole = emulator.NkiTensor.whole(tensor.storage)
    if tensor.is_onchip and tensor.shape[0] == 1:
        return
    again = whole.ap(tensor.get_pattern(), offset=tensor.offset)
    np.testing.assert_array_equal(memory.view(again), array)


def test_a_partition_index_keeps_the_partition_dimension_and_hbm_drops_it():
    chip, _, _ = tensor_and_array((4, 6), "sbuf")
    hbm, _, _ = tensor_and_array((4, 6), "shared_hbm")
    assert chip[2].shape == (1, 6)
    assert chip[2, 3].shape == (1, 1)
    assert hbm[2].shape == (6,)
    assert hbm[2, 3].shape == (1,)
    assert chip[-1].start_partition == 3


def test_rearrange_splits_permutes_and_merges_by_name():
    tensor, memory, array = tensor_and_array((4, 24), "sbuf")
    view = tensor.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4})
    np.testing.assert_array_equal(memory.view(view), array.reshape(4, 4, 6).transpose(0, 2, 1))
    tensor, memory, array = tensor_and_array((2, 3, 4), "shared_hbm")
    view = tensor.rearrange(("a", "b", "c"), (("a", "b"), "c"))
    np.testing.assert_array_equal(memory.view(view), array.reshape(6, 4))


@pytest.mark.parametrize("dtype", [dtypes.uint8, dtypes.int16, dtypes.float32, dtypes.bfloat16])
def test_view_reinterprets_bits_as_numpy_does(dtype):
    tensor, memory, array = tensor_and_array((4, 6), "sbuf")
    np.testing.assert_array_equal(
        memory.view(tensor[:, 2:4].view(dtype)).view(np.uint8), array[:, 2:4].copy().view(np.uint8)
    )
    assert tensor.view(dtype).shape == (4, 6 * 4 // dtype.itemsize)


def test_ds_is_a_slice():
    tensor, memory, array = tensor_and_array((4, 6), "shared_hbm")
    np.testing.assert_array_equal(memory.view(tensor[nl.ds(1, 2), nl.ds(3, 3)]), array[1:3, 3:6])


REFUSED = {
    "past the end": lambda t: t[:, 0:7],
    "before the start": lambda t: t[:, -7],
    "empty slice": lambda t: t[:, 3:3],
    "negative step": lambda t: t[:, ::-1],
    "too many indices": lambda t: t[0, 0, 0],
    "new axis": lambda t: t[None],
    "array index": lambda t: t[np.array([1, 2])],
    "bool index": lambda t: t[True],
    "permuted partition": lambda t: t.permute((1, 0)),
    "split partition": lambda t: t.reshape_dim(0, (2, 2)),
    "broadcast partition": lambda t: t[0:1].broadcast(0, 4),
    "reshaped partition": lambda t: t.reshape((8, 3)),
    "partition stride": lambda t: t.ap([[3, 4], [1, 6]]),
    "broadcast of more than one": lambda t: t.broadcast(1, 12),
    "squeeze of more than one": lambda t: t.squeeze_dim(1),
    "copying reshape": lambda t: t.reshape((4, 2, 3)).permute((0, 2, 1)).reshape((4, 6)),
    "no such dtype": lambda t: t.view("float64"),
    "trn3 indirection": lambda t: t.indirect(None),
}


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_a_view_that_does_not_exist_is_refused(build):
    with pytest.raises(emulator.Refusal):
        build(tensor_and_array((4, 6), "sbuf")[0])


LOOKING = {
    "if": bool,
    "int": int,
    "float": float,
    "iteration": list,
    "len": len,
    "membership": lambda t: 1 in t,
    "comparison": lambda t: t == t[0:4],
    "order": lambda t: t < 1,
    "sum": lambda t: t + 1,
    "product": lambda t: 2 * t,
    "negation": lambda t: -t,
    "index": lambda t: [0, 1][t],
    "assignment": lambda t: t.__setitem__(0, 1),
}


@pytest.mark.parametrize("look", LOOKING.values(), ids=LOOKING)
def test_python_cannot_look_at_a_tensor(look):
    with pytest.raises(emulator.Refusal, match="not known while the kernel is traced"):
        look(tensor_and_array((4, 6), "sbuf")[0])


def test_a_tensor_is_not_none():
    tensor = tensor_and_array((4, 6), "sbuf")[0]
    assert tensor != None  # noqa: E711 - what kernels of the parser's time write
    assert {tensor: 1}[tensor] == 1
