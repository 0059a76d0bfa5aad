"""Every public operation as a torch operator: one schema, traced whole, the same numbers as with NumPy arrays."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import draft_verify
from draft_verify import arrays, backends

torch = pytest.importorskip("torch")

from draft_verify import torch_ops  # noqa: E402

B, HEADS, SLOTS, D, T, V = 2, 2, 16, 8, 4, 11


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*entries):
    return np.array(entries, np.int32)


def caches(layers=1):
    return tuple(values(B, HEADS, SLOTS, D, seed=layer) for layer in range(layers))


def laws(*shape, seed=0):
    exponentials = np.exp(values(*shape, seed=seed))
    return exponentials / exponentials.sum(-1, keepdims=True)


def uniforms(columns):
    return np.random.default_rng(7).uniform(0.01, 0.99, (B, columns)).astype(np.float32)


DRAFTS = ints([1, 4, 2], [7, -1, 3])
LOGITS = values(B, T, V)
ALLOWED = ints(*[[[-2]] * T] * B)  # every id but 0

QUERY = values(B, 2 * HEADS, T, D, seed=8)
WINDOW = (values(B, HEADS, T, D, seed=9), values(B, HEADS, T, D, seed=10))


def fp8(array):
    return array.astype(ml_dtypes.float8_e4m3)


def bf16(array):
    return array.astype(ml_dtypes.bfloat16)


# One or more calls of each operation, with NumPy arrays; a tuple is one array a layer.
SAMPLES = {
    "commit_window": [
        (
            (*caches(2), values(B, HEADS, T, D), values(B, HEADS, T, D, seed=5), ints(3, 5), ints(1, -1)),
            {"path": ints([0, 2, -1, -1], [-1, -1, -1, -1])},
        ),
        (
            (
                caches(2),
                caches(2),
                (values(B, HEADS, T, D),) * 2,
                (values(B, HEADS, T, D),) * 2,
                ints(3, 5),
                ints(1, 3),
            ),
            {},
        ),
    ],
    "commit_window fp8": [
        (
            (*map(fp8, caches(2)), *map(bf16, WINDOW), ints(3, 5), ints(1, 3)),
            {"key_scale": 0.5, "value_scale": np.array([2, 0.25], np.float32)},
        )
    ],
    "verify_attention bf16": [
        ((bf16(QUERY), *map(bf16, WINDOW), *map(fp8, caches(2)), ints(3, 9)), {"key_scale": 0.5})
    ],
    "compact_window": [((*caches(2), ints(3, 5), ints([0, 2, -1, -1], [0, 1, 3, -1]), ints(1, 2)), {})],
    "save_ring": [((*caches(2), ints(3, 15), 4), {}), ((caches(2), caches(2), ints(3, 15), 4), {})],
    "restore_ring": [
        ((*caches(2), values(B, HEADS, T, D, seed=3), values(B, HEADS, T, D, seed=4), ints(3, 15), ints(1, 0)), {})
    ],
    "verify_attention": [
        (
            (QUERY, *WINDOW, *caches(2), ints(3, 9)),
            {"draft_lens": ints(3, 1), "softcap": 20.0, "tree": ints(-1, 0, 0, 1)},
        ),
        (
            (QUERY, None, None, *caches(2), ints(3, 9)),
            {"return_lse": True, "scale": 0.3, "query_positions": ints(3, 9)},
        ),
    ],
    "merge_attention": [((values(3, B, HEADS, T, D), values(3, B, HEADS, T)), {})],
    "greedy_acceptance": [
        ((DRAFTS, LOGITS), {"draft_lens": ints(3, 2), "vocab_size": 9}),
        ((DRAFTS, LOGITS), {"allowed_mask": ALLOWED}),
    ],
    "rejection_sampling": [
        ((DRAFTS, LOGITS, uniforms(T + 1)), {"draft_logits": values(B, T - 1, V, seed=2), "temperature": 0.7}),
        (
            (DRAFTS, LOGITS, uniforms(T + 1)),
            {"draft_probs": laws(B, T - 1, V), "temperature": np.array([0, 2], np.float32), "draft_lens": ints(-1, 3)},
        ),
    ],
    "rejection_sampling own vocabulary": [
        (
            (DRAFTS, LOGITS, uniforms(T + 1)),
            {"draft_logits": values(B, T - 1, 3, seed=2), **given, "allowed_mask": ALLOWED},
        )
        for given in (
            {"draft_to_target": ints(4, 7, 4)},
            {"target_to_draft": draft_verify.invert_draft_to_target(ints(4, 7, 4), V)},
        )
    ],
    "shard_statistics": [
        ((DRAFTS, LOGITS, uniforms(T + 1)), {"shard": 1, "num_shards": 2, "vocab_size": 2 * V, "temperature": 0.5}),
        (
            (DRAFTS, LOGITS, uniforms(T + 1)),
            {"shard": 0, "num_shards": 2, "vocab_size": 2 * V, "draft_logits": LOGITS[:, 1:], "truncated": True},
        ),
    ],
    "shard_cuts": [
        (
            (np.ones((2, B, T, 322), np.float32), np.ones((2, 1, B, T, 8, 512), np.float32)),
            {"vocab_size": 2 * V, "top_k": 3, "top_p": 0.9},
        )
    ],
    "shard_weights": [
        (
            (np.ones((1, B, T, 5), np.float32), np.ones((1, B, T, 16), np.float32), LOGITS),
            {"shard": 0, "num_shards": 2, "vocab_size": 2 * V, "by_mass": True},
        )
    ],
    "shard_excess": [
        (
            (np.ones((2, B, T, 322), np.float32), DRAFTS, LOGITS, uniforms(T + 1)),
            {"shard": 1, "vocab_size": 2 * V, "draft_logits": values(B, T - 1, V, seed=2)},
        )
    ],
    "shard_draws": [
        (
            (np.ones((2, B, T, 322), np.float32), DRAFTS, LOGITS, uniforms(T + 1)),
            {"shard": 0, "vocab_size": 2 * V, "draft_probs": laws(B, T - 1, V)},
        )
    ],
    "combine_shards": [
        (
            (np.ones((2, B, T, 322), np.float32), np.ones((2, B, 6, 64), np.float32), DRAFTS, uniforms(T + 1)),
            {"vocab_size": 2 * V, "draft_lens": ints(-1, 2)},
        ),
        (
            (np.ones((2, B, T, 322), np.float32), np.ones((2, B, 6, 64), np.float32), DRAFTS, uniforms(T + 1)),
            {"vocab_size": 2 * V, "draft": "probs", "rule": "block", "excess": np.ones((2, B, T, 64), np.float32)},
        ),
    ],
    "mask_logits": [((LOGITS, ALLOWED), {"vocab_size": V - 1})],
    "token_logprobs": [
        ((LOGITS, ints([1, 4, -1, -1], [7, -1, -1, -1]), ints([0, 1, -1, -1], [0, -1, -1, -1])), given)
        for given in ({}, {"allowed_mask": ALLOWED, "top_p": 0.9})
    ],
    "tree_acceptance": [
        ((ints(-1, 0, 0, 1), DRAFTS, LOGITS), {}),
        ((ints(-1, 0, 0, 1), DRAFTS, LOGITS), {"allowed_mask": ALLOWED}),
        (
            (ints([-1, 0, 0, 1], [-1, 0, 1, -2]), DRAFTS, LOGITS, uniforms(T + 1)),
            {"rule": "independent", "draft_probs": laws(B, T, V), "temperature": 0.9, "top_k": 5},
        ),
        (
            (ints(-1, 0, 0, 1), DRAFTS, LOGITS, uniforms(T + 1)),
            {
                "rule": "without_replacement",
                "draft_logits": values(B, T, 3),
                "target_to_draft": draft_verify.invert_draft_to_target(ints(4, 7, 4), V),
            },
        ),
    ],
    "typical_acceptance": [
        ((DRAFTS, LOGITS, uniforms(T + 1)), {"posterior_threshold": 0.09, "posterior_alpha": 0.3, **given})
        for given in ({"temperature": 0.5}, {"tree": ints(-1, 0, 0, 1), "allowed_mask": ALLOWED})
    ],
    "sample_tokens": [
        ((LOGITS[:, 0], uniforms(2)), {"temperature": 0.5, "return_law": True}),
        ((LOGITS[:, 0], uniforms(2)), {"top_p": 0.5, "vocab_size": 9}),
        ((LOGITS[:, 0], uniforms(2)), {"allowed_mask": ALLOWED[:, 0], "return_law": True}),
    ],
    "project_draft_law": [
        ((ints([1, 0, -1, 4], [3, -1, -1, 2]),), {"draft_probs": laws(B, 3, 5)}),
        ((ints([1, 0, -1, 4]),), {"draft_logits": bf16(values(B, 3, 5)), "temperature": 0.7, "top_k": 2}),
    ],
    "select_state": [((values(B, T, 3, 5), ints(2, -1)), {})],
    "select_hidden": [((values(B, T, 6), ints(0, 3)), {})],
    "shift_conv_window": [((values(B, 5, 3 + T), ints(1, -1), T), {})],
    "uniforms_for": [((np.array([3, 5], np.int64), ints(10, 11), 3), {"purpose": "draft"})],
}
# A name may say what is special; the operation is its first word.
CASES = [(name, i) for name, calls in SAMPLES.items() for i in range(len(calls))]
FIRST = [(name, i) for name, i in CASES if i == 0 and name in arrays.OPERATIONS]


def sample(name, i):
    """The public function, and fresh torch and NumPy copies of its arguments."""
    function = getattr(draft_verify, name.split()[0])
    args, kwargs = SAMPLES[name][i]
    as_arrays = [each(value, lambda array: array.copy()) for value in args]
    as_tensors = [each(value, lambda array: arrays.to_torch(array.copy())) for value in args]
    keywords = {key: each(value, lambda array: arrays.to_torch(array.copy())) for key, value in kwargs.items()}
    return function, (as_arrays, kwargs), (as_tensors, keywords)


def each(value, change):
    if isinstance(value, tuple):
        return tuple(each(entry, change) for entry in value)
    return change(value) if isinstance(value, np.ndarray) else value


def flat(result):
    return [np.asarray(arrays.to_numpy(entry)) for entry in torch_ops._flat(result) if hasattr(entry, "dtype")]


def operator_arguments(name, args, kwargs):
    """As `torch.ops.draft_verify.<name>` wants them: lists where there may be several layers."""
    parameters = [
        argument.name for argument in getattr(torch.ops.draft_verify, name.split()[0]).default._schema.arguments
    ]
    layered = torch_ops._LAYERED.get(name.split()[0], ())

    def listed(parameter, value):
        if parameter in layered:
            return list(value) if isinstance(value, tuple) else [value]
        return value if parameter in torch_ops._TYPES else torch_ops._tensor(parameter, value, torch.device("cpu"))

    return tuple(map(listed, parameters, args)), {key: listed(key, value) for key, value in kwargs.items()}


def test_every_public_operation_is_an_operator_with_a_sample_here():
    assert set(arrays.OPERATIONS) == {name.split()[0] for name in SAMPLES}
    for name in arrays.OPERATIONS:
        assert hasattr(torch.ops.draft_verify, name)


@pytest.mark.parametrize("name, i", CASES)
def test_tensors_give_what_arrays_give(name, i):
    function, (args, kwargs), (tensors, tensor_kwargs) = sample(name, i)
    expected, result = function(*args, **kwargs), function(*tensors, **tensor_kwargs)
    assert all(torch.is_tensor(leaf) for leaf in torch_ops._flat(result))
    for ours, theirs in zip(flat(result), flat(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    for ours, theirs in zip(flat(tuple(tensors)), flat(tuple(args)), strict=True):  # what was written in place
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name, i", CASES)
def test_opcheck_finds_schema_and_fake_implementation_true(name, i):
    _, _, (tensors, tensor_kwargs) = sample(name, i)
    args, kwargs = operator_arguments(name, tensors, tensor_kwargs)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(leaf.dtype == torch.float8_e4m3fn for leaf in arrays.leaves(args) if torch.is_tensor(leaf)):
        checks = ["test_autograd_registration", "test_faketensor"]  # the others compare, which torch cannot with fp8
    torch.library.opcheck(getattr(torch.ops.draft_verify, name.split()[0]).default, args, kwargs, test_utils=checks)


@pytest.mark.parametrize("name, i", FIRST)
def test_compile_sees_one_operator_and_computes_the_same(name, i):
    function, (args, kwargs), (tensors, tensor_kwargs) = sample(name, i)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda *args, **kwargs: function(*args, **kwargs), fullgraph=True, backend=backend)
    result = compiled(*tensors, **tensor_kwargs)
    for ours, theirs in zip(flat(result), flat(function(*args, **kwargs)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (graph,) = graphs
    operators = [node for node in graph.graph.nodes if "draft_verify" in str(node.target)]
    assert len(operators) == 1


@pytest.mark.parametrize("name, i", FIRST)
def test_export_traces_it(name, i):
    function, (args, kwargs), (tensors, tensor_kwargs) = sample(name, i)

    class Module(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return function(*args, **kwargs)

    program = torch.export.export(Module(), tuple(tensors), tensor_kwargs)
    result = program.module()(*tensors, **tensor_kwargs)
    for ours, theirs in zip(flat(result), flat(function(*args, **kwargs)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_uniforms_in_a_devices_graph_are_the_hosts_bit_for_bit(dtype):
    from draft_verify import philox
    from draft_verify.reference.uniforms_for import uniforms_for

    info = np.iinfo(dtype)
    random = np.random.default_rng(3).integers(info.min, info.max, 200, dtype=dtype, endpoint=True)
    seeds = np.concatenate([random, np.array([0, 1, info.min, info.max], dtype)])
    positions = np.random.default_rng(4).integers(0, 2**31, len(seeds), dtype=np.int32)
    for purpose in ("verify", "draft"):
        expected = uniforms_for(seeds, positions, 7, purpose)
        result = philox.uniforms(torch.from_numpy(seeds), torch.from_numpy(positions), 7, purpose)
        np.testing.assert_array_equal(result.numpy(), expected)


def test_uniforms_in_a_devices_graph_never_leave_the_integers_that_fp32_holds():
    """Every intermediate stays below 2^24, where fp32 arithmetic is integer arithmetic."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from draft_verify import philox

    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function.overloadpacket in (torch.ops.aten.mul, torch.ops.aten.add) and result.dtype == torch.int32:
                largest.append(int(result.max()))
            return result

    seeds = torch.full((4,), -1, dtype=torch.int32)
    with Watch():
        philox.uniforms(seeds, torch.full((4,), 2**31 - 1, dtype=torch.int32), 7, "verify")
    assert 2**22 < max(largest) < 2**24


