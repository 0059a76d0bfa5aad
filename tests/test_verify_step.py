"""verify_step: one call from logits to the next window, against a decoder that walks token by token."""

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify.reference.emulator import Refusal
from draft_verify.verify_step import CacheWindow, verify_step

V, HEADS, D, SLOTS = 6, 2, 4, 12


@st.composite
def steps(draw):
    batch, rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.standard_normal((batch, rows, V)).astype(np.float32)
    tokens = rng.integers(0, V, (batch, rows - 1)).astype(np.int32)
    if draw(st.booleans()):  # drafts that the greedy target keeps for a while
        tokens = np.where(rng.random(tokens.shape) < 0.8, logits.argmax(-1)[:, :-1], tokens).astype(np.int32)
    seq_lens = rng.integers(0, SLOTS - rows + 1, batch).astype(np.int32)
    window = [rng.standard_normal((batch, HEADS, rows, D)).astype(np.float32) for _ in range(2)]
    caches = [np.full((batch, HEADS, SLOTS, D), np.nan, np.float32) for _ in range(2)]
    options = {
        "stop_token_ids": tuple(draw(st.sets(st.integers(0, V - 1), max_size=2))),
        "max_length": draw(st.sampled_from([None, 3, 7, SLOTS + 2])),
        "draft_lens": draw(st.sampled_from([None, rng.integers(-1, rows, batch).astype(np.int32)])),
    }
    if draw(st.booleans()):
        options["seeds"] = rng.integers(0, 2**31, batch).astype(np.int32)
        options["temperature"] = 0.7
    return tokens, logits, seq_lens, caches, window, options


@given(steps())
def test_a_step_is_acceptance_cut_token_by_token_and_committed(case):
    tokens, logits, seq_lens, caches, window, options = case
    batch, rows = logits.shape[:2]
    draft_lens = np.full(batch, rows - 1, np.int32) if options["draft_lens"] is None else options["draft_lens"].copy()
    limit = options["max_length"]
    if limit is not None:
        draft_lens[seq_lens + 1 >= limit] = -1
    if "seeds" in options:
        accepted = draft_verify.rejection_sampling(
            tokens,
            logits,
            draft_verify.uniforms_for(options["seeds"], seq_lens, rows - 1),
            draft_lens=draft_lens,
            temperature=options["temperature"],
        )
    else:
        accepted = draft_verify.greedy_acceptance(tokens, logits, draft_lens=draft_lens)
    step = verify_step(tokens, logits, seq_lens, [CacheWindow(*caches, *window)], **options)

    for b in range(batch):
        emitted, finished = [], draft_lens[b] < 0
        for token in accepted.tokens[b, : accepted.num_accepted[b] + 1].tolist():
            emitted.append(token)
            if token in options["stop_token_ids"] or (limit is not None and seq_lens[b] + 1 + len(emitted) == limit):
                finished = True
                break
        assert step.tokens[b].tolist() == emitted + [-1] * (rows - len(emitted))
        assert step.num_emitted[b] == len(emitted) and step.num_accepted[b] == len(emitted) - 1
        assert step.next_tokens[b] == (emitted[-1] if emitted else -1)
        assert step.next_seq_lens[b] == seq_lens[b] + len(emitted)
        assert step.finished[b] == finished
        assert step.path[b].tolist() == list(range(len(emitted))) + [-1] * (rows - len(emitted))
        for cache, rows_of in zip(caches, window):
            written = slice(seq_lens[b], seq_lens[b] + len(emitted))
            np.testing.assert_array_equal(cache[b, :, written], rows_of[b, :, : len(emitted)])
            assert np.isnan(np.delete(cache[b], np.r_[written], axis=1)).all()


@given(steps())
def test_tensors_step_as_arrays_do(case):
    torch = pytest.importorskip("torch")
    tokens, logits, seq_lens, caches, window, options = case

    def tensor(value):
        return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value

    tensors = CacheWindow(*(tensor(array) for array in (*caches, *window)))
    ours = verify_step(
        *(tensor(array) for array in (tokens, logits, seq_lens)),
        [tensors],
        **{name: tensor(value) for name, value in options.items()},
    )
    expected = verify_step(tokens, logits, seq_lens, [CacheWindow(*caches, *window)], **options)
    for name, theirs in expected._asdict().items():
        if name != "caches":
            np.testing.assert_array_equal(getattr(ours, name).numpy(), theirs)
            assert getattr(ours, name).numpy().dtype == theirs.dtype
    for cache, theirs in zip(tensors[:2], caches):
        np.testing.assert_array_equal(cache.numpy(), theirs)


