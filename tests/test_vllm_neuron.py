"""The vLLM Neuron plugin's rejection sampler contract: flat ragged batches in, [B, K + 1] with -1 out."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import draft_verify
from draft_verify import backends

torch = pytest.importorskip("torch")

from draft_verify.vllm_neuron import RejectionSampler, rejection_sampler, windows  # noqa: E402

V = 9
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


def sampling(temperature, top_k=None, top_p=None):
    def tensor(value, dtype):
        return None if value is None else torch.tensor(value, dtype=dtype)

    return SimpleNamespace(
        all_greedy=False,
        temperature=tensor(temperature, torch.float32),
        top_k=tensor(top_k, torch.int32),
        top_p=tensor(top_p, torch.float32),
    )


@st.composite
def batches(draw):
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total = sum(lengths)
    tokens = rng.integers(0, V, total)
    logits = 2 * rng.standard_normal((total + len(lengths), V)).astype(np.float32)
    laws = rng.dirichlet(np.ones(V), total).astype(np.float32)
    uniforms = rng.uniform(0.001, 0.999, (len(lengths), max(lengths) + 2)).astype(np.float32)
    return lengths, tokens.tolist(), logits, laws, uniforms


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
