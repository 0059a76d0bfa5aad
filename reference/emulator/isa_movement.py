"""Instructions that move data: DMA, copies, fills, shuffles across partitions."""

from __future__ import annotations

import math

import numpy as np

from . import cycles, rules
from .enums import dge_mode as dge_modes
from .enums import engine as engines
from .enums import oob_mode as oob_modes
from .instruction import Call, Refusal, instruction
from .numerics import f32, store
from .rules import is_tensor

_SHUFFLE_KEEP = 255
_TRANSPOSE_ALIGNMENT = 32


def _check_dma(call: Call, *tensors) -> None:
    if call.args.get("priority") is not None:
        raise Refusal("priority needs NeuronCore-v4 (trn3)", priority=call.priority)
    rules.member(call, "oob_mode", oob_modes)
    if "dge_mode" in call.args:
        rules.member(call, "dge_mode", dge_modes)
    for tensor in tensors:
        if tensor.is_psum:
            raise Refusal("a DMA does not reach PSUM: copy to SBUF with nisa.tensor_copy first", tensor=tensor)
    if call.oob_mode == oob_modes.skip and not any(tensor.is_indirect() for tensor in tensors):
        call.note("oob_mode.skip is for dynamic addresses: no tensor has one, so it does nothing")


def _check_dma_copy(call: Call) -> None:
    rules.tensor_operand(call, "dst", "src")
    dst, src = call.dst, call.src
    _check_dma(call, dst, src)
    if dst.size != src.size:
        raise Refusal("dst and src must have the same number of elements", dst=dst.shape, src=src.shape)
    _check_descriptors(call, dst, src)
    if call.dge_mode == dge_modes.hwdge and dst.dtype != src.dtype:
        raise Refusal("dge_mode.hwdge does not convert: dst and src must have the same dtype", dst=dst.dtype,
                      src=src.dtype)  # fmt: skip
    if call.args["engine"] != engines.unknown:
        if call.dge_mode != dge_modes.hwdge:
            raise Refusal("engine is only for dge_mode.hwdge", dge_mode=call.dge_mode.name)
        rules.engine_in(call, engines.sync, engines.scalar)
    _check_dma_overlap(dst, src)


def _check_descriptors(call: Call, dst, src) -> None:
    """Who may address dynamically, and with which descriptor generation."""
    for indirect, other in ((dst, src), (src, dst)):
        if indirect.vector_offset is not None:
            if not other.is_sbuf:
                raise Refusal("a gather or scatter has SBUF on its other side (BIR231): go through SBUF",
                              other=other.buffer)  # fmt: skip
            if call.dge_mode not in (dge_modes.unknown, dge_modes.swdge):
                raise Refusal("a gather or scatter needs software descriptors: dge_mode unknown or swdge",
                              dge_mode=call.dge_mode.name)  # fmt: skip
        if indirect.scalar_offset is not None and call.dge_mode == dge_modes.none:
            raise Refusal("dge_mode.none has static addresses: no scalar_offset")


_EXACT_OVERLAP_ELEMENTS = 1 << 20


def _check_dma_overlap(dst, src) -> None:
    if dst.storage is not src.storage or dst.is_indirect() or src.is_indirect():
        return
    if (dst.offset, rules.merged(dst.pattern)) == (src.offset, rules.merged(src.pattern)):
        return
    if max(dst.size, src.size) <= _EXACT_OVERLAP_ELEMENTS and np.intersect1d(_elements(dst), _elements(src)).size:
        raise Refusal("dst overlaps src: the descriptors of a DMA run in no particular order", dst=dst.pattern,
                      src=src.pattern)  # fmt: skip


def _elements(tensor) -> np.ndarray:
    offsets = np.full(1, tensor.offset, np.int64)
    for stride, count in rules.merged(tensor.pattern):
        offsets = (offsets[:, None] + stride * np.arange(count)).ravel()
    return offsets


@instruction(writes="dst", reads="src", engine=engines.dma, check=_check_dma_copy)
def dma_copy(
    dst, src, priority=None, oob_mode=oob_modes.error, dge_mode=dge_modes.unknown, engine=engines.unknown, name=None
):
    """dst = src between HBM and SBUF; other dtypes go through float32."""
    store(dst, src)


