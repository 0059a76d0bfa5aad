"""Does what a fused model emits follow the target's law? Counted over the first three tokens."""

import itertools
import math

import numpy as np
import torch

from tests.nxdi import harness


def sample_and_compare(model, prompt, params, rounds):
    """Decodes batches of one prompt, asserts the law of their first three tokens, returns the drafts accepted."""
    batch, vocab_size = model.batch_size, model.config.vocab_size
    counts = np.zeros((vocab_size,) * 3)
    accepted = 0
    for round_ in range(rounds):
        torch.manual_seed(round_)  # NxDI's own sampler, where it still draws the first token
        decoder = harness.Decoder(model, params)
        seeds = torch.arange(batch, dtype=torch.float32)[:, None] + round_ * batch
        decoder.sampling_params = torch.cat([decoder.sampling_params, seeds], dim=1)
        texts = [[int(token)] for token in decoder.prefill([prompt] * batch)[:, 0]]
        while min(map(len, texts)) < 3:
            for text, tokens in zip(texts, decoder.step()):
                kept = tokens[tokens >= 0].tolist()
                accepted += len(kept) - 1
                text += kept
        for text in texts:
            counts[tuple(text[:3])] += 1

    expected = law_of_three_tokens(model.target_model, prompt, params, batch) * counts.sum()
    assert counts[expected == 0].sum() == 0
    large = expected >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    chi2 = ((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    freedom = len(wanted) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom), (chi2, freedom)
    return accepted


def law_of_three_tokens(target_model, prompt, params, batch):
    """The target's processed law of the next three tokens, from its logits after every prefix."""
    from draft_verify.reference.sampling import sampling_law

    top_k, top_p, temperature = params
    vocab_size = target_model.config.vocab_size
    wanted, target_model.wants_logits = target_model.wants_logits, True
    prefixes = [[*prompt, *tail] for n in range(3) for tail in itertools.product(range(vocab_size), repeat=n)]
    laws = {}
    for start in range(0, len(prefixes), batch):
        group = prefixes[start : start + batch]
        padded = group + [prompt] * (batch - len(group))
        inputs = harness.context_inputs(padded, target_model.neuron_config.seq_len)
        with torch.no_grad():
            logits = target_model(*inputs, torch.arange(batch, dtype=torch.int32), torch.ones((batch, 3)))[0]
        for prefix, row in zip(group, logits.reshape(batch, -1).numpy()):
            laws[tuple(prefix[len(prompt) :])] = sampling_law(
                row[:vocab_size], temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=0.0
            )
    target_model.wants_logits = wanted
    joint = np.zeros((vocab_size,) * 3)
    for text in itertools.product(range(vocab_size), repeat=3):
        joint[text] = math.prod(laws[text[:n]][text[n]] for n in range(3))
    return joint
