"""The reject list of nki-reference.md section 6: capacity, PSUM, initialisation, addresses and sizes (see pairs.py)."""

import re

import numpy as np
import pytest

from draft_verify.reference import emulator
from tests.emulator.pairs import Rows, output, register, stored

nl = emulator.modules()["nki.language"]
nisa = emulator.modules()["nki.isa"]
X = np.arange(128 * 64, dtype=np.float32).reshape(128, 64) / 1024
ROWS = np.array([[3], [1], [4], [7]], np.int32)
COUNT = np.array([[2]], np.int32)
ROW_LIST = Rows()
row = ROW_LIST.row


@row("1 sbuf capacity", "SBUF is full.*live=.*limit=212984", X)
def sbuf(x, wrong):
    tiles = [nl.full((128, 4096), i, nl.float32) for i in range(14 if wrong else 12)]
    total = nl.load(x)
    for tile in tiles:
        nisa.tensor_tensor(total, total, tile[:, :64], nl.add)
    return stored(total)


@row("1 sbuf capacity counts only what is live", "SBUF is full", X)
def sbuf_live(x, wrong):
    total = nl.load(x)
    kept = []
    for i in range(30):
        tile = nl.full((128, 4096), i, nl.float32)
        nisa.tensor_tensor(total, total, tile[:, :64], nl.add)
        kept.append(tile)
    if wrong:
        for tile in kept:
            nisa.tensor_tensor(total, total, tile[:, :64], nl.add)
    return stored(total)


@row("1 psum capacity", "PSUM is full.*live=9, limit=8", X)
def psum(x, wrong):
    tile = nl.load(x)
    banks = [nl.ndarray((64, 64), nl.float32, buffer=nl.psum) for _ in range(9 if wrong else 8)]
    for bank in banks:
        nisa.nc_matmul(bank, tile, tile, accumulate=False)
    total = nl.zeros((64, 64), nl.float32)
    for bank in banks:
        nisa.tensor_tensor(total, total, bank, nl.add)
    return stored(total)


@row("1 too many partitions", "more partitions than there are", X)
def partitions(x, wrong):
    tile = nl.zeros((129 if wrong else 128, 64), nl.float32)
    nisa.tensor_tensor(tile[0:128], tile[0:128], nl.load(x), nl.add)
    return stored(tile[0:128])


@row("1 chosen addresses overlap", "lies over a tensor that is still in use", X)
def addresses(x, wrong):
    first = nl.ndarray((128, 64), nl.float32, address=(0, 0))
    second = nl.ndarray((128, 64), nl.float32, address=(0, 128 if wrong else 256))
    nisa.dma_copy(first, x)
    nisa.dma_copy(second, x)
    return stored(nl.add(first, second))


@row("1 psum address off a bank", "begins at a bank", X)
def psum_address(x, wrong):
    tile = nl.load(x)
    product = nl.ndarray((64, 64), nl.float32, buffer=nl.psum, address=(0, 1024 if wrong else 2048))
    nisa.nc_matmul(product, tile, tile, accumulate=False)
    return stored(product)


@row("3 accumulate=True first", "nc_matmul: accumulate=True into PSUM that no matmul has started", X)
def accumulate_first(x, wrong):
    tile = nl.load(x)
    product = nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
    for k in range(2):
        nisa.nc_matmul(product, tile, tile, accumulate=True if wrong else k > 0)
    return stored(product)


@row("3 accumulate after memset", "another instruction than a matmul wrote", X)
def accumulate_after_memset(x, wrong):
    tile = nl.load(x)
    product = nl.zeros((64, 64), nl.float32, buffer=nl.psum)
    if not wrong:
        nisa.nc_matmul(product, tile, tile, accumulate=False)
    nisa.nc_matmul(product, tile, tile, accumulate=True)
    return stored(product)