def _check_dma_transpose(call: Call) -> None:
    rules.tensor_operand(call, "dst", "src")
    dst, src = call.dst, call.src
    _check_dma(call, dst, src)
    rules.buffer_in(call, "sbuf", "dst")
    rules.same_dtype(call, "dst", "src")
    if dst.is_indirect():
        raise Refusal("dma_transpose writes a static dst only")
    permutation = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(src.ndim)
    if permutation is None:
        raise Refusal("src must have 2, 3 or 4 dimensions", shape=src.shape)
    if call.axes is not None and tuple(call.axes) != permutation:
        raise Refusal(f"a {src.ndim}-dimensional src is transposed by axes {permutation}", axes=call.axes)
    transposed = tuple(src.shape[axis] for axis in permutation)
    if dst.shape != transposed:
        raise Refusal("dst.shape must be the permuted src.shape, rank included", dst=dst.shape, permuted=transposed)
    if src.dtype.itemsize not in (2, 4):
        raise Refusal("a DMA transposes dtypes of 2 or 4 bytes", dtype=src.dtype)
    if call.oob_mode == oob_modes.skip and not src.is_indirect():
        raise Refusal("oob_mode.skip is only for a dynamically addressed src")
    if src.vector_offset is not None:
        _check_indirect_transpose(call)
    elif call.dge_mode not in (dge_modes.unknown, dge_modes.hwdge):
        raise Refusal("a direct transpose takes dge_mode unknown or hwdge", dge_mode=call.dge_mode.name)
    elif call.dge_mode == dge_modes.hwdge:
        _check_generated_transpose(call)
        first = src.shape[0]
        if src.ndim == 2 and first != 16:
            raise Refusal("hwdge: a 2-dimensional src has 16 rows", shape=src.shape)
        if src.ndim > 2 and (first not in (1, 2, 4, 8, 16) or first * src.shape[-2] % 16):
            raise Refusal("hwdge: src.shape[0] is 1, 2, 4, 8 or 16 and src.shape[0] * src.shape[-2] divides by 16",
                          shape=src.shape)  # fmt: skip


def _check_generated_transpose(call: Call) -> None:
    """What a transpose needs whose descriptors are generated, by hardware or software."""
    dst, src = call.dst, call.src
    if src.dtype.itemsize != 2:
        raise Refusal("this transpose takes 2-byte dtypes only", dtype=src.dtype)
    if src.shape[-1] > 128:
        raise Refusal("this transpose takes src.shape[-1] <= 128", shape=src.shape)
    start = dst.offset % dst.partition_elements
    steps = [stride for stride, count in dst.pattern[1:-1] if count > 1]
    if any(elements * dst.dtype.itemsize % _TRANSPOSE_ALIGNMENT for elements in (start, *steps)):
        raise Refusal("dst of this transpose starts and steps in multiples of 32 bytes (BIR155)", start=start,
                      steps=steps, dtype=dst.dtype)  # fmt: skip


def _check_indirect_transpose(call: Call) -> None:
    src, index = call.src, call.src.vector_offset
    if call.dge_mode not in (dge_modes.unknown, dge_modes.swdge):
        raise Refusal("an indirect transpose takes dge_mode unknown or swdge", dge_mode=call.dge_mode.name)
    _check_generated_transpose(call)
    if src.ndim == 4 and 1 not in (src.shape[1], src.shape[2]):
        raise Refusal("an indirect transpose of 4 dimensions has src.shape[1] or src.shape[2] equal to 1",
                      shape=src.shape)  # fmt: skip
    rows, columns = index.num_partitions, index.free_size
    if index.dtype != "uint32":
        raise Refusal("the indices of an indirect transpose are uint32", dtype=index.dtype)
    if src.shape[0] % 16 or rows * columns < src.shape[0]:
        raise Refusal("an indirect transpose gathers a multiple of 16 rows, one index each", rows=src.shape[0],
                      indices=index.shape)  # fmt: skip
    if rows % 16 or not 16 <= rows <= 128 or (columns > 1 and rows != 128):
        raise Refusal("indices have 16..128 partitions (a multiple of 16), exactly 128 for several columns",
                      indices=index.shape)  # fmt: skip


