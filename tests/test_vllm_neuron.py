"""The vLLM Neuron plugin's rejection sampler contract: flat ragged batches in, [B, K + 1] with -1 out."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import draft_verify
from draft_verify import backends

torch = pytest.importorskip("torch")

from draft_verify.vllm_neuron import RejectionSampler, rejection_sampler, windows  # noqa: E402

V = 9
PADDED = ("logits", "drafts", "targets", "laws")
GREEDY = SimpleNamespace(all_greedy=True, temperature=None, top_k=None, top_p=None)


def metadata(num_draft_tokens, draft_token_ids):
    """As vLLM builds it: each request's draft rows, then its bonus row."""
    target, bonus, row = [], [], 0
    for n in num_draft_tokens:
        target += range(row, row + n)
        bonus.append(row + n)
        row += n + 1
    return SimpleNamespace(
        draft_token_ids=torch.tensor(draft_token_ids, dtype=torch.int32),
        cu_num_draft_tokens=torch.tensor(np.cumsum(num_draft_tokens), dtype=torch.int32),
        target_logits_indices=torch.tensor(target, dtype=torch.int32),
        bonus_logits_indices=torch.tensor(bonus, dtype=torch.int32),
        max_spec_len=max(num_draft_tokens),
    )


def sampling(temperature, top_k=None, top_p=None, **others):
    def tensor(value, dtype):
        return None if value is None else torch.tensor(value, dtype=dtype)

    return SimpleNamespace(
        all_greedy=False,
        temperature=tensor(temperature, torch.float32),
        top_k=tensor(top_k, torch.int32),
        top_p=tensor(top_p, torch.float32),
        **others,
    )


def flat_batch(lengths, seed=0):
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    tokens = rng.integers(0, V, total)
    logits = 2 * rng.standard_normal((total + len(lengths), V)).astype(np.float32)
    laws = rng.dirichlet(np.ones(V), total).astype(np.float32)
    uniforms = rng.uniform(0.001, 0.999, (len(lengths), max(lengths) + 2)).astype(np.float32)
    return lengths, tokens.tolist(), logits, laws, uniforms


def batches():
    return st.builds(flat_batch, st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 2**32 - 1))


def test_the_design_pages_example_becomes_windows():
    batch = windows(metadata([3, 0, 2, 0, 1], [11, 12, 13, 21, 22, 31]))
    assert batch.draft_lens.tolist() == [3, 0, 2, 0, 1]
    assert batch.draft_tokens.tolist() == [[11, 12, 13], [-1] * 3, [21, 22, -1], [-1] * 3, [31, -1, -1]]
    assert [row[: n + 1] for row, n in zip(batch.rows.tolist(), [3, 0, 2, 0, 1])] == [
        [0, 1, 2, 3],
        [4],
        [5, 6, 7],
        [8],
        [9, 10],
    ]


@given(batches(), st.booleans(), st.sampled_from([0.0, 0.8]))
def test_a_flat_batch_gives_what_each_request_alone_gives(batch, with_laws, temperature):
    lengths, tokens, logits, laws, uniforms = batch
    temperatures = [temperature if i % 2 else 1.0 for i in range(len(lengths))]
    original = logits.copy()
    result = RejectionSampler()(
        metadata(lengths, tokens),
        torch.from_numpy(laws) if with_laws else None,
        torch.from_numpy(logits),
        sampling(temperatures, top_k=[3] * len(lengths), top_p=[0.9] * len(lengths)),
        uniforms=torch.from_numpy(uniforms),
    )
    assert result.dtype == torch.int32 and result.shape == (len(lengths), max(lengths) + 1)
    np.testing.assert_array_equal(logits, original)
    start = row = 0
    for b, n in enumerate(lengths):
        own = np.concatenate([uniforms[b, :n], uniforms[b, -2:]])[None]
        alone = draft_verify.rejection_sampling(
            np.array(tokens[start : start + n], np.int32)[None],
            logits[None, row : row + n + 1],
            own,
            draft_probs=laws[None, start : start + n] if with_laws else None,
            temperature=temperatures[b],
            top_k=3,
            top_p=0.9,
        )
        assert result[b, : n + 1].tolist() == alone.tokens[0].tolist()
        assert (result[b, n + 1 :] == -1).all()
        start, row = start + n, row + n + 1


def padded(tensor, rows):
    """`tensor` with poison, in ids 0, up to a number of rows."""
    poison = torch.nan if tensor.is_floating_point() else 0
    return torch.cat([tensor, tensor.new_full((max(rows - len(tensor), 0), *tensor.shape[1:]), poison)])


