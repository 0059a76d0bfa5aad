"""Two gloo processes: what ranks compute together is what one computes alone, the same bits on both."""

import os
import pickle
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

import draft_verify

torch = pytest.importorskip("torch")

B, HQ, HKV, T, D, SLOTS = 3, 4, 2, 4, 8, 16
RANKS = 2


def attention_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    window = random(B, HQ, T, D), random(B, HKV, T, D), random(B, HKV, T, D)
    caches = random(B, HKV, RANKS * SLOTS, D), random(B, HKV, RANKS * SLOTS, D)
    return window, caches, torch.tensor([0, 10, 27], dtype=torch.int32)


def attention_over_context_shards(rank, options):
    from draft_verify.parallel import context_parallel_attention

    window, caches, seq_lens = attention_inputs()
    shard = []
    for cache in caches:
        part = cache[:, :, rank * SLOTS : (rank + 1) * SLOTS].clone()
        live = (seq_lens - rank * SLOTS).clamp(0, SLOTS)
        part[torch.arange(SLOTS)[None, :].expand(B, SLOTS)[:, None].expand(B, HKV, SLOTS) >= live[:, None, None]] = (
            torch.nan
        )
        shard.append(part)
    result = context_parallel_attention(*window, *shard, seq_lens, return_lse=True, **options)
    expected = draft_verify.verify_attention(*window, *caches, seq_lens, return_lse=True, **options)
    for ours, theirs in zip(result, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    return [tensor.numpy() for tensor in result]


def chain(rank):
    return attention_over_context_shards(rank, {})


def tree_sinks_and_window(rank):
    options = {
        "tree": torch.tensor([-1, 0, 0, 2], dtype=torch.int32),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "sliding_window": 9,
        "softcap": 15.0,
        "draft_lens": torch.tensor([3, -1, 1], dtype=torch.int32),
    }
    return attention_over_context_shards(rank, options)


def one_decision_from_logits_that_differ_T34(rank):
    from draft_verify.parallel import same_decision

    logits = torch.zeros((B, T, 5))
    logits[:, :, 2 + rank] = 1e-6  # a near tie that the ranks see differently
    drafts = torch.full((B, T - 1), 2, dtype=torch.int32)
    own = draft_verify.greedy_acceptance(drafts, logits)
    assert own.num_accepted.tolist() == ([T - 1] * B if rank == 0 else [0] * B)
    shared = same_decision(own)
    assert shared.num_accepted.tolist() == [T - 1] * B and shared.tokens.tolist() == [[2] * T] * B
    assert [field.dtype for field in shared] == [field.dtype for field in own]
    return [field.numpy() for field in shared]


def counters_of_all_ranks(rank):
    from draft_verify.parallel import merge_stats

    stats = draft_verify.AcceptanceStats(2 + rank)
    stats.update(SimpleNamespace(tokens=np.array([[7, 8, -1]]), num_accepted=np.array([1])), draft_lens=[2])
    merged = merge_stats(stats)
    assert merged.steps == 2 and merged.accepted.tolist() == [2, 0, 0] and stats.steps == 1
    return [merged.accepted]


def vocabulary_cases():
    """Windows of 3 sequences: laws, greedy rows, NaN and -inf rows, ids outside the vocabulary, ragged and empty."""
    rng = np.random.default_rng(9)
    vocab_size, width, rows, batch = 301, 152, 4, 4
    for case in range(40):
        logits = 3 * rng.standard_normal((batch, rows, RANKS * width)).astype(np.float32)
        draft_logits = logits[:, :-1] + rng.standard_normal((batch, rows - 1, RANKS * width)).astype(np.float32)
        logits[..., vocab_size:] = draft_logits[..., vocab_size:] = np.nan  # padding columns
        tokens = np.where(
            rng.random((batch, rows - 1)) < 0.7,
            draft_logits[..., :vocab_size].argmax(-1),
            rng.integers(-1, vocab_size + 1, (batch, rows - 1)),
        ).astype(np.int32)
        if case % 4 == 1:
            logits[rng.integers(batch), rng.integers(rows), rng.integers(vocab_size)] = np.nan
            draft_logits[rng.integers(batch), rng.integers(rows - 1), rng.integers(vocab_size)] = np.nan
            logits[rng.integers(batch), rng.integers(rows), :vocab_size] = -np.inf
        if case % 4 == 2:
            logits[:] = np.round(logits)  # ties
        yield {
            "draft_tokens": tokens,
            "target_logits": logits,
            "uniforms": rng.uniform(0.001, 0.999, (batch, rows + 1)).astype(np.float32),
            "draft_logits": None if case % 3 == 0 else draft_logits,
            "draft_lens": rng.integers(-1, rows, batch).astype(np.int32),
            "temperature": rng.choice(np.array([0, 0.7, 1.3], np.float32), batch),
            "vocab_size": vocab_size,
        }


def acceptance_over_vocabulary_shards(rank):
    from draft_verify.vocab_parallel import vocab_parallel_sampling

    results = []
    for case in vocabulary_cases():
        width = case["target_logits"].shape[2] // RANKS
        expected = draft_verify.rejection_sampling(**case)
        shard = {
            name: torch.from_numpy(value[..., rank * width : (rank + 1) * width] if "logits" in name else value)
            if isinstance(value, np.ndarray)
            else value
            for name, value in case.items()
        }
        result = vocab_parallel_sampling(**shard)
        for ours, theirs in zip(result, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
            assert ours.numpy().dtype == theirs.dtype
        results += [field.numpy() for field in result]
    return results


def no_drafts_over_vocabulary_shards(rank):
    from draft_verify.vocab_parallel import vocab_parallel_sampling

    case = next(vocabulary_cases())
    width = case["target_logits"].shape[2] // RANKS
    logits, uniforms = case["target_logits"][:, :1], case["uniforms"][:, -2:]
    none = np.zeros((len(logits), 0), np.int32)
    expected = draft_verify.rejection_sampling(none, logits, uniforms, vocab_size=case["vocab_size"])
    result = vocab_parallel_sampling(
        torch.from_numpy(none),
        torch.from_numpy(logits[..., rank * width : (rank + 1) * width]),
        torch.from_numpy(uniforms),
        vocab_size=case["vocab_size"],
    )
    np.testing.assert_array_equal(result.tokens.numpy(), expected.tokens)
    return [result.tokens.numpy()]


CHECKS = [
    acceptance_over_vocabulary_shards,
    no_drafts_over_vocabulary_shards,
    chain,
    tree_sinks_and_window,
    one_decision_from_logits_that_differ_T34,
    counters_of_all_ranks,
]


def work(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {}
    for check in CHECKS:
        try:
            results[check.__name__] = check(rank)
        except Exception:  # the other rank's next collective fails when this one leaves
            results.update(
                (later.__name__, traceback.format_exc()) for later in CHECKS if later.__name__ not in results
            )
            break
    with open(os.path.join(folder, f"rank{rank}"), "wb") as file:
        pickle.dump(results, file)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)
    return [pickle.loads(open(os.path.join(folder, f"rank{rank}"), "rb").read()) for rank in range(RANKS)]


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_two_ranks_together(ranks, check):
    for rank, results in enumerate(ranks):
        assert not isinstance(results[check], str), f"rank {rank}: {results[check]}"
    for mine, theirs in zip(ranks[0][check], ranks[1][check], strict=True):
        np.testing.assert_array_equal(mine, theirs)
