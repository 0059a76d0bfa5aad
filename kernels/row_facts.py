"""Everything a chain's decisions need to know of its window rows, from one read of each."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .chain import load_sequences, load_tokens, over_rows, proposed, row_numbers, select, to_columns, to_rows, usable
from .row_laws import laws_and_kinds, row_laws
from .statistics import entry_at, kept_mass
from .truncation import put_threshold, row_parameters
from .vocabulary import floats, tensor_scalar, tensor_tensor

# One fact is [B, T]. Peaks, totals and thresholds give a row's law: exp((x - peak) / T) / total, for x not below the
# threshold. TEST is the token rule's comparison, RATIO target / draft at the draft, BEST the target's best id.
TARGET_OK, DRAFT_OK, TEST, BEST, RATIO = 0, 1, 2, 3, 4
TARGET_PEAK, TARGET_TOTAL, TARGET_THRESHOLD, DRAFT_PEAK, DRAFT_TOTAL, DRAFT_THRESHOLD = 5, 6, 7, 8, 9, 10
HAS_DRAFT, TOKEN, ROW_FACTS = 11, 12, 13
SMALLEST = 2.0**-126  # instead of a draft mass of zero, which no draft was drawn with


@dataclass
class Laws(nl.NKIObject):
    """A batch's target and draft laws, in HBM: all columns, or those of a shard of the vocabulary."""

    target_logits: object  # [B, T, V] fp32 or bf16
    draft_law: object  # [B, K, V] fp32 or bf16; None for one-hot drafts
    draft_kind: str  # "logits", "probs" or "one_hot"
    cut: bool  # whether top-k, top-p or min-p may be on
    vocab_size: int  # ids of all lanes
    partition_ids: object  # [128, 1], each lane's first id
    shard: tuple  # (first lane, columns, first id) that the arrays hold; () for all


@dataclass
class Chains(nl.NKIObject):
    """A chunk of sequences with their drafts and parameters, fp32 on partition 0: [1, B], or [1, B, T] a window row."""

    first: int  # sequence of the batch
    count: int
    rows: int
    uniforms: object  # [all sequences, T + 1], in HBM
    tokens: object  # [1, B, T], the draft after each row
    has_draft: object  # [1, B, T], whether there is one with an id
    row_number: object  # [1, B, T]
    good: object  # values in their range
    active: object  # and not an empty slot
    greedy: object
    scale: object  # 1 / T; 1 for greedy sequences
    limits: object  # [1, PARAMETERS, B * T] of `truncation.row_parameters`; None where nothing is cut


def load_chains(draft_tokens, uniforms, draft_lens, temperature, truncation, first, count, rows, vocab_size):
    """`truncation`: (top_k, top_p, min_p) [all sequences], or None."""
    row_number = row_numbers(count, rows)
    tokens = load_tokens(draft_tokens, first, count, rows)
    cut = truncation != None  # noqa: E711
    top_k, top_p, min_p = truncation if cut else (None, None, None)
    lens, good, active, greedy, scale, limits = load_parameters(
        draft_lens, temperature, top_k, top_p, min_p, first, count, rows, cut, vocab_size
    )
    has_draft = proposed(tokens, lens, row_number, vocab_size)
    return Chains(first, count, rows, uniforms, tokens, has_draft, row_number, good, active, greedy, scale, limits)


def row_facts(chains, laws, ratios):
    """[1, ROW_FACTS, B, T] fp32, reading every target and draft row once; `ratios` says whether RATIO is wanted."""
    columns = row_columns(chains)
    found = row_laws(
        laws_and_kinds(laws.target_logits, laws.draft_law, laws.draft_kind),
        chains.first,
        chains.count,
        chains.rows,
        columns[:, 0:1],
        chains.limits,
        laws.vocab_size,
        laws.partition_ids,
    )
    entries = token_entries(columns, chains, laws)
    for i in range(len(found)):
        found[i]["entry"] = entries[i]
    draft = found[1] if len(found) == 2 else None
    return facts_of(chains, columns, found[0], draft, laws.draft_kind, ratios)


