"""tree_acceptance: the path of a tree of drafts that is kept, and the one token after it, on the device.

First every row is read once for its statistics, as for a chain. Then each sequence walks its tree, a candidate a step:
the next row whose parent is the current node is accepted, or taken out of the node's law. Rows stand behind their
parents and siblings in order, so the walk meets them in one ascent; its state (node, path, masses) stays on the chip.
"""

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import (
    allocate_outputs,
    at_row,
    over_rows,
    proposed,
    row_numbers,
    select,
    sequence_chunks,
    store_acceptance,
    to_int,
)
from .draw import draw, load_uniforms
from .node_facts import (
    BEST,
    DRAFT_OK,
    DRAFT_PEAK,
    DRAFT_THRESHOLD,
    NODE_FACTS,
    TARGET_OK,
    TARGET_PEAK,
    TARGET_THRESHOLD,
    node_facts,
)
from .row_facts import load_parameters
from .statistics import replace_spoiled
from .tree import load_parents, load_row_tokens, require_tree
from .truncation import drop_below
from .vocabulary import (
    FILL,
    NUM_GROUPS,
    first_ids,
    floats,
    group_size,
    load_row_at,
    spread,
    tensor_scalar,
    tensor_tensor,
    transpose,
)

# What a walk leaves.
END_ROW, END_ACCEPTED, END_BEST, END_SPOILED, END_INVALID, END_DRAWN, END_FACTS = 0, 1, 2, 3, 4, 5, 6


@nki.jit
def tree_acceptance(
    tree,
    draft_tokens,
    target_logits,
    uniforms,
    draft_law,
    draft_lens,
    temperature,
    top_k,
    top_p,
    min_p,
    rule,
    draft_kind,
    cut,
    vocab_size,
):
    """Rules greedy, target_only, without_replacement and independent; see `draft_verify.tree_acceptance`.

    Args:
        tree: [T] or [B, T] int32 parents.
        draft_tokens: [B, T - 1] int32; None where T is 1.
        target_logits: [B, T, V] fp32 or bf16.
        uniforms: [B, T + 1] fp32.
        draft_law: [B, T, V] fp32 or bf16, logits or probabilities; None for one-hot drafts.
        draft_lens: [B] int32, rows after the root, -1 an empty slot.
        temperature: [B] fp32, 0 greedy.
        top_k, top_p, min_p: [B] int32, fp32, fp32; None unless `cut`.
        draft_kind: "logits", "probs" or "one_hot".
        cut: whether any of the three may be on.
        vocab_size: columns of V that count.

    Returns:
        tokens [B, T], num_accepted [B], path [B, T], invalid [B], all int32.
    """
    batch, rows, _ = target_logits.shape
    outputs = allocate_outputs(batch, rows)
    for chunk in sequence_chunks(batch, rows, 1, nl.tile_size.pmax):
        first, count, repeated = chunk
        partition_ids = first_ids(vocab_size)
        row_number = row_numbers(count, rows)
        tokens = load_row_tokens(draft_tokens, first, count, rows)
        parents = load_parents(tree, first, count, rows)
        lens, good, active, greedy, scale, limits = load_parameters(
            draft_lens, temperature, top_k, top_p, min_p, first, count, rows, cut, vocab_size
        )
        one_more = tensor_scalar(lens, nl.add, 1.0)
        live = proposed(tokens, one_more, row_number, vocab_size)
        require_tree(good, active, parents, tensor_tensor(row_number, over_rows(one_more, rows), nl.less), row_number)
        facts = node_facts(first, count, target_logits, draft_law, draft_kind, vocab_size, scale, limits, partition_ids)

        path = floats((1, count, rows))
        path_tokens = floats((1, count, rows))
        ends = floats((1, END_FACTS, count))
        for sequence in range(count):
            one = slice(sequence, sequence + 1)
            tree_walk = Walk(
                sequence=first + sequence,
                facts=facts[:, :, sequence],
                parents=parents[:, sequence],
                tokens=tokens[:, sequence],
                live=live[:, sequence],
                row_number=row_number[:, sequence],
                greedy=greedy[:, one],
                scale=scale[:, one],
                target_logits=target_logits,
                draft_law=draft_law,
                rule=rule,
                draft_kind=draft_kind,
                cut=cut,
                vocab_size=vocab_size,
                path=path[:, sequence],
                path_tokens=path_tokens[:, sequence],
                node=constant(0.0),
                tested=constant(0.0),
                accepted=constant(0.0),
                here=floats((1, NODE_FACTS)),
                tests=None if rule == "greedy" else floats((1, rows)),
                state=None if rule == "greedy" else node_state(target_logits, draft_law, draft_kind, vocab_size),
            )
            walk(tree_walk, uniforms, ends[:, :, sequence])
        spoiled = tensor_tensor(active, ends[:, END_SPOILED], nl.multiply)
        best = floats((1, count))
        nisa.tensor_copy(dst=best, src=ends[:, END_BEST])
        replace_spoiled(best, spoiled, ends[:, END_ROW], first, target_logits, vocab_size, partition_ids)
        emitted = best
        if rule != "greedy":
            chosen = tensor_tensor(ends[:, END_SPOILED], greedy, nl.maximum)
            emitted = select(chosen, best, ends[:, END_DRAWN])
        store_acceptance(
            outputs,
            first,
            repeated,
            path_tokens,
            path,
            ends[:, END_ACCEPTED],
            emitted,
            active,
            good,
            ends[:, END_INVALID],
            row_number,
        )
    return outputs


