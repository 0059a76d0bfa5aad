"""Vocabulary-parallel acceptance: what ranks tell each other, and the decision that follows from it.

A rank of n holds consecutive columns and G = 128 / n of the lanes, `size` ids each. Everything is exchanged by lane, so
that the decision is the unsharded kernel's, bit for bit, where a shard is G whole groups of the vocabulary.
"""

import nki.isa as nisa
import nki.language as nl

from .decision import decide
from .row_facts import Laws, facts_of, row_columns
from .row_laws import combine_rows
from .truncation import MASS, THRESHOLD
from .vocabulary import NUM_GROUPS, floats, transpose

# Statistics of a row: target maxima, totals and candidates and draft maxima and totals, G each; then the two entries at
# the token. Draws of a sequence, G each: sums and drawn ids of the residual and of the target's law, and the best
# finite entries.
LANE_STATISTICS, ENTRIES = 5, 2
# Cuts of a row whose law is cut: THRESHOLD, MASS, whether it is deep, and its largest entry and total uncut.
DEEP, LARGEST, WHOLE, SHARD_CUTS = 2, 3, 4, 5
RESIDUAL_SUM, TARGET_SUM, RESIDUAL_ID, TARGET_ID, FINITE_MAXIMUM, FINITE_ID, DRAWS = 0, 1, 2, 3, 4, 5, 6


def shard_geometry(width, shard, num_shards, vocab_size):
    """((first lane, columns, first id) of a rank, and the vocabulary its lanes would make up)."""
    lanes = NUM_GROUPS // num_shards
    size = (width + lanes - 1) // lanes
    first_id = shard * width
    return (shard * lanes, max(0, min(width, vocab_size - first_id)), first_id), NUM_GROUPS * size


def shard_laws(target_logits, draft_law, draft_kind, cuts, shard, num_shards, vocab_size):
    """A rank's columns, on its lanes; `cuts` None where nothing is cut."""
    width = target_logits.shape[2]
    own, vocabulary = shard_geometry(width, shard, num_shards, vocab_size)
    partition_ids = shard_first_ids(width, num_shards)
    return Laws(target_logits, draft_law, draft_kind, cuts != None, vocabulary, partition_ids, own)  # noqa: E711


def shard_first_ids(width, num_shards):
    """[128, 1] fp32: the first id of every lane of every rank."""
    lanes = NUM_GROUPS // num_shards
    size = (width + lanes - 1) // lanes
    ids = floats((1, num_shards, lanes))
    nisa.iota(dst=ids, pattern=[[width, num_shards], [size, lanes]], offset=0, channel_multiplier=0)
    return transpose(ids.reshape((1, NUM_GROUPS)))


def gathered_laws(statistics, row_scale, first, count, rows, draft_kind):
    """Each law as `row_laws` has it, with its entry at the token, from all ranks' statistics; None for one-hot."""
    num_shards = statistics.shape[0]
    lanes = NUM_GROUPS // num_shards
    num_rows = count * rows
    whole = floats((num_rows, LANE_STATISTICS, NUM_GROUPS))
    entries = floats((num_rows, ENTRIES))
    nisa.memset(dst=entries, value=0.0)
    for shard in range(num_shards):
        of_shard = statistics[shard, first : first + count].reshape((num_rows, LANE_STATISTICS * lanes + ENTRIES))
        part = floats((num_rows, LANE_STATISTICS * lanes + ENTRIES))
        nisa.dma_copy(dst=part, src=of_shard)
        nisa.tensor_copy(
            dst=whole[:, :, shard * lanes : (shard + 1) * lanes],
            src=part[:, 0 : LANE_STATISTICS * lanes].reshape((num_rows, LANE_STATISTICS, lanes)),
        )
        own = part[:, LANE_STATISTICS * lanes : LANE_STATISTICS * lanes + ENTRIES]
        nisa.tensor_tensor(dst=entries, data1=entries, data2=own, op=nl.add)
    target = combine_rows((whole[:, 0], whole[:, 1], whole[:, 2]), row_scale)
    target["entry"] = entries[:, 0:1]
    draft = None
    if draft_kind != "one_hot":
        draft = combine_rows((whole[:, 3], whole[:, 4], None), row_scale)
        draft["entry"] = entries[:, 1:2]
    return target, draft


def decide_together(statistics, cuts, excess, chains, rule, draft_kind):
    """The decision of a chunk from all ranks' statistics [n, B, T, 5 G + 2]: the same on every rank.

    Args:
        cuts: [laws, B, T, SHARD_CUTS] of the target, and of a draft with logits; None where nothing is cut.
        excess: [n, B, T, G] of `shard_excess`, under the block rule; None for one-hot drafts.
    """
    facts = shard_facts(statistics, cuts, chains, rule == "block", draft_kind)
    whole = None
    if rule == "block" and draft_kind != "one_hot":
        whole = gathered_lanes(excess, chains)
    return decide(chains, facts, rule, draft_kind, whole)


def shard_facts(statistics, cuts, chains, ratios, draft_kind):
    """`row_facts` of the whole vocabulary, from what all ranks gave."""
    first, count, rows = chains.first, chains.count, chains.rows
    columns = row_columns(chains)
    target, draft = gathered_laws(statistics, columns[:, 0:1], first, count, rows, draft_kind)
    if cuts != None:  # noqa: E711
        laws = [target, draft]
        for i in range(cuts.shape[0]):
            own = floats((count * rows, SHARD_CUTS))
            nisa.dma_copy(dst=own, src=cuts[i, first : first + count].reshape((count * rows, SHARD_CUTS)))
            laws[i]["threshold"] = own[:, THRESHOLD : THRESHOLD + 1]
            laws[i]["total"] = own[:, MASS : MASS + 1]
    return facts_of(chains, columns, target, draft, draft_kind, ratios)


def gathered_lanes(values, chains):
    """[n, 128] of a chunk's rows, of [shards, B, T, G] `values` from all ranks."""
    num_shards, _, rows, lanes = values.shape
    whole = floats((chains.count * rows, NUM_GROUPS))
    for shard in range(num_shards):
        nisa.dma_copy(
            dst=whole[:, shard * lanes : (shard + 1) * lanes],
            src=values[shard, chains.first : chains.first + chains.count].reshape((chains.count * rows, lanes)),
        )
    return whole