@instruction(writes="dst", reads="src", engine=engines.dma, check=_check_dma_transpose)
def dma_transpose(dst, src, axes=None, priority=None, dge_mode=dge_modes.unknown, oob_mode=oob_modes.error, name=None):
    """dst = src with its first and last dimensions exchanged, bit by bit."""
    dst[...] = np.swapaxes(src, 0, -1) if src.ndim != 4 else src.transpose(3, 1, 2, 0)


_MAX_DMA_SOURCES = 16


def _check_dma_compute(call: Call) -> None:
    rules.tensor_operand(call, "dst")
    dst, srcs = call.dst, call.srcs
    if not isinstance(srcs, (list, tuple)) or not all(is_tensor(src) for src in srcs):
        raise Refusal("srcs must be a list of tensors", given=srcs)
    if not 1 <= len(srcs) <= _MAX_DMA_SOURCES:
        raise Refusal("dma_compute takes 1 to 16 sources", given=len(srcs))
    _check_dma(call, dst, *srcs)
    rules.operator_in(call, "reduce_op", ("add",))
    if call.scales is not None and (len(call.scales) != len(srcs) or any(scale != 1.0 for scale in call.scales)):
        raise Refusal("scales must be 1.0, one for each source", scales=call.scales)
    for src in srcs:
        if src.size != dst.size:
            raise Refusal("every source has the elements of dst", dst=dst.shape, src=src.shape)
    if any(tensor.scalar_offset is not None for tensor in (dst, *srcs)):
        raise Refusal("dma_compute has static addresses or a vector_offset, no scalar_offset")
    if any(tensor.vector_offset is not None for tensor in (dst, *srcs)):
        _check_read_modify_write(call)


def _check_read_modify_write(call: Call) -> None:
    dst, srcs = call.dst, call.srcs
    if not call.unique_indices:
        raise Refusal("unique_indices must be True: repeated indices are not supported")
    if len(srcs) != 2:
        raise Refusal("a read-modify-write takes exactly 2 sources", given=len(srcs))
    indirect = [src for src in srcs if src.vector_offset is not None]
    direct = [src for src in srcs if src.vector_offset is None]
    if dst.vector_offset is not None:
        # Scatter: dst(HBM)[i] += src(SBUF).
        if len(indirect) != 1 or not _same_view(indirect[0], dst) or not direct[0].is_sbuf:
            raise Refusal("a scatter adds one SBUF source to dst, which is the other source", srcs=srcs, dst=dst)
    elif len(indirect) != 1 or not dst.is_sbuf or not _same_view(direct[0], dst):
        raise Refusal("a gather adds one indirect HBM source to an SBUF dst, which is the other source", srcs=srcs,
                      dst=dst)  # fmt: skip


def _same_view(a, b) -> bool:
    return (a.storage, a.offset, a.pattern) == (b.storage, b.offset, b.pattern) and a.vector_offset is b.vector_offset


@instruction(writes="dst", reads="srcs", engine=engines.dma, check=_check_dma_compute)
def dma_compute(dst, srcs, reduce_op, scales=None, unique_indices=True, oob_mode=oob_modes.error, name=None):
    """dst = the float32 sum of srcs; with a vector_offset a read-modify-write of the rows it names."""
    total = f32(srcs[0]).reshape(dst.shape)
    for src in srcs[1:]:
        total = total + f32(src).reshape(dst.shape)
    store(dst, total)


def _copy_engine(call: Call) -> engines:
    return engines.vector if call.args["engine"] == engines.unknown else call.args["engine"]


def _check_tensor_copy(call: Call) -> None:
    rules.same_shape(call, "dst", "src")
    rules.engine_in(call, engines.vector, engines.scalar, engines.gpsimd)


@instruction(writes="dst", reads="src", engine=_copy_engine, check=_check_tensor_copy, cycles=cycles.copy)
def tensor_copy(dst, src, engine=engines.unknown, name=None):
    """dst = src on chip: bit by bit for equal dtypes, through float32 otherwise."""
    store(dst, src)


def _check_tensor_copy_predicated(call: Call) -> None:
    rules.same_shape(call, "dst", "predicate")
    rules.dtype_in(call, "predicate", ("uint8", "uint16", "uint32"))
    if is_tensor(call.src):
        rules.same_shape(call, "dst", "src")
        rules.same_dtype(call, "dst", "src")
        rules.one_in_psum(call, "src", "predicate")
        if call.reverse_pred:
            raise Refusal("reverse_pred with a tensor src is refused by the verifier (BIR207): invert the predicate")
    elif not rules.is_number(call.src):
        raise Refusal("src must be a tensor or a number", given=call.src)