@dataclass
class Walk(nl.NKIObject):
    """One sequence's tree, and where its walk is: [1, T] a row, [1, 1] else unless said otherwise."""

    sequence: int
    facts: object  # [1, NODE_FACTS, T]
    parents: object
    tokens: object
    live: object  # flags of the rows that may be accepted
    row_number: object
    greedy: object
    scale: object
    target_logits: object  # in HBM, all sequences'
    draft_law: object
    rule: str
    draft_kind: str
    cut: bool
    vocab_size: int
    path: object  # the rows kept, the root at 0
    path_tokens: object  # and their ids
    node: object
    tested: object  # the last row that was
    accepted: object
    here: object  # [1, NODE_FACTS], the node's
    tests: object  # uniform numbers of the rows; None for greedy walks, which need no law
    state: object  # as node_state leaves it, likewise


def walk(tree, uniforms, end):
    """One sequence's way from the root; writes `end` [1, END_FACTS]."""
    rows = tree.row_number.shape[1]
    by_law = tree.rule != "greedy"
    nisa.memset(dst=tree.path, value=0.0)
    nisa.memset(dst=tree.path_tokens, value=0.0)
    nisa.tensor_copy(dst=tree.here, src=tree.facts[:, :, 0])
    if by_law:
        enter_node(tree, constant(1.0))
        nisa.memset(dst=tree.tests, value=0.0)
        if rows > 1:
            nisa.dma_copy(dst=tree.tests[:, 1:rows], src=uniforms[tree.sequence : tree.sequence + 1, 0 : rows - 1])

    found_child = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)

    def step_while_found(more):
        nisa.tensor_copy(dst=found_child, src=step(tree))
        nisa.register_load(more, found_child)
        return more

    def step_anyway(row):
        step(tree)

    # The two cores of LNC 2 must take equally many steps: all there can be, unless both walk the one tree there is.
    if rows > 1 and (nl.num_programs(0) == 1 or tree.target_logits.shape[0] == 1):
        nl.while_loop(nisa.register_alloc(1), step_while_found)
    elif rows > 1:
        first_row = nisa.register_alloc(1)
        nl.fori_loop(first_row, rows, step_anyway)

    node, accepted, here = tree.node, tree.accepted, tree.here
    nisa.tensor_copy(dst=end[:, END_ROW : END_ROW + 1], src=node)
    nisa.tensor_copy(dst=end[:, END_ACCEPTED : END_ACCEPTED + 1], src=accepted)
    nisa.tensor_copy(dst=end[:, END_BEST : END_BEST + 1], src=here[:, BEST : BEST + 1])
    spoiled = tensor_scalar(here[:, TARGET_OK : TARGET_OK + 1], nl.multiply, -1.0, nl.add, 1.0)
    nisa.tensor_copy(dst=end[:, END_SPOILED : END_SPOILED + 1], src=spoiled)
    # Children that could not be tested, for want of a draft law, are why a node may be left.
    children = tensor_scalar(tree.parents, nl.equal, node)
    nisa.tensor_tensor(dst=children, data1=children, data2=tree.live, op=nl.multiply)
    barred = tensor_scalar(total_of(children), nl.greater, 0.0)
    shut = tensor_scalar(open_flag(here, tree.greedy, tree.draft_kind), nl.multiply, -1.0, nl.add, 1.0)
    nisa.tensor_tensor(dst=barred, data1=barred, data2=shut, op=nl.multiply)
    nisa.tensor_tensor(dst=end[:, END_INVALID : END_INVALID + 1], data1=spoiled, data2=barred, op=nl.maximum)
    if by_law:
        masses, groups, _ = tree.state["target"]
        laws = [(masses.expand_dim(1), transpose(groups), constant(1.0))]
        drawn = draw(laws, load_uniforms(uniforms, tree.sequence, 1), tree.vocab_size)
        nisa.tensor_copy(dst=end[:, END_DRAWN : END_DRAWN + 1], src=drawn)


