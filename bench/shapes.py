"""What is measured: for each operation the shapes, example inputs, and the bytes that any implementation must move.

The grid is B 1/4/16 sequences, T 4/8/16 window rows, S 2k/8k/32k cache slots, head sizes 64/128, vocabularies of
32k/128k/152k; 8 query heads on one key/value head for attention, as a core of a tensor-parallel model sees them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

import draft_verify

BATCHES = (1, 4, 16)
ROWS = (4, 8, 16)
SLOTS = (2048, 8192, 32768)
HEAD_SIZES = (64, 128)
VOCABULARIES = (32_000, 128_256, 151_936)
DRAFT_VOCABULARY = 32_000  # EAGLE-3 heads
QUERY_HEADS = 8
HIDDEN = 4096
BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3

Make = Callable[[tuple[int, ...], Any], np.ndarray]


def zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Data for tracing: pages that nobody touches take no memory."""
    return np.zeros(shape, dtype)


def random_data(seed: int) -> Make:
    """Normal data for running."""
    rng = np.random.default_rng(seed)
    return lambda shape, dtype: rng.standard_normal(shape, np.float32).astype(dtype)


@dataclass(frozen=True)
class Case:
    """One call of one operation.

    shape: what to print about it. inputs(make): positional and keyword arguments, whose data arrays come from
    make(shape, dtype). must_move: bytes that any implementation reads from or writes to HBM. data: what tracing takes
    for `make`, where trip counts depend on it. pieces: (bytes, how many) of the contiguous pieces that the layouts cut
    must_move into, where they are short: no descriptor is longer.
    """

    operation: str
    variant: str
    shape: dict[str, int]
    inputs: Callable[[Make], tuple[tuple, dict]] = field(repr=False)
    must_move: int
    data: Make = field(default=zeros, repr=False)
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def name(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"{self.operation} {self.variant} {sizes}".replace("  ", " ")

    def call(self, make: Make, **options: Any) -> Any:
        """Calls the public function; options are its `backend` and `lnc`."""
        args, kwargs = self.inputs(make)
        return public(self.operation)(*args, **kwargs, **options)


def public(operation: str) -> Callable:
    """`draft_verify.<operation>`."""
    return getattr(draft_verify, operation)


def cases(quick: bool = False) -> list[Case]:
    """The whole grid, or the few shapes that the project's targets are stated for."""
    return [case for group in (attention, acceptance, rollback) for case in group(quick)]


def operations() -> list[str]:
    """Names of all that has a case."""
    return sorted({case.operation for case in cases(quick=True)})


def _grid(quick: bool, **axes: tuple[int, ...]) -> Iterator[dict[str, int]]:
    """Every combination of the axes; quick: one T, the targets' S and D, the largest V, two batches."""
    few = {"B": (1, 4), "T": (8,), "S": (8192,), "D": (128,), "V": (151_936,)}
    points: list[dict[str, int]] = [{}]
    for name, values in axes.items():
        points = [point | {name: value} for point in points for value in (few[name] if quick else values)]
    return iter(points)


# Attention -----------------------------------------------------------------------------------------------------------


def attention(quick: bool) -> Iterator[Case]:
    """Every slot live that can be; transposed keys as AWS's kernel has them, and the other layouts."""
    for point in _grid(quick, B=BATCHES, T=ROWS, S=SLOTS, D=HEAD_SIZES):
        for layout in ("BHDS", "BHSD"):
            yield attention_case(layout, point, cache_layout=layout)
    point = {"B": 4, "T": 8, "S": 8192, "D": 128}
    for batch in BATCHES:
        yield attention_case("NHPD blocks of 16", point | {"B": batch}, cache_layout="NHPD", block=16)
    yield attention_case("NPHD blocks of 256", point, cache_layout="NPHD", block=256)
    yield attention_case("BHDS fp8", point, cache_layout="BHDS", cache_dtype=FP8)
    yield attention_case("BHDS window of 1024", point, cache_layout="BHDS", sliding_window=1024)
    yield attention_case("BHDS lengths 500 to 8000", point, cache_layout="BHDS", lengths=(500, 1000, 4000, 8000))
    yield attention_case("BHDS tree", point | {"B": 1, "T": 64}, cache_layout="BHDS", tree=True)
    yield _merge(point)


def attention_case(
    variant: str,
    point: dict[str, int],
    *,
    cache_layout: str = "BHDS",
    block: int = 0,
    cache_dtype: Any = BF16,
    sliding_window: int | None = None,
    lengths: tuple[int, ...] | None = None,
    tree: bool = False,
) -> Case:
    batch, rows, slots, size = point["B"], point["T"], point["S"], point["D"]
    lengths = lengths or (slots - rows,) * batch

    def inputs(make: Make) -> tuple[tuple, dict]:
        window = (batch, 1, rows, size)
        keywords: dict[str, Any] = {"cache_layout": cache_layout, "sliding_window": sliding_window}
        keys = values = (batch, 1, slots, size)
        if cache_layout == "BHDS":
            keys = (batch, 1, size, slots)
        if block:
            blocks = batch * slots // block
            keys = values = (blocks, 1, block, size) if cache_layout == "NHPD" else (blocks, block, 1, size)
            keywords["block_table"] = np.arange(blocks, dtype=np.int32).reshape(batch, -1)
        if tree:
            keywords["tree"] = ((np.arange(rows) - 1) // 2).astype(np.int32)
        args = (make((batch, QUERY_HEADS, rows, size), BF16), make(window, BF16), make(window, BF16))
        return (*args, make(keys, cache_dtype), make(values, cache_dtype), np.array(lengths, np.int32)), keywords

    live = sum(min(length, sliding_window or length) for length in lengths)
    return Case("verify_attention", variant, point, inputs, 2 * size * np.dtype(cache_dtype).itemsize * live)


def _merge(point: dict[str, int], shards: int = 4) -> Case:
    batch, rows, size = point["B"], point["T"], point["D"]
    shape = (shards, batch, QUERY_HEADS, rows)
    return Case(
        "merge_attention",
        f"{shards} shards",
        {name: point[name] for name in "BTD"},
        lambda make: ((make((*shape, size), BF16), make(shape, np.float32)), {}),
        batch * QUERY_HEADS * rows * ((shards + 1) * size * 2 + (shards + 1) * 4),
    )


# Acceptance ----------------------------------------------------------------------------------------------------------


def acceptance(quick: bool) -> Iterator[Case]:
    """bf16 logits; drafts with their own logits where the rule uses them."""
    for point in _grid(quick, B=BATCHES, T=ROWS, V=VOCABULARIES):
        row = point["V"] * 2
        yield Case("greedy_acceptance", "", point, _acceptance_inputs(point), point["B"] * point["T"] * row)
        truncated = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
        for variant, options, data in (
            ("token", {"temperature": 0.8}, zeros),
            ("token top-k top-p", truncated, random_data(0)),
            ("token top-k top-p of flat laws", truncated, zeros),  # each row is searched whole: the worst case
            ("block", {"temperature": 0.8, "rule": "block"}, zeros),
        ):
            inputs = _acceptance_inputs(point, uniforms=True, draft_logits=True, **options)
            # Every row of both models once, and two rows again for the token that is drawn.
            yield Case("rejection_sampling", variant, point, inputs, point["B"] * (2 * point["T"] + 1) * row, data)
        yield Case("mask_logits", "", point, _mask_inputs(point), point["B"] * point["T"] * (2 * row + point["V"] // 8))
        yield Case("token_logprobs", "", point, _logprob_inputs(point), point["B"] * point["T"] * row)
        typical = {"posterior_threshold": 0.09, "posterior_alpha": 0.3}
        inputs = _acceptance_inputs(point, uniforms=True, **typical)
        yield Case("typical_acceptance", "", point, inputs, point["B"] * point["T"] * row)
    for batch, rows in itertools.product((1,) if quick else (1, 4), (16, 64)):
        point = {"B": batch, "T": rows, "V": 151_936}
        moved = point["B"] * point["T"] * point["V"] * 2
        yield Case("tree_acceptance", "greedy", point, _tree_inputs(point, rule="greedy"), moved)
        for rule, laws in (("target_only", 1), ("without_replacement", 2)):
            inputs = _tree_inputs(point, uniforms=True, draft_logits=laws == 2, rule=rule, temperature=0.8)
            yield Case("tree_acceptance", rule, point, inputs, laws * moved)
    for point in _grid(quick, B=BATCHES, V=VOCABULARIES):
        yield Case("sample_tokens", "", point, _sample_inputs(point), point["B"] * point["V"] * 2)
    for point in _grid(quick, B=BATCHES, T=ROWS, V=VOCABULARIES):
        point |= {"Vd": min(DRAFT_VOCABULARY, point["V"])}
        yield _projection(point, "probs", np.float32)
        yield _projection(point, "logits", BF16)


def _laws(point: dict[str, int], make: Make, uniforms: bool, draft_logits: bool, draft_rows: int) -> tuple[list, dict]:
    batch, rows, size = point["B"], point["T"], point["V"]
    drafts = np.arange(batch * (rows - 1), dtype=np.int32).reshape(batch, rows - 1)
    args: list = [drafts, make((batch, rows, size), BF16)]
    if uniforms:
        args.append(np.full((batch, rows + 1), 0.5, np.float32))
    return args, {"draft_logits": make((batch, draft_rows, size), BF16)} if draft_logits else {}


def _acceptance_inputs(point: dict[str, int], uniforms: bool = False, draft_logits: bool = False, **options: Any):
    def inputs(make: Make) -> tuple[tuple, dict]:
        args, laws = _laws(point, make, uniforms, draft_logits, point["T"] - 1)
        return tuple(args), laws | options

    return inputs


def _tree_inputs(point: dict[str, int], uniforms: bool = False, draft_logits: bool = False, **options: Any):
    def inputs(make: Make) -> tuple[tuple, dict]:
        args, laws = _laws(point, make, uniforms, draft_logits, point["T"])
        tree = ((np.arange(point["T"]) - 1) // 2).astype(np.int32)
        return (tree, *args), laws | options

    return inputs


def _mask_inputs(point: dict[str, int]):
    batch, rows, size = point["B"], point["T"], point["V"]

    def inputs(make: Make) -> tuple[tuple, dict]:
        allowed = np.full((batch, rows, -(-size // 32)), 0x55555555, np.int32)
        return (make((batch, rows, size), BF16), allowed), {}

    return inputs


def _logprob_inputs(point: dict[str, int]):
    batch, rows, size = point["B"], point["T"], point["V"]

    def inputs(make: Make) -> tuple[tuple, dict]:
        path = np.tile(np.arange(rows, dtype=np.int32), (batch, 1))
        return (make((batch, rows, size), BF16), path, path), {"temperature": 0.8}

    return inputs


def _projection(point: dict[str, int], kind: str, dtype: Any) -> Case:
    """Every draft id a target id of its own, spread evenly."""
    batch, rows, size, draft_size = point["B"], point["T"] - 1, point["V"], point["Vd"]

    def inputs(make: Make) -> tuple[tuple, dict]:
        targets = (np.arange(draft_size) * size // draft_size).astype(np.int32)
        law = {f"draft_{kind}": make((batch, rows, draft_size), dtype)}
        return (draft_verify.invert_draft_to_target(targets, size),), law

    moved = batch * rows * (draft_size * np.dtype(dtype).itemsize + size * 4) + size * 4
    return Case("project_draft_law", kind, point, inputs, moved)


def _sample_inputs(point: dict[str, int]):
    def inputs(make: Make) -> tuple[tuple, dict]:
        logits = make((point["B"], point["V"]), BF16)
        return (logits, np.full((point["B"], 2), 0.5, np.float32)), {"temperature": 0.8}

    return inputs


# Rollback ------------------------------------------------------------------------------------------------------------


def rollback(quick: bool) -> Iterator[Case]:
    """Half the drafts accepted; moves of a layer with 8 key/value heads, one layer or eight a launch."""
    for point in _grid(quick, B=BATCHES, T=ROWS):
        for layout in ("BHSD", "BHDS", "NHPD", "NPHD"):
            for layers in (1, 8):
                yield _commit(point | {"D": 128, "layers": layers}, layout)
            yield _commit(point | {"D": 128, "layers": 8}, layout, stacked=True)
        for layout in ("BHSD", "BHDS"):
            yield _commit(point | {"D": 128, "layers": 8}, layout, tree=True)
        yield _commit(point | {"D": 128, "layers": 8}, "BHSD", tree=True, stacked=True)
        yield _compact(point | {"D": 128})
        yield from _ring(point | {"D": 128})
        shape = point | {"H": HIDDEN}
        moved = 2 * point["B"] * HIDDEN * 2
        yield Case("select_hidden", "", shape, _select_inputs(shape, (HIDDEN,)), moved)
        state = 2**20 // 2
        yield _shift(point | {"C": HIDDEN})
        shape = point | {"bytes": 2**20}
        yield Case(
            "select_state",
            "1 MiB a sequence",
            shape,
            _select_inputs(shape, (128, state // 128)),
            2 * point["B"] * 2**20,
        )


ROLLBACK_SLOTS, ROLLBACK_HEADS, ROLLBACK_BLOCK = 4096, 8, 16


def _cache_shapes(layout: str, batch: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...], dict]:
    heads, slots, block = ROLLBACK_HEADS, ROLLBACK_SLOTS, ROLLBACK_BLOCK
    options: dict[str, Any] = {"cache_layout": layout}
    if layout in ("NHPD", "NPHD"):
        blocks = batch * slots // block
        shape = (blocks, heads, block, size) if layout == "NHPD" else (blocks, block, heads, size)
        return shape, shape, options | {"block_table": np.arange(blocks, dtype=np.int32).reshape(batch, -1)}
    rows = (batch, heads, slots, size)
    return (batch, heads, size, slots) if layout == "BHDS" else rows, rows, options


def _commit(point: dict[str, int], layout: str, tree: bool = False, stacked: bool = False) -> Case:
    """Rows 0, 1, 2, ... of a chain, or 0, 2, 4, ... of a tree; layers stacked in one tensor are further sequences."""
    batch, rows, size, layers = point["B"], point["T"], point["D"], point["layers"]
    if stacked:
        batch, layers = batch * layers, 1
    accepted = (rows - 1) // 2

    def inputs(make: Make) -> tuple[tuple, dict]:
        keys, values, options = _cache_shapes(layout, batch, size)
        window = (batch, ROLLBACK_HEADS, rows, size)
        entries = [tuple(make(shape, BF16) for _ in range(layers)) for shape in (keys, values, window, window)]
        if layers == 1:
            entries = [entry[0] for entry in entries]
        lengths = np.full(batch, ROLLBACK_SLOTS // 2 + 5, np.int32)
        if tree:
            options["path"] = _every_other_row(batch, accepted + 1, accepted)  # a tree so deep
        return (*entries, lengths, np.full(batch, accepted, np.int32)), options

    run = (accepted + 1) * size * 2  # of a head
    runs = layers * batch * ROLLBACK_HEADS
    keys = values = (run, runs)
    if layout == "NPHD":
        keys = values = (run * ROLLBACK_HEADS, runs // ROLLBACK_HEADS)
    elif layout == "BHDS":
        keys = (run // size, runs * size)
    windows = (size * 2, 2 * runs * (accepted + 1)) if tree else (run, 2 * runs)
    variant = f"{layout}{' tree' if tree else ''}{' stacked' if stacked else ''}"
    return Case("commit_window", variant, point, inputs, 4 * runs * run, pieces=(windows, keys, values))


def _every_other_row(batch: int, rows: int, accepted: int) -> np.ndarray:
    path = np.full((batch, rows), -1, np.int32)
    path[:, : accepted + 1] = 2 * np.arange(accepted + 1)
    return path


def _compact(point: dict[str, int]) -> Case:
    batch, rows, size = point["B"], point["T"], point["D"]
    accepted = (rows - 1) // 2
    path = _every_other_row(batch, rows, accepted)

    def inputs(make: Make) -> tuple[tuple, dict]:
        keys, values, options = _cache_shapes("BHSD", batch, size)
        lengths = np.full(batch, ROLLBACK_SLOTS // 2 + 5, np.int32)
        return (make(keys, BF16), make(values, BF16), lengths, path, np.full(batch, accepted, np.int32)), options

    row, heads = size * 2, 2 * batch * ROLLBACK_HEADS
    pieces = ((row, heads * accepted), (row * accepted, heads))
    return Case("compact_window", "BHSD", point, inputs, 2 * heads * accepted * row, pieces=pieces)


def _ring(point: dict[str, int]) -> Iterator[Case]:
    """A window of rows saved, and the rejected half of them restored."""
    batch, rows, size = point["B"], point["T"], point["D"]
    accepted = (rows - 1) // 2
    row, heads = size * 2, 2 * batch * ROLLBACK_HEADS
    lengths = np.full(batch, 2 * ROLLBACK_SLOTS - rows // 2, np.int32)  # half the window is past the ring's end

    def rings(make: Make) -> tuple:
        keys, values, _ = _cache_shapes("BHSD", batch, size)
        return make(keys, BF16), make(values, BF16)

    def saved(make: Make) -> tuple:
        window = (batch, ROLLBACK_HEADS, rows, size)
        return make(window, BF16), make(window, BF16)

    half = rows // 2 * row
    yield Case(
        "save_ring",
        "BHSD",
        point,
        lambda make: ((*rings(make), lengths, rows), {}),
        2 * heads * rows * row,
        pieces=((half, 2 * heads), (rows * row, heads)),
    )
    yield Case(
        "restore_ring",
        "BHSD",
        point,
        lambda make: ((*rings(make), *saved(make), lengths, np.full(batch, accepted, np.int32)), {}),
        2 * heads * half,
        pieces=((half, 2 * heads),),
    )


def _shift(point: dict[str, int], width: int = 4) -> Case:
    """The inputs of a causal convolution of `width` over C channels."""
    batch, rows, channels = point["B"], point["T"], point["C"]

    def inputs(make: Make) -> tuple[tuple, dict]:
        history = make((batch, channels, width - 1 + rows), BF16)
        return (history, np.full(batch, (rows - 1) // 2, np.int32), rows), {}

    return Case("shift_conv_window", f"width {width}", point, inputs, 2 * batch * channels * (width - 1) * 2)


def _select_inputs(point: dict[str, int], row: tuple[int, ...]):
    def inputs(make: Make) -> tuple[tuple, dict]:
        batch, rows = point["B"], point["T"]
        return (make((batch, rows, *row), BF16), np.full(batch, (rows - 1) // 2, np.int32)), {}

    return inputs