def test_a_compiled_graph_of_tensors_runs_the_kernels_on_the_emulator_in_place():
    def step(key_cache, value_cache, key, value, lengths, drafts, logits):
        acceptance = draft_verify.greedy_acceptance(drafts, logits, backend="emulator")
        draft_verify.commit_window(
            key_cache, value_cache, key, value, lengths, acceptance.num_accepted, backend="emulator"
        )
        return acceptance.tokens

    inputs = [
        arrays.to_torch(array.copy()) for array in (*WINDOW, ints(3, 5), LOGITS.argmax(-1)[:, :-1].astype("i4"), LOGITS)
    ]
    compiled_caches, eager_caches = ([arrays.to_torch(cache) for cache in caches(2)] for _ in range(2))
    torch._dynamo.reset()
    tokens = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled_caches, *inputs)
    acceptance = draft_verify.greedy_acceptance(*inputs[3:])
    draft_verify.commit_window(*eager_caches, *inputs[:3], acceptance.num_accepted)
    assert torch.equal(tokens, acceptance.tokens) and acceptance.num_accepted.tolist() == [T - 1] * B
    for ours, theirs in zip(compiled_caches, eager_caches):
        assert torch.equal(ours, theirs)


def test_wrong_shapes_are_refused_while_tracing_and_wrong_values_where_there_are_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(draft_lens):
        return draft_verify.greedy_acceptance(
            torch.zeros((B, T - 1), dtype=torch.int32), torch.zeros((B, T, V)), draft_lens=draft_lens
        )

    with FakeTensorMode():
        assert call(torch.full((B,), 99, dtype=torch.int32)).tokens.shape == (B, T)
        with pytest.raises(ValueError, match="draft_lens"):
            call(torch.zeros((B + 1,), dtype=torch.int32))
    with pytest.raises(ValueError, match="draft_lens: got 99"):
        call(torch.full((B,), 99, dtype=torch.int32))


