"""Published pairs of target and draft on Trainium2: the model's prediction beside the published figure.

The time of a plain decode step is modelled as its weights read once from HBM, shared by the tensor-parallel ranks, and
a fixed time a layer: `LAYER_MS`, two all-reduces and their launches, the least-squares fit to the two dense baselines
published at one tensor parallelism, Llama-3.3-70B's 19.6 ms and Llama-3.1-405B's 37.9 ms. Nothing is fitted to
speculative figures but where a preset says "measured"; misses are shown as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from .speedup import StepCost, conditional, expected_tokens, fit_step_cost

HBM_GB_PER_S = 2 * 362  # a logical core of two physical ones (LNC 2, trn2's default): nki-reference.md section 4
LAYER_MS = 0.175
BYTES_PER_WEIGHT = 2  # bfloat16
TILE = 128  # the cache slots an attention kernel takes at a time


@dataclass(frozen=True)
class Model:
    """A dense decoder's public configuration; for a mixture of experts, `active_experts` are read a token."""

    name: str
    num_layers: int
    hidden_size: int
    feed_forward_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    active_experts: int = 1

    @property
    def weights_read(self) -> int:
        """Weights a decode step reads: every layer and the output projection; of the embedding, one row."""
        attention = 2 * self.hidden_size * self.head_size * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.feed_forward_size * self.active_experts
        return self.num_layers * (attention + feed_forward) + self.vocab_size * self.hidden_size

    def step_ms(self, tensor_parallel: int) -> float:
        """Modelled time of one plain decode step at batch 1."""
        return (
            self.weights_read * BYTES_PER_WEIGHT / (tensor_parallel * HBM_GB_PER_S * 1e6) + self.num_layers * LAYER_MS
        )

    def attention_ms(self, tensor_parallel: int, rows: int, context: int, batch: int) -> float:
        """Modelled time of all layers' verify_attention on one rank, as if 8 query heads shared a key/value head."""
        from .cost import measure
        from .shapes import attention_case

        heads = max(1, self.num_kv_heads // tensor_parallel)
        slots = -(-(context + rows) // TILE) * TILE
        shape = {"B": batch * heads, "T": rows, "S": slots, "D": self.head_size}
        return self.num_layers * measure(attention_case("BHDS", shape), lnc=2)[0].bound_us / 1000


QWEN3_32B = Model("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936)
QWEN3_1_7B = Model("Qwen3-1.7B", 28, 2048, 6144, 16, 8, 128, 151936)
QWEN3_0_6B = Model("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151936)
LLAMA_405B = Model("Llama-3.1-405B", 126, 16384, 53248, 128, 8, 128, 128256)
LLAMA_70B = Model("Llama-3.3-70B", 80, 8192, 28672, 64, 8, 128, 128256)
LLAMA_8B = Model("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
LLAMA_1B = Model("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256)
EAGLE3_8B = Model("EAGLE3 head of Llama-3.1-8B", 1, 4096, 14336, 32, 8, 128, 32000)
GPT_OSS_20B = Model("gpt-oss-20b", 24, 2880, 2880, 64, 8, 64, 201088, active_experts=4)

AWS_BLOG = "AWS ML blog, 2026-04-15"
NXDI_TUTORIALS = "aws-neuron-sdk, libraries/nxd-inference/tutorials"


@dataclass(frozen=True)
class Published:
    """A published speedup at K drafts a step, and the acceptance behind it, where that was published too."""

    num_draft_tokens: int
    speedup: float
    kind: str
    source: str


@dataclass(frozen=True)
class Preset:
    """A target and its draft; conditional acceptance `rates` by position, and where they come from."""

    title: str
    target: Model
    draft: str
    tensor_parallel: int
    rates: list[float]
    rates_source: str
    published: list[Published]
    published_step_ms: float | None = None
    draft_model: Model | None = None
    measured_cost: StepCost | None = None
    notes: str = field(default="")

    @cached_property
    def cost(self) -> StepCost:
        """The measured cost where there is one, else modelled: rows are free, a draft token is a draft step."""
        if self.measured_cost is not None:
            return self.measured_cost
        step_ms = self.target.step_ms(self.tensor_parallel)
        return StepCost(c=self.draft_model.step_ms(self.tensor_parallel) / step_ms, step_ms=step_ms)

    def cost_at(self, context: int, batch: int) -> StepCost:
        """The modelled cost with the attention of `batch` sequences of `context` tokens, by this library's kernel.

        Raises ValueError for a preset whose cost is measured.
        """
        if self.draft_model is None:
            raise ValueError(f"{self.title}: its step cost is measured, not modelled")

        def step_ms(model: Model, rows: int) -> float:
            return model.step_ms(self.tensor_parallel) + model.attention_ms(self.tensor_parallel, rows, context, batch)

        plain = step_ms(self.target, 1)
        windows = (7, 15)
        cost = fit_step_cost(windows, [step_ms(self.target, window + 1) for window in windows], plain)
        return replace(cost, c=step_ms(self.draft_model, 1) / plain)

    def predicted(self, num_draft_tokens: int) -> float:
        """Speedup at K."""
        return expected_tokens(self.rates, num_draft_tokens) / self.cost.of(num_draft_tokens, num_draft_tokens)

    def acceptance_needed(self, published: Published) -> float | None:
        """The acceptance rate, the same at each position, that explains a published speedup; None if none does."""
        wanted = published.speedup * self.cost.of(published.num_draft_tokens, published.num_draft_tokens)
        if wanted > published.num_draft_tokens + 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if expected_tokens([middle], published.num_draft_tokens) < wanted else (low, middle)
            )
        return high


def rates_from_lengths(mean_lengths: dict[int, float]) -> list[float]:
    """Conditional rates by position from mean emitted tokens a step at several K; equal between two known K."""
    survival, rates, known, length = 1.0, [], 0, 1.0
    for window, mean_length in sorted(mean_lengths.items()):
        gap, gained = window - known, mean_length - length
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            reached = survival * sum(middle**i for i in range(1, gap + 1))
            low, high = (middle, high) if reached < gained else (low, middle)
        rates += [high] * gap
        survival, known, length = survival * high**gap, window, mean_length
    return rates


P_EAGLE_LENGTHS = {1: 1.90, 2: 2.68, 3: 3.17, 4: 3.62, 7: 4.08}
P_EAGLE_TOKENS_PER_S = {0: 31.5, 1: 40.7, 2: 46.7, 3: 48.2, 4: 48.5, 7: 42.5}
P_EAGLE_SOURCE = "nkipy, examples/models/gpt_oss/peagle/README.md"

PRESETS = {
    "qwen3-32b+1.7b": Preset(
        title="Qwen3-32B + Qwen3-1.7B",
        target=QWEN3_32B,
        draft="Qwen3-1.7B",
        draft_model=QWEN3_1_7B,
        tensor_parallel=4,
        rates=conditional([0.75, 0.57, 0.45]),
        rates_source="MT-Bench, K = 3, vllm#43091; further positions as the third",
        published=[
            Published(7, 1.0, "open-ended", AWS_BLOG),
            Published(7, 3.0, "structured", AWS_BLOG),
        ],
        published_step_ms=45.0,
        notes="tensor parallelism is not in the source; one chip, TP 4, assumed",
    ),
    "qwen3-32b+0.6b": Preset(
        title="Qwen3-32B + Qwen3-0.6B",
        target=QWEN3_32B,
        draft="Qwen3-0.6B",
        draft_model=QWEN3_0_6B,
        tensor_parallel=4,
        rates=[0.65],
        rates_source="assumed: the source says only that it accepts less than the 1.7B draft",
        published=[],
        published_step_ms=45.0,
        notes="TP 4 assumed, as for the larger draft",
    ),
    "llama-3.3-70b+1b": Preset(
        title="Llama-3.3-70B + Llama-3.2-1B",
        target=LLAMA_70B,
        draft="Llama-3.2-1B",
        draft_model=LLAMA_1B,
        tensor_parallel=64,
        rates=[0.8],
        rates_source="assumed: no acceptance was published",
        published=[Published(6, 19.6 / 5.3, "tutorial prompts", NXDI_TUTORIALS)],
        published_step_ms=19.6,
    ),
    "llama-3.1-8b+eagle3": Preset(
        title="Llama-3.1-8B + EAGLE3",
        target=LLAMA_8B,
        draft="EAGLE3 head",
        draft_model=EAGLE3_8B,
        tensor_parallel=8,
        rates=conditional([0.865, 0.725, 0.635]),
        rates_source="measured at K = 3, vllm-neuron tutorial",
        published=[Published(3, 10.52 / 6.41, "tutorial prompts", "vllm-neuron, docs/tutorials")],
        published_step_ms=10.52,
    ),
    "gpt-oss-20b+p-eagle": Preset(
        title="gpt-oss-20b + P-EAGLE",
        target=GPT_OSS_20B,
        draft="P-EAGLE head",
        tensor_parallel=4,
        rates=rates_from_lengths(P_EAGLE_LENGTHS),
        rates_source="measured mean lengths",
        published=[
            Published(k, tokens / P_EAGLE_TOKENS_PER_S[0], "measured", P_EAGLE_SOURCE)
            for k, tokens in P_EAGLE_TOKENS_PER_S.items()
            if k > 0
        ],
        published_step_ms=1000 / P_EAGLE_TOKENS_PER_S[0],
        measured_cost=fit_step_cost(
            list(P_EAGLE_LENGTHS),
            [1000 * P_EAGLE_LENGTHS[k] / P_EAGLE_TOKENS_PER_S[k] for k in P_EAGLE_LENGTHS],
            1000 / P_EAGLE_TOKENS_PER_S[0],
        ),
        notes="step cost fitted to the measured total times of the source",
    ),
}