def test_a_draft_that_is_a_stop_token_is_emitted_and_nothing_behind_it_T61():
    logits = np.zeros((1, 4, V), np.float32)
    logits[0, [0, 1, 2, 3], [3, 5, 2, 1]] = 9
    cache = np.zeros((1, HEADS, SLOTS, D), np.float32)
    rows = np.ones((1, HEADS, 4, D), np.float32)
    step = verify_step(
        np.array([[3, 5, 2]], np.int32),
        logits,
        np.array([2], np.int32),
        [CacheWindow(cache, cache.copy(), rows, rows)],
        stop_token_ids=(5,),
    )
    assert step.tokens.tolist() == [[3, 5, -1, -1]] and step.finished.tolist() == [True]
    # The stop token itself has no key yet, as the last token of any step.
    assert cache[0, 0, :, 0].tolist() == [0, 0, 1, 1] + [0] * 8 and step.next_seq_lens.tolist() == [4]


@pytest.mark.parametrize("rule", [None, "greedy"])
@given(case=steps())
def test_a_trees_accepted_path_is_cut_and_committed(case, rule):
    tokens, logits, seq_lens, caches, window, options = case
    batch, rows = logits.shape[:2]
    parents = np.array([-1, 0, 0, 1, 2][:rows], np.int32)
    rng = np.random.default_rng(int(seq_lens.sum()))
    uniforms = rng.uniform(0.01, 0.99, (batch, rows + 1)).astype(np.float32)
    arguments = {"rule": "target_only", "uniforms": uniforms, "temperature": 0.8}
    step_arguments = {"uniforms": uniforms, "temperature": 0.8}
    if rule == "greedy":
        arguments, step_arguments = {"rule": "greedy"}, {}
    accepted = draft_verify.tree_acceptance(parents, tokens, logits, **arguments)
    stops = options["stop_token_ids"]
    step = verify_step(
        tokens,
        logits,
        seq_lens,
        [CacheWindow(*caches, *window)],
        tree=parents,
        stop_token_ids=stops,
        **step_arguments,
    )
    for b in range(batch):
        emitted = accepted.tokens[b, : accepted.num_accepted[b] + 1].tolist()
        cut = next((i + 1 for i, token in enumerate(emitted) if token in stops), len(emitted))
        assert step.tokens[b, : step.num_emitted[b]].tolist() == emitted[:cut]
        assert step.path[b, :cut].tolist() == accepted.path[b, :cut].tolist()
        for cache, rows_of in zip(caches, window):
            np.testing.assert_array_equal(
                cache[b, :, seq_lens[b] : seq_lens[b] + cut], rows_of[b][:, accepted.path[b, :cut]]
            )
            assert np.isnan(cache[b, :, seq_lens[b] + cut :]).all()