class LazyTensor(torch.Tensor):
    """Says that it lives on an XLA device."""

    device = SimpleNamespace(type="xla")


def test_xla_tensors_launch_the_kernel_on_a_parameters_data_and_its_outputs_are_the_caches(monkeypatch):
    launched = []

    class Kernel:
        def __getitem__(self, lnc):
            def launch(key_caches, value_caches, keys, *rest):
                launched.append((lnc, key_caches, value_caches, keys))
                return "written keys", "written values"

            return launch

    def lazy(array):
        return torch.Tensor._make_subclass(LazyTensor, torch.from_numpy(array))

    monkeypatch.setattr(backends.loader, "kernel", lambda operation, backend: Kernel())
    key_cache, value_cache, key, value, lengths = map(lazy, (*caches(2), *WINDOW, ints(3, 5)))
    result = draft_verify.commit_window(key_cache, value_cache, key, value, lengths, lengths, path=None, lnc=2)
    assert result == ("written keys", "written values")
    ((lnc, key_data, value_data, keys),) = launched
    assert lnc == 2 and keys is key
    for data, cache in ((key_data, key_cache), (value_data, value_cache)):
        assert data is not cache and data.data_ptr() == cache.data_ptr()


def test_a_map_is_turned_round_into_a_tensor_where_it_was_one():
    for given in (ints(4, 7, 4), torch.tensor([4, 7, 4], dtype=torch.int32)):
        table = draft_verify.invert_draft_to_target(given, V)
        assert type(table) is type(given) and table.shape == (2, V)
        assert table[0, [4, 7]].tolist() == [0, 1] and table[1].tolist() == [-1] * 4 + [2] + [-1] * 6


