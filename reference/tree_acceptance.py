"""tree_acceptance: the path of a tree of drafts that is kept, and the one token after it.

greedy             Miao et al. (SpecInfer), arXiv 2305.09781, algorithm 2, VerifyGreedy
independent        the same, VerifyStochastic: siblings drawn independently from the draft law
without_replacement Yang et al., arXiv 2402.14160, and Chen et al. (Sequoia), arXiv 2402.12374, algorithm 2
target_only        siblings without a law (EAGLE's evaluate_posterior, arXiv 2401.15077): one-hot draft laws
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from draft_verify.reference.acceptance import Acceptance, empty_acceptance
from draft_verify.reference.project_draft_law import over_target_ids
from draft_verify.reference.rejection_sampling import draft_law_at, one_hot, residual_law
from draft_verify.reference.sampling import best_token, draw, has_law, sampling_law


def sibling_thresholds(
    rule: str, target_law: np.ndarray, draft_law: np.ndarray | None, tokens: Iterable[int]
) -> Iterator[tuple[float, np.ndarray]]:
    """For siblings in their order, given that all before were rejected: what a uniform must stay below to accept, and
    the law that is left if it does not. A token that an earlier sibling had is never accepted and leaves the law.
    """
    law = target_law
    seen = set()
    for token in tokens:
        if token in seen and rule != "independent":
            yield 0.0, law
            continue
        seen.add(token)
        drawn_from = one_hot(token, len(law)) if rule == "target_only" else draft_law
        if drawn_from.sum() == 0:  # everything the draft could draw was rejected
            yield 0.0, law
            continue
        # A token of no draft mass is never drawn; uniform * 0 < target accepts it where the target has some.
        mass = drawn_from[token]
        threshold = law[token] / mass if mass > 0 else float(law[token] > 0)
        law = residual_law(law, drawn_from)
        if rule == "without_replacement":
            draft_law = np.where(np.arange(len(law)) == token, 0, draft_law)
            draft_law = draft_law / (draft_law.sum() or 1)
        yield float(threshold), law


def tree_acceptance(
    tree: np.ndarray,
    draft_tokens: np.ndarray,
    target_logits: np.ndarray,
    uniforms: np.ndarray | None = None,
    *,
    rule: str = "greedy",
    draft_logits: np.ndarray | None = None,
    draft_probs: np.ndarray | None = None,
    draft_lens: np.ndarray | None = None,
    temperature: np.ndarray | None = None,
    top_k: np.ndarray | None = None,
    top_p: np.ndarray | None = None,
    min_p: np.ndarray | None = None,
    vocab_size: int | None = None,
    allowed_mask: np.ndarray | None = None,
    draft_to_target: np.ndarray | None = None,
    target_to_draft: np.ndarray | None = None,
) -> Acceptance:
    """See `draft_verify.tree_acceptance`."""
    batch, num_rows, width = target_logits.shape
    vocab_size = width if vocab_size is None else vocab_size
    target_logits, draft_logits, draft_probs = over_target_ids(
        target_logits,
        draft_logits,
        draft_probs,
        draft_to_target,
        target_to_draft,
        allowed_mask,
        vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    result = empty_acceptance(batch, num_rows)
    for b in range(batch):
        num_drafts = num_rows - 1 if draft_lens is None else int(draft_lens[b])
        if num_drafts < 0:
            continue
        parents = tree if tree.ndim == 1 else tree[b]
        parameters = {
            "temperature": 1.0 if temperature is None else float(temperature[b]),
            "top_k": 0 if top_k is None else int(top_k[b]),
            "top_p": 1.0 if top_p is None else float(top_p[b]),
            "min_p": 0.0 if min_p is None else float(min_p[b]),
        }
        greedy = rule == "greedy" or parameters["temperature"] == 0
        tokens = [-1, *(int(token) for token in draft_tokens[b])]
        path, last = [0], None
        while last is None:
            row = path[-1]
            logits = np.asarray(target_logits[b, row, :vocab_size], np.float64)
            children = [
                child for child in range(1, num_drafts + 1) if parents[child] == row and 0 <= tokens[child] < vocab_size
            ]
            if not has_law(logits):
                last = best_token(logits)
                result.invalid[b] = True
            elif greedy:
                matches = [child for child in children if tokens[child] == best_token(logits)]
                if matches:
                    path.append(matches[0])
                else:
                    last = best_token(logits)
            else:
                law = sampling_law(logits, **parameters)
                draft_law = None
                if children and rule != "target_only":
                    draft_law = draft_law_at(draft_logits, draft_probs, -1, (b, row), vocab_size, parameters)
                    if draft_law is None:
                        result.invalid[b] = True
                        children = []
                thresholds = sibling_thresholds(rule, law, draft_law, [tokens[child] for child in children])
                for child, (threshold, law) in zip(children, thresholds):  # noqa: B007
                    if uniforms[b, child - 1] < threshold:
                        path.append(child)
                        break
                else:
                    last = draw(law, uniforms[b, -2], uniforms[b, -1])
        accepted = len(path) - 1
        result.tokens[b, : accepted + 1] = [*(tokens[row] for row in path[1:]), last]
        result.num_accepted[b] = accepted
        result.path[b, : accepted + 1] = path
    return result
