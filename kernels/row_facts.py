"""Everything a chain's decisions need to know of its window rows, from one read of each."""

import nki.isa as nisa
import nki.language as nl

from .chain import at_row, load_sequences, over_rows, select, to_columns, to_rows, usable
from .row_laws import row_laws
from .statistics import entry_at, kept_mass
from .truncation import put_threshold, row_parameters
from .vocabulary import floats, tensor_scalar, tensor_tensor

# One fact is [B, T]. Peaks, totals and thresholds give a row's law: exp((x - peak) / T) / total, for x not below the
# threshold. TEST is the token rule's comparison, RATIO target / draft at the draft, BEST the target's best id.
TARGET_OK, DRAFT_OK, TEST, BEST, RATIO = 0, 1, 2, 3, 4
TARGET_PEAK, TARGET_TOTAL, TARGET_THRESHOLD, DRAFT_PEAK, DRAFT_TOTAL, DRAFT_THRESHOLD = 5, 6, 7, 8, 9, 10
HAS_DRAFT, TOKEN, ROW_FACTS = 11, 12, 13
SMALLEST = 2.0**-126  # instead of a draft mass of zero, which no draft was drawn with


def row_facts(
    tokens,
    has_draft,
    first,
    target_logits,
    uniforms,
    draft_law,
    draft_kind,
    vocab_size,
    scale,
    limits,
    ratios,
    partition_ids,
):
    """[1, ROW_FACTS, B, T] fp32, reading every target and draft row once.

    Args:
        tokens, has_draft: [1, B, T], the draft after each row, and whether there is one with an id.
        first: the chunk's first sequence.
        scale: [1, B], 1 / T.
        limits: [1, PARAMETERS, n] of `truncation.row_parameters`; None where nothing is cut.
        ratios: whether RATIO is wanted.
    """
    _, count, rows = tokens.shape
    columns = row_columns(tokens, has_draft, first, uniforms, scale)
    target_entry, draft_entry = token_entries(columns, first, rows, target_logits, draft_law)
    laws = [(target_logits, "logits")]
    if draft_kind != "one_hot":
        laws.append((draft_law, draft_kind))
    laws = row_laws(laws, first, count, rows, scale, limits, vocab_size, partition_ids)
    laws[0]["entry"] = target_entry
    draft = None
    if draft_kind != "one_hot":
        draft = laws[1]
        draft["entry"] = draft_entry
    return facts_of(tokens, has_draft, columns, laws[0], draft, draft_kind, ratios)


def row_columns(tokens, has_draft, first, uniforms, scale):
    """[n, 4]: 1 / T, the uniform of the test, the token (0 without one) and the row of the draft law, of every row."""
    _, count, rows = tokens.shape
    drafts = rows - 1
    per_row = floats((1, 4, count, rows))
    nisa.tensor_copy(dst=per_row[:, 0], src=over_rows(scale, rows))
    tests = floats((1, count, rows))
    nisa.dma_copy(dst=tests, src=uniforms.expand_dim(0)[:, first : first + count, 0:rows])
    nisa.tensor_copy(dst=per_row[:, 1], src=tests)
    nisa.tensor_tensor(dst=per_row[:, 2], data1=tokens, data2=has_draft, op=nl.multiply)
    nisa.iota(dst=per_row[:, 3], pattern=[[drafts, count], [1, rows]], offset=first * drafts, channel_multiplier=0)
    nisa.memset(dst=per_row[:, 3, :, drafts:rows], value=0.0)
    return to_columns(per_row.reshape((1, 4, count * rows)))


def token_entries(columns, first, rows, target_logits, draft_law, shard=()):
    """The target's and the draft's entry at each row's token, [n, 1] each; None for one-hot drafts.

    Args:
        columns: of `row_columns`.
    """
    grid_row = floats((columns.shape[0], 1))
    nisa.iota(dst=grid_row, pattern=[[0, 1]], offset=first * rows, channel_multiplier=1)
    token = columns[:, 2:3]
    target = entry_in(target_logits, grid_row, token, shard)
    return target, entry_in(draft_law, columns[:, 3:4], token, shard) if draft_law != None else None  # noqa: E711


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


def facts_of(tokens, has_draft, columns, target, draft, draft_kind, ratios):
    """[1, ROW_FACTS, B, T] fp32 from `row_columns` and each law of `row_laws`, with its "entry" at the token.

    One-hot drafts have none.
    """
    _, count, rows = tokens.shape
    num_rows = count * rows
    facts = floats((1, ROW_FACTS, count, rows))
    nisa.tensor_copy(dst=facts[:, HAS_DRAFT], src=has_draft)
    nisa.tensor_copy(dst=facts[:, TOKEN], src=tokens)
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


def accepted_rows(facts, greedy):
    """Flags [1, B, T]: the draft after the row is accepted, seen by itself."""
    _, _, _, rows = facts.shape
    by_law = tensor_tensor(facts[:, TEST], facts[:, DRAFT_OK], nl.multiply)
    # by_law + greedy * (match - by_law)
    accept = tensor_tensor(facts[:, BEST], facts[:, TOKEN], nl.equal)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=by_law, op=nl.subtract)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=over_rows(greedy, rows), op=nl.multiply)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=by_law, op=nl.add)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=facts[:, TARGET_OK], op=nl.multiply)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=facts[:, HAS_DRAFT], op=nl.multiply)
    return accept


def last_row(facts, accepted, row_number, greedy, active):
    """What the row after the last accepted draft says.

    Returns:
        last [1, ROW_FACTS, B]: its facts. And [1, B] flags: has_law, of active sequences whose target row there has
        one; sampled; residual, where the law to draw from is target less draft; invalid.
    """
    _, _, _, rows = facts.shape
    last = at_row(facts, tensor_tensor(row_number, over_rows(accepted, rows), nl.equal))
    sampled = tensor_scalar(greedy, nl.multiply, -1.0, nl.add, 1.0)
    sampled_draft = tensor_tensor(last[:, HAS_DRAFT], sampled, nl.multiply)
    nisa.tensor_tensor(dst=sampled_draft, data1=sampled_draft, data2=last[:, TARGET_OK], op=nl.multiply)
    residual = tensor_tensor(sampled_draft, last[:, DRAFT_OK], nl.multiply)
    # 1 - target_ok + sampled_draft * (1 - draft_ok)
    invalid = tensor_tensor(sampled_draft, residual, nl.subtract)
    nisa.tensor_tensor(dst=invalid, data1=invalid, data2=last[:, TARGET_OK], op=nl.subtract)
    nisa.tensor_scalar(dst=invalid, data=invalid, op0=nl.add, operand0=1.0)
    has_law = tensor_tensor(active, last[:, TARGET_OK], nl.multiply)
    return last, has_law, sampled, residual, invalid


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
