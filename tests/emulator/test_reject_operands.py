"""The reject list of nki-reference.md section 6, rows on operands: engines, buffers, dtypes, patterns, operators.

Each row: a wrong kernel that is refused with a message naming the instruction, the kernel's line, the rule and the
values, and its corrected twin that runs. Rows that make hardware answer wrongly, not refuse, show the wrong answer.
"""

import re

import numpy as np
import pytest

from draft_verify.reference import emulator

from .tiles import bf16, fp8, in_psum, nisa, nl, normal, run

X = normal(128, 64)
HALF = X.astype(bf16)
INDEX = np.arange(128, dtype=np.uint32)[::-1].reshape(128, 1).copy()
FP32_MIN = float(np.finfo(np.float32).min)
RESET = nisa.reduce_cmd.reset_reduce


def new(shape=(128, 64), dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def stored(tile):
    out = new(tile.shape, tile.dtype, nl.shared_hbm)
    nl.store(out, nl.copy(tile) if tile.buffer == nl.psum else tile)
    return out


def psum(shape=(128, 64), dtype=nl.float32):
    return new(shape, dtype, nl.psum)


ROWS = {}


def row(name, rule, *arrays):
    """Registers kernel(*tensors, wrong): the wrong kernel and its twin differ in one place."""

    def register(kernel):
        ROWS[name] = (kernel, rule, arrays)
        return kernel

    return register


@row("2 moving too wide", r"nc_matmul: moving has at most 512 columns.*\(128, 640\)", X, normal(128, 640))
def moving_width(x, wide, wrong):
    columns = 640 if wrong else 512
    product = psum((64, columns))
    nisa.nc_matmul(product, nl.load(x), nl.load(wide[:, :columns]), accumulate=False)
    return stored(product)


@row("2 stationary too wide", r"stationary has at most 128 columns.*\(128, 129\)", X, normal(128, 129))
def stationary_width(x, wide, wrong):
    rows = 129 if wrong else 128
    product = psum((128, 64))
    nisa.nc_matmul(product, nl.load(wide[:, :rows]), nl.load(x), accumulate=False)
    return stored(product)


@row("2 dst across banks", r"dst must lie inside one PSUM bank.*banks=\[0, 1\]", X)
def bank_crossing(x, wrong):
    tile, product = nl.load(x), psum((64, 600))
    start = 500 if wrong else 512
    nisa.nc_matmul(product[:, start : start + 64], tile, tile, accumulate=False)
    return stored(product[:, start : start + 64])


@row("2 dst not float32", r"dst of a matmul is float32 on trn2.*dtype=bfloat16", HALF)
def matmul_dst(x, wrong):
    tile, product = nl.load(x), psum((64, 64), nl.bfloat16 if wrong else nl.float32)
    nisa.nc_matmul(product, tile, tile, accumulate=False)
    return stored(product)


@row("2 operands on different partitions", "contract over the same partitions", X)
def contraction(x, wrong):
    tile, product = nl.load(x), psum((64, 64))
    nisa.nc_matmul(product, tile[0 : 64 if wrong else 128], tile, accumulate=False)
    return stored(product)


@row("2 float32 times bfloat16", "float32 multiplies float32 only.*stationary=float32, moving=bfloat16", X, HALF)
def mixed_matmul(x, half, wrong):
    moving, product = nl.load(half), psum((64, 64))
    nisa.nc_matmul(product, nl.load(x), moving if wrong else nl.copy(moving, nl.float32), accumulate=False)
    return stored(product)


@row("5 two inputs in psum", r"tensor_tensor: data1 and data2 cannot both be in PSUM \(BVF027\)", X)
def two_psum_inputs(x, wrong):
    tile = nl.load(x)
    moved, result = in_psum(tile), new()
    nisa.tensor_tensor(result, moved, in_psum(tile) if wrong else tile, nl.add)
    return stored(result)


@row("5 gpsimd on psum", "the GpSimd engine does not reach PSUM.*src.buffer=MemoryRegion.psum", X)
def gpsimd_psum(x, wrong):
    moved, result = in_psum(nl.load(x)), new()
    nisa.tensor_copy(result, moved, engine=nisa.engine.gpsimd if wrong else nisa.engine.vector)
    return stored(result)


@row("5 dma from psum", "dma_copy: a DMA does not reach PSUM", X)
def dma_psum(x, wrong):
    moved, out = in_psum(nl.load(x)), new(buffer=nl.shared_hbm)
    nisa.dma_copy(out, moved if wrong else nl.copy(moved))
    return out


@row("5 bfloat16 into psum", r"narrower than 4 bytes into PSUM \(BIR311\).*dst.dtype=bfloat16", X)
def narrow_psum(x, wrong):
    result = psum(dtype=nl.bfloat16 if wrong else nl.float32)
    nisa.tensor_copy(result, nl.load(x))
    return stored(result)


@row("5 hbm operand", "compute engines reach SBUF and PSUM only", X)
def hbm_operand(x, wrong):
    result = new()
    nisa.tensor_copy(result, x if wrong else nl.load(x))
    return stored(result)


@row("6 base partitions differ", r"same partition \(BIR297\).*'data1': 0, 'data2': 32", X)
def base_partitions(x, wrong):
    tile, result = nl.load(x), new((32, 64))
    start = 32 if wrong else 0
    nisa.tensor_tensor(result, tile[0:32], tile[start : start + 32], nl.add)
    return stored(result)


@row("6 illegal start partition", r"src: 32 partitions start at one of \[0, 32, 64, 96\] only.*start_partition=16", X)
def start_partition(x, wrong):
    tile, result = nl.load(x), new((32, 64))
    start = 16 if wrong else 64
    nisa.tensor_copy(result, tile[start : start + 32])
    return stored(result)


@row("6 start partition of 33 to 64", r"src: 40 partitions start at one of \[0, 64\] only.*start_partition=32", X)
def start_partition_of_half(x, wrong):
    tile, result = nl.load(x), new((40, 64))
    start = 32 if wrong else 64
    nisa.tensor_copy(result, tile[start : start + 40])
    return stored(result)


@row("6 partition stride", "src: partitions must be consecutive", X)
def partition_stride(x, wrong):
    tile, result = nl.load(x), new((32, 64))
    nisa.tensor_copy(result, tile[0:64:2] if wrong else tile[0:32])
    return stored(result)


@row("6 five free dimensions", r"src: an access pattern has at most 4 free dimensions \(BIR049\)", normal(8, 243))
def free_dimensions(x, wrong):
    tile = nl.load(x).reshape((8, 3, 3, 3, 3, 3))
    result = new((8, 243))
    nisa.tensor_copy(result, tile.permute((0, 5, 4, 3, 2, 1) if wrong else (0, 5, 4, 3, 1, 2)))
    return stored(result)


@row("6 stride beyond int16", "strides in positive 16-bit steps.*stride=40000, limit=32767", X)
def wide_stride(x, wrong):
    tile = new((4, 2 * 40_000), nl.uint8)
    nisa.memset(tile[:, : 2 * 32_000], 1)
    nisa.memset(tile[:, 2 * 32_000 :], 1)
    step = 40_000 if wrong else 32_000
    result = new((4, 2, 2), nl.uint8)
    nisa.tensor_copy(result, tile.ap([[80_000, 4], [step, 2], [1, 2]]))
    return stored(result)


@row("6 count beyond 16 bits", "counts in 16 bits.*count=70000, limit=65535", X)
def wide_count(x, wrong):
    tile = new((4, 70_000), nl.uint8)
    nisa.memset(tile if wrong else tile[:, :35_000], 1)
    nisa.memset(tile[:, 35_000:], 1)
    return stored(tile)


@row("8 gather from hbm to hbm", "a gather or scatter has SBUF on its other side", X, INDEX)
def gather_hbm_to_hbm(x, index, wrong):
    rows, out = nl.load(index), new(buffer=nl.shared_hbm)
    gathered = x.ap([[64, 128], [1, 64]], vector_offset=rows)
    nisa.dma_copy(out, gathered if wrong else nl.load(gathered))
    return out


@row("8 gather with hwdge", "needs software descriptors.*dge_mode=hwdge", X, INDEX)
def gather_hwdge(x, index, wrong):
    rows, tile = nl.load(index), new()
    mode = nisa.dge_mode.hwdge if wrong else nisa.dge_mode.swdge
    nisa.dma_copy(tile, x.ap([[64, 128], [1, 64]], vector_offset=rows), dge_mode=mode)
    return stored(tile)


@row("8 static descriptors with a dynamic address", "dge_mode.none has static addresses", X)
def static_dynamic(x, wrong):
    tile, row_number = new((1, 64)), nl.full((1, 1), 3, nl.int32)
    source = x.ap([[64, 1], [1, 64]], scalar_offset=row_number)
    nisa.dma_copy(tile, source, dge_mode=nisa.dge_mode.none if wrong else nisa.dge_mode.unknown)
    return stored(tile)


@row("9 hwdge with a conversion", "dge_mode.hwdge does not convert.*dst=bfloat16, src=float32", X)
def hwdge_conversion(x, wrong):
    tile = new(dtype=nl.bfloat16 if wrong else nl.float32)
    nisa.dma_copy(tile, x, dge_mode=nisa.dge_mode.hwdge)
    return stored(tile)


@row("9 transposed shape", r"dma_transpose: dst.shape must be the permuted src.shape", HALF)
def transposed_shape(x, wrong):
    tile = new((64, 1, 128) if wrong else (64, 128), nl.bfloat16)
    nisa.dma_transpose(tile, x)
    return stored(tile)


@row("9 transpose of bytes", "a DMA transposes dtypes of 2 or 4 bytes.*dtype=uint8", X.astype(np.uint8), HALF)
def transposed_bytes(x, half, wrong):
    source = x if wrong else half
    tile = new((64, 128), source.dtype)
    nisa.dma_transpose(tile, source)
    return stored(tile)


@row("9 hwdge transpose", "hwdge: a 2-dimensional src has 16 rows", HALF)
def hwdge_transpose(x, wrong):
    rows = 128 if wrong else 16
    tile = new((64, rows), nl.bfloat16)
    nisa.dma_transpose(tile, x[0:rows], dge_mode=nisa.dge_mode.hwdge)
    return stored(tile)


@row("9 indirect transpose of float32", "takes 2-byte dtypes only.*dtype=float32", X, HALF, INDEX)
def indirect_transpose(x, half, index, wrong):
    source, rows = (x if wrong else half), nl.load(index)
    tile = new((64, 128), source.dtype)
    nisa.dma_transpose(tile, source.ap([[64, 128], [1, 64]], vector_offset=rows))
    return stored(tile)


@row("9 alignment of a transpose", r"starts and steps in multiples of 32 bytes \(BIR155\).*start=8", HALF, INDEX)
def transposed_alignment(x, index, wrong):
    tile, start = new((64, 160), nl.bfloat16), 8 if wrong else 16
    gathered = x.ap([[64, 128], [1, 64]], vector_offset=nl.load(index))
    nisa.dma_transpose(tile[:, start : start + 128], gathered)
    return stored(tile[:, start : start + 128])


@row("9 scales of dma_compute", r"dma_compute: scales must be 1.0.*scales=\[1.0, 0.5\]", X)
def dma_scales(x, wrong):
    tile = new()
    nisa.dma_compute(tile, [x, x], nl.add, scales=[1.0, 0.5 if wrong else 1.0])
    return stored(tile)


@row("9 priority", "priority needs NeuronCore-v4", X)
def dma_priority(x, wrong):
    tile = new()
    nisa.dma_copy(tile, x, priority=1 if wrong else None)
    return stored(tile)


@row("10 skip without a dynamic address", "oob_mode.skip is for dynamic addresses", X)
def pointless_skip(x, wrong):
    tile = new()
    nisa.dma_copy(tile, x, oob_mode=nisa.oob_mode.skip if wrong else nisa.oob_mode.error)
    return stored(tile)


@row("11 copy onto itself", "dst overlaps src: the descriptors of a DMA run in no particular order", X)
def overlapping_dma(x, wrong):
    nisa.dma_copy(x[64:128], x[32:96] if wrong else x[0:64])
    return x


@row("12 integers with a psum operand", "tensor_tensor: 32-bit integers on the Vector engine go through float32",
     INDEX.view(np.int32))  # fmt: skip
def psum_integers(x, wrong):
    tile, result = nl.load(x), new((128, 1), nl.int32)
    nisa.tensor_tensor(result, in_psum(tile) if wrong else tile, tile, nl.add)
    return stored(result)


@row("15 call of trn3", "exponential: available on NeuronCore-v4", X)
def trn3_call(x, wrong):
    tile, result = nl.load(x), new()
    if wrong:
        nisa.exponential(result, tile)
    else:
        nisa.activation(result, nl.exp, tile)
    return stored(result)


@row("15 operator of trn3", r"op0=nl.abs_max: NeuronCore-v4 \(trn3\) only", X)
def trn3_operator(x, wrong):
    tile, result = nl.load(x), new()
    nisa.tensor_scalar(result, tile, nl.abs_max if wrong else nl.maximum, 1.0)
    return stored(result)


@row("15 square as an arithmetic operator", "op0=nl.square is an activation function", X)
def trn3_square(x, wrong):
    tile, result = nl.load(x), new()
    if wrong:
        nisa.tensor_scalar(result, tile, nl.square, None)
    else:
        nisa.activation(result, nl.square, tile)
    return stored(result)


@row("16 continued accumulators", "reduce_cmd=reduce continues accumulators", X)
def continued_accumulators(x, wrong):
    tile, total = nl.load(x), new((128, 1))
    options = {"op0": nl.add, "operand0": 0.0, "reduce_op": nl.add}
    nisa.tensor_scalar_reduce(tile, tile, reduce_cmd=RESET, reduce_res=None if wrong else total, **options)
    if wrong:
        nisa.tensor_scalar_reduce(tile, tile, reduce_cmd=nisa.reduce_cmd.reduce, reduce_res=total, **options)
    return stored(total)


@row("16 idle select_reduce", "reduce_cmd=idle.*reduce_res is unknown", X)
def idle_maximum(x, wrong):
    tile, total, predicate = nl.load(x), new((128, 1)), nl.full((128, 64), 1, nl.uint8)
    command = nisa.reduce_cmd.idle if wrong else RESET
    nisa.select_reduce(tile, predicate, tile, 0.0, reduce_res=total, reduce_cmd=command)
    return stored(total)


@row("16 idle activation", "reduce_cmd=idle.*what earlier calls left", X)
def idle_sum(x, wrong):
    tile, total = nl.load(x), new((128, 1))
    command = nisa.reduce_cmd.idle if wrong else RESET
    nisa.activation(tile, nl.exp, tile, reduce_op=nl.add, reduce_res=total, reduce_cmd=command)
    return stored(total)


@row("17 vector operand dtype", "tensor_scalar: operand0 must be one of float32.*dtype=bfloat16", X, HALF)
def vector_dtype(x, half, wrong):
    tile, result = nl.load(x), new()
    column = nl.load((half if wrong else x)[:, 0:1])
    nisa.tensor_scalar(result, tile, nl.multiply, column)
    return stored(result)


@row("17 vector operand shape", r"operand0 must be a number or a \[128, 1\] tensor.*shape=\(128, 2\)", X)
def vector_shape(x, wrong):
    tile, result = nl.load(x), new()
    nisa.tensor_scalar(result, tile, nl.multiply, nl.load(x[:, 0 : 2 if wrong else 1]))
    return stored(result)


@row("17 bitvec and arithmetic mixed", "op0 and op1 are both bitvec or both arithmetic", INDEX)
def mixed_operators(x, wrong):
    tile, result = nl.load(x), new((128, 1), nl.uint32)
    nisa.tensor_scalar(result, tile, nl.bitwise_and, 7, op1=nl.add if wrong else nl.bitwise_or, operand1=1)
    return stored(result)


@row("17 bitvec on floats", "data: bitvec operators take integer dtypes.*dtype=float32", X)
def float_bits(x, wrong):
    tile, result = nl.load(x), new(dtype=nl.uint32)
    nisa.tensor_scalar(result, tile if wrong else tile.view(nl.uint32), nl.bitwise_and, 7)
    return stored(result)


@row("17 predicate dtype", "predicate must be one of uint8, uint16, uint32.*dtype=float32", X)
def predicate_dtype(x, wrong):
    tile, result = nl.load(x), nl.zeros((128, 64), nl.float32)
    predicate = new(dtype=nl.float32 if wrong else nl.uint8)
    nisa.tensor_scalar(predicate, tile, nl.greater, 0.0)
    nisa.tensor_copy_predicated(result, tile, predicate)
    return stored(result)


@row("17 predicated dtypes differ", "dst and src must have the same dtype.*dst=bfloat16, src=float32", X)
def predicated_dtypes(x, wrong):
    result = nl.zeros((128, 64), nl.bfloat16 if wrong else nl.float32)
    nisa.tensor_copy_predicated(result, nl.load(x), nl.full((128, 64), 1, nl.uint8))
    return stored(result)


@row("17 reversed predicate with a tensor", "reverse_pred with a tensor src is refused", X)
def reversed_predicate(x, wrong):
    result, predicate = nl.zeros((128, 64), nl.float32), nl.full((128, 64), 0, nl.uint8)
    nisa.tensor_copy_predicated(result, nl.load(x) if wrong else 1.0, predicate, reverse_pred=True)
    return stored(result)


@row("17 select_reduce of int32", "on_true can be any dtype but tfloat32, int32 and uint32", X)
def selected_integers(x, wrong):
    tile, result = new(dtype=nl.int32 if wrong else nl.int16), new()
    nisa.memset(tile, 3)
    nisa.select_reduce(result, nl.full((128, 64), 1, nl.uint8), tile, 0.0)
    return stored(result)


@row("17 float memset of integers", "memset: value must match the dtype of dst.*value=2.0, dtype=int32", X)
def float_memset(x, wrong):
    tile = new(dtype=nl.int32)
    nisa.memset(tile, 2.0 if wrong else 2)
    return stored(tile)


@row("17 local_gather index", "index must be one of uint16.*dtype=uint32", X, INDEX)
def gather_index(x, index, wrong):
    tile, result = nl.load(x), new((128, 16))
    rows = nl.copy(nl.load(index), nl.uint32 if wrong else nl.uint16)
    nisa.tensor_scalar(rows, rows, nl.bitwise_and, 63)
    nisa.local_gather(result, tile, rows, num_elem_per_idx=1, num_valid_indices=16)
    return stored(result)


@row("17 n_gather index", "indices must be one of uint32.*dtype=int32", X, INDEX)
def n_gather_index(x, index, wrong):
    tile, result = nl.load(x), new((128, 1))
    rows = nl.load(index)
    nisa.tensor_scalar(rows, rows, nl.bitwise_and, 63)
    nisa.nc_n_gather(result, tile, rows.view(nl.int32) if wrong else rows)
    return stored(result)


@row("17 range_select bounds", "bound0 must be one of float32.*dtype=bfloat16", X, HALF)
def bound_dtype(x, half, wrong):
    bound, result = nl.load((half if wrong else x)[:, 0:1]), new()
    good = nl.load(x[:, 0:1])
    nisa.range_select(result, nl.load(x), nl.greater_equal, nl.less, bound, good)
    return stored(result)


@row("17 range_select fill", "on_false_value is fixed to FP32_MIN", X)
def range_fill(x, wrong):
    bound, result = nl.load(x[:, 0:1]), new()
    fill = -1e30 if wrong else FP32_MIN
    nisa.range_select(result, nl.load(x), nl.greater_equal, nl.less, bound, bound, on_false_value=fill)
    return stored(result)


@row("18 operator off the scalar engine", "the Scalar engine of trn2 does multiply and add.*op0=nl.maximum", X)
def scalar_engine(x, wrong):
    tile, result = nl.load(x), new()
    nisa.tensor_scalar(result, tile, nl.maximum if wrong else nl.multiply, 2.0, engine=nisa.engine.scalar)
    return stored(result)


@row("18 power on the vector engine", "nl.power runs on GpSimd only", np.abs(X))
def vector_power(x, wrong):
    tile, result = nl.load(x), new()
    engine = nisa.engine.vector if wrong else nisa.engine.unknown
    nisa.tensor_tensor(result, tile, tile, nl.power, engine=engine)
    return stored(result)


@row("18 rsqrt on the vector engine", "tensor_scalar runs nl.rsqrt on GpSimd, and nothing else there", np.abs(X))
def vector_rsqrt(x, wrong):
    tile, result = nl.load(x), new()
    engine = nisa.engine.vector if wrong else nisa.engine.gpsimd
    nisa.tensor_scalar(result, tile, nl.rsqrt, 0.0, engine=engine)
    return stored(result)


@row("18 division", "op=nl.divide: not a hardware instruction", np.abs(X))
def division(x, wrong):
    tile, result = nl.load(x), new()
    if wrong:
        nisa.tensor_tensor(result, tile, tile, nl.divide)
    else:
        nisa.reciprocal(result, tile)
        nisa.tensor_tensor(result, tile, result, nl.multiply)
    return stored(result)


@row("18 maximum as an activation's reduction", "reduce_op must be one of nl.add.*given=nl.maximum", X)
def activation_maximum(x, wrong):
    tile, total = nl.load(x), new((128, 1))
    nisa.activation_reduce(tile, nl.exp, tile, nl.maximum if wrong else nl.add, total)
    return stored(total)


@row("18 reduction over a middle axis", r"axis must be the last contiguous free dimensions.*axis=1", X)
def middle_axis(x, wrong):
    tile, result = nl.load(x).reshape((128, 4, 16)), new((128, 16))
    nisa.tensor_reduce(result, nl.add, tile if wrong else tile.permute((0, 2, 1)), axis=1 if wrong else 2)
    return stored(result)


@row("18 reduction over partitions", "axis 0 is the partition dimension", X)
def partition_axis(x, wrong):
    result = new((1, 64) if wrong else (128, 1))
    nisa.tensor_reduce(result, nl.add, nl.load(x), axis=0 if wrong else 1)
    return stored(result)


@row("18 vector transpose too large", r"the vector engine transposes tiles up to 32 x 32", X)
def vector_transpose(x, wrong):
    size = 64 if wrong else 32
    result = new((size, size))
    nisa.nc_transpose(result, nl.load(x[0:size, 0:size]))
    return stored(result)


@row("19 shifted in place", r"dst overlaps data partly.*\(BVF029\)", X)
def shifted(x, wrong):
    tile = nl.load(x)
    target = tile if wrong else new()
    nisa.tensor_scalar(target[:, 1:64], tile[:, 0:63], nl.add, 1.0)
    return stored(target[:, 1:64])


@row("19 scan into its shifted source", "dst overlaps data1 partly", X)
def shifted_scan(x, wrong):
    tile, ones = nl.load(x), nl.ones((128, 63), nl.float32)
    target = tile[:, 1:64] if wrong else tile[:, 0:63]
    nisa.tensor_tensor_scan(target, ones, tile[:, 0:63], 0.0, nl.multiply, nl.add)
    return stored(target)


@row("signature: unknown keyword", "tensor_copy: unknown keyword argument 'mask'", X)
def unknown_keyword(x, wrong):
    result = new()
    nisa.tensor_copy(result, nl.load(x), **({"mask": None} if wrong else {}))
    return stored(result)


@row("signature: missing operand", "tensor_tensor: missing argument 'op'", X)
def missing_operand(x, wrong):
    tile, result = nl.load(x), new()
    nisa.tensor_tensor(result, tile, tile, **({} if wrong else {"op": nl.add}))
    return stored(result)


@pytest.mark.parametrize("name", ROWS)
def test_the_wrong_kernel_is_refused_and_its_twin_runs(name):
    kernel, rule, arrays = ROWS[name]

    def launched(wrong):
        return emulator.jit(lambda *tensors: kernel(*tensors, wrong))

    with pytest.raises(emulator.Refusal, match=rule) as refused:
        emulator.trace(launched(True), *arrays, strict=True)
    assert re.search(re.escape(__file__) + r":\d+: ", str(refused.value)), "the message names the kernel's line"
    emulator.simulate(launched(False), strict=True)(*[array.copy() for array in arrays])


RUN_TIME = {
    "10 nc_n_gather past its data": (
        r"nc_n_gather: index outside the free dimension of data.*index=64, elements=64",
        64,
    ),
    "10 local_gather past its source": (r"local_gather: index outside the free dimension of src_buffer.*index=70", 70),
    "2 transpose by what is no identity": (r"nc_matmul: transpose mode multiplies by an identity", 2),
}


@pytest.mark.parametrize("name", RUN_TIME)
def test_data_that_an_instruction_cannot_take_is_refused_when_it_runs(name):
    rule, value = RUN_TIME[name]

    def emit(dst, x, data):
        if "n_gather" in name:
            nisa.nc_n_gather(dst, x, nl.copy(data, nl.uint32))
        elif "local_gather" in name:
            nisa.local_gather(dst, x, nl.copy(data, nl.uint16), num_elem_per_idx=1, num_valid_indices=16)
        else:
            turned, back = psum((64, 16)), psum((16, 64))
            nisa.nc_matmul(turned, x[:16], data, is_transpose=True, accumulate=False)
            nisa.nc_transpose(back, nl.copy(turned))
            nisa.tensor_copy(dst, back)

    data = np.eye(16, dtype=np.float32) if "identity" in name else np.zeros((16, 1), np.float32)
    out = ((16, 64), nl.float32) if "identity" in name else ((16, 16 if "local" in name else 1), nl.float32)
    run(emit, X[:16], data, out=out)
    data[3, 0] = value
    with pytest.raises(emulator.Refusal, match=rule) as refused:
        run(emit, X[:16], data, out=out)
    assert re.search(re.escape(__file__) + r":\d+: ", str(refused.value)), "the message names the kernel's line"


def test_row_12_flat_indices_beyond_two_to_the_24_are_wrong_in_float32_and_right_in_integers():
    """row * 151,936 + token, the index of a vocabulary row: tensor_scalar rounds it, GpSimd does not."""
    rows, tokens = np.full((4, 1), 127, np.int32), np.array([[1], [3], [5], [7]], np.int32)

    def emit(wrong, right, rows, tokens):
        nisa.tensor_scalar(wrong, rows, nl.multiply, 151_936.0, op1=nl.add, operand1=1.0)
        width = nl.full((4, 1), 151_936, nl.int32)
        nisa.tensor_tensor(right, rows, width, nl.multiply)
        nisa.tensor_tensor(right, right, tokens, nl.add)

    wrong, right = run(emit, rows, tokens, out=[((4, 1), nl.int32)] * 2)
    np.testing.assert_array_equal(right, rows * 151_936 + tokens)
    assert (wrong != 127 * 151_936 + 1).all()


def test_row_13_a_fully_masked_row_is_nan_where_its_maximum_went_through_bfloat16():
    scores, bound = normal(2, 8), np.zeros((2, 1), np.float32)

    def emit(rounded, kept, scores, bound):
        for dst in (rounded, kept):
            masked, peak = new((2, 8), nl.bfloat16), new((2, 1), dst.dtype)
            nisa.range_select(masked, scores, nl.less, nl.less, bound, bound, reduce_cmd=RESET, reduce_res=peak)
            difference = new((2, 8))
            nisa.tensor_tensor(difference, masked, peak.broadcast(1, 8), nl.subtract)
            nisa.activation(dst, nl.exp, difference)

    rounded, kept = run(emit, scores, bound, out=[((2, 8), nl.bfloat16), ((2, 8), nl.float32)])
    assert np.isnan(rounded.astype(np.float32)).all() and (kept == 0).all()


def test_row_14_the_logarithm_of_zero_is_garbage_and_a_clamped_one_is_not():
    data = np.array([[0.0, 0.5]], np.float32)

    def emit(wrong, right, x):
        nisa.activation(wrong, nl.log, x)
        clamped = new((1, 2))
        nisa.tensor_scalar(clamped, x, nl.maximum, 2.0**-64)
        nisa.activation(right, nl.log, clamped)

    wrong, right = run(emit, data, out=[((1, 2), nl.float32)] * 2)
    assert np.isnan(wrong[0, 0]) and np.isfinite(right).all()


@pytest.mark.parametrize("dtype", [bf16, fp8])
def test_row_32_a_matmul_sees_its_operands_rounded_and_sums_in_float32(dtype):
    stationary, moving = normal(128, 4), normal(128, 8, seed=1)

    def emit(dst, stationary, moving):
        product, name = psum((4, 8)), getattr(nl, np.dtype(dtype).name)
        nisa.nc_matmul(product, nl.copy(stationary, name), nl.copy(moving, name), accumulate=False)
        nisa.tensor_copy(dst, product)

    result = run(emit, stationary, moving, out=((4, 8), nl.float32))
    rounded = stationary.astype(dtype).astype(np.float64).T @ moving.astype(dtype).astype(np.float64)
    np.testing.assert_allclose(result, rounded, rtol=1e-5, atol=1e-4)
    assert np.abs(result - stationary.T @ moving).max() > 1e-2
