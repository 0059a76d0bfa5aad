"""Index patterns, gathers, compaction and top-k of the GpSimd engine, and random bits, against plain NumPy."""

import itertools

import numpy as np
import pytest

from .tiles import assert_same_bits, bf16, nisa, nl, normal, rng, run


def affine(pattern, offset, multiplier, partitions):
    rows = []
    for partition in range(partitions):
        steps = itertools.product(*(range(count) for _, count in pattern))
        base = offset + partition * multiplier
        rows.append([base + sum(i * step for i, (step, _) in zip(index, pattern)) for index in steps])
    return np.array(rows)


@pytest.mark.parametrize("name", ["int32", "uint32", "float32", "bfloat16", "int16"])
@pytest.mark.parametrize("pattern", [[[1, 12]], [[-3, 4], [0, 3]], [[100, 2], [7, 1], [1, 3], [0, 2]]])
def test_iota_counts_in_int32_and_converts(pattern, name):
    dtype = getattr(nl, name)
    offset = 40 if name == "uint32" else -5
    emit = lambda dst: nisa.iota(dst=dst, pattern=pattern, offset=offset, channel_multiplier=13)  # noqa: E731
    result = run(emit, out=((33, 4, 3), dtype))
    np.testing.assert_array_equal(result, affine(pattern, offset, 13, 33).reshape(33, 4, 3).astype(dtype.np))


def test_iota_is_exact_beyond_two_to_the_24():
    emit = lambda dst: nisa.iota(dst, [[1, 3]], offset=2**24, channel_multiplier=151_936)  # noqa: E731
    np.testing.assert_array_equal(run(emit, out=((128, 3), nl.uint32)), affine([[1, 3]], 2**24, 151_936, 128))


COMPARE = {"equal": np.equal, "not_equal": np.not_equal, "less": np.less, "greater_equal": np.greater_equal}


@pytest.mark.parametrize("name", COMPARE)
@pytest.mark.parametrize("dtypes", [(np.float32, "bfloat16"), (bf16, "bfloat16"), (np.int32, "int32")])
def test_affine_select_keeps_what_compares_true_with_zero(name, dtypes):
    data = (10 * normal(20, 3, 4)).astype(dtypes[0])
    pattern = [[-2, 3], [1, 4]]

    def emit(dst, x):
        nisa.affine_select(
            dst=dst,
            pattern=pattern,
            offset=-4,
            channel_multiplier=1,
            on_true_tile=x,
            on_false_value=-7.0,
            cmp_op=getattr(nl, name),
        )

    chosen = COMPARE[name](affine(pattern, -4, 1, 20), 0).reshape(20, 3, 4)
    dtype = getattr(nl, dtypes[1])
    expected = np.where(chosen, data.astype(dtype.np), np.array(-7, dtype.np))
    np.testing.assert_array_equal(run(emit, data, out=((20, 3, 4), dtype)), expected)


@pytest.mark.parametrize("name, fold", [("add", np.sum), ("average", np.mean), ("maximum", np.max)])
def test_a_partition_reduction_leaves_one_partition(name, fold):
    data = normal(100, 2, 3)
    emit = lambda dst, x: nisa.tensor_partition_reduce(dst, getattr(nl, name), x)  # noqa: E731
    result = run(emit, data, out=((1, 2, 3), nl.float32))
    np.testing.assert_allclose(result[0], fold(data.astype(np.float64), axis=0), rtol=1e-5, atol=1e-6)


def test_a_partition_reduction_of_bits():
    data = rng().integers(0, 2**31, (7, 5)).astype(np.int32)
    emit = lambda dst, x: nisa.tensor_partition_reduce(dst=dst, op=nl.bitwise_or, data=x)  # noqa: E731
    np.testing.assert_array_equal(run(emit, data, out=((1, 5), nl.int32))[0], np.bitwise_or.reduce(data, axis=0))