@pytest.fixture
def launches(monkeypatch):
    """What a device would be asked to run: (operation, lnc, arguments) of every launch; results are of no use."""
    launched = []

    class Kernel:
        def __init__(self, operation):
            self.operation = operation

        def __getitem__(self, lnc):
            def launch(*arguments):
                launched.append((self.operation, lnc, arguments))
                if self.operation == "mask_logits":
                    return arguments[0]
                if self.operation == "project_draft_law":
                    return lazy(laws(B, T - 1, V))
                return (lazy(ints([0])),) * 4

            return launch

    monkeypatch.setattr(backends.loader, "kernel", lambda operation, backend: Kernel(operation))
    return launched


def lazy(array):
    return torch.Tensor._make_subclass(LazyTensor, torch.from_numpy(array))


def test_on_a_device_a_draft_law_is_projected_by_its_own_launch_and_verified_as_probabilities(launches):
    drafts, logits, numbers, own, targets = map(
        lazy, (DRAFTS, LOGITS, uniforms(T + 1), values(B, T - 1, 3), ints(4, 7, 4))
    )
    table = lazy(draft_verify.invert_draft_to_target(ints(4, 7, 4), V))
    draft_verify.rejection_sampling(drafts, logits, numbers, draft_logits=own, target_to_draft=table, lnc=2)
    (first, lnc, projection), (second, _, verification) = launches
    assert (first, second, lnc) == ("project_draft_law", "rejection_sampling", 2)
    assert projection[0] is own and projection[1] is table and projection[7] == "logits"
    assert verification[3].shape == (B, T - 1, V) and verification[9] == "probs"
    with pytest.raises(ValueError, match="invert_draft_to_target"):
        draft_verify.rejection_sampling(drafts, logits, numbers, draft_logits=own, draft_to_target=targets)