@given(batches(), st.booleans(), st.fixed_dictionaries({name: st.integers(0, 24) for name in PADDED}))
@example(flat_batch([3, 0, 2, 1]), True, {"logits": 16, "drafts": 6, "targets": 6, "laws": 12})
@example(flat_batch([4, 1]), True, {"logits": 10, "drafts": 20, "targets": 20, "laws": 5})
@example(flat_batch([0, 0]), True, {"logits": 2, "drafts": 4, "targets": 0, "laws": 0})
def test_rows_that_the_metadata_does_not_name_are_never_read_T25(batch, with_laws, rows):
    """Static shapes pad the flat arrays, each to a bucket of its own: B * (K + 1) rows of logits say nothing."""
    lengths, tokens, logits, laws, uniforms = batch
    flat, parameters = metadata(lengths, tokens), sampling([0.8] * len(lengths))
    logits, laws, rest = torch.from_numpy(logits), torch.from_numpy(laws), {"uniforms": torch.from_numpy(uniforms)}
    expected = RejectionSampler()(flat, laws if with_laws else None, logits, parameters, **rest)
    flat.draft_token_ids = padded(flat.draft_token_ids, rows["drafts"])
    flat.target_logits_indices = padded(flat.target_logits_indices, rows["targets"])
    laws = padded(laws, rows["laws"]) if with_laws else None
    assert torch.equal(RejectionSampler()(flat, laws, padded(logits, rows["logits"]), parameters, **rest), expected)


def test_a_ragged_batch_in_a_full_bucket_keeps_its_own_rows():
    logits = torch.zeros((16, V))
    logits[torch.arange(10), torch.tensor([5, 6, 7, 8, 4, 3, 2, 1, 8, 7])] = 9
    result = RejectionSampler()(metadata([3, 0, 2, 1], [5, 6, 0, 3, 0, 0]), None, logits, GREEDY)
    assert result.tolist() == [[5, 6, 7, -1], [4, -1, -1, -1], [3, 2, -1, -1], [8, -1, -1, -1]]


@pytest.mark.parametrize("rows", [7, 6])
def test_rows_out_of_order_are_taken_by_their_indices(rows):
    flat = metadata([2, 2], [1, 2, 3, 4])
    logits = torch.zeros((6, V))
    logits[torch.arange(6), torch.tensor([1, 2, 3, 3, 4, 5])] = 9
    order = torch.tensor([5, 3, 1, 0, 2, 4])
    shuffled = torch.full((rows, V), torch.nan)
    shuffled[order] = logits
    flat.target_logits_indices = order[flat.target_logits_indices]
    flat.bonus_logits_indices = order[flat.bonus_logits_indices]
    assert RejectionSampler()(flat, None, shuffled, GREEDY).tolist() == [[1, 2, 3], [3, 4, 5]]


def min_p_processor(min_p):
    """As vLLM's: [B, 1], stale where no request has one."""
    return SimpleNamespace(min_p_count=int(any(min_p)), min_p=torch.tensor(min_p, dtype=torch.float32)[:, None])


@pytest.mark.parametrize("by", ["field", "processor"])
def test_min_p_is_applied_wherever_vllm_keeps_it_T35(by):
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.1] + [1e-9] * 5] * 2))
    uniforms = torch.full((2, 2), 0.9999)  # the last id of the last group that has a mass
    for min_p, tokens in (([0.0, 0.0], [3, 3]), ([0.0, 0.5], [3, 1]), ([0.9, 0.5], [0, 1])):
        others = {"min_p": torch.tensor(min_p)}
        if by == "processor":
            others = {"logitsprocs": SimpleNamespace(all=[min_p_processor(min_p)])}
        result = RejectionSampler()(
            metadata([0, 0], []), None, logits, sampling([1.0, 1.0], **others), uniforms=uniforms
        )
        assert result[:, 0].tolist() == tokens


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"no_penalties": False}, "penalties"),
        ({"allowed_token_ids_mask": torch.zeros((1, V), dtype=torch.bool)}, "allowed_token_ids_mask"),
        ({"bad_words_token_ids": {0: [[3]]}}, "bad_words_token_ids"),
        ({"logitsprocs": SimpleNamespace(all=[SimpleNamespace(biases={0: {3: 1.0}})])}, "SimpleNamespace"),
        ({"logitsprocs": SimpleNamespace(all=[SimpleNamespace(min_toks={0: (4, [], {1})})])}, "SimpleNamespace"),
        ({"logitsprocs": SimpleNamespace(all=[SimpleNamespace()])}, "SimpleNamespace"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_applied_to_drafts_is_refused_T35(others, named, temperature):
    for parameters in (sampling([temperature], **others), SimpleNamespace(**{**vars(GREEDY), **others})):
        with pytest.raises(ValueError, match=f"^sampling_metadata: got {named}"):
            RejectionSampler()(metadata([1], [2]), None, torch.zeros((2, V)), parameters)


def test_processors_that_no_request_uses_are_no_reason_to_refuse():
    unused = [min_p_processor([0.0]), SimpleNamespace(biases={}), SimpleNamespace(min_toks={})]
    others = {
        "no_penalties": True,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": SimpleNamespace(all=unused),
        "generators": {},
    }
    result = RejectionSampler()(metadata([1], [2]), None, torch.zeros((2, V)), sampling([0.0], **others))
    assert result.tolist() == [[0, -1]]


def test_a_requests_own_generator_draws_its_tokens():
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 500)).astype(np.float32))

    def tokens(seed):
        own = sampling([1.0, 1.0], generators={1: torch.Generator().manual_seed(seed)})
        return RejectionSampler()(metadata([2, 2], [1, 2, 3, 4]), None, logits, own)[1].tolist()

    assert tokens(3) == tokens(3) and len({tuple(tokens(seed)) for seed in range(9)}) > 3


