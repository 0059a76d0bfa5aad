"""Known-wrong variants of the decode loop, the drafts and the window model."""

from __future__ import annotations

from . import Mutant

DECODE, WINDOW = "tests/test_demo_decode.py", "tests/test_window.py"

MUTANTS = [
    Mutant(
        "synthetic acceptance counts matches after a rejection",
        "bench/synthetic.py",
        "np.logical_and.accumulate(passed, axis=1).sum(axis=1)",
        "passed.sum(axis=1)",
        (f"{WINDOW}::test_a_draft_that_passes_after_a_rejection_counts_nothing",),
    ),
    Mutant(
        "drafts go past the length asked for",
        "bench/decode.py",
        "min(num_draft_tokens, left - 1)",
        "num_draft_tokens",
        (f"{DECODE}::test_no_more_tokens_come_than_asked_for",),
    ),
    Mutant(
        "text goes on after the stop token",
        "bench/decode.py",
        "emitted[: emitted.index(stop) + 1] if stop in emitted else emitted",
        "emitted",
        (f"{DECODE}::test_decoding_ends_with_the_stop_token_and_forgets_what_came_after",),
    ),
    Mutant(
        "rejected rows are committed to a ring",
        "bench/decode.py",
        "window.commit(cache, acceptance.num_accepted,",
        "window.commit(cache, window.draft_lens,",
        (f"{DECODE}::test_a_ring_no_longer_than_the_window_decodes_like_the_plain_model",),
    ),
    Mutant(
        "a tree's siblings repeat",
        "bench/drafts.py",
        "remaining[token] = 0",
        "pass",
        ("tests/test_demo_model.py::test_sampled_drafts_come_with_the_law_they_were_drawn_from",),
    ),
    Mutant(
        "tree rows see every row before them",
        "bench/drafts.py",
        "ancestors[:, :length] = True",
        "ancestors[:, :start] = True",
        ("tests/test_demo_model.py::test_the_law_of_a_tree_row_depends_on_its_ancestors_alone",),
    ),
    Mutant(
        "rates by position are taken as independent of what came before",
        "bench/speedup.py",
        "survival *= rates[",
        "survival = rates[",
        (f"{WINDOW}::test_every_window_agrees_with_simulation_and_none_beats_the_best",),
    ),
    Mutant(
        "a near tie excuses every difference",
        "bench/demo.py",
        "margins[index] <= NEAR_TIE",
        "margins[index] <= 10",
        ("tests/test_demo.py::test_only_a_near_tie_excuses_a_difference",),
    ),
]
