"""What acceptance costs on trn2, modelled: bytes from HBM, busy time, instructions, at 151,936 ids in bf16, K = 7."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from draft_verify import loader
from draft_verify.reference import emulator

V, K = 151_936, 7
ROW_BYTES = 2 * V
HBM_BYTES_PER_SECOND = 362e9  # one physical core


def cost_of(batch: int, temperature: float = 1.0, spoiled: bool = False, limits: tuple = (None, None, None)):
    """`limits`: top_k, top_p and min_p of all sequences."""
    rng = np.random.default_rng(0)
    target = np.zeros((batch, K + 1, V), ml_dtypes.bfloat16)
    target[..., rng.integers(0, V, 1000)] = 3
    target[..., rng.integers(0, V, 30)] = 15
    if spoiled:
        target[0, 0, 5] = np.nan
    arrays = (
        np.full((batch, K), 17, np.int32),
        target,
        np.full((batch, K + 2), 0.5, np.float32),
        target[:, :K].copy(),
        np.full(batch, K, np.int32),
        np.full(batch, temperature, np.float32),
    )
    kernel = loader.kernel("rejection_sampling", "emulator")
    cut = limits[0] is not None
    if cut:
        limits = tuple(np.full(batch, limit, dtype) for limit, dtype in zip(limits, (np.int32, np.float32, np.float32)))
    program = emulator.trace(kernel[1], *arrays, *limits, "logits", "token", cut, V, strict=True)
    program.run(*arrays, *(limits if cut else ()))
    return program, program.cost()


def test_the_token_rule_reads_each_row_once_and_two_rows_a_sequence_again():
    for batch in (1, 4):
        _, cost = cost_of(batch)
        rows = batch * (2 * K + 3) * ROW_BYTES
        moved = sum(core.read_bytes + core.written_bytes for core in cost.cores)
        assert moved <= rows * 1.001  # and the few hundred bytes of tokens, uniforms and results


def test_one_sequence_takes_fewer_than_400_instructions():
    program, _ = cost_of(1)
    assert sum(1 for _ in program.calls(0)) < 400


@pytest.mark.parametrize(("temperature", "spoiled", "within"), [(1.0, False, 1.5), (0.0, False, 2.0), (1.0, True, 2.0)])
def test_sixteen_sequences_stay_near_the_hbm_limit(temperature, spoiled, within):
    _, cost = cost_of(16, temperature, spoiled)
    limit = 16 * (2 * K + 3) * ROW_BYTES / HBM_BYTES_PER_SECOND
    print(f"temperature {temperature}, spoiled {spoiled}: {1e6 * cost.bound:.1f} us of {1e6 * limit:.1f}")
    assert cost.bound <= within * limit


def test_truncation_inside_the_candidates_reads_no_row_again_and_stays_near_the_limit():
    for batch in (1, 4):
        _, cost = cost_of(batch, limits=(20, 0.95, 0.01))
        rows = batch * (2 * K + 3) * ROW_BYTES
        moved = sum(core.read_bytes + core.written_bytes for core in cost.cores)
        print(f"B = {batch}: {1e6 * cost.bound:.1f} us of {1e6 * rows / HBM_BYTES_PER_SECOND:.1f}")
        assert moved <= rows * 1.001
        assert cost.bound <= 5.1 * rows / HBM_BYTES_PER_SECOND


def test_truncation_below_the_candidates_reads_no_row_again_and_costs_no_more_than_its_searches():
    _, cost = cost_of(1, limits=(2000, 0.999, 0.0))
    moved = sum(core.read_bytes + core.written_bytes for core in cost.cores)
    assert moved <= (2 * K + 3) * ROW_BYTES * 1.001
    assert cost.bound <= 400e-6