@row("3 accumulate in a later iteration", "another instruction than a matmul wrote", X, COUNT)
def accumulate_in_loop(x, count, wrong):
    tile = nl.load(x)
    product = nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
    total = nl.zeros((64, 64), nl.float32)
    if wrong:
        nisa.nc_matmul(product, tile, tile, accumulate=False)

    def body(i):
        nisa.nc_matmul(product, tile, tile, accumulate=wrong)
        nisa.tensor_tensor(total, total, product, nl.add)
        nisa.memset(product, 0.0)

    nl.fori_loop(0, register(nl.load(count)), body)
    return stored(total)


@row("3 part of a group unwritten", "accumulate=True into PSUM that no matmul has started", X)
def partial_group(x, wrong):
    tile = nl.load(x)
    product = nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(product[:, 0 : 32 if wrong else 64], tile, tile[:, 0 : 32 if wrong else 64], accumulate=False)
    nisa.nc_matmul(product, tile, tile, accumulate=True)
    return stored(product)


@row("3 inferred accumulate", "accumulate is inferred", X)
def inferred(x, wrong):
    tile = nl.load(x)
    product = nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(product, tile, tile, accumulate=None if wrong else False)
    return stored(product)


@row("3 unread group restarted", "previous one was never read", X)
def unread_group(x, wrong):
    tile = nl.load(x)
    product = nl.ndarray((64, 64), nl.float32, buffer=nl.psum)
    nisa.nc_matmul(product, tile, tile, accumulate=False)
    results = () if wrong else (stored(product),)
    nisa.nc_matmul(product, tile, tile, accumulate=False)
    return (*results, stored(product))


@row("4 uninitialised sbuf", r"tensor_tensor: data2 reads what was never written.*first_missing=\(0, 63\)", X)
def uninitialised(x, wrong):
    tile, other = nl.load(x), nl.ndarray((128, 64), nl.float32)
    nisa.memset(other[:, 0 : 63 if wrong else 64], 1.0)
    return stored(nl.add(tile, other))


@row("4 uninitialised bytes under another dtype", "reads what was never written", X)
def uninitialised_bytes(x, wrong):
    tile = nl.ndarray((128, 64), nl.float32)
    halves = tile.view(nl.bfloat16)
    nisa.memset(halves[:, 0::2], 0.0)
    if not wrong:
        nisa.memset(halves[:, 1::2], 0.0)
    return stored(nl.add(tile, nl.load(x)))


@row("4 uninitialised hbm", "dma_copy: src reads what was never written", X)
def uninitialised_hbm(x, wrong):
    scratch = nl.ndarray((128, 64), nl.float32, buffer=nl.private_hbm)
    if not wrong:
        nl.store(scratch, nl.load(x))
    return stored(nl.load(scratch))


@row("4 written only in a loop that may not run", "reads what was never written", X, COUNT)
def written_in_loop(x, count, wrong):
    tile = nl.ndarray((128, 64), nl.float32)
    if not wrong:
        nisa.memset(tile, 0.0)

    def body(i):
        nisa.dma_copy(tile, x)

    nl.fori_loop(0, register(nl.load(count)), body)
    return stored(tile)


@row("4 output not fully written", r"an output is not fully written.*first_missing=\(64, 0\)", X)
def partial_output(x, wrong):
    out = output()
    nl.store(out[0 : 64 if wrong else 128], nl.load(x[0 : 64 if wrong else 128]))
    return out


@row("4 output not fully written by a run", "an output is not fully written", X, COUNT, run_time=True)
def partial_output_in_loop(x, count, wrong):
    out = output((2 if not wrong else 3, 64))
    tile = nl.load(x[0:1])

    def body(i):
        nisa.dma_copy(out.ap([[64, 1], [1, 64]], scalar_offset=i, indirect_dim=0), tile)

    nl.fori_loop(0, register(nl.load(count)), body)
    return out


@row("4 rows that a gather skips", "reads what was never written", X, np.array([[3], [1], [-1], [7]], np.int32),
     run_time=True)  # fmt: skip
def skipped_rows(x, rows, wrong):
    index, tile = nl.load(rows), nl.ndarray((4, 64), nl.float32)
    if not wrong:
        nisa.memset(tile, 0.0)
    nisa.dma_copy(tile, x.vector_select(0, index), oob_mode=nisa.oob_mode.skip)
    return stored(tile)


