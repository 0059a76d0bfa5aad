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


def acceptance_over_vocabulary_shards(rank, **options):
    from draft_verify.parallel import vocabulary_parallel_sampling

    rng = np.random.default_rng(9)
    vocab_size, rows, batch = options.pop("vocab_size", 256), 4, 4
    truncated = options.pop("truncated", False)
    width = vocab_size // RANKS
    columns = slice(rank * width, (rank + 1) * width)
    results = []
    for case in range(options.pop("cases", 30)):
        logits = 3 * rng.standard_normal((batch, rows, vocab_size)).astype(np.float32)
        draft_logits = logits[:, :-1] + rng.standard_normal((batch, rows - 1, vocab_size)).astype(np.float32)
        exponentials = np.exp(draft_logits)
        law = {
            0: {},
            1: {"draft_logits": draft_logits},
            2: {"draft_probs": exponentials / exponentials.sum(-1, keepdims=True)},
        }[case % 3]
        best = draft_logits.argmax(-1)
        tokens = np.where(rng.random(best.shape) < 0.7, best, rng.integers(-1, vocab_size + 1, best.shape))
        if case % 4 == 1:
            logits[rng.integers(batch), rng.integers(rows), rng.integers(vocab_size)] = np.nan
        if case % 4 == 2:
            logits[:] = np.round(logits)  # ties
        arguments = {
            "draft_tokens": tokens.astype(np.int32),
            "target_logits": logits,
            "uniforms": rng.uniform(0.001, 0.999, (batch, rows + 1)).astype(np.float32),
            "draft_lens": rng.integers(-1, rows, batch).astype(np.int32),
            "temperature": rng.choice(np.array([0, 0.7, 1.3], np.float32), batch),
            **law,
        }
        if truncated:
            arguments["top_k"] = rng.choice(np.array([0, 3, 40, vocab_size - 200], np.int32), batch)
            arguments["top_p"] = rng.choice(np.array([1, 0.99, 0.5], np.float32), batch)
            arguments["min_p"] = rng.choice(np.array([0, 0.01], np.float32), batch)
        rule = "block" if case % 2 else "token"
        expected = draft_verify.rejection_sampling(**arguments, rule=rule)
        sharded = {
            name: torch.from_numpy(np.ascontiguousarray(value[..., columns] if value.ndim == 3 else value))
            for name, value in arguments.items()
        }
        result = vocabulary_parallel_sampling(**sharded, rule=rule, vocab_size=vocab_size, **options)
        for ours, theirs in zip(result, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
        results += [field.numpy() for field in result]
    return results


def acceptance_over_vocabulary_shards_cut_by_every_limit(rank):
    return acceptance_over_vocabulary_shards(rank, truncated=True)


def acceptance_over_vocabulary_shards_cut_below_their_candidates(rank):
    return acceptance_over_vocabulary_shards(rank, truncated=True, cases=3, vocab_size=128 * 72)


def kernels_over_vocabulary_shards(rank):
    return acceptance_over_vocabulary_shards(rank, cases=3, backend="emulator")


def masks_and_draft_vocabularies_over_vocabulary_shards(rank):
    """A rank's part of both is its columns."""
    from draft_verify.parallel import vocabulary_parallel_sampling

    rng = np.random.default_rng(11)
    vocab_size, rows, batch, draft_size = 256, 4, 3, 20
    width = vocab_size // RANKS
    columns = slice(rank * width, (rank + 1) * width)
    ids = rng.permutation(vocab_size)[:15]
    draft_to_target = ids[np.arange(draft_size) % 15].astype(np.int32)
    table = draft_verify.invert_draft_to_target(draft_to_target, vocab_size)
    results = []
    for kind, backend in (("logits", "reference"), ("probs", "reference"), ("logits", "emulator")):
        logits = 2 * rng.standard_normal((batch, rows, vocab_size)).astype(np.float32)
        logits[..., ids] += 3
        own = rng.standard_normal((batch, rows - 1, draft_size)).astype(np.float32)
        law = own if kind == "logits" else np.exp(own) / np.exp(own).sum(-1, keepdims=True)
        mask = rng.integers(-(2**31), 2**31, (batch, rows, vocab_size // 32)).astype(np.int32)
        shared = {
            "draft_tokens": draft_to_target[rng.integers(0, draft_size, (batch, rows - 1))],
            "uniforms": rng.uniform(0.001, 0.999, (batch, rows + 1)).astype(np.float32),
            "temperature": np.full(batch, 0.8, np.float32),
            f"draft_{kind}": law,
        }
        expected = draft_verify.rejection_sampling(
            target_logits=logits, allowed_mask=mask, target_to_draft=table, **shared, backend=backend
        )
        parts = {
            "target_logits": logits[..., columns],
            "allowed_mask": mask[..., rank * width // 32 : (rank + 1) * width // 32],
            "target_to_draft": table[:, columns],
        }
        sharded = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in (shared | parts).items()}
        result = vocabulary_parallel_sampling(**sharded, vocab_size=vocab_size, backend=backend)
        for ours, theirs in zip(result, expected, strict=True):
            np.testing.assert_array_equal(ours.numpy(), theirs)
        results += [field.numpy() for field in result]
    return results


def tokens_and_logprobs_over_vocabulary_shards(rank):
    """Both as one core has them; of the law, each rank its columns."""
    from draft_verify.parallel import vocabulary_parallel_logprobs, vocabulary_parallel_tokens

    rng = np.random.default_rng(13)
    vocab_size, rows, batch = 256, 4, 5
    width = vocab_size // RANKS
    columns = slice(rank * width, (rank + 1) * width)
    results = []
    for case, backend in enumerate(("reference", "reference", "reference", "emulator")):
        logits = 2 * rng.standard_normal((batch, rows, vocab_size)).astype(np.float32)
        mask = rng.integers(-(2**31), 2**31, (batch, rows, vocab_size // 32)).astype(np.int32)
        logits[0, 1, 200] = np.nan
        options = {"temperature": np.array([0.7, 0, 1.3, 1, 0.4], np.float32)} if case else {}
        if case > 1:
            options["top_k"] = np.array([5, 3, 0, 40, 256], np.int32)
            options["top_p"] = np.array([0.5, 0.9, 0.8, 1, 0.95], np.float32)
        masked = case % 2 == 1

        def own(array):
            return torch.from_numpy(np.ascontiguousarray(array))

        shared = {name: own(value) for name, value in options.items()}
        shared |= {"vocab_size": vocab_size, "backend": backend}
        mask_columns = slice(rank * width // 32, (rank + 1) * width // 32)
        of_all = {"allowed_mask": mask} if masked else {}
        of_rank = {"allowed_mask": own(mask[..., mask_columns])} if masked else {}

        tokens = rng.integers(0, vocab_size, (batch, rows)).astype(np.int32)
        tokens[:, :2] = logits.argmax(-1)[:, :2]
        tokens[2, 3:] = -1
        path = np.where(tokens >= 0, np.minimum(np.arange(rows), 2), -1).astype(np.int32)
        expected = draft_verify.token_logprobs(logits, tokens, path, **options, **of_all, backend="reference")
        actual = vocabulary_parallel_logprobs(own(logits[..., columns]), own(tokens), own(path), **shared, **of_rank)
        for ours, theirs in zip(actual, expected, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-5, atol=1e-5)
            results.append(ours.numpy())

        uniforms = rng.uniform(0.001, 0.999, (batch, 2)).astype(np.float32)
        of_all, of_rank = ({name: value[:, 1] for name, value in masks.items()} for masks in (of_all, of_rank))
        expected = draft_verify.sample_tokens(
            logits[:, 1], uniforms, **options, **of_all, return_law=True, backend="reference"
        )
        actual = vocabulary_parallel_tokens(
            own(logits[:, 1, columns]), own(uniforms), **shared, **of_rank, return_law=True
        )
        np.testing.assert_array_equal(actual.tokens.numpy(), expected.tokens)
        np.testing.assert_array_equal(actual.invalid.numpy(), expected.invalid)
        np.testing.assert_allclose(actual.probs.numpy(), expected.probs, rtol=1e-5)
        np.testing.assert_allclose(actual.law.numpy(), expected.law[:, columns], rtol=1e-5, atol=1e-12)
        results += [actual.tokens.numpy(), actual.probs.numpy()]
    return results


CHECKS = [
    tokens_and_logprobs_over_vocabulary_shards,
    masks_and_draft_vocabularies_over_vocabulary_shards,
    acceptance_over_vocabulary_shards,
    acceptance_over_vocabulary_shards_cut_by_every_limit,
    acceptance_over_vocabulary_shards_cut_below_their_candidates,
    kernels_over_vocabulary_shards,
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
