"""Arithmetic of views: index expressions, strides that a reshape keeps, named rearrangements."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .instruction import Refusal
from .opaque import Opaque


@dataclass(frozen=True)
class DynamicSlice:
    """`nl.ds(start, size)`."""

    start: int
    size: int


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous array, in elements."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def is_contiguous(shape, strides) -> bool:
    return all(size == 1 or stride == dense for size, stride, dense in zip(shape, strides, row_major(tuple(shape))))


def index_steps(key, shape: tuple[int, ...], on_chip: bool) -> list[tuple[int, int, int, bool]]:
    """(start, count, step, keep) per dimension of an index expression; out of range is refused, never clipped."""
    key = key if isinstance(key, tuple) else (key,)
    ellipses = sum(item is Ellipsis for item in key)
    if ellipses > 1 or len(key) - ellipses > len(shape):
        raise Refusal("too many indices", index=_show(key), shape=shape)
    if ellipses == 0:
        key = (*key, Ellipsis)
    at = next(position for position, item in enumerate(key) if item is Ellipsis)
    key = key[:at] + (slice(None),) * (len(shape) - len(key) + 1) + key[at + 1 :]
    return [_index_step(item, dim, size, shape, on_chip) for dim, (item, size) in enumerate(zip(key, shape))]


def _index_step(item, dim, size, shape, on_chip):
    if isinstance(item, DynamicSlice):
        item = slice(item.start, _plain(item.start, item, shape) + _plain(item.size, item, shape), 1)
    if isinstance(item, slice):
        step = 1 if item.step is None else _plain(item.step, item, shape)
        start = _wrap(0 if item.start is None else _plain(item.start, item, shape), size)
        stop = _wrap(size if item.stop is None else _plain(item.stop, item, shape), size)
        if step < 1 or not 0 <= start < stop <= size:
            raise Refusal("slice out of range: 0 <= start < end <= size and step >= 1",
                          dim=dim, slice=_show((item,)), size=size, shape=shape)  # fmt: skip
        return start, (stop - start + step - 1) // step, step, True
    index = _wrap(_plain(item, item, shape), size)
    if not 0 <= index < size:
        raise Refusal("index out of range", dim=dim, index=item, size=size, shape=shape)
    return index, 1, 1, on_chip and dim == 0


def _wrap(value, size):
    return value + size if value < 0 else value


def _plain(value, item, shape) -> int:
    if isinstance(value, Opaque):
        raise Refusal(
            "slices are trace-time ints; for a run-time offset use .ap(scalar_offset=...) or select", shape=shape
        )
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refusal("a tensor is indexed by ints, slices, nl.ds and Ellipsis", index=_show((item,)), shape=shape)
    return value


def _show(key) -> str:
    def one(item):
        if isinstance(item, slice):
            return ":".join("" if part is None else str(part) for part in (item.start, item.stop, item.step)).rstrip(
                ":"
            )
        return "..." if item is Ellipsis else str(item)

    return "[" + ", ".join(map(one, key)) + "]"


def infer(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """`shape` with one -1 replaced so that its product is `size`."""
    if shape.count(-1) == 1:
        known = -prod(shape)
        shape = tuple(size // known if part == -1 and known else part for part in shape)
    if any(part < 1 for part in shape) or prod(shape) != size:
        raise Refusal("the parts of a split dimension multiply to its size", parts=shape, size=size)
    return shape


def reshape_strides(shape, strides, new_shape) -> tuple[int, ...] | None:
    """Strides of the same elements in the same order under `new_shape`, None where that needs a copy."""
    # Runs of old dimensions that are contiguous among themselves: (elements, innermost stride).
    runs = []
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    result, left, stride = [], 1, 1
    for size in reversed(new_shape):
        if size == 1:
            result.append(stride)  # as far as the inner dimensions reach
            continue
        if left == 1:
            if not runs:
                return None
            left, stride = runs.pop()
        if left % size:
            return None
        result.append(stride)
        left //= size
        stride *= size
    return tuple(reversed(result)) if not runs and left == 1 else None


def rearrange_plan(src, dst, sizes: dict, shape):
    """Splits per dimension, the permutation of the split dimensions, and the (start, end) dimensions to merge."""
    groups = [part if isinstance(part, tuple) else (part,) for part in src]
    if len(groups) != len(shape):
        raise Refusal("rearrange: the source pattern names every dimension", pattern=src, shape=shape)
    split, names = [], []
    for group, size in zip(groups, shape):
        split.append(infer(tuple(sizes.get(name, size if len(group) == 1 else -1) for name in group), size))
        names += group
    targets = [part if isinstance(part, tuple) else (part,) for part in dst]
    wanted = [name for group in targets for name in group]
    if sorted(wanted) != sorted(names) or len(set(names)) != len(names):
        raise Refusal("rearrange: both patterns name the same dimensions once", source=src, destination=dst)
    merged, position = [], 0
    for group in targets:
        merged.append((position, position + len(group) - 1))
        position += len(group)
    return split, tuple(names.index(name) for name in wanted), merged