def test_compile_sees_uniforms_acceptance_and_one_commit_a_cache():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 3, V), generator=generator)
    caches = [torch.zeros((2, HEADS, SLOTS, D)) for _ in range(4)]
    rows = [torch.randn((2, HEADS, 3, D), generator=generator) for _ in range(2)]
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    def step(logits, seq_lens, seeds):
        windows = [CacheWindow(*caches[:2], *rows), CacheWindow(*caches[2:], *rows)]
        return verify_step(
            torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
            logits,
            seq_lens,
            windows,
            seeds=seeds,
            stop_token_ids=(1,),
            max_length=9,
        )[:-1]

    inputs = logits, torch.tensor([3, 7], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
    torch._dynamo.reset()
    result = torch.compile(step, fullgraph=True, backend=backend)(*inputs)
    for ours, theirs in zip(result, step(*inputs), strict=True):
        assert torch.equal(ours, theirs)
    (graph,) = graphs
    operators = [str(node.target) for node in graph.graph.nodes if "draft_verify" in str(node.target)]
    assert len(operators) == 4 and sum("commit_window" in name for name in operators) == 2


@pytest.mark.parametrize("is_tree", [False, True])
@given(case=steps())
def test_typical_acceptance_steps_chains_and_trees(case, is_tree):
    tokens, logits, seq_lens, caches, window, options = case
    rows = logits.shape[1]
    arguments = {
        "tree": np.array([-1, 0, 0, 1, 2][:rows], np.int32) if is_tree else None,
        "temperature": 0.8,
        "posterior_threshold": 0.3,
        "posterior_alpha": 0.5,
        "draft_lens": options["draft_lens"],
    }
    uniforms = np.full((len(logits), rows + 1), 0.4, np.float32)
    step = verify_step(
        tokens, logits, seq_lens, CacheWindow(*caches, *window), rule="typical", uniforms=uniforms, **arguments
    )
    accepted = draft_verify.typical_acceptance(tokens, logits, uniforms, **arguments)
    for ours, theirs in zip((step.tokens, step.num_accepted, step.path, step.invalid), accepted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


DRAWS = {"uniforms": np.full((1, 4), 0.5, np.float32)}
LOGITS = np.zeros((1, 3, V), np.float32)
CHAIN, TREE = {"draft_logits": LOGITS[:, :2]}, {"tree": np.array([-1, 0, 0], np.int32)}
TYPICAL = {"rule": "typical", "posterior_threshold": 0.1, "posterior_alpha": 0.3}


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("temperature", {"temperature": 0.7}),
        ("temperature", {"temperature": -5.0, "rule": "greedy"}),
        ("temperature", {"temperature": np.array([0.7], np.float32)}),
        ("top_k", {"temperature": 0, "top_k": 3}),
        ("top_p", {"top_p": 0.9, **TREE}),
        ("min_p", {"min_p": 0.1}),
        ("draft_logits", CHAIN),
        ("draft_probs", {"draft_probs": LOGITS[:, :2]}),
        ("draft_to_target", {"draft_to_target": np.arange(V, dtype=np.int32)}),
        ("temperature", {"temperature": 0.7, "rule": "greedy", **DRAWS}),
        ("uniforms", {"seeds": np.array([1], np.int32), **DRAWS}),
        ("uniforms", {"rule": "token"}),
        ("rule", {"draft_logits": LOGITS, **TREE, **DRAWS}),
        ("rule", {"rule": "independent", **CHAIN, **DRAWS}),
        ("posterior_alpha", {"posterior_alpha": 0.3, **DRAWS}),
        ("posterior_alpha", {"rule": "typical", "posterior_threshold": 0.3, **DRAWS}),
        ("top_k", {**TYPICAL, "top_k": 3, **DRAWS}),
        ("draft_logits", {**TYPICAL, **CHAIN, **DRAWS}),
    ],
)
def test_what_a_step_would_not_use_is_refused_T35(argument, options):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        verify_step(np.zeros((1, 2), np.int32), LOGITS, np.array([2], np.int32), **options)


def test_compile_takes_a_temperature_of_0_and_no_tensor_whose_value_it_cannot_see():
    torch = pytest.importorskip("torch")
    inputs = [torch.zeros((1, 2), dtype=torch.int32), torch.from_numpy(LOGITS), torch.tensor([2], dtype=torch.int32)]

    def step(temperature):
        return verify_step(*inputs, temperature=temperature)[:-1]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for ours, theirs in zip(compiled(0.0), step(0.0), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(Exception, match=r"temperature: got .*, expected None without seeds or uniforms"):
        compiled(torch.zeros(1))


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0), np.zeros(1, np.float32)])
def test_temperature_0_says_what_a_greedy_step_does(zero):
    inputs = np.zeros((1, 2), np.int32), LOGITS, np.array([2], np.int32)
    assert verify_step(*inputs, temperature=zero).tokens.tolist() == verify_step(*inputs).tokens.tolist()


@pytest.mark.parametrize("options", [{}, {"max_length": 9}, {"seeds": np.array([5, 6], np.int32)}])
def test_an_empty_slot_may_have_any_length_and_no_other(options):
    tokens, logits = np.ones((2, 2), np.int32), np.random.default_rng(0).standard_normal((2, 3, V)).astype(np.float32)
    draft_lens = np.array([2, -1], np.int32)
    for anything in (-1, 0, -(2**31), 2**31 - 1):
        step = verify_step(tokens, logits, np.array([3, anything], np.int32), draft_lens=draft_lens, **options)
        alone = {name: value[:1] if name == "seeds" else value for name, value in options.items()}
        expected = verify_step(tokens[:1], logits[:1], np.array([3], np.int32), draft_lens=draft_lens[:1], **alone)
        assert step.tokens.tolist() == [*expected.tokens.tolist(), [-1] * 3]
        assert step.next_seq_lens[1] == anything and step.finished[1]
    for lens in (None, np.array([2, 0], np.int32)):
        with pytest.raises(ValueError, match=r"^seq_lens: got -1 at \[1\]"):
            verify_step(tokens, logits, np.array([3, -1], np.int32), draft_lens=lens, **options)