def step(tree):
    """Tests the next child of the node, if there is one; returns 1 if there was, else 0."""
    parents, tokens, live, row_number = tree.parents, tree.tokens, tree.live, tree.row_number
    node, tested, accepted, here = tree.node, tree.tested, tree.accepted, tree.here
    greedy, state, tests, rule, draft_kind = tree.greedy, tree.state, tree.tests, tree.rule, tree.draft_kind
    rows = row_number.shape[1]
    by_law = rule != "greedy"
    children = tensor_scalar(parents, nl.equal, node)
    nisa.tensor_tensor(dst=children, data1=children, data2=live, op=nl.multiply)
    candidates = tensor_scalar(row_number, nl.greater, tested, nl.multiply, open_flag(here, greedy, draft_kind))
    nisa.tensor_tensor(dst=candidates, data1=candidates, data2=children, op=nl.multiply)
    child = minimum(select(candidates, row_number, float(rows)))
    found = tensor_scalar(child, nl.less, float(rows))
    at_child = tensor_scalar(row_number, nl.equal, child)
    token = chosen_value(tokens, at_child)
    accept = tensor_tensor(token, here[:, BEST : BEST + 1], nl.equal)
    if by_law:
        if rule == "independent":
            passes = constant(1.0)
        else:
            # A token that an earlier sibling had is passed over.
            before = tensor_scalar(row_number, nl.less, child)
            nisa.tensor_tensor(dst=before, data1=before, data2=children, op=nl.multiply)
            same = tensor_scalar(tokens, nl.equal, token)
            nisa.tensor_tensor(dst=before, data1=before, data2=same, op=nl.multiply)
            passes = tensor_scalar(total_of(before), nl.equal, 0.0)
        nisa.tensor_tensor(dst=passes, data1=passes, data2=found, op=nl.multiply)
        test = law_test(state, token, chosen_value(tests, at_child), draft_kind)
        nisa.tensor_tensor(dst=test, data1=test, data2=passes, op=nl.multiply)
        sampled = tensor_scalar(greedy, nl.multiply, -1.0, nl.add, 1.0)
        rejected = tensor_tensor(passes, test, nl.subtract)
        nisa.tensor_tensor(dst=rejected, data1=rejected, data2=sampled, op=nl.multiply)
        take_out(state, token, rejected, rule)
        accept = select(greedy, accept, test)
    nisa.tensor_tensor(dst=accept, data1=accept, data2=found, op=nl.multiply)

    nisa.tensor_copy(dst=tested, src=child)
    nisa.tensor_copy(dst=node, src=select(accept, child, node))
    put(tree.path_tokens, row_number, accepted, accept, token)
    nisa.tensor_tensor(dst=accepted, data1=accepted, data2=accept, op=nl.add)
    put(tree.path, row_number, accepted, accept, child)
    entered = at_row(tree.facts.expand_dim(2), at_child.expand_dim(1))
    for fact in range(NODE_FACTS):
        column = here[:, fact : fact + 1]
        nisa.tensor_copy(dst=column, src=select(accept, entered[:, fact], column))
    if by_law:
        enter_node(tree, accept)
    return found


def constant(value):
    tile = floats((1, 1))
    nisa.memset(dst=tile, value=value)
    return tile


def total_of(values):
    result = floats((1, 1))
    nisa.tensor_reduce(dst=result, op=nl.add, data=values, axis=1)
    return result


def minimum(values):
    result = floats((1, 1))
    nisa.tensor_reduce(dst=result, op=nl.minimum, data=values, axis=1)
    return result