@instruction(
    writes="dst",
    reads="src predicate",
    engine=engines.vector,
    check=_check_tensor_copy_predicated,
    cycles=cycles.predicated,
    may_write=lambda call: True,
)
def tensor_copy_predicated(dst, src, predicate, reverse_pred=False, name=None):
    """dst = src where predicate is not 0 (0 with reverse_pred); elsewhere dst stays."""
    chosen = (predicate == 0) if reverse_pred else (predicate != 0)
    if isinstance(src, np.ndarray):
        source = src.reshape(dst.shape)
    else:
        source = np.empty(1, dst.dtype)
        store(source, np.float32(src))
    np.copyto(dst, source, where=chosen.reshape(dst.shape))


def _memset_engine(call: Call) -> engines:
    if call.args["engine"] != engines.unknown:
        return call.args["engine"]
    return engines.vector if getattr(call.dst, "is_psum", False) else engines.gpsimd


def _check_memset(call: Call) -> None:
    rules.tensor_operand(call, "dst")
    rules.engine_in(call, engines.vector, engines.gpsimd)
    dtype, value = call.dst.dtype, call.value
    if not rules.is_number(value):
        raise Refusal("value must be a compile-time number", given=value)
    if dtype.is_integer:
        limits = np.iinfo(dtype.np)
        if not isinstance(value, int) or not limits.min <= value <= limits.max:
            raise Refusal("value must match the dtype of dst: an integer in its range", value=value, dtype=dtype)


@instruction(writes="dst", engine=_memset_engine, check=_check_memset, cycles=cycles.memset)
def memset(dst, value, engine=engines.unknown, name=None):
    """dst = value everywhere."""
    if dst.dtype.kind in "iu":
        dst[...] = value
    else:
        store(dst, np.float32(value))


def _check_stream_shuffle(call: Call) -> None:
    rules.tensor_operand(call, "dst", "src")
    rules.same_dtype(call, "dst", "src")
    dst, src, mask = call.dst, call.src, call.shuffle_mask
    if dst.free_size != src.free_size:
        raise Refusal("dst and src must have the same elements per partition", dst=dst.shape, src=src.shape)
    if not isinstance(mask, (list, tuple)) or len(mask) != rules.QUADRANT:
        raise Refusal("shuffle_mask must be a list of 32 integers", given=mask)
    if any(not isinstance(entry, int) or not (0 <= entry < rules.QUADRANT or entry == _SHUFFLE_KEEP) for entry in mask):
        raise Refusal("shuffle_mask holds partitions 0..31 of a quadrant, or 255 to keep", given=mask)
    active = math.ceil(max(dst.num_partitions, src.num_partitions) / rules.QUADRANT) * rules.QUADRANT
    step = 128 if active > 64 else active
    for name, tensor in (("src", src), ("dst", dst)):
        if tensor.start_partition % step:
            raise Refusal(f"{name}: {active} active partitions start at a multiple of {step}",
                          start_partition=tensor.start_partition)  # fmt: skip
    for row in range(dst.num_partitions):
        entry = mask[row % rules.QUADRANT]
        if entry != _SHUFFLE_KEEP and row // rules.QUADRANT * rules.QUADRANT + entry >= src.num_partitions:
            raise Refusal("shuffle_mask reads a partition that src does not have", partition=row, reads=entry,
                          src=src.shape)  # fmt: skip


@instruction(
    writes="dst",
    reads="src",
    engine=engines.vector,
    check=_check_stream_shuffle,
    cycles=cycles.one_per_element,
    may_write=lambda call: _SHUFFLE_KEEP in call.shuffle_mask,
)
def nc_stream_shuffle(dst, src, shuffle_mask, name=None):
    """dst partition i = src partition shuffle_mask[i] within each quadrant of 32 partitions; 255 keeps dst."""
    rows = np.arange(dst.shape[0])
    entries = np.asarray(shuffle_mask)[rows % rules.QUADRANT]
    moved = entries != _SHUFFLE_KEEP
    sources = rows // rules.QUADRANT * rules.QUADRANT + entries
    dst[moved] = src[sources[moved]].reshape(-1, *dst.shape[1:])