def row_columns(chains):
    """[n, 4]: 1 / T, the uniform of the test, the token (0 without one) and the row of the draft law, of every row."""
    first, count, rows = chains.first, chains.count, chains.rows
    drafts = rows - 1
    per_row = floats((1, 4, count, rows))
    nisa.tensor_copy(dst=per_row[:, 0], src=over_rows(chains.scale, rows))
    tests = floats((1, count, rows))
    nisa.dma_copy(dst=tests, src=chains.uniforms.expand_dim(0)[:, first : first + count, 0:rows])
    nisa.tensor_copy(dst=per_row[:, 1], src=tests)
    nisa.tensor_tensor(dst=per_row[:, 2], data1=chains.tokens, data2=chains.has_draft, op=nl.multiply)
    nisa.iota(dst=per_row[:, 3], pattern=[[drafts, count], [1, rows]], offset=first * drafts, channel_multiplier=0)
    nisa.memset(dst=per_row[:, 3, :, drafts:rows], value=0.0)
    return to_columns(per_row.reshape((1, 4, count * rows)))


def token_entries(columns, chains, laws):
    """The target's and the draft's entry at each row's token, [n, 1] each; None for one-hot drafts.

    Args:
        columns: of `row_columns`.
    """
    grid_row = floats((chains.count * chains.rows, 1))
    nisa.iota(dst=grid_row, pattern=[[0, 1]], offset=chains.first * chains.rows, channel_multiplier=1)
    token = columns[:, 2:3]
    draft = None
    if laws.draft_kind != "one_hot":
        draft = entry_in(laws.draft_law, columns[:, 3:4], token, laws.shard)
    return entry_in(laws.target_logits, grid_row, token, laws.shard), draft


def entry_in(law, law_row, token, shard):
    """As `entry_at`, of a law that may hold a shard: 0 for tokens outside it."""
    if len(shard) == 0:
        return entry_at(law, law_row, token)
    _, columns, first_id = shard
    local = tensor_scalar(token, nl.subtract, float(first_id))
    inside = tensor_scalar(local, nl.greater_equal, 0.0)
    below = tensor_scalar(local, nl.less, float(columns))
    nisa.tensor_tensor(dst=inside, data1=inside, data2=below, op=nl.multiply)
    nisa.tensor_tensor(dst=local, data1=local, data2=inside, op=nl.multiply)
    return select(inside, entry_at(law, law_row, local), 0.0)


