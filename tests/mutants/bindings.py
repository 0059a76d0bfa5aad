"""Known-wrong variants of the bindings: what NxDI and other systems got wrong, and slips at the seams."""

from tests.mutants import Mutant

MUTANTS = [
    Mutant(
        "a match after a rejection counts as accepted (traps.md T57)",
        "bindings/acceptance_stats.py",
        "self.reached[: min(accepted + 1, drafted)] += 1",
        "self.reached[:drafted] += 1",
        ("tests/test_acceptance_stats.py",),
    ),
    Mutant(
        "the text goes on behind an accepted stop token (T61)",
        "bindings/verify_step.py",
        "xp.minimum(acceptance.num_accepted, xp.minimum(first_stop, most))",
        "xp.minimum(acceptance.num_accepted, most)",
        ("tests/test_verify_step.py",),
    ),
    Mutant(
        "a cut step commits the uncut path",
        "bindings/verify_step.py",
        "            step.num_accepted,\n            path=step.path,",
        "            acceptance.num_accepted,\n            path=acceptance.path,",
        ("tests/test_verify_step.py",),
    ),
    Mutant(
        "NxDI's contaminated masks: the length is a mask's sum",
        "bindings/nxdi/attention.py",
        "lengths = conventions.seq_lens(position_ids)",
        "lengths = attention_mask[:, 0, 0].sum(dim=-1).to(torch.int32)",
        ("tests/test_nxdi.py",),
    ),
    Mutant(
        "every row's position in every row's draft mask",
        "bindings/nxdi/models.py",
        "mask = mask.scatter(1, positions[:, i : i + 1].to(torch.int64), 1)",
        "mask = mask.index_fill(1, positions[:, i].to(torch.int64), 1)",
        ("tests/test_nxdi.py",),
    ),
    Mutant(
        "sampled drafts verified as if they had no law",
        "bindings/nxdi/models.py",
        "                draft_logits=torch.cat(draft_logits, dim=1),\n",
        "",
        ("tests/test_nxdi.py",),
    ),
    Mutant(
        "drafts and accept tests share their uniforms (T05)",
        "bindings/nxdi/models.py",
        '2 * (rows - 1), "draft")',
        '2 * (rows - 1), "verify")',
        ("tests/test_nxdi.py",),
    ),
    Mutant(
        "a tree's parent is its first ancestor",
        "bindings/nxdi/conventions.py",
        "return ancestors.amax(dim=-1).to(torch.int32)",
        "return torch.where(index > 0, 0, -1).expand(ancestors.shape[:2]).to(torch.int32)",
        ("tests/test_nxdi.py",),
    ),
    Mutant(
        "a short request's bonus row is the one at K",
        "bindings/vllm_neuron.py",
        "rows=torch.where(is_draft, targets[flat], bonus[:, None]),",
        "rows=torch.where(index < index[-1], targets[flat], bonus[:, None]),",
        ("tests/test_vllm_neuron.py",),
    ),
    Mutant(
        "every rank's shard starts at position 0",
        "bindings/parallel.py",
        "start = torch.full_like(seq_lens, dist.get_rank(group) * slots)",
        "start = torch.zeros_like(seq_lens)",
        ("tests/test_parallel.py",),
    ),
    Mutant(
        "every rank says it is the first shard of the vocabulary",
        "bindings/parallel.py",
        '"shard": dist.get_rank(group),',
        '"shard": 0,',
        ("tests/test_parallel.py",),
    ),
    Mutant(
        "fake tensors are not checked",
        "bindings/torch_ops.py",
        'function(**{**arguments, "backend": backends.TRACING})',
        "pass",
        ("tests/test_torch_ops.py",),
    ),
]
