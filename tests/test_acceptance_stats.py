"""AcceptanceStats: what counts as drafted, reached, accepted and emitted, and the formats it is exported in."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_verify.acceptance_stats import AcceptanceStats


def step(flags, tokens=None, num_draft_tokens=None):
    """An acceptance of one sequence whose drafts matched where `flags` is true; tokens default to 100, 101, ..."""
    num_accepted = next((i for i, flag in enumerate(flags) if not flag), len(flags))
    width = (len(flags) if num_draft_tokens is None else num_draft_tokens) + 1
    emitted = np.arange(100, 100 + width) if tokens is None else np.array(tokens)
    emitted = np.where(np.arange(width) <= num_accepted, emitted, -1)
    return SimpleNamespace(tokens=emitted[None].astype(np.int32), num_accepted=np.array([num_accepted], np.int32))


@st.composite
def batches(draw):
    num_draft_tokens = draw(st.integers(0, 5))
    rows = draw(st.lists(st.tuples(st.integers(-1, num_draft_tokens), st.integers(0, 5)), min_size=1, max_size=6))
    draft_lens = np.array([length for length, _ in rows], np.int32)
    num_accepted = np.array([min(length, accepted) if length >= 0 else -1 for length, accepted in rows], np.int32)
    values = draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=num_draft_tokens + 1, max_size=num_draft_tokens + 1),
            min_size=len(rows),
            max_size=len(rows),
        )
    )
    tokens = np.where(np.arange(num_draft_tokens + 1) <= num_accepted[:, None], np.array(values), -1)
    return SimpleNamespace(tokens=tokens, num_accepted=num_accepted), draft_lens


def test_a_match_after_a_rejection_is_not_accepted_T57_T60():
    for flags, accepted, conditional in (
        ([1, 0, 1, 1], [1, 0, 0, 0], [1.0, 0.0]),
        ([0, 1, 0, 0], [0, 0, 0, 0], [0.0]),
        ([1, 0, 1, 0], [1, 0, 0, 0], [1.0, 0.0]),
    ):
        stats = AcceptanceStats(4)
        stats.update(step(flags))
        assert stats.accepted.tolist() == accepted
        assert stats.unconditional_rates == [float(a) for a in accepted]
        assert stats.conditional_rates[: len(conditional)] == conditional
        assert all(math.isnan(rate) for rate in stats.conditional_rates[len(conditional) :])


def test_accepted_and_emitted_are_counted_apart_T58_T59():
    stats = AcceptanceStats(3)
    stats.update(step([1, 0, 1]))
    stats.update(step([1, 1, 1]))
    assert stats.accepted.sum() == 4 and stats.emitted == 6 and stats.steps == 2
    assert stats.mean_accepted == 2.0 and stats.tokens_per_step == 3.0
    assert stats.acceptance_rate == 4 / 6


def test_an_end_of_sequence_cuts_the_step_and_is_no_rejection_T61():
    stats = AcceptanceStats(4, stop_token_ids=[2])
    stats.update(step([1, 1, 1, 1], tokens=[7, 2, 8, 9, 9]))
    assert stats.emitted == 2
    assert stats.accepted.tolist() == stats.drafted.tolist() == stats.reached.tolist() == [1, 1, 0, 0]
    stats = AcceptanceStats(4, stop_token_ids=[2])
    stats.update(step([1, 1, 0, 0], tokens=[7, 8, 2, 9, 9]))  # the recovered token is the stop token: nothing is cut
    assert stats.emitted == 3
    assert stats.accepted.tolist() == [1, 1, 0, 0]
    assert stats.reached.tolist() == [1, 1, 1, 0]
    assert stats.drafted.tolist() == [1, 1, 1, 1]


def test_a_cut_at_the_maximum_length_counts_only_what_was_handed_out_T61():
    stats = AcceptanceStats(3)
    stats.update(step([1, 1, 1]), num_emitted=[2])
    assert stats.emitted == 2 and stats.accepted.tolist() == stats.drafted.tolist() == [1, 1, 0]
    stats.update(step([1, 1, 1]), num_emitted=[0])
    assert stats.steps == 1


def test_short_proposals_and_empty_slots_do_not_count_as_rejections_T19():
    stats = AcceptanceStats(3)
    stats.update(step([1], num_draft_tokens=3), draft_lens=[1])
    stats.update(step([], num_draft_tokens=3), draft_lens=[0])
    stats.update(
        SimpleNamespace(tokens=np.full((1, 4), -1), num_accepted=np.array([-1])), draft_lens=np.array([-1], np.int32)
    )
    assert stats.steps == 2 and stats.emitted == 3
    assert stats.drafted.tolist() == [1, 0, 0]
    assert stats.unconditional_rates[0] == 1.0 and math.isnan(stats.unconditional_rates[1])


@given(batches(), st.sets(st.integers(0, 4), max_size=2))
def test_counters_equal_a_walk_over_each_sequence(batch, stop_token_ids):
    acceptance, draft_lens = batch
    num_draft_tokens = acceptance.tokens.shape[1] - 1
    stats = AcceptanceStats(num_draft_tokens, stop_token_ids)
    stats.update(acceptance, draft_lens=draft_lens)

    drafted, reached, accepted = (np.zeros(num_draft_tokens, int) for _ in range(3))
    steps = emitted = 0
    for row, num_accepted, length in zip(acceptance.tokens, acceptance.num_accepted, draft_lens):
        if length < 0:
            continue
        steps += 1
        alive = True  # all drafts so far were accepted
        for i in range(length):
            drafted[i] += 1
            reached[i] += alive
            alive = alive and i < num_accepted
            accepted[i] += alive
            emitted += alive
            if alive and row[i] in stop_token_ids:
                break
        else:
            emitted += 1
    assert (stats.steps, stats.emitted) == (steps, emitted)
    assert stats.drafted.tolist() == drafted.tolist()
    assert stats.reached.tolist() == reached.tolist()
    assert stats.accepted.tolist() == accepted.tolist()
    product = 1.0
    for i, rate in enumerate(stats.conditional_rates):
        if len(set(drafted)) == 1 and reached[i]:  # with drafts of one length the two kinds of rate must agree
            product *= rate
            assert stats.unconditional_rates[i] == pytest.approx(product)


@given(st.lists(batches(), max_size=4))
def test_merging_ranks_equals_counting_together(all_batches):
    together = AcceptanceStats(5)
    ranks = []
    for acceptance, draft_lens in all_batches:
        padding = ((0, 0), (0, 6 - acceptance.tokens.shape[1]))
        wide = SimpleNamespace(
            tokens=np.pad(acceptance.tokens, padding, constant_values=-1), num_accepted=acceptance.num_accepted
        )
        together.update(wide, draft_lens=draft_lens)
        ranks.append(AcceptanceStats(acceptance.tokens.shape[1] - 1))
        ranks[-1].update(acceptance, draft_lens=draft_lens)
    merged = AcceptanceStats(5)
    for rank in reversed(ranks):
        merged.merge(rank)
    assert merged == together


@given(batches())
def test_json_brings_everything_back(batch):
    acceptance, draft_lens = batch
    stats = AcceptanceStats(acceptance.tokens.shape[1] - 1, [3])
    stats.update(acceptance, draft_lens=draft_lens)
    assert AcceptanceStats.from_json(stats.to_json()) == stats
    assert json.loads(stats.to_json())["schema"] == "draft_verify.acceptance_stats/1"
    with pytest.raises(ValueError, match="schema"):
        AcceptanceStats.from_dict({**stats.to_dict(), "schema": "other/1"})


def test_prometheus_text_has_one_sample_per_counter_and_position():
    stats = AcceptanceStats(2)
    stats.update(step([1, 0]))
    text = stats.to_prometheus({"model": 'a"b\\c\nd'})
    assert text.endswith("\n")
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    label = r'model="a\"b\\c\nd"'
    assert f"draft_verify_steps_total{{{label}}} 1" in samples
    assert f"draft_verify_emitted_tokens_total{{{label}}} 2" in samples
    assert f'draft_verify_accepted_tokens_total{{{label},position="0"}} 1' in samples
    assert f'draft_verify_accepted_tokens_total{{{label},position="1"}} 0' in samples
    assert len(samples) == 2 + 3 * 2
    for name in ("steps", "emitted_tokens", "drafted_tokens", "reached_tokens", "accepted_tokens"):
        assert text.count(f"# TYPE draft_verify_{name}_total counter\n") == 1
        assert text.count(f"# HELP draft_verify_{name}_total ") == 1
    assert "draft_verify_steps_total 1\n" in stats.to_prometheus()


def test_torch_tensors_are_counted_as_arrays_are():
    torch = pytest.importorskip("torch")
    stats = AcceptanceStats(2)
    stats.update(
        SimpleNamespace(tokens=torch.tensor([[5, 6, -1]]), num_accepted=torch.tensor([1])),
        draft_lens=torch.tensor([2]),
    )
    assert stats.accepted.tolist() == [1, 0] and stats.emitted == 2


@pytest.mark.parametrize(
    "change",
    [
        {"draft_lens": [1]},
        {"draft_lens": [3]},
        {"draft_lens": [[2]]},
        {"num_emitted": [1, 2]},
    ],
)
def test_a_bad_step_is_refused_and_counts_nothing(change):
    stats = AcceptanceStats(2)
    with pytest.raises(ValueError, match="expected"):
        stats.update(step([1, 1]), **change)
    assert stats == AcceptanceStats(2)
    with pytest.raises(ValueError, match="num_draft_tokens"):
        AcceptanceStats(-1)