def facts_of(chains, columns, target, draft, draft_kind, ratios):
    """[1, ROW_FACTS, B, T] fp32 from `row_columns` and each law of `row_laws`, with its "entry" at the token.

    One-hot drafts have none.
    """
    count, rows = chains.count, chains.rows
    num_rows = count * rows
    facts = floats((1, ROW_FACTS, count, rows))
    nisa.tensor_copy(dst=facts[:, HAS_DRAFT], src=chains.has_draft)
    nisa.tensor_copy(dst=facts[:, TOKEN], src=chains.tokens)
    row_scale = columns[:, 0:1]
    total = target["total"]
    mass = kept_mass(target["entry"], target["peak"], row_scale, target["threshold"])

    found = floats((num_rows, HAS_DRAFT))
    put_threshold(found[:, TARGET_THRESHOLD : TARGET_THRESHOLD + 1], target["threshold"])
    if draft_kind == "one_hot":
        nisa.memset(dst=found[:, DRAFT_OK : DRAFT_OK + 1], value=1.0)
        nisa.memset(dst=found[:, DRAFT_PEAK : DRAFT_THRESHOLD + 1], value=1.0)
        draft_mass, draft_total = found[:, DRAFT_OK : DRAFT_OK + 1], found[:, DRAFT_TOTAL : DRAFT_TOTAL + 1]
    else:
        draft_mass, draft_total = draft["entry"], draft["total"]
        if draft_kind == "logits":
            draft_mass = kept_mass(draft_mass, draft["peak"], row_scale, draft["threshold"])
            nisa.tensor_scalar(dst=found[:, DRAFT_OK : DRAFT_OK + 1], data=draft_total, op0=nl.greater, operand0=0.0)
        else:
            # Finite: infinity and NaN times 0 are NaN.
            nisa.tensor_scalar(
                dst=found[:, DRAFT_OK : DRAFT_OK + 1],
                data=draft_total,
                op0=nl.multiply,
                operand0=0.0,
                op1=nl.equal,
                operand1=0.0,
            )
            nisa.memset(dst=draft_total, value=1.0)
        nisa.tensor_copy(dst=found[:, DRAFT_PEAK : DRAFT_PEAK + 1], src=draft["peak"])
        nisa.tensor_copy(dst=found[:, DRAFT_TOTAL : DRAFT_TOTAL + 1], src=draft_total)
        put_threshold(found[:, DRAFT_THRESHOLD : DRAFT_THRESHOLD + 1], draft["threshold"])

    # uniform * draft < target, both over the same denominator: no division.
    left = tensor_tensor(columns[:, 1:2], total, nl.multiply)
    nisa.tensor_tensor(dst=left, data1=left, data2=draft_mass, op=nl.multiply)
    right = tensor_tensor(mass, draft_total, nl.multiply)
    nisa.tensor_tensor(dst=found[:, TEST : TEST + 1], data1=left, data2=right, op=nl.less)
    nisa.tensor_copy(dst=found[:, BEST : BEST + 1], src=target["best"])
    if ratios:
        ratio = tensor_tensor(draft_mass, total, nl.multiply)
        nisa.tensor_scalar(dst=ratio, data=ratio, op0=nl.maximum, operand0=SMALLEST)
        nisa.reciprocal(dst=ratio, data=ratio)
        nisa.tensor_tensor(dst=found[:, RATIO : RATIO + 1], data1=right, data2=ratio, op=nl.multiply)
    else:
        nisa.memset(dst=found[:, RATIO : RATIO + 1], value=0.0)
    nisa.tensor_scalar(dst=found[:, TARGET_OK : TARGET_OK + 1], data=total, op0=nl.greater, operand0=0.0)
    nisa.tensor_copy(dst=found[:, TARGET_PEAK : TARGET_PEAK + 1], src=target["peak"])
    nisa.tensor_copy(dst=found[:, TARGET_TOTAL : TARGET_TOTAL + 1], src=total)
    nisa.tensor_copy(dst=facts.reshape((1, ROW_FACTS, num_rows))[:, 0:HAS_DRAFT], src=to_rows(found))
    return facts


def load_parameters(draft_lens, temperature, top_k, top_p, min_p, first, count, rows, cut, vocab_size):
    """A chunk's per-sequence values.

    Returns:
        draft_lens, good, active, greedy, 1 / T, all [1, B], where good flags values in their range, active those of
        them that are no empty slots; and the limits of `row_facts`. Greedy rows take their statistics at temperature
        1, since only their best id counts and whether they have a law.
    """
    lens = load_sequences(draft_lens, first, count)
    heat = load_sequences(temperature, first, count)
    good, active = usable(lens, rows - 1)
    heat_ok = tensor_scalar(heat, nl.greater_equal, 0.0)
    nisa.tensor_tensor(dst=good, data1=good, data2=heat_ok, op=nl.multiply)
    nisa.tensor_tensor(dst=active, data1=active, data2=heat_ok, op=nl.multiply)
    greedy = tensor_scalar(heat, nl.equal, 0.0)
    scale = tensor_tensor(heat, greedy, nl.add)
    limits = None
    if cut:
        limits = row_parameters(
            load_sequences(top_k, first, count),
            load_sequences(top_p, first, count),
            load_sequences(min_p, first, count),
            scale,
            rows,
            vocab_size,
        )
    nisa.reciprocal(dst=scale, data=scale)
    return lens, good, active, greedy, scale, limits
