"""sample_tokens: the processed law of a row and one token drawn from it, on the device."""

import nki
import nki.isa as nisa
import nki.language as nl

from .chain import row_index, select, sequence_chunks, store_int
from .draw import draw, load_uniforms
from .node_facts import BEST, TARGET_OK, TARGET_PEAK, TARGET_THRESHOLD, TARGET_TOTAL, lane_sums, node_facts, row_masses
from .row_facts import load_parameters
from .statistics import entry_at, kept_mass, replace_spoiled
from .vocabulary import (
    MASS_BYTES,
    NUM_GROUPS,
    first_ids,
    floats,
    group_size,
    spread,
    store_row,
    tensor_scalar,
    tensor_tensor,
    transpose,
)


@nki.jit
def sample_tokens(logits, uniforms, empty, temperature, top_k, top_p, min_p, cut, return_law, vocab_size):
    """Temperature, top-k, top-p, min-p, then a draw: the group of ids first, then the id.

    Args:
        logits: [B, V] fp32 or bf16.
        uniforms: [B, 2] fp32.
        empty: [B] int32, 0, or -1 for a row that is none.
        temperature: [B] fp32, 0 greedy.
        top_k, top_p, min_p: [B] int32, fp32, fp32; None unless `cut`.
        cut: whether any of the three may be on.
        return_law: whether the law is an output.
        vocab_size: columns of V that count.

    Returns:
        tokens [B] int32, probs [B] fp32, invalid [B] int32, and the law [B, V] fp32.
    """
    batch, width = logits.shape
    tokens = nl.ndarray((batch,), dtype=nl.int32, buffer=nl.shared_hbm)
    probs = nl.ndarray((batch,), dtype=nl.float32, buffer=nl.shared_hbm)
    invalid = nl.ndarray((batch,), dtype=nl.int32, buffer=nl.shared_hbm)
    law = None
    if return_law:
        law = nl.ndarray((batch, width), dtype=nl.float32, buffer=nl.shared_hbm)
    for chunk in sequence_chunks(batch, 1, 4 * group_size(vocab_size), MASS_BYTES):
        first, count, repeated = chunk
        partition_ids = first_ids(vocab_size)
        _, good, active, greedy, scale, limits = load_parameters(
            empty, temperature, top_k, top_p, min_p, first, count, 1, cut, vocab_size
        )
        rows = logits.reshape((batch, 1, width))
        facts = node_facts(first, count, rows, None, "one_hot", vocab_size, scale, limits, partition_ids)[:, :, :, 0]
        has_law = tensor_tensor(active, facts[:, TARGET_OK], nl.multiply)
        none = floats((1, count))
        nisa.memset(dst=none, value=0.0)
        masses = row_masses(row_index(none, first, 1), facts, has_law, scale, logits, cut, vocab_size)
        groups = lane_sums(masses)
        always = floats((count, 1))
        nisa.memset(dst=always, value=1.0)
        drawn = transpose(draw([(masses, groups, always)], load_uniforms(uniforms, first, count), vocab_size))

        best = floats((1, count))
        nisa.tensor_copy(dst=best, src=facts[:, BEST])
        spoiled = tensor_tensor(active, has_law, nl.subtract)
        replace_spoiled(best, spoiled, none, first, rows, vocab_size, partition_ids)
        sampled = tensor_scalar(greedy, nl.multiply, -1.0, nl.add, 1.0)
        nisa.tensor_tensor(dst=sampled, data1=sampled, data2=has_law, op=nl.multiply)
        token = select(sampled, drawn, best)
        token = select(active, token, -1.0)

        # The law at the token, of the sampled rows; 1 in the others.
        share = floats((1, count))
        nisa.reciprocal(dst=share, data=select(sampled, facts[:, TARGET_TOTAL], 1.0))
        known = tensor_scalar(token, nl.maximum, 0.0)
        entry = entry_at(logits, transpose(row_index(none, first, 1)), transpose(known))
        mass = transpose(
            kept_mass(
                entry,
                transpose(facts[:, TARGET_PEAK]),
                transpose(scale),
                transpose(facts[:, TARGET_THRESHOLD]) if cut else None,
            )
        )
        nisa.tensor_tensor(dst=mass, data1=mass, data2=share, op=nl.multiply)
        prob = tensor_tensor(select(sampled, mass, 1.0), active, nl.multiply)
        store_int(tokens, first, repeated, token)
        flagged = tensor_tensor(spoiled, good, nl.subtract)
        nisa.tensor_scalar(dst=flagged, data=flagged, op0=nl.add, operand0=1.0)
        store_int(invalid, first, repeated, flagged)
        if repeated < count:
            nisa.dma_copy(dst=probs.expand_dim(0)[:, first + repeated : first + count], src=prob[:, repeated:count])
        if return_law:
            weight = tensor_tensor(share, sampled, nl.multiply)
            for sequence in range(repeated, count):
                write_law(
                    law,
                    first + sequence,
                    masses[:, sequence],
                    weight[:, sequence : sequence + 1],
                    token[:, sequence : sequence + 1],
                    sampled[:, sequence : sequence + 1],
                    vocab_size,
                )
    if return_law:
        return tokens, probs, invalid, law
    return tokens, probs, invalid


def write_law(law, row, masses, weight, token, sampled, vocab_size):
    """law[row] = masses * weight, or one-hot at the token where the row is not sampled."""
    _, width = law.shape
    size = group_size(vocab_size)
    certain = tensor_scalar(sampled, nl.multiply, -1.0, nl.add, 1.0)
    ids = floats((NUM_GROUPS, size))
    nisa.iota(dst=ids, pattern=[[1, size]], offset=0, channel_multiplier=size)
    nisa.tensor_scalar(
        dst=ids, data=ids, op0=nl.equal, operand0=spread(token), op1=nl.multiply, operand1=spread(certain)
    )
    nisa.scalar_tensor_tensor(dst=ids, data=masses, op0=nl.multiply, operand0=spread(weight), op1=nl.add, operand1=ids)
    store_row(law, row, ids, vocab_size)
    if vocab_size < width:
        rest = width - vocab_size
        zeros = floats((1, rest))
        nisa.memset(dst=zeros, value=0.0)
        nisa.dma_copy(dst=law[row : row + 1, vocab_size:width], src=zeros)
