"""What follows from the facts of a chain's rows: how many drafts are accepted, and the law of the token after them."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from .block_rule import block_prefix
from .chain import at_row, leading_count, over_rows, select, store_acceptance
from .row_facts import BEST, DRAFT_OK, DRAFT_TOTAL, HAS_DRAFT, TARGET_OK, TEST, TOKEN
from .vocabulary import tensor_scalar, tensor_tensor


@dataclass
class Decision(nl.NKIObject):
    """[1, B] each, of the row after the accepted drafts but `accepted`."""

    accepted: object
    last: object  # [1, ROW_FACTS, B], the row's facts
    has_law: object  # of active sequences: whether the target row has a law
    sampled: object
    residual: object  # whether the law to draw from is target less draft
    invalid: object


def decide(chains, facts, rule, draft_kind, excess):
    """The decision by `facts` [1, ROW_FACTS, B, T]; `excess` as `block_prefix` takes it, None under the token rule."""
    accepted = leading_count(accepted_rows(facts, chains.greedy), chains.row_number)
    if rule == "token":
        return decision_at(chains, facts, accepted)
    passing, weights = block_prefix(chains, facts, excess)
    decision = decision_at(chains, facts, select(chains.greedy, accepted, passing))
    if draft_kind != "one_hot":
        # The residual is of weight * target: as if the draft's total were larger by the weight.
        here = tensor_tensor(chains.row_number, over_rows(decision.accepted, chains.rows), nl.equal)
        weight = at_row(weights.expand_dim(1), here)[:, 0]
        total = decision.last[:, DRAFT_TOTAL]
        nisa.tensor_tensor(dst=total, data1=total, data2=weight, op=nl.multiply)
    return decision


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


def decision_at(chains, facts, accepted):
    """The decision that accepts `accepted` [1, B] drafts."""
    here = tensor_tensor(chains.row_number, over_rows(accepted, chains.rows), nl.equal)
    last = at_row(facts, here)
    sampled = tensor_scalar(chains.greedy, nl.multiply, -1.0, nl.add, 1.0)
    sampled_draft = tensor_tensor(last[:, HAS_DRAFT], sampled, nl.multiply)
    nisa.tensor_tensor(dst=sampled_draft, data1=sampled_draft, data2=last[:, TARGET_OK], op=nl.multiply)
    residual = tensor_tensor(sampled_draft, last[:, DRAFT_OK], nl.multiply)
    # 1 - target_ok + sampled_draft * (1 - draft_ok)
    invalid = tensor_tensor(sampled_draft, residual, nl.subtract)
    nisa.tensor_tensor(dst=invalid, data1=invalid, data2=last[:, TARGET_OK], op=nl.subtract)
    nisa.tensor_scalar(dst=invalid, data=invalid, op0=nl.add, operand0=1.0)
    has_law = tensor_tensor(chains.active, last[:, TARGET_OK], nl.multiply)
    return Decision(accepted, last, has_law, sampled, residual, invalid)


def store_chains(outputs, repeated, chains, decision, emitted):
    """Stores a chunk's acceptance, whose last tokens are `emitted` [1, B]; not of its first `repeated` sequences."""
    store_acceptance(
        outputs,
        chains.first,
        repeated,
        chains.tokens,
        chains.row_number,
        decision.accepted,
        emitted,
        chains.active,
        chains.good,
        decision.invalid,
        chains.row_number,
    )