@given(batches())
def test_greedy_requests_agree_however_they_are_verified(batch):
    lengths, tokens, logits, _, uniforms = batch
    flat = metadata(lengths, tokens)
    by_logits = RejectionSampler()(flat, None, torch.from_numpy(logits), GREEDY, uniforms=torch.from_numpy(uniforms))
    by_tokens = rejection_sampler(flat, torch.from_numpy(logits.argmax(-1)))
    assert torch.equal(by_logits, by_tokens)
    assert torch.equal(by_tokens, rejection_sampler(flat, torch.from_numpy(logits.argmax(-1))[:, None]))


def test_every_request_emits_a_token_T14():
    result = RejectionSampler()(metadata([2, 0], [5, 5]), None, torch.zeros((4, V)), GREEDY)
    assert result.tolist() == [[0, -1, -1], [0, -1, -1]]


def test_seeds_make_a_step_reproducible_whoever_else_is_in_the_batch():
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.standard_normal((8, V)).astype(np.float32))
    sampler, seeds, positions = RejectionSampler(), torch.tensor([5, 6]), torch.tensor([70, 80], dtype=torch.int32)
    both = sampler(
        metadata([3, 3], [1, 2, 3, 4, 5, 6]), None, logits, sampling([1.0, 1.0]), seeds=seeds, positions=positions
    )
    alone = sampler(
        metadata([3], [4, 5, 6]), None, logits[4:], sampling([1.0]), seeds=seeds[1:], positions=positions[1:]
    )
    assert torch.equal(both[1:], alone)
    with pytest.raises(ValueError, match="uniforms: got seeds as well"):
        sampler(metadata([0], []), None, logits[:1], GREEDY, uniforms=torch.full((1, 2), 0.5), seeds=seeds[:1])
    for alone in ({"seeds": seeds[:1]}, {"positions": positions[:1]}):
        with pytest.raises(ValueError, match="positions: got "):
            sampler(metadata([0], []), None, logits[:1], GREEDY, **alone)


def test_the_kernel_verifies_a_ragged_batch_of_mixed_requests_on_the_emulator():
    flat = metadata([2, 0, 3], [3, 4, 5, 6, 7])
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn((8, V), generator=generator)
    laws = torch.softmax(torch.randn((5, V), generator=generator), dim=-1)
    uniforms = torch.rand((3, 5), generator=generator)
    arguments = flat, laws, logits, sampling([0.0, 1.0, 0.7], top_k=[9, 3, 4])
    on_emulator = RejectionSampler(backend="emulator")(*arguments, uniforms=uniforms)
    assert torch.equal(on_emulator, RejectionSampler()(*arguments, uniforms=uniforms))


@pytest.mark.parametrize("lengths", [[2, 2], [2, 1]])
def test_compile_sees_one_operator_for_the_verification(lengths):
    flat = metadata(lengths, [3, 4, 5, 6][: sum(lengths)])
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((sum(lengths) + 2, V)).astype(np.float32))
    uniforms = torch.full((2, 4), 0.4)
    sampler, parameters = RejectionSampler(), sampling([1.0, 0.0])
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(sampler, fullgraph=True, backend=backend)
    result = compiled(flat, None, logits, parameters, uniforms=uniforms)
    assert torch.equal(result, sampler(flat, None, logits, parameters, uniforms=uniforms))
    (graph,) = graphs
    assert sum("draft_verify" in str(node.target) for node in graph.graph.nodes) == 1
    assert not {"item", "tolist", "nonzero"} & {str(node.target) for node in graph.graph.nodes}


@pytest.mark.parametrize("device, wrapped", [("xla", False), ("neuron", True)])
def test_a_native_neuron_tensor_takes_the_kernel_through_the_plugins_operator(monkeypatch, device, wrapped):
    calls = []

    class Launchable:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, lnc):
            return lambda *arguments: calls.append((self.name, lnc, arguments)) or "output"

    monkeypatch.setattr(backends.loader, "kernel", lambda operation, backend: Launchable(operation))
    hop = SimpleNamespace(wrap_nki=lambda kernel: Launchable(f"wrapped {kernel.name}"))
    monkeypatch.setitem(sys.modules, "libtorch_neuronx_lite.nki.nki_hop", hop)
    for package in ("libtorch_neuronx_lite", "libtorch_neuronx_lite.nki"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace(__path__=[]))
    tensor = SimpleNamespace(device=SimpleNamespace(type=device))
    assert backends.launch("op", (tensor, tensor), 3, backend="device", lnc=2) == ("output",)
    assert calls == [("wrapped op" if wrapped else "op", 2, ((tensor, tensor), 3))]
