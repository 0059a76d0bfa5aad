"""Tensors of a traced kernel: a storage, and views of it as patterns of strides and counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from . import context, dtypes, views
from .dtypes import DType
from .enums import MemoryRegion
from .instruction import Refusal
from .opaque import Opaque, VirtualRegister

PARTITIONS = 128


@dataclass(eq=False)
class Storage:
    """Memory of one allocation: [partitions, free...] on chip, row-major in HBM."""

    shape: tuple[int, ...]
    dtype: DType
    buffer: str  # a MemoryRegion's value
    name: str
    kind: str = "internal"  # "input", "output", "constant"
    address: tuple[int, int] | None = None  # (partition, byte offset), where the kernel chose it
    core: int = 0
    source: str = ""  # where the kernel allocated it
    loop: object = None  # the innermost runtime loop whose body allocated it
    constant: object = field(default=None, repr=False)  # the data of nl.shared_constant
    mutable: bool = False  # an argument annotated nt.mutable_tensor
    written: bool = False  # some instruction has it as a destination
    contended: bool = False  # both cores touch it at run-time addresses
    tracked: bool = False  # which elements are written is known only at run time
    poisoned: bool = False  # elements that nothing writes are read

    def __str__(self):
        return f"{self.name}{list(self.shape)} {self.dtype}"

    @property
    def shows_unwritten(self) -> bool:
        """Whether elements that nothing has written may be read: they hold NaN."""
        return self.poisoned or self.tracked

    @property
    def on_chip(self) -> bool:
        return self.buffer in ("sbuf", "psum")

    @cached_property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @cached_property
    def partition_bytes(self) -> int:
        """Bytes in each partition, on chip."""
        return prod(self.shape[1:]) * self.dtype.itemsize


class NkiTensor(Opaque):
    """A view of a storage. Strides and offset count elements of `dtype` over the raw storage."""

    __slots__ = ("dtype", "index_bound", "index_stride", "indirect_dim", "offset", "outside", "scalar_offset", "shape",
                 "storage", "strides", "vector_offset")  # fmt: skip
    kind = "tensor"

    def __init__(self, storage, shape, strides, offset, dtype, scalar_offset=None, vector_offset=None,
                 indirect_dim=None, index_stride=0, index_bound=None, outside=False):  # fmt: skip
        self.storage = storage
        self.shape = shape
        self.strides = strides
        self.offset = offset
        self.dtype = dtype
        self.scalar_offset = scalar_offset
        self.vector_offset = vector_offset
        self.indirect_dim = indirect_dim
        self.index_stride = index_stride  # elements that one unit of the dynamic offset moves
        self.index_bound = index_bound  # dynamic offsets must be below it, None: only inside the storage
        self.outside = outside  # a view of what reaches past its storage: may do so too

    @classmethod
    def whole(cls, storage: Storage) -> NkiTensor:
        """The tensor that covers a storage."""
        return cls(storage, storage.shape, views.row_major(storage.shape), 0, storage.dtype)

    def _view(self, shape, strides, offset=None) -> NkiTensor:
        return NkiTensor(
            self.storage, tuple(shape), tuple(strides), self.offset if offset is None else offset, self.dtype,
            self.scalar_offset, self.vector_offset, self.indirect_dim, self.index_stride, self.index_bound,
            self.outside,
        )  # fmt: skip

    # What a view is.

    @property
    def name(self) -> str:
        return self.storage.name

    @property
    def buffer(self) -> MemoryRegion:
        return MemoryRegion(self.storage.buffer)

    @property
    def address(self) -> tuple[int, int] | None:
        """(partition, byte offset) where the kernel chose it."""
        return self.storage.address

    @property
    def is_sbuf(self) -> bool:
        return self.storage.buffer == "sbuf"

    @property
    def is_psum(self) -> bool:
        return self.storage.buffer == "psum"

    @property
    def is_hbm(self) -> bool:
        return not self.storage.on_chip

    @property
    def is_onchip(self) -> bool:
        return self.storage.on_chip

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def pattern(self) -> list[list[int]]:
        """[[stride, count], ...] in elements over the raw storage, partition first on chip."""
        return [[stride, count] for stride, count in zip(self.strides, self.shape)]

    def get_pattern(self) -> list[list[int]]:
        return self.pattern

    @property
    def partition_elements(self) -> int:
        """Elements of `dtype` that a whole partition of the storage holds, on chip."""
        return self.storage.partition_bytes // self.itemsize

    @property
    def start_partition(self) -> int:
        first = self.storage.address[0] if self.storage.address else 0
        return first + self.offset // self.partition_elements

    @property
    def num_partitions(self) -> int:
        return self.shape[0]

    @property
    def free_size(self) -> int:
        """Elements a partition."""
        return prod(self.shape[1:])

    def is_indirect(self) -> bool:
        return self.scalar_offset is not None or self.vector_offset is not None

    def is_contiguous(self) -> bool:
        first = 1 if self.is_onchip else 0
        return views.is_contiguous(self.shape[first:], self.strides[first:])

    def __repr__(self):
        return f"{self.name}[{', '.join(map(str, self.shape))}] {self.dtype} {self.storage.buffer}"

    def __bool__(self):
        """Of an argument as it was given, that it is there: nki-library's kernels ask so of optional ones.

        UNVERIFIED: no document says what it is. Any other tensor could only be asked for its values.
        """
        if self.storage.kind != "input" or self.shape != self.storage.shape or self.offset != 0:
            return Opaque.__bool__(self)
        context.note("Python `if`, `and`, `or` or `not` on an argument tells that it is there, not what it holds")
        return True

    # Views of a view.

    def __getitem__(self, key) -> NkiTensor:
        steps = views.index_steps(key, self.shape, self.is_onchip)
        shape, strides, offset = [], [], self.offset
        for dim, (start, count, step, keep) in enumerate(steps):
            self._guard(dim, (start, count, step) == (0, self.shape[dim], 1), "sliced")
            offset += start * self.strides[dim]
            if keep:
                shape.append(count)
                strides.append(step * self.strides[dim])
        return self._at_least(shape, strides, offset)

    def _at_least(self, shape, strides, offset) -> NkiTensor:
        """On-chip views keep a free dimension, HBM views any dimension."""
        if len(shape) < (2 if self.is_onchip else 1):
            shape, strides = [*shape, 1], [*strides, 1]
        return self._view(shape, strides, offset)

    def _guard(self, dim: int, untouched: bool, what: str):
        if not untouched and self.vector_offset is not None and dim == 0:
            raise Refusal(f"dimension 0 of a vector-indirect view cannot be {what}", shape=self.shape)

    def _dim(self, dim, *, allow_partition: bool, what: str) -> int:
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            raise Refusal(f"{what}: no such dimension", dim=dim, shape=self.shape)
        dim %= self.ndim
        if dim == 0 and not allow_partition:
            if self.is_onchip:
                raise Refusal(f"the partition dimension of an on-chip tensor cannot be {what}", shape=self.shape)
            self._guard(dim, False, what)
        return dim

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        dim = self._dim(dim, allow_partition=True, what="sliced")
        key = (slice(None),) * dim + (slice(start, end, step),)
        return self[key]

    def select(self, dim: int, index) -> NkiTensor:
        dim = self._dim(dim, allow_partition=True, what="selected")
        if not isinstance(index, (NkiTensor, VirtualRegister)):
            return self[(slice(None),) * dim + (index,)]
        if isinstance(index, VirtualRegister):
            raise Refusal("select takes an int or a [1,1] SBUF tensor; for a register use .ap(scalar_offset=register)")
        if dim == 0 and self.is_onchip:
            raise Refusal("the partition of an on-chip tensor cannot be selected at run time", shape=self.shape)
        self._refuse_second_offset()
        shape = self.shape[:dim] + self.shape[dim + 1 :]
        strides = self.strides[:dim] + self.strides[dim + 1 :]
        view = self._at_least(shape, strides, self.offset)
        return view._indirect(scalar_offset=index, dim=dim, stride=self.strides[dim], bound=self.shape[dim])

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        if dim != 0:
            raise Refusal("vector_select works on dimension 0 only", dim=dim)
        self._refuse_second_offset()
        _check_vector(self, vector_offset, getattr(vector_offset, "num_partitions", 0))
        view = self._view((vector_offset.shape[0], *self.shape[1:]), self.strides)
        return view._indirect(vector_offset=vector_offset, dim=0, stride=self.strides[0], bound=self.shape[0])

    def _refuse_second_offset(self):
        if self.is_indirect():
            raise Refusal("one dynamic offset per view: this view has one already", tensor=self)

    def _indirect(self, dim, stride, bound, scalar_offset=None, vector_offset=None) -> NkiTensor:
        if scalar_offset is not None:
            _check_scalar(scalar_offset)
        self.scalar_offset, self.vector_offset = scalar_offset, vector_offset
        self.indirect_dim, self.index_stride, self.index_bound = dim, stride, bound
        return self

    def permute(self, dims) -> NkiTensor:
        dims = tuple(dims)
        if sorted(dims) != list(range(self.ndim)):
            raise Refusal("permute: dims is no permutation of the dimensions", dims=dims, shape=self.shape)
        if dims[0] != 0:
            self._dim(0, allow_partition=False, what="permuted")
        return self._view((self.shape[d] for d in dims), (self.strides[d] for d in dims))

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        dim = self._dim(dim, allow_partition=False, what="broadcast")
        if self.shape[dim] != 1:
            raise Refusal("broadcast: the dimension must have size 1", dim=dim, shape=self.shape)
        shape, strides = list(self.shape), list(self.strides)
        shape[dim], strides[dim] = size, 0
        return self._view(shape, strides)

    def expand_dim(self, dim: int) -> NkiTensor:
        if dim == self.ndim:
            return self._view((*self.shape, 1), (*self.strides, 1))
        dim = self._dim(dim, allow_partition=False, what="preceded by a new dimension")
        outer = self.strides[dim] * self.shape[dim]
        return self._view((*self.shape[:dim], 1, *self.shape[dim:]), (*self.strides[:dim], outer, *self.strides[dim:]))

    def squeeze_dim(self, dim: int) -> NkiTensor:
        dim = self._dim(dim, allow_partition=False, what="squeezed")
        if self.shape[dim] != 1:
            raise Refusal("squeeze_dim: the dimension must have size 1", dim=dim, shape=self.shape)
        return self._view(self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def reshape_dim(self, dim: int, shape) -> NkiTensor:
        shape = views.infer(tuple(shape), self.shape[dim])
        dim = self._dim(dim, allow_partition=len(shape) == 1, what="split")
        strides = tuple(stride * self.strides[dim] for stride in views.row_major(shape))
        return self._view(
            self.shape[:dim] + shape + self.shape[dim + 1 :], self.strides[:dim] + strides + self.strides[dim + 1 :]
        )

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        end_dim %= self.ndim
        if start_dim != end_dim:
            start_dim = self._dim(start_dim, allow_partition=False, what="merged")
        merged = prod(self.shape[start_dim : end_dim + 1])
        return self._reshaped((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]), "flatten_dims")

    def reshape(self, shape) -> NkiTensor:
        return self._reshaped(tuple(shape), "reshape")

    def _reshaped(self, shape, what) -> NkiTensor:
        if any(not isinstance(size, int) or size < 1 for size in shape) or prod(shape) != self.size:
            raise Refusal(f"{what}: the number of elements must stay", shape=self.shape, new_shape=shape)
        first = 1 if self.is_onchip or self.vector_offset is not None else 0
        if shape[:first] != self.shape[:first]:
            raise Refusal(f"{what}: the partition dimension must stay", shape=self.shape, new_shape=shape)
        strides = views.reshape_strides(self.shape[first:], self.strides[first:], shape[first:])
        if strides is None:
            raise Refusal(
                f"{what}: the view's layout allows it only with a copy", pattern=self.pattern, new_shape=shape
            )
        return self._view(shape, self.strides[:first] + strides)

    def rearrange(self, src_pattern, dst_pattern, fixed_sizes=None) -> NkiTensor:
        split, order, merged = views.rearrange_plan(src_pattern, dst_pattern, fixed_sizes or {}, self.shape)
        view = self
        for dim in reversed(range(self.ndim)):
            if len(split[dim]) != 1:
                view = view.reshape_dim(dim, split[dim])
        view = view.permute(order)
        for start, end in reversed(merged):
            if start != end:
                view = view.flatten_dims(start, end)
        return view

    def view(self, dtype) -> NkiTensor:
        dtype = _dtype(dtype)
        if self.is_indirect():
            raise Refusal("view: not supported on a dynamically addressed view", tensor=self)
        old, new = self.itemsize, dtype.itemsize
        if old == new:
            return NkiTensor(self.storage, self.shape, self.strides, self.offset, dtype, outside=self.outside)
        if self.strides[-1] != 1 and self.shape[-1] != 1:
            raise Refusal("view: the last dimension must be contiguous", pattern=self.pattern)
        quantities = (self.offset, self.shape[-1], *(s for s, n in zip(self.strides[:-1], self.shape) if n > 1))
        if any(quantity * old % new for quantity in quantities):
            raise Refusal(
                "view: sizes, strides and offset must be whole elements of the new dtype", tensor=self, dtype=dtype
            )
        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        strides = (*(stride * old // new for stride in self.strides[:-1]), 1)
        return NkiTensor(self.storage, shape, strides, self.offset * old // new, dtype, outside=self.outside)

    reinterpret_cast = view

    def indirect(self, index, num_elem=None):
        raise Refusal(".indirect() needs NeuronCore-v4 (trn3)")

    def ap(self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, dtype=None) -> NkiTensor:
        """An explicit access pattern over the raw storage, from this view's offset on."""
        if scalar_offset is not None and vector_offset is not None:
            raise Refusal("scalar_offset and vector_offset exclude each other")
        if scalar_offset is not None or vector_offset is not None:
            self._refuse_second_offset()
        if self.offset or self.size != self.storage.nbytes // self.itemsize:
            context.note(".ap() on a sliced view: sources conflict on how it composes; call it on the whole tensor")
        dtype = self.dtype if dtype is None else _dtype(dtype)
        scale = self.itemsize / dtype.itemsize
        start = self.offset * scale + (offset or 0)
        if start != int(start):
            raise Refusal("ap: the view does not start at a whole element of the new dtype", tensor=self, dtype=dtype)
        shape = tuple(count for _, count in pattern)
        strides = tuple(stride for stride, _ in pattern)
        view = NkiTensor(self.storage, shape, strides, int(start), dtype)
        if view.is_onchip and view.ndim < 2:
            raise Refusal("ap: the pattern of an on-chip tensor has a partition pair and free pairs", pattern=pattern)
        if vector_offset is not None:
            if indirect_dim != 0:
                raise Refusal("vector_offset works with indirect_dim=0 only", indirect_dim=indirect_dim)
            _check_vector(self, vector_offset, shape[0])
            stride = int(self.strides[0] * scale)
            # The pattern's leading stride is ignored; rows follow the base tensor's dimension 0.
            view.strides = (stride, *strides[1:])
            view._indirect(vector_offset=vector_offset, dim=0, stride=stride, bound=self.shape[0])
        elif scalar_offset is not None:
            dim = self._dim(indirect_dim, allow_partition=self.is_hbm, what="addressed at run time")
            view._indirect(scalar_offset=scalar_offset, dim=dim, stride=int(self.strides[dim] * scale), bound=None)
        _check_pattern(view)
        view.outside = past_storage(view) is not None
        return view