def chosen_value(values, chosen):
    """[1, 1]: the finite value of `values` [1, T] where `chosen` [1, T] is 1; 0 where nowhere."""
    return total_of(tensor_tensor(values, chosen, nl.multiply))


def put(values, row_number, position, flag, value):
    """values[position] = value where flag, which held 0 before."""
    there = tensor_scalar(row_number, nl.equal, position, nl.multiply, flag)
    nisa.scalar_tensor_tensor(dst=values, data=there, op0=nl.multiply, operand0=value, op1=nl.add, operand1=values)


def open_flag(here, greedy, draft_kind):
    """[1, 1]: whether the node's children can be tested: it has a law, and so has their draft unless it is greedy."""
    if draft_kind == "one_hot":
        return here[:, TARGET_OK : TARGET_OK + 1]
    tests = tensor_tensor(here[:, DRAFT_OK : DRAFT_OK + 1], greedy, nl.maximum)
    return tensor_tensor(tests, here[:, TARGET_OK : TARGET_OK + 1], nl.multiply)


def node_state(target_logits, draft_law, draft_kind, vocab_size):
    """Tiles that live as long as the walk: the node's rows, and (masses [128, size], lane sums, total) of its laws."""
    size = group_size(vocab_size)
    state = {"ids": floats((NUM_GROUPS, size))}
    nisa.iota(dst=state["ids"], pattern=[[1, size]], offset=0, channel_multiplier=size)
    state["target_row"] = nl.ndarray((NUM_GROUPS, size), dtype=target_logits.dtype, buffer=nl.sbuf)
    nisa.memset(dst=state["target_row"], value=FILL)
    state["target"] = (floats((NUM_GROUPS, size)), floats((NUM_GROUPS, 1)), floats((1, 1)))
    nisa.memset(dst=state["target"][0], value=1.0)
    if draft_kind != "one_hot":
        state["draft_row"] = nl.ndarray((NUM_GROUPS, size), dtype=draft_law.dtype, buffer=nl.sbuf)
        nisa.memset(dst=state["draft_row"], value=FILL if draft_kind == "logits" else 0.0)
        state["draft"] = (floats((NUM_GROUPS, size)), floats((NUM_GROUPS, 1)), floats((1, 1)))
        nisa.memset(dst=state["draft"][0], value=0.0)
    return state


def enter_node(tree, flag):
    """Where `flag` [1, 1] is set, the masses become those of the node's laws, if it has them; always sums them up."""
    here, state = tree.here, tree.state
    batch, rows, _ = tree.target_logits.shape
    has_target = tensor_tensor(flag, here[:, TARGET_OK : TARGET_OK + 1], nl.multiply)
    row = tensor_scalar(tree.node, nl.add, float(tree.sequence * rows))
    enter(
        state["target"],
        state["target_row"],
        tree.target_logits,
        "logits",
        select(has_target, row, float(batch * rows)),
        has_target,
        tree.scale,
        here[:, TARGET_PEAK : TARGET_PEAK + 1],
        here[:, TARGET_THRESHOLD : TARGET_THRESHOLD + 1],
        tree.cut,
        tree.vocab_size,
    )
    if tree.draft_kind != "one_hot":
        has_draft = tensor_tensor(has_target, here[:, DRAFT_OK : DRAFT_OK + 1], nl.multiply)
        enter(
            state["draft"],
            state["draft_row"],
            tree.draft_law,
            tree.draft_kind,
            select(has_draft, row, float(batch * rows)),
            has_draft,
            tree.scale,
            here[:, DRAFT_PEAK : DRAFT_PEAK + 1],
            here[:, DRAFT_THRESHOLD : DRAFT_THRESHOLD + 1],
            tree.cut,
            tree.vocab_size,
        )


def enter(law, row, rows_in_hbm, kind, index, flag, scale, peak, threshold, cut, vocab_size):
    masses, _, _ = law
    load_row_at(row, rows_in_hbm, to_int(index), vocab_size)
    values = floats((1, 4))
    nisa.tensor_copy(dst=values[:, 0:1], src=scale)
    nisa.tensor_tensor(dst=values[:, 1:2], data1=peak, data2=scale, op=nl.multiply)
    nisa.tensor_scalar(dst=values[:, 1:2], data=values[:, 1:2], op0=nl.multiply, operand0=-1.0)
    nisa.tensor_copy(dst=values[:, 2:3], src=threshold)
    nisa.tensor_copy(dst=values[:, 3:4], src=flag)
    on_lanes = spread(transpose(values))
    fresh = floats(masses.shape)
    if kind == "logits":
        if cut:
            drop_below(row, on_lanes[:, 2:3])
        nisa.activation(dst=fresh, op=nl.exp, data=row, bias=on_lanes[:, 1:2], scale=on_lanes[:, 0:1])
    else:
        nisa.tensor_copy(dst=fresh, src=row)
    copy_where(masses, fresh, on_lanes[:, 3:4])
    sum_up(law)