@row("4 register never written", "register that was never written", X)
def unwritten_register(x, wrong):
    tile = nl.load(x)
    bound = nisa.register_alloc(None if wrong else 2)

    def body(i):
        nisa.tensor_tensor(tile, tile, tile, nl.add)

    nl.fori_loop(0, bound, body)
    return stored(tile)


@row("7 slice past the end", r"slice out of range.*slice=\[0:65\], size=64", X)
def long_slice(x, wrong):
    return stored(nl.load(x[:, 0 : 65 if wrong else 64]))


@row("7 pattern past the end", "pattern outside the tensor", X)
def long_pattern(x, wrong):
    tile = nl.load(x)
    wide = tile.ap([[64, 128], [2, 33]])
    return stored(wide if wrong else wide[:, 0:32])  # a view that nothing uses may reach too far


@row("7 pattern past the last partition", "pattern past the last partition", X)
def deep_pattern(x, wrong):
    tile = nl.load(x)
    return stored(tile.ap([[64, 128], [1, 64]], offset=64 if wrong else 0))


@row("8 vector offset past dimension 0", "indirect_dim=0 only", X, ROWS)
def indirect_dim(x, rows, wrong):
    tile = nl.ndarray((4, 64), nl.float32)
    nisa.dma_copy(tile, x.ap([[64, 4], [1, 64]], vector_offset=nl.load(rows), indirect_dim=1 if wrong else 0))
    return stored(tile)


@row("8 vector offset into sbuf", "addresses HBM tensors only", X, ROWS)
def gather_from_sbuf(x, rows, wrong):
    tile = nl.ndarray((4, 64), nl.float32)
    source = nl.load(x) if wrong else x
    nisa.dma_copy(tile, source.vector_select(0, nl.load(rows)))
    return stored(tile)


@row("8 vector offset dtype", "int32 or uint32", X, ROWS)
def index_dtype(x, rows, wrong):
    index = nl.load(rows, dtype=nl.int16 if wrong else nl.uint32)
    tile = nl.ndarray((4, 64), nl.float32)
    nisa.dma_copy(tile, x.vector_select(0, index))
    return stored(tile)


@row("8 vector offset shape", "one row index per partition", X, ROWS.reshape(1, 4))
def index_shape(x, rows, wrong):
    index = nl.ndarray((1, 4) if wrong else (4, 1), nl.int32)
    nisa.dma_copy(index, rows)
    tile = nl.ndarray((4, 64), nl.float32)
    nisa.dma_copy(tile, x.ap([[64, 4], [1, 64]], vector_offset=index))
    return stored(tile)


@row("8 ap on a sliced view", "ap.. on a sliced view", X)
def sliced_ap(x, wrong):
    tile = nl.ndarray((64, 64), nl.float32)
    pattern = [[64, 64], [1, 64]]
    nisa.dma_copy(tile, x[64:128].ap(pattern) if wrong else x.ap(pattern, offset=64 * 64))
    return stored(tile)


@row("8 two dynamic offsets", "one dynamic offset per view", X.reshape(4, 32, 64), COUNT)
def two_offsets(x, count, wrong):
    tile, index = nl.ndarray((32, 64), nl.float32), nl.load(count)
    view = x.select(0, index)
    if wrong:
        view = view.select(0, index)
    nisa.dma_copy(tile, view)
    return stored(tile)


@row("10 offset out of bounds", "dma_copy: run-time offset out of bounds.*offset=128, limit=128", X,
     np.array([[128]], np.int32), run_time=True)  # fmt: skip
def out_of_bounds(x, index, wrong):
    tile = nl.zeros((1, 64), nl.float32)
    mode = nisa.oob_mode.error if wrong else nisa.oob_mode.skip
    nisa.dma_copy(tile, x.ap([[64, 1], [1, 64]], scalar_offset=nl.load(index), indirect_dim=0), oob_mode=mode)
    return stored(tile)


@row("10 offset past the only row", "dma_copy: run-time offset out of bounds.*limit=1", X, np.array([[1]], np.int32),
     run_time=True)  # fmt: skip