@pytest.mark.parametrize("options", [{}, {"max_length": 9}])
@pytest.mark.parametrize("tensor", range(5))
def test_one_tensor_among_arrays_makes_a_step_of_tensors(tensor, options):
    torch = pytest.importorskip("torch")
    inputs = [
        np.ones((2, 2), np.int32),
        np.random.default_rng(0).standard_normal((2, 3, V)).astype(np.float32),
        np.array([3, 4], np.int32),
        np.array([2, 1], np.int32),  # draft_lens
        np.array([5, 6], np.int32),  # seeds
    ]
    mixed = [torch.from_numpy(value) if i == tensor else value for i, value in enumerate(inputs)]
    step, expected = (
        verify_step(*arrays[:3], draft_lens=arrays[3], seeds=arrays[4], **options) for arrays in (mixed, inputs)
    )
    for name, theirs in expected._asdict().items():
        if name != "caches":
            np.testing.assert_array_equal(getattr(step, name).numpy(), theirs)


@pytest.mark.parametrize(("given", "ids"), [(None, ()), (2, (2,)), (np.int64(2), (2,)), (np.array([2, 3]), (2, 3))])
def test_stop_tokens_come_as_configurations_hold_them(given, ids):
    logits = np.zeros((1, 3, V), np.float32)
    logits[0, range(3), [1, 2, 4]] = 9
    inputs = np.array([[1, 2]], np.int32), logits, np.array([2], np.int32)
    assert verify_step(*inputs, stop_token_ids=given).tokens.tolist() == [[1, 2, -1 if ids else 4]]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_bad_input_is_refused_before_anything_is_written(kind):
    rows = np.ones((1, HEADS, 3, D), np.float32)
    caches = [np.zeros((1, HEADS, SLOTS, D), np.float32) for _ in range(3)]
    small = np.zeros((1, HEADS, 1, D), np.float32)
    arrays = [np.zeros((1, 2), np.int32), np.zeros((1, 3, V), np.float32), np.array([1], np.int32)]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        rows, small = torch.from_numpy(rows), torch.from_numpy(small)
        arrays = [torch.from_numpy(array) for array in arrays]
        windows = [torch.from_numpy(cache) for cache in caches]
    else:
        windows = caches
    good, bad = CacheWindow(*windows[:2], rows, rows), CacheWindow(windows[2], small, rows, rows)
    with pytest.raises(ValueError, match="key_cache"):
        verify_step(*arrays, [good, bad])
    with pytest.raises(ValueError, match="seq_lens"):  # no room in the second cache
        verify_step(*arrays, [good, CacheWindow(small, small, rows, rows)])
    with pytest.raises(ValueError, match="draft_tokens"):
        verify_step(arrays[0][:, :1], *arrays[1:], [good])
    if kind == "torch":
        for array in (caches[2], (caches[2],)):
            for among in ((array, windows[2], rows, rows), (windows[2], array, rows, rows)):
                with pytest.raises(ValueError, match="_cache: got ndarray"):
                    verify_step(*arrays, [good, CacheWindow(*among)])
    assert not any(cache.any() for cache in caches)


def test_a_cache_that_the_kernel_refuses_leaves_the_others_as_they_were(monkeypatch):
    """More instructions than a program may have, say: known once the kernel is traced, not before."""
    rows = np.ones((1, HEADS, 3, D), np.float32)
    caches = np.zeros((2, 4, 1, HEADS, SLOTS, D), np.float32)
    one, many = (CacheWindow(*map(tuple, caches[:, :layers]), *[(rows,) * layers] * 2) for layers in (1, 4))
    arrays = np.zeros((1, 2), np.int32), np.zeros((1, 3, V), np.float32), np.array([1], np.int32)
    verify_step(*arrays, [one], backend="emulator")  # traced now, and no more refused
    assert caches[:, 0].any()
    caches[:] = 0
    tracer = importlib.import_module("draft_verify.reference.emulator.trace")
    monkeypatch.setattr(tracer, "_MAX_INSTRUCTIONS", 1)
    with pytest.raises(Refusal, match="too many instructions"):
        verify_step(*arrays, [one, many], backend="emulator")
    assert not caches.any()