def _dtype(dtype) -> DType:
    resolved = dtypes.resolve(dtype)
    if resolved is None:
        raise Refusal("not an nl dtype", dtype=dtype)
    return resolved


def _check_scalar(offset):
    if isinstance(offset, VirtualRegister):
        return
    if not (isinstance(offset, NkiTensor) and offset.is_sbuf and offset.size == 1 and offset.dtype.is_integer):
        raise Refusal("a scalar offset is a register or a [1,1] integer tensor in SBUF", scalar_offset=offset)


def _check_vector(base, offset, rows):
    if not base.is_hbm:
        raise Refusal("a vector offset addresses HBM tensors only", tensor=base)
    # [P, 1] everywhere but in a gathering dma_transpose, which takes columns of 128 (checked where it is used).
    if not (isinstance(offset, NkiTensor) and offset.is_sbuf and offset.size >= rows):
        raise Refusal(
            "a vector offset is an SBUF tensor [P, 1], one row index per partition", vector_offset=offset, P=rows
        )
    if offset.dtype not in ("int32", "uint32"):
        raise Refusal("a vector offset is int32 or uint32", dtype=offset.dtype)


def _check_pattern(view: NkiTensor):
    """Counts positive, strides not negative, on chip whole partitions apart."""
    if any(not isinstance(n, int) or n < 1 or not isinstance(s, int) or s < 0 for s, n in view.pattern):
        raise Refusal("ap: counts are positive and strides are not negative", pattern=view.pattern)
    if view.is_onchip:
        stride, count = view.pattern[0]
        if count > 1 and stride != view.partition_elements:
            raise Refusal("ap: the partition stride is the number of elements a partition", stride=stride,
                          elements=view.partition_elements)  # fmt: skip


def past_storage(view: NkiTensor) -> Refusal | None:
    """Why a view leaves its storage, which only `ap` can make it do; None where it does not.

    A kernel may make such a view, as long as no instruction uses it.
    """
    offset, size, first = view.offset, view.storage.nbytes // view.itemsize, 1 if view.vector_offset is not None else 0
    values = {"pattern": view.pattern, "offset": view.offset, "shape": view.storage.shape}
    if view.is_onchip:
        size, first = view.partition_elements, 1
        partition, offset = divmod(offset, size)
        if partition + view.shape[0] > view.storage.shape[0]:
            return Refusal("ap: pattern past the last partition", **values)
    last = offset + sum((count - 1) * stride for stride, count in view.pattern[first:])
    if last >= size or offset < 0:
        return Refusal("ap: pattern outside the tensor", **values)
    return None