def test_on_a_device_masks_are_launches_of_their_own_before_the_rule(launches):
    drafts, logits, numbers, mask = map(lazy, (DRAFTS, LOGITS, uniforms(T + 1), ALLOWED))
    draft_verify.greedy_acceptance(drafts, logits, allowed_mask=mask)
    draft_verify.rejection_sampling(drafts, logits, numbers, draft_logits=logits[:, :-1], allowed_mask=mask)
    draft_verify.tree_acceptance(lazy(ints(-1, 0, 0, 1)), drafts, logits, allowed_mask=mask)
    medusa = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}
    draft_verify.typical_acceptance(drafts, logits, numbers, **medusa, allowed_mask=mask)
    assert [operation for operation, _, _ in launches] == [
        *("mask_logits", "greedy_acceptance"),
        *("mask_logits", "mask_logits", "rejection_sampling"),
        *("mask_logits", "tree_acceptance"),
        *("mask_logits", "typical_acceptance"),
    ]


@pytest.mark.parametrize("kind", [tuple, list])
def test_layers_come_back_as_a_tuple_however_they_came(kind):
    caches = [torch.zeros((1, 1, 8, 4)) for _ in range(4)]
    rows = [torch.ones((1, 1, 2, 4)) for _ in range(2)]
    lengths = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    keys, values = draft_verify.commit_window(kind(caches[:2]), kind(caches[2:]), kind(rows), kind(rows), *lengths)
    assert type(keys) is type(values) is tuple and keys[1] is caches[1] and values[0] is caches[2]