def copy_where(dst, src, flag):
    """dst = src [128, size] on the lanes whose flag [128, 1] is set: all or none."""
    mask = nl.ndarray((NUM_GROUPS, 1), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mask, src=flag)
    nisa.tensor_copy_predicated(dst=dst, src=src, predicate=mask.broadcast(1, dst.shape[1]))


def sum_up(law):
    """Lane sums and total of a law's masses."""
    masses, groups, total = law
    nisa.tensor_reduce(dst=groups, op=nl.add, data=masses, axis=1)
    nisa.tensor_reduce(dst=total, op=nl.add, data=transpose(groups), axis=1)


def law_test(state, token, uniform, draft_kind):
    """[1, 1]: uniform * draft < target at the token, both normalised, without a division."""
    target_mass = mass_at(state["target"][0], token, state["ids"])
    left = tensor_tensor(uniform, state["target"][2], nl.multiply)
    if draft_kind == "one_hot":
        return tensor_tensor(left, target_mass, nl.less)
    nisa.tensor_tensor(dst=left, data1=left, data2=mass_at(state["draft"][0], token, state["ids"]), op=nl.multiply)
    right = tensor_tensor(target_mass, state["draft"][2], nl.multiply)
    return tensor_tensor(left, right, nl.less)


def mass_at(masses, token, ids):
    """[1, 1]: the mass of one id."""
    there = floats(masses.shape)
    nisa.scalar_tensor_tensor(
        dst=there, data=ids, op0=nl.equal, operand0=spread(token), op1=nl.multiply, operand1=masses
    )
    by_lane = floats((NUM_GROUPS, 1))
    nisa.tensor_reduce(dst=by_lane, op=nl.add, data=there, axis=1)
    return total_of(transpose(by_lane))


def take_out(state, token, rejected, rule):
    """Where `rejected` [1, 1] is set: the target's masses become max(target - draft, 0), or lose the token.

    Where nothing would be left, which only rounding can bring about, they stay. Without replacement, the draft's law
    loses the token then.
    """
    masses, _, total = state["target"]
    if rule != "independent":
        removed = spread(select(rejected, token, -1.0))
    left = floats(masses.shape)
    if rule == "target_only":
        nisa.scalar_tensor_tensor(
            dst=left, data=state["ids"], op0=nl.not_equal, operand0=removed, op1=nl.multiply, operand1=masses
        )
    else:
        draft_masses, _, draft_total = state["draft"]
        some = tensor_scalar(draft_total, nl.greater, 0.0, nl.multiply, rejected)
        ratio = floats((1, 1))
        nisa.reciprocal(dst=ratio, data=draft_total)
        nisa.tensor_tensor(dst=ratio, data1=ratio, data2=total, op=nl.multiply)
        nisa.tensor_scalar(dst=ratio, data=ratio, op0=nl.multiply, operand0=-1.0)
        nisa.scalar_tensor_tensor(
            dst=left,
            data=draft_masses,
            op0=nl.multiply,
            operand0=spread(select(some, ratio, 0.0)),
            op1=nl.add,
            operand1=masses,
        )
        nisa.tensor_scalar(dst=left, data=left, op0=nl.maximum, operand0=0.0)
    by_lane = floats((NUM_GROUPS, 1))
    nisa.tensor_reduce(dst=by_lane, op=nl.add, data=left, axis=1)
    copy_where(masses, left, spread(tensor_scalar(total_of(transpose(by_lane)), nl.greater, 0.0)))
    sum_up(state["target"])
    if rule == "without_replacement":
        draft_masses = state["draft"][0]
        nisa.scalar_tensor_tensor(
            dst=draft_masses,
            data=state["ids"],
            op0=nl.not_equal,
            operand0=removed,
            op1=nl.multiply,
            operand1=draft_masses,
        )
        sum_up(state["draft"])
