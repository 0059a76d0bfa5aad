"""rejection_sampling: drafts kept so that every emitted token follows the target's law, on the device.

Two phases a chunk of sequences. First every target and draft row is read once for its statistics, from which all
accept tests follow. Then only the row after the last accepted draft is read again, for the one token drawn.
"""

import nki
import nki.isa as nisa
import nki.language as nl

from .block_rule import excess_masses
from .chain import allocate_outputs, select, sequence_chunks
from .decision import decide, store_chains
from .draw import draw, load_uniforms
from .last_row import choose_law, last_masses
from .row_facts import BEST, Laws, load_chains, row_facts
from .statistics import replace_spoiled
from .vocabulary import MASS_BYTES, first_ids, floats, group_size, tensor_tensor, transpose


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
    laws = Laws(target_logits, draft_law, draft_kind, cut, vocab_size, first_ids(vocab_size), ())
    # Two fp32 masses an id: the target's and the residual's.
    for chunk in sequence_chunks(batch, rows, 8 * group_size(vocab_size), MASS_BYTES):
        first, count, repeated = chunk
        chains = load_chains(
            draft_tokens,
            uniforms,
            draft_lens,
            temperature,
            (top_k, top_p, min_p) if cut else None,
            first,
            count,
            rows,
            vocab_size,
        )
        facts = row_facts(chains, laws, rule == "block")
        excess = None
        if rule == "block" and draft_kind != "one_hot":
            excess = excess_masses(chains, laws, facts)
        decision = decide(chains, facts, rule, draft_kind, excess)
        last, residual = decision.last, decision.residual
        residual_masses, target_masses, lanes = last_masses(chains, laws, decision)
        residual_groups, target_groups = transpose(lanes[:, 0]), transpose(lanes[:, 1])
        use_residual, use_target = choose_law(residual_groups, residual)
        pair = [(residual_masses, residual_groups, use_residual), (target_masses, target_groups, use_target)]
        drawn = transpose(draw(pair, load_uniforms(uniforms, first, count), vocab_size))
        best = floats((1, count))
        nisa.tensor_copy(dst=best, src=last[:, BEST])
        spoiled = tensor_tensor(chains.active, decision.has_law, nl.subtract)
        replace_spoiled(best, spoiled, decision.accepted, first, target_logits, vocab_size, laws.partition_ids)
        by_law = tensor_tensor(decision.has_law, decision.sampled, nl.multiply)
        store_chains(outputs, repeated, chains, decision, select(by_law, drawn, best))
    return outputs