def only_row(x, index, wrong):
    tile = nl.zeros((1, 64), nl.float32)
    mode = nisa.oob_mode.error if wrong else nisa.oob_mode.skip
    row = x.reshape((1, 128 * 64)).ap([[64, 1], [1, 64]], scalar_offset=nl.load(index), indirect_dim=0)
    nisa.dma_copy(tile, row, oob_mode=mode)
    return stored(tile)


@row("10 negative row", "out of bounds.*offset=4294967295", X, np.array([[3], [-1]], np.int32), run_time=True)
def negative_row(x, rows, wrong):
    tile = nl.zeros((2, 64), nl.float32)
    mode = nisa.oob_mode.error if wrong else nisa.oob_mode.skip
    nisa.dma_copy(tile, x.vector_select(0, nl.load(rows)), oob_mode=mode)
    return stored(tile)


@row("10 offset past its partition on chip", "out of bounds", X, np.array([[62]], np.int32), run_time=True)
def on_chip_offset(x, index, wrong):
    tile, out = nl.load(x), nl.ndarray((128, 2), nl.float32)
    width = 4 if wrong else 2
    part = nl.ndarray((128, width), nl.float32)
    nisa.tensor_copy(part, tile.ap([[64, 128], [1, width]], scalar_offset=nl.load(index), indirect_dim=1))
    nisa.tensor_copy(out, part[:, 0:2])
    return stored(out)


@row("11 duplicate rows of a scatter", "scatter to one row twice.*row=3", X, np.array([[3], [1], [3], [7]], np.int32),
     run_time=True)  # fmt: skip
def duplicates(x, rows, wrong):
    tile = nl.load(x[0:4])
    index = nl.load(rows)
    if not wrong:
        nisa.iota(index, [[0, 1]], offset=0, channel_multiplier=1)
    out = output()
    nl.store(out, nl.load(x))
    with nl.no_reorder():
        nisa.dma_copy(out.vector_select(0, index), tile)
    return out


@row("26 unrolled too far", "too many instructions.*limit=20000", X)
def unrolled(x, wrong):
    counter = nisa.register_alloc(0)
    for number in range(20_000 if wrong else 100):
        nisa.register_move(counter, number)
    return stored(nl.load(x))


@row("27 tensor of 4 GB", "smaller than 4 GB", X)
def too_large(x, wrong):
    scratch = nl.ndarray((2**10, 2**20 if wrong else 2**8), nl.float32, buffer=nl.private_hbm)
    nl.store(scratch[0:128, 0:64], nl.load(x))
    return stored(nl.load(scratch[0:128, 0:64]))


@row("28 write may overtake a read", "nothing keeps this write behind the read", X, ROWS, run_time=True)
def overtaking(x, rows, wrong):
    index, tile = nl.load(rows), nl.zeros((4, 64), nl.float32)
    cache = output()
    nl.store(cache, nl.load(x))
    kept = nl.ndarray((4, 64), nl.float32)

    def move():
        nisa.dma_copy(kept, cache.vector_select(0, index))
        nisa.dma_copy(cache.vector_select(0, index), tile)

    if wrong:
        move()
    else:
        with nl.no_reorder():
            move()
    return cache, stored(kept)


@pytest.mark.parametrize("name", ROW_LIST)
def test_the_wrong_kernel_is_refused_and_its_twin_runs(name):
    ROW_LIST.check(name)


def test_a_tile_that_nothing_reads_is_noted():
    """Row 4, BIR293: public kernels that run on hardware have such tiles, so it is no error."""

    def kernel(x, read):
        constant = nl.zeros((128, 64), nl.float32)
        tile = nl.load(x)
        return stored(nl.add(tile, constant) if read else tile)

    notes = emulator.trace(kernel, X, False, strict=True).notes
    assert len(notes) == 1 and re.search(r":\d+: nisa.memset: nothing reads constant\.\d+, which it writes", notes[0])
    assert emulator.trace(kernel, X, True, strict=True).notes == []
