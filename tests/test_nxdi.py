"""draft_verify.nxdi against stand-ins with NxD Inference's signatures; `make test-nxdi` runs the real classes."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests import nxdi_standins as standins  # noqa: E402

V = 5


@pytest.fixture(scope="module", autouse=True)
def nxdi():
    with pytest.MonkeyPatch.context() as monkeypatch:
        standins.install(monkeypatch)
        import draft_verify.nxdi

        yield draft_verify.nxdi
        for name in [name for name in sys.modules if name.startswith("draft_verify.nxdi")]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def conventions(nxdi):
    import draft_verify.nxdi.conventions

    return draft_verify.nxdi.conventions


def test_importing_it_without_nxdi_says_what_to_install():
    run = subprocess.run([sys.executable, "-c", "import draft_verify.nxdi"], capture_output=True, text=True)
    assert run.returncode != 0
    assert "ImportError: draft_verify.nxdi needs NxD Inference" in run.stderr
    assert "pip install neuronx-distributed-inference" in run.stderr


# --- apply ---


def test_apply_puts_the_mixins_in_and_keeps_the_name(nxdi):
    class NeuronThingForCausalLM(standins.NeuronBaseForCausalLM):
        _model_cls = standins.NeuronBaseModel

    result = nxdi.apply(NeuronThingForCausalLM)
    assert issubclass(result, NeuronThingForCausalLM) and result.__name__ == "NeuronThingForCausalLM"
    assert issubclass(result._model_cls, nxdi.ModelMixin)
    assert NeuronThingForCausalLM._model_cls is standins.NeuronBaseModel  # the stock class stays as it was
    table = torch.zeros((V, V))
    model = result(standins.fused_config(table, table, batch=1, speculation_length=4)).context_encoding_model
    assert isinstance(model, nxdi.FusedSpecMixin)
    assert isinstance(model.draft_model, nxdi.ModelMixin) and isinstance(model.target_model, nxdi.ModelMixin)
    assert isinstance(model.target_model.self_attn, nxdi.AttentionMixin)
    for cls in (standins.NeuronFusedSpecModel, standins.NeuronAttentionBase, standins.NeuronBaseModel):
        once = nxdi.apply(cls)
        assert once is nxdi.apply(cls) is nxdi.apply(once) and once is not cls
    with pytest.raises(TypeError, match="int"):
        nxdi.apply(int)


# --- conventions ---


@st.composite
def trees(draw):
    return [-1] + [draw(st.integers(0, row - 1)) for row in range(1, draw(st.integers(1, 9)))]


def breadth_first(parents):
    """The same tree with rows in breadth-first order, as NxDI numbers its nodes."""
    order, level = [], [0]
    while level:
        order += level
        level = [child for node in level for child, parent in enumerate(parents) if parent == node]
    position = {node: i for i, node in enumerate(order)}
    return [-1 if parents[node] < 0 else position[parents[node]] for node in order]


@given(trees())
def test_a_tree_is_the_same_from_its_config_and_from_its_mask(conventions, parents):
    parents = breadth_first(parents)
    config = {str(node): [str(c) for c, p in enumerate(parents) if p == node] for node in set(parents) - {-1}}
    assert conventions.parents_from_config(config) == parents
    rows = len(parents)
    mask = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        mask[row] |= mask[parents[row]]
    result = conventions.parents_from_mask(mask[None, None].expand(2, 1, rows, rows))
    assert result.dtype == torch.int32 and result.tolist() == [parents] * 2
    depths = conventions.depths(parents)
    assert depths == (mask.sum(dim=1) - 1).tolist()


@pytest.mark.parametrize(
    "config, words",
    [
        ({"0": ["2"]}, "node ids"),
        ({"0": ["1", "2"], "1": ["2"]}, "second parent"),
        ({"0": ["2"], "2": ["1"]}, "parents first"),
        ({"0": ["1"], "1": ["0"]}, "second parent"),
        ({"0": ["1"], "2": ["3"]}, "without a parent"),
    ],
)
def test_a_config_that_is_no_tree_is_refused(conventions, config, words):
    with pytest.raises(ValueError, match=words):
        conventions.parents_from_config(config)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_accepted_tokens_and_what_the_fused_model_returns_for_them(conventions, batch, rows, seed):
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 3, (batch, rows)).astype(np.int32)
    drafts = rng.integers(0, 3, (batch, rows - 1)).astype(np.int32)
    positions = rng.integers(0, 10, (batch, 1)).astype(np.int32)
    acceptance = conventions.accepted_tokens(torch.from_numpy(drafts), torch.from_numpy(target))
    mask = torch.zeros((batch, 16), dtype=torch.int32)
    accepted, next_ids, next_mask, next_positions = conventions.fused_outputs(
        acceptance, torch.from_numpy(positions), mask
    )
    for b in range(batch):
        n = 0
        while n < rows - 1 and drafts[b, n] == target[b, n]:
            n += 1
        assert accepted[b].tolist() == [*target[b, : n + 1], *[-1] * (rows - 1 - n)]
        assert next_ids[b].tolist() == [target[b, n]]
        assert next_positions[b].tolist() == [positions[b, 0] + n + 1]
        assert next_mask[b].tolist() == [1] * next_positions[b, 0] + [0] * (16 - next_positions[b, 0])
    assert [x.dtype for x in (accepted, next_ids, next_positions)] == [torch.int32] * 3


def test_a_full_slot_emits_nothing_and_stays(conventions):
    lengths = torch.tensor([3, 7, 8, 9])
    assert conventions.draft_lens(lengths, 8, 4).tolist() == [3, 0, -1, -1]
    acceptance = conventions.accepted_tokens(
        torch.tensor([[1], [1]]), torch.tensor([[1, 2], [1, 2]]), torch.tensor([-1, 0], dtype=torch.int32)
    )
    accepted, next_ids, _, positions = conventions.fused_outputs(
        acceptance, torch.tensor([[8], [7]], dtype=torch.int32), torch.zeros((2, 8))
    )
    assert accepted.tolist() == [[-1, -1], [1, -1]] and positions.tolist() == [[8], [8]]
    assert (next_ids >= 0).all()  # an embedding reads it


def test_top_k_of_0_and_minus_1_is_off_and_uniforms_are_open(conventions):
    parameters = conventions.sampling_parameters(torch.tensor([[-1.0, 0.9, 0.7], [50.0, 1.0, 0.0]]))
    assert parameters["top_k"].tolist() == [-1, 50] and parameters["top_k"].dtype == torch.int32
    assert parameters["temperature"].tolist() == pytest.approx([0.7, 0])
    uniforms = conventions.open_interval(torch.tensor([0.0, 0.25, 1.0]))
    assert uniforms[0] > 0 and uniforms[2] < 1 and uniforms[1] == 0.25


# --- attention ---


@pytest.mark.parametrize("kind", ["chain", "transposed", "sinks", "tree", "single"])
def test_attention_is_what_nxdi_computes_without_its_contaminated_masks(nxdi, kind):
    torch.manual_seed(0)
    rows = 1 if kind == "single" else 4
    sinks = torch.randn(4) if kind == "sinks" else None
    stock = standins.NeuronAttentionBase(
        k_cache_transposed=kind == "transposed", sinks=sinks, enable_token_tree=kind == "tree"
    )
    ours = nxdi.apply(standins.NeuronAttentionBase)(
        k_cache_transposed=kind == "transposed", sinks=sinks, enable_token_tree=kind == "tree"
    )
    lengths = torch.tensor([3, 9])
    query, key, value = (torch.randn((2, heads, rows, 8)) for heads in (4, 2, 2))
    key_cache, value_cache = torch.randn((2, 2, 16, 8)), torch.randn((2, 2, 16, 8))
    mask = (torch.arange(16) < lengths[:, None])[:, None, None]
    active = torch.ones((rows, rows), dtype=torch.bool).tril()
    if kind == "tree":
        active[2, 1] = active[3, 1] = False  # parents -1, 0, 0, 2
    active = active[None, None].expand(2, 1, rows, rows)
    positions = lengths[:, None] + torch.arange(rows)
    if kind == "transposed":
        key_cache = key_cache.transpose(2, 3).contiguous()
    arguments = query, key, value, positions, (key_cache, value_cache), mask, active
    expected = stock.compute_for_token_gen(*arguments)
    torch.testing.assert_close(ours.compute_for_token_gen(*arguments), expected, rtol=1e-4, atol=1e-5)
    # NxDI's draft loop sets the other row's position in this row's mask: the lengths do not see it.
    dirty = mask | (torch.arange(16) == 9)
    arguments = query, key, value, positions, (key_cache, value_cache), dirty, active
    torch.testing.assert_close(ours.compute_for_token_gen(*arguments), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4},
        {"attention_chunk_size": 8},
        {"flash_decoding_enabled": True},
        {"padding_side": "left"},
        {"is_medusa": True},
        {"enable_token_tree": True, "is_eagle_draft": True},
    ],
)
def test_what_is_no_prefix_of_the_cache_stays_with_nxdi(nxdi, change, monkeypatch):
    ours = nxdi.apply(standins.NeuronAttentionBase)()
    for name, value in change.items():
        setattr(ours if hasattr(ours, name) else ours.neuron_config, name, value)
    seen = []
    monkeypatch.setattr(
        standins.NeuronAttentionBase, "compute_for_token_gen", lambda self, *arguments: seen.append(arguments)
    )
    ours.compute_for_token_gen("Q", "K", "V", torch.zeros((1, 1)), ("k", "v"), "mask", "active")
    assert len(seen) == 1


# --- the fused model ---


def tables(seed, difference):
    rng = np.random.default_rng(seed)
    target = 2 * rng.standard_normal((V, V))
    draft = target + difference * rng.standard_normal((V, V))
    return torch.tensor(target, dtype=torch.float32), torch.tensor(draft, dtype=torch.float32)


def prefill(model, prompts, sampling_params, seq_len=24):
    batch = len(prompts)
    input_ids = torch.zeros((batch, seq_len), dtype=torch.int32)
    mask, positions = torch.zeros_like(input_ids), torch.ones_like(input_ids)
    for b, prompt in enumerate(prompts):
        input_ids[b, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        mask[b, : len(prompt)] = 1
        positions[b, : len(prompt)] = torch.arange(len(prompt), dtype=torch.int32)
    return model(input_ids, mask, positions, torch.arange(batch), sampling_params)


@pytest.mark.parametrize("tp_degree", [1, 2])
@pytest.mark.parametrize("output_logits", [False, True])
@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_greedy_decoding_is_the_targets_own_with_each_rows_own_mask(nxdi, difference, output_logits, tp_degree):
    target, draft = tables(1, difference)
    rows = 4
    config = standins.fused_config(
        target, draft, batch=3, speculation_length=rows, output_logits=output_logits, tp_degree=tp_degree
    )
    model = nxdi.apply(standins.NeuronFusedSpecModel)(config)
    assert model.target_model.wants_logits == (tp_degree == 1)  # over ranks, NxDI's sharded argmax gathers far less
    params = torch.ones((3, 3))
    prompts = [[1, 2, 0], [2, 3, 4, 1, 1], [0, 1, 3, 3]]
    outputs = prefill(model, prompts, params)
    texts = [[int(token)] for token in outputs[0][:, 0]]
    for _ in range(4):
        _, ids, mask, positions = outputs[:4]
        model.draft_model.calls.clear()
        outputs = model(ids, mask, positions, torch.arange(3), params)
        assert len(outputs) == 4 + 4 + 2 * output_logits
        for text, tokens in zip(texts, outputs[0]):
            kept = tokens[tokens >= 0].tolist()
            assert kept
            text += kept
        for i, (_, draft_mask, draft_positions, _) in enumerate(model.draft_model.calls):
            assert torch.equal(draft_positions, positions + i)
            assert torch.equal(draft_mask.sum(dim=1, keepdim=True), positions + i)
        assert len(model.draft_model.calls) == rows  # the last one brings the last draft's keys into the cache
        assert torch.equal(model.target_model.calls[-1][2], positions + torch.arange(rows))
    for prompt, text in zip(prompts, texts):
        token = prompt[-1]
        for emitted in text:
            token = int(target[token].argmax())
            assert emitted == token
        if difference == 0:
            assert len(text) == 1 + 4 * rows


def test_sampled_drafts_follow_the_targets_processed_law(nxdi):
    from draft_verify.reference.sampling import sampling_law

    target, draft = tables(2, 1.5)
    batch, rounds, top_k, top_p, temperature = 64, 20, 4, 0.97, 0.8
    config = standins.fused_config(target, draft, batch=batch, speculation_length=3, do_sample=True)
    model = nxdi.apply(standins.NeuronFusedSpecModel)(config)

    def processed(table):
        return [
            sampling_law(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.0) for row in table.numpy()
        ]

    laws, draft_laws = processed(target), processed(draft)
    counts = np.zeros((V, V, V))
    first_drafts_accepted, overlaps = 0, []
    for round_ in range(rounds):
        seeds = torch.arange(batch) + batch * round_
        params = torch.stack(
            [torch.full((batch,), float(value)) for value in (top_k, top_p, temperature)] + [seeds.float()], dim=1
        )
        outputs = prefill(model, [[0, 1, 3]] * batch, params)
        texts = [[int(token)] for token in outputs[0][:, 0]]
        overlaps += [np.minimum(laws[text[0]], draft_laws[text[0]]).sum() for text in texts]
        for step in itertools.count():
            if min(map(len, texts)) >= 3:
                break
            _, ids, mask, positions = outputs[:4]
            outputs = model(ids, mask, positions, torch.arange(batch), params)
            if step == 0:
                first_drafts_accepted += int((outputs[0][:, 1] >= 0).sum())
            for text, tokens in zip(texts, outputs[0]):
                text += tokens[tokens >= 0].tolist()
        for text in texts:
            counts[tuple(text[:3])] += 1
    # A draft is kept with probability sum(min(target, draft)): all that its law allows.
    deviation = math.sqrt(sum(p * (1 - p) for p in overlaps))
    assert abs(first_drafts_accepted - sum(overlaps)) < 4 * deviation
    expected = np.zeros_like(counts)
    for a, b, c in itertools.product(range(V), repeat=3):
        expected[a, b, c] = laws[3][a] * laws[a][b] * laws[b][c] * counts.sum()
    assert counts[expected == 0].sum() == 0
    large = expected >= 5
    observed, wanted = (np.append(array[large], array[~large].sum()) for array in (counts, expected))
    chi2 = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    freedom = len(wanted) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom), (chi2, freedom)


def test_without_seeds_the_generator_decides_and_temperature_0_stays_greedy(nxdi):
    target, draft = tables(3, 0.5)
    config = standins.fused_config(target, draft, batch=2, speculation_length=3, do_sample=True)
    model = nxdi.apply(standins.NeuronFusedSpecModel)(config)
    params = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 5.0]])
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        outputs = prefill(model, [[0, 2, 1]] * 2, params)
        outputs = model(outputs[1], outputs[2], outputs[3], torch.arange(2), params)
        greedy = int(target[target[1].argmax()].argmax())
        assert outputs[0][0, 0] == greedy
        seen.add(tuple(outputs[0][1].tolist()))
    assert len(seen) > 1


def test_a_window_that_crosses_a_block_goes_to_the_sequences_own_next_block(nxdi):
    table = torch.zeros((V, V))
    config = standins.fused_config(table, table, batch=2, speculation_length=4, is_prefix_caching=True, pa_block_size=4)
    model = nxdi.apply(standins.NeuronFusedSpecModel)(config)
    positions = torch.tensor([[6], [1]], dtype=torch.int32)
    blocks = torch.tensor([[7, 2, 9], [5, 0, 0]], dtype=torch.int32)
    counting_up = torch.tensor([[10, 11, 12, 13], [-1, -1, -1, -1]], dtype=torch.int32)  # 12 is block 3, not block 9
    mask = (torch.arange(12) < positions).to(torch.int32)
    model._token_gen_forward(
        torch.zeros((2, 1), dtype=torch.int32),
        mask,
        positions,
        torch.arange(2),
        torch.ones((2, 3)),
        slot_mapping=counting_up,
        active_block_table=blocks,
        num_queries=torch.ones((2, 1), dtype=torch.int32),
        computed_context_lens=positions,
    )
    assert model.target_model.calls[-1][3].tolist() == [[10, 11, 36, 37], [-1] * 4]
    assert torch.cat([call[3] for call in model.draft_model.calls], dim=1).tolist() == [[10, 11, 36, 37], [-1] * 4]


# --- EAGLE ---


@given(trees(), st.integers(0, 2**32 - 1))
def test_the_accepted_path_comes_first_and_no_row_is_lost(nxdi, parents, seed):
    from draft_verify.nxdi.eagle import path_first

    rng = np.random.default_rng(seed)
    paths = []
    for _ in range(3):
        path, row = [0], 0
        while children := [child for child, parent in enumerate(parents) if parent == row]:
            if rng.random() < 0.3:
                break
            row = int(rng.choice(children))
            path.append(row)
        paths.append(path + [-1] * (len(parents) - len(path)))
    order, place = path_first(torch.tensor(paths, dtype=torch.int32))
    for path, rows, places in zip(paths, order.tolist(), place.tolist()):
        kept = [row for row in path if row >= 0]
        assert rows == kept + [row for row in range(len(parents)) if row not in kept]
        assert [places[row] for row in rows] == list(range(len(parents)))


def test_a_sampled_eagle_chain_is_verified_against_the_whole_law(nxdi):
    import draft_verify
    from draft_verify.nxdi.eagle import WholeLogits

    target, draft = tables(4, 0.5)
    config = standins.fused_config(target, draft, batch=2, speculation_length=4, do_sample=True)
    model = nxdi.apply(standins.NeuronFusedSpecModel)(config)
    logits = torch.tensor(np.random.default_rng(0).standard_normal((2, 4, V)), dtype=torch.float32)
    drafts = torch.tensor([[0, 1, 2], [3, 4, 0]])
    params = torch.tensor([[3.0, 0.9, 0.7, 11.0], [0.0, 1.0, 0.0, 12.0]])
    positions = torch.tensor([[5], [9]], dtype=torch.int32)

    # As NxDI's chain forward calls them: the sampler's result through all three hooks.
    model._step = params, positions[:, 0]
    sampler = WholeLogits(model.target_model.whole_logits)
    indices, values = sampler(logits, params, return_values=True, rank_id=0)
    adjusted = model._adjust_target_probs(None, drafts, values, indices, 3)
    target_ids = sampler._multinomial(adjusted, 2)
    target_ids = torch.gather(indices, 2, target_ids).squeeze(2)
    tokens, index = model._speculative_token_selection(drafts, target_ids, drafts, None, indices[:, :3], values[:, :3])
    expected = draft_verify.rejection_sampling(
        drafts.to(torch.int32),
        logits,
        draft_verify.uniforms_for(params[:, 3].to(torch.int32), positions[:, 0], 3),
        temperature=params[:, 2].contiguous(),
        top_k=params[:, 0].to(torch.int32),
        top_p=params[:, 1].contiguous(),
    )
    assert torch.equal(tokens, expected.tokens) and index[:, 0].tolist() == expected.num_accepted.tolist()
    outputs = model._tkg_postprocessor([torch.zeros((2, 4)), tokens], torch.zeros((2, 16)), positions)
    assert outputs[3][:, 0].tolist() == (positions[:, 0] + expected.num_accepted + 1).tolist()


# --- tracing ---


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_step_is_one_graph_without_a_look_at_a_value(nxdi, do_sample):
    target, draft = tables(5, 0.5)
    config = standins.fused_config(target, draft, batch=2, speculation_length=3, do_sample=do_sample)
    model = nxdi.apply(standins.NeuronFusedSpecModel)(config)
    params = torch.tensor([[3.0, 0.9, 0.7, 11.0], [0.0, 1.0, 0.0, 12.0]])
    inputs = [torch.tensor([[1], [2]], dtype=torch.int32), torch.zeros((2, 16), dtype=torch.int32)]
    inputs += [torch.tensor([[5], [9]], dtype=torch.int32), torch.arange(2), params]
    expected = model(*inputs)
    torch._dynamo.reset()
    result = torch.compile(model, fullgraph=True, backend="eager")(*inputs)
    for ours, theirs in zip(result, expected, strict=True):
        assert torch.equal(ours, theirs)