def test_arrays_among_tensors_are_taken_but_for_what_is_written():
    cache, rows, array = (
        torch.zeros((1, 1, 8, 4)),
        np.ones((1, 1, 2, 4), np.float32),
        np.zeros((1, 1, 8, 4), np.float32),
    )
    lengths = np.zeros(1, np.int32), np.ones(1, np.int32)
    draft_verify.commit_window(cache, cache.clone(), rows, rows, *lengths)
    assert cache[0, 0, :, 0].tolist() == [1, 1] + [0] * 6
    for caches in ((array, cache), (cache, array), ([cache, array], [cache, cache])):
        layered = isinstance(caches[0], list)
        with pytest.raises(ValueError, match="_cache: got ndarray, expected a tensor"):
            draft_verify.commit_window(*caches, *([[rows, rows]] * 2 if layered else [rows] * 2), *lengths)
    assert not array.any() and not cache[0, 0, 2:].any()


def test_fp8_that_torch_wrote_is_what_trn2_reads_after_a_clamp_and_not_without():
    numbers = torch.tensor([-448.0, -256.0, -240.0, 0.5, 240.0, 247.0, 256.0, 300.0, 448.0])
    assert arrays.to_numpy(numbers.clamp(-240, 240).to(torch.float8_e4m3fn)).astype(np.float32).tolist() == [
        -240, -240, -240, 0.5, 240, 240, 240, 240, 240,
    ]  # fmt: skip
    as_they_are = arrays.to_numpy(numbers.to(torch.float8_e4m3fn)).astype(np.float32)
    assert np.isfinite(as_they_are).tolist() == [False, False, True, True, True, True, False, False, False]


def test_a_wrong_cache_dtype_is_answered_in_torchs_words_too():
    rows, lengths = torch.zeros((1, 1, 2, 4)), torch.zeros(1, dtype=torch.int32)
    for wrong in (torch.zeros((1, 1, 8, 4), dtype=torch.float8_e5m2), torch.zeros((1, 1, 8, 4), dtype=torch.float16)):
        with pytest.raises(ValueError, match=r"value_cache: got dtype float.* or float8_e4m3 \(torch.float8_e4m3fn"):
            draft_verify.verify_attention(rows, rows, rows, wrong, wrong, lengths)
    # The numbers of NumPy's type reach 448 and are not taken by their bits without a word.
    wrong = np.zeros((1, 1, 8, 4), ml_dtypes.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"got dtype float8_e4m3fn, .* viewed as"):
        draft_verify.verify_attention(*[rows.numpy()] * 3, wrong, wrong, lengths.numpy())