@pytest.mark.parametrize("elements, valid", [(1, 32), (4, 20), (2, 17)])
def test_local_gather_shares_one_index_list_among_16_partitions(elements, valid):
    data, rows = normal(32, 40, elements), rng().integers(0, 40, (32, 2))

    def emit(dst, data, index):
        nisa.local_gather(dst, data, index, num_elem_per_idx=elements, num_valid_indices=valid)

    result = run(emit, data, (rows * elements).astype(np.uint16), out=((32, valid, elements), nl.float32))
    for core in range(2):
        part = slice(16 * core, 16 * core + 16)
        picked = [rows[16 * core + j % 16, j // 16] for j in range(valid)]
        np.testing.assert_array_equal(result[part], data[part][:, picked])


def test_n_gather_picks_from_the_flattened_free_dimensions_of_each_partition():
    data, index = normal(9, 4, 5, dtype=bf16), rng().integers(0, 20, (9, 3, 2)).astype(np.uint32)
    emit = lambda dst, x, i: nisa.nc_n_gather(dst=dst, data=x, indices=i)  # noqa: E731
    expected = np.stack([row.ravel()[positions] for row, positions in zip(data, index)])
    assert_same_bits(run(emit, data, index, out=((9, 3, 2), nl.bfloat16)), expected)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_nonzero_with_count_compacts_every_sixteenth_partition(dtype):
    data = rng().integers(0, 2, (33, 8)).astype(dtype)

    def emit(dst, x):
        nisa.memset(dst=dst, value=99)
        nisa.nonzero_with_count(dst=dst, src=x, index_offset=16, padding_val=-1)

    result = run(emit, data, out=((33, 9), nl.int32))
    expected = np.full((33, 9), 99)
    for row in (0, 16, 32):
        found = [16 + column for column in range(8) if data[row, column]]
        expected[row] = [*found, *[-1] * (8 - len(found)), len(found)]
    np.testing.assert_array_equal(result, expected)


def test_topk_reads_and_writes_the_snake_of_16_partitions():
    n, k = 42, 20
    data = rng().permutation(32 * 3).reshape(32, 3).astype(bf16)
    values, index = run(
        lambda values, index, x: nisa.topk(val_dst=values, idx_dst=index, src=x, n=n),
        data,
        out=[((32, k), nl.bfloat16), ((32, k), nl.uint32)],
        strict=False,
    )
    for core in range(2):
        part = slice(16 * core, 16 * core + 16)
        snake = data[part].T.ravel()[:n].astype(np.float32)
        found = index[part].T.ravel()[:k]
        assert sorted(found) == sorted(np.argsort(-snake)[:k])
        np.testing.assert_array_equal(values[part].T.ravel()[:k].astype(np.float32), snake[found])


def test_sequence_bounds_follow_the_documented_example():
    ids = np.array([[0, 1, 1, 2, 2, 2, 0, 3, 3]], np.int32)
    result = run(lambda dst, x: nisa.sequence_bounds(dst=dst, segment_ids=x), ids, out=((1, 2, 9), nl.int32))
    np.testing.assert_array_equal(result, [[[9, 1, 1, 3, 3, 3, 9, 7, 7], [-1, 3, 3, 6, 6, 6, -1, 9, 9]]])


@pytest.mark.parametrize("name", ["vector", "gpsimd"])
def test_random_bits_follow_their_seed(name):
    engine = getattr(nisa.engine, name)

    def emit(first, again, other, seeds):
        for dst, seed in ((first, 0), (again, 0), (other, 1)):
            if name == "vector":
                nisa.set_rng_seed(seeds[0:1, seed : seed + 1])
            else:
                nisa.rand_set_state(seeds[:, 6 * seed : 6 * seed + 6])
            nisa.rng(dst, engine=engine)

    seeds = rng().integers(1, 2**32, (8, 12), np.uint32)
    first, again, other = run(emit, seeds, out=[((8, 500), nl.uint32)] * 3)
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.99
    assert abs(first.astype(np.float64).mean() / 2**32 - 0.5) < 0.02 and len(np.unique(first)) > 3990


def test_the_generator_state_can_be_saved_and_restored():
    def emit(first, again, seeds):
        nisa.rand_set_state(seeds)
        state = nl.ndarray((4, 6), dtype=nl.uint32)
        nisa.rand_get_state(state)
        nisa.rng(first, engine=nisa.engine.gpsimd)
        nisa.rand_set_state(state)
        nisa.rng(again, engine=nisa.engine.gpsimd)

    seeds = rng().integers(1, 2**32, (4, 6), np.uint32)
    np.testing.assert_array_equal(*run(emit, seeds, out=[((4, 10), nl.uint8)] * 2))


@pytest.mark.parametrize("prob", [0.0, 0.25, 1.0])
def test_dropout_zeroes_about_the_asked_share(prob):
    result = run(lambda dst, x: nisa.dropout(dst, x, prob), np.ones((128, 200), bf16), out=((128, 200), nl.bfloat16))
    assert abs((result == 0).mean() - prob) < 0.02 and set(np.unique(result.astype(np.float32))) <= {0.0, 1.0}
