"""rejection_sampling: drafts kept so that every emitted token follows the target's law, on the device.

Two phases a chunk of sequences. First every target and draft row is read once for its statistics, from which all
accept tests follow. Then only the row after the last accepted draft is read again, for the one token drawn.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .block_rule import block_prefix
from .chain import (
    allocate_outputs,
    at_row,
    leading_count,
    load_tokens,
    over_rows,
    proposed,
    row_numbers,
    select,
    sequence_chunks,
    store_acceptance,
)
from .draw import draw, load_uniforms
from .last_row import choose_law, last_masses
from .row_facts import (
    BEST,
    DRAFT_TOTAL,
    accepted_rows,
    last_row,
    load_parameters,
    row_facts,
)
from .statistics import replace_spoiled
from .vocabulary import (
    MASS_BYTES,
    first_ids,
    floats,
    group_size,
    tensor_tensor,
    transpose,
)


@nki.jit
def rejection_sampling(
    draft_tokens,
    target_logits,
    uniforms,
    draft_law,
    draft_lens,
    temperature,
    top_k,
    top_p,
    min_p,
    draft_kind,
    rule,
    cut,
    vocab_size,
):
    """Accepts drafts by their laws, and draws the token after them from the residual law, or the target's own.

    Token rule (arXiv 2211.17192): accept iff uniform * draft < target. Block rule (2403.10444): see `block_rule`.

    Args:
        draft_tokens: [B, K] int32; None where K is 0.
        target_logits: [B, T, V] fp32 or bf16, T = K + 1.
        uniforms: [B, T + 1] fp32.
        draft_law: [B, K, V] fp32 or bf16: logits or probabilities; None for one-hot drafts.
        draft_lens: [B] int32, -1 an empty slot.
        temperature: [B] fp32, 0 greedy.
        top_k, top_p, min_p: [B] int32, fp32, fp32; None unless `cut`.
        draft_kind: "logits", "probs" or "one_hot".
        rule: "token" or "block".
        cut: whether any of the three may be on.
        vocab_size: columns of V that count.

    Returns:
        tokens [B, T], num_accepted [B], path [B, T], invalid [B], all int32.
    """
    batch, rows, _ = target_logits.shape
    outputs = allocate_outputs(batch, rows)
    # Two fp32 masses an id: the target's and the residual's.
    for chunk in sequence_chunks(batch, rows, 8 * group_size(vocab_size), MASS_BYTES):
        first, count, repeated = chunk
        partition_ids = first_ids(vocab_size)
        row_number = row_numbers(count, rows)
        tokens = load_tokens(draft_tokens, first, count, rows)
        lens, good, active, greedy, scale, limits = load_parameters(
            draft_lens, temperature, top_k, top_p, min_p, first, count, rows, cut, vocab_size
        )
        has_draft = proposed(tokens, lens, row_number, vocab_size)
        facts = row_facts(
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
            rule == "block",
            partition_ids,
        )

        accept = accepted_rows(facts, greedy)
        accepted = leading_count(accept, row_number)
        if rule == "block":
            passing, weights = block_prefix(
                facts, row_number, first, target_logits, uniforms, draft_law, draft_kind, cut, scale, vocab_size
            )
            accepted = select(greedy, accepted, passing)
        last, has_law, sampled, residual, invalid = last_row(facts, accepted, row_number, greedy, active)
        if rule == "block" and draft_kind != "one_hot":
            # The residual is of weight * target: as if the draft's total were larger by the weight.
            weight = at_row(weights.expand_dim(1), tensor_tensor(row_number, over_rows(accepted, rows), nl.equal))
            nisa.tensor_tensor(dst=last[:, DRAFT_TOTAL], data1=last[:, DRAFT_TOTAL], data2=weight[:, 0], op=nl.multiply)

        residual_masses, target_masses, lanes = last_masses(
            first,
            count,
            accepted,
            last,
            has_law,
            residual,
            scale,
            target_logits,
            draft_law,
            draft_kind,
            cut,
            vocab_size,
            partition_ids,
        )
        residual_groups, target_groups = transpose(lanes[:, 0]), transpose(lanes[:, 1])
        use_residual, use_target = choose_law(residual_groups, residual)
        laws = [(residual_masses, residual_groups, use_residual), (target_masses, target_groups, use_target)]
        drawn = transpose(draw(laws, load_uniforms(uniforms, first, count), vocab_size))
        best = floats((1, count))
        nisa.tensor_copy(dst=best, src=last[:, BEST])
        replace_spoiled(
            best, tensor_tensor(active, has_law, nl.subtract), accepted, first, target_logits, vocab_size, partition_ids
        )
        by_law = tensor_tensor(has_law, sampled, nl.multiply)
        emitted = select(by_law, drawn, best)
        store_acceptance(
            outputs, first, repeated, tokens, row_number, accepted, emitted, active, good, invalid, row_number
        )
    return outputs
