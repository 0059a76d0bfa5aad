"""Acceptance with the faults that others' has had, in the kernels and in the references."""

from __future__ import annotations

from tests.mutants import Mutant

TRAPS = "tests/test_acceptance_traps.py"
UNLIKE = "tests/test_rejection_sampling.py::test_residuals_of_unlike_laws_are_drawn_from"
KERNEL = "tests/test_rejection_sampling.py::test_kernel_accepts_and_draws_as_the_reference_says"
CUT = "tests/test_rejection_sampling.py::test_kernel_cuts_rows_by_top_k_top_p_and_min_p_as_the_reference"
BLOCK = "tests/test_rejection_sampling.py::test_kernel_keeps_the_longest_passing_block"
COMPANY = "tests/test_rejection_sampling.py::test_other_sequences_leave_a_sequence_bit_for_bit"
EXTREMES = "tests/test_rejection_sampling.py::test_extreme_uniforms_emit_nothing_of_zero_probability"
GREEDY = "tests/test_greedy_acceptance.py"
LAW = "tests/test_rejection_sampling_law.py"
TREE_LAW = "tests/test_tree_acceptance_law.py"
TREE = "tests/test_tree_acceptance.py::test_kernel_walks_as_the_reference"
TYPICAL = "tests/test_typical_acceptance.py"
SAMPLE = "tests/test_sample_tokens.py"
PROJECT = "tests/test_project_draft_law.py"
TRUNCATION = "tests/test_truncation.py"
SHARDS = "tests/test_combine_shards.py"

FACTS = "kernels/row_facts.py"
LAST_ROW = "kernels/last_row.py"
CHAIN_REFERENCE = "reference/rejection_sampling.py"
TREE_KERNEL = "kernels/tree_acceptance.py"

MUTANTS = [
    Mutant(
        "a draft is accepted where uniform * draft equals the target (kernel)",
        FACTS,
        "data1=left, data2=right, op=nl.less)",
        "data1=left, data2=right, op=nl.less_equal)",
        (f"{TRAPS}::test_equality_rejects",),
    ),
    Mutant(
        "a draft is accepted where uniform * draft equals the target (reference)",
        CHAIN_REFERENCE,
        "if not uniforms[row] * draft_law[draft] < target_law[draft]:",
        "if not uniforms[row] * draft_law[draft] <= target_law[draft]:",
        (f"{TRAPS}::test_equality_rejects",),
    ),
    Mutant(
        "the residual leaves the draft law out (kernel)",
        LAST_ROW,
        "dst=mass, data=law, op0=nl.multiply, operand0=ratio, op1=nl.add, operand1=target_mass",
        "dst=mass, data=law, op0=nl.multiply, operand0=0.0, op1=nl.add, operand1=target_mass",
        (UNLIKE,),
    ),
    Mutant(
        "the residual takes the drafted token out, not the draft law (reference)",
        CHAIN_REFERENCE,
        "    excess = np.maximum(weight * target_law - draft_law, 0)\n    return",
        "    excess = np.where(draft_law == draft_law.max(), 0, target_law)\n    return",
        (f"{TRAPS}::test_the_whole_draft_law_is_subtracted", LAW),
    ),
    Mutant(
        "a residual of nothing is drawn from all the same (kernel)",
        LAST_ROW,
        "use_residual = tensor_scalar(total, nl.greater, 0.0, nl.multiply, transpose(residual))",
        "use_residual = tensor_scalar(total, nl.greater_equal, 0.0, nl.multiply, transpose(residual))",
        ("tests/test_rejection_sampling.py::test_a_residual_of_nothing_falls_back_to_the_target",),
    ),
    Mutant(
        "the accept test's uniform draws the token too (kernel)",
        "kernels/draw.py",
        "src=uniforms[first : first + count, columns - 2 : columns]",
        "src=uniforms[first : first + count, 0:2]",
        (f"{TRAPS}::test_the_draw_ignores_the_uniforms_of_the_accept_tests",),
    ),
    Mutant(
        "drafts and verification share one stream",
        "reference/uniforms_for.py",
        '"draft": 1}',
        '"draft": 0}',
        ("tests/test_uniforms_for.py",),
    ),
    Mutant(
        "the draw is closed where it must be half-open (kernel)",
        "kernels/draw.py",
        "        op0=nl.less_equal,\n",
        "        op0=nl.less,\n",
        (EXTREMES, KERNEL, f"{TRAPS}::test_a_last_tile_without_mass_is_never_drawn_from"),
    ),
    Mutant(
        "a uniform of 1 runs past the last token (kernel)",
        "kernels/draw.py",
        "BELOW_ONE = 1.0 - 2.0**-23",
        "BELOW_ONE = 1.0",
        ("tests/test_rejection_sampling.py::test_on_the_device_a_uniform_of_1_stays_inside_the_vocabulary",),
    ),
    Mutant(
        "accepted flags are counted past the first rejection (kernel)",
        "kernels/chain.py",
        "        op0=nl.multiply,\n        op1=nl.add,\n    )\n    passed",
        "        op0=nl.multiply,\n        op1=nl.add,\n    )\n    prefix = accept\n    passed",
        (f"{TRAPS}::test_a_replacement_is_emitted_at_the_first_rejection",),
    ),
    Mutant(
        "the last of equal logits wins (kernel)",
        "kernels/statistics.py",
        "nisa.tensor_reduce(dst=best, op=nl.minimum, data=score, axis=1)",
        "nisa.tensor_reduce(dst=best, op=nl.add, data=score, axis=1)",
        (GREEDY,),
    ),
    Mutant(
        "spoiled rows are not searched for their finite entries (kernel)",
        "kernels/statistics.py",
        "op0=nl.multiply, operand0=0.0, op1=nl.equal, operand1=0.0)",
        "op0=nl.multiply, operand0=0.0, op1=nl.not_equal, operand1=0.0)",
        (GREEDY,),
    ),
    Mutant(
        "a spoiled sequence's masses reach its neighbours (kernel)",
        LAST_ROW,
        "target_row = to_int(select(has_law, row_index(accepted, first * rows, rows), float(batch * rows)))",
        "target_row = to_int(row_index(accepted, first * rows, rows))",
        (COMPANY, KERNEL),
    ),
    Mutant(
        "the token that crosses top-p is dropped (reference)",
        "reference/sampling.py",
        "weights[mass_of_first[strictly_above] >= top_p] = 0",
        "weights[mass_of_first[strictly_above] + law > top_p] = 0",
        (f"{TRAPS}::test_the_token_that_crosses_top_p_stays",),
    ),
    Mutant(
        "the token that crosses top-p is dropped (kernel)",
        "kernels/truncation.py",
        "data2=goal, op=nl.greater_equal)",
        "data2=goal, op=nl.greater)",
        (CUT, f"{TRAPS}::test_top_p_is_each_row_its_own"),
    ),
    Mutant(
        "min-p is dropped (kernel)",
        "kernels/truncation.py",
        "threshold = tensor_tensor(values[:, PEAK], values[:, BELOW_PEAK], nl.subtract)",
        "threshold = tensor_scalar(values[:, PEAK], nl.multiply, 0.0, nl.add, KEEP_ALL)",
        (f"{TRAPS}::test_min_p_is_applied",),
    ),
    Mutant(
        "rows cut below their candidates are not searched whole (kernel)",
        "kernels/row_laws.py",
        "    nl.fori_loop(0, deep_trips(deep, num_rows), search)\n",
        "",
        (TRUNCATION,),
    ),
    Mutant(
        "rows searched whole are those of the first part that was held (kernel)",
        "kernels/row_laws.py",
        "tiles[len(tiles) - 1].high\n    own = slice(low, high)",
        "tiles[len(tiles) - 1].high\n    own = slice(0, high - low)",
        (f"{TRUNCATION}::test_more_rows_than_are_held_at_once_are_cut_part_by_part",),
    ),
    Mutant(
        "an odd number of rows to be searched whole leaves the last one out (kernel)",
        "kernels/truncation.py",
        "(rows_a_trip - 1) / 2, nl.multiply",
        "-(rows_a_trip - 1) / 2, nl.multiply",
        (f"{TRUNCATION}::test_only_rows_cut_below_their_candidates_are_searched_whole",),
    ),
    Mutant(
        "flags of the last 128 columns alone are counted (kernel)",
        "kernels/truncation.py",
        "moving=groups.members,\n                accumulate=start > 0",
        "moving=groups.members,\n                accumulate=False",
        (f"{TRUNCATION}::test_every_cut_of_every_law_is_the_references",),
    ),
    Mutant(
        "the block rule takes every rank's residual mass from the first (kernel)",
        "kernels/shards.py",
        "src=values[shard, chains.first",
        "src=values[0, chains.first",
        (f"{SHARDS}::test_a_block_passes_by_the_weighted_residual_mass_of_all_ranks",),
    ),
    Mutant(
        "the residual of a block leaves its weight out (kernel)",
        "kernels/decision.py",
        "nisa.tensor_tensor(dst=total, data1=total, data2=weight, op=nl.multiply)",
        "nisa.tensor_tensor(dst=total, data1=total, data2=total, op=nl.maximum)",
        (f"{SHARDS}::test_a_block_passes_by_the_weighted_residual_mass_of_all_ranks",),
    ),
    Mutant(
        "a threshold that equals entries which are no candidates counts as found (kernel)",
        "kernels/truncation.py",
        "data1=certain, data2=uncovered, op=nl.less_equal)",
        "data1=certain, data2=uncovered, op=nl.less)",
        (f"{TRUNCATION}::test_every_cut_of_every_law_is_the_references",),
    ),
    Mutant(
        "top-p takes its share of the whole law, not of what top-k left (kernel)",
        "kernels/truncation.py",
        "left = select(tensor_scalar(top_k, nl.less, OFF), mass_above(tile, masses, by_k, above, groups), total)",
        "left = tensor_scalar(total, nl.multiply, 1.0)",
        (f"{TRUNCATION}::test_every_cut_of_every_law_is_the_references", CUT),
    ),
    Mutant(
        "cores of LNC 2 count their own deep rows only (kernel)",
        "kernels/truncation.py",
        "most_of_cores(total), nl.add",
        "total, nl.add",
        (f"{TRUNCATION}::test_both_cores_make_the_trips_of_the_one_with_more",),
    ),
    Mutant(
        "the block rule stops at the first prefix that fails (reference)",
        CHAIN_REFERENCE,
        "accepted = max(i for i, h in enumerate(passes) if i == 0 or uniforms[b, i - 1] <= h)",
        "accepted = next((i for i, h in enumerate(passes[1:]) if uniforms[b, i] > h), len(pairs))",
        (f"{LAW}::test_block_decisions_switch_exactly_at_their_probabilities", BLOCK),
    ),
    Mutant(
        "the block rule keeps the first prefix that passes (kernel)",
        "kernels/block_rule.py",
        "nisa.tensor_reduce(dst=longest, op=nl.maximum, data=passes, axis=2)",
        "nisa.tensor_reduce(dst=longest, op=nl.minimum, data=passes, axis=2)",
        (BLOCK,),
    ),
    Mutant(
        "block verification with the token rule's residual (reference)",
        CHAIN_REFERENCE,
        "                weight = weights[accepted]\n",
        "                weight = 1.0\n",
        (UNLIKE,),
    ),
    Mutant(
        "the draft law keeps a rejected sibling's mass (reference)",
        "reference/tree_acceptance.py",
        "draft_law = np.where(np.arange(len(law)) == token, 0, draft_law)",
        "draft_law = np.where(np.arange(len(law)) < 0, 0, draft_law)",
        (f"{TREE_LAW}::test_every_tree_leaves_the_target_law",),
    ),
    Mutant(
        "the draft law is not renormalised after a sibling's rejection (reference)",
        "reference/tree_acceptance.py",
        "            draft_law = draft_law / (draft_law.sum() or 1)\n",
        "",
        (f"{TREE_LAW}::test_every_tree_leaves_the_target_law",),
    ),
    Mutant(
        "repeated siblings of an independent draft are skipped (reference)",
        "reference/tree_acceptance.py",
        'if token in seen and rule != "independent":',
        "if token in seen:",
        (f"{TREE_LAW}::test_every_tree_leaves_the_target_law",),
    ),
    Mutant(
        "the draft law keeps a rejected sibling's mass (kernel)",
        TREE_KERNEL,
        '    if rule == "without_replacement":\n        draft_masses',
        '    if rule == "with_replacement":\n        draft_masses',
        ("tests/test_tree_acceptance.py::test_five_siblings_of_a_few_tokens_are_tried_in_turn",),
    ),
    Mutant(
        "a rejected sibling leaves the target's law as it was (kernel)",
        TREE_KERNEL,
        "        take_out(state, token, rejected, rule)\n",
        "",
        (TREE,),
    ),
    Mutant(
        "typical acceptance forgets the entropy (kernel)",
        "kernels/typical_acceptance.py",
        "operand0=posterior_alpha, op1=nl.minimum",
        "operand0=posterior_alpha, op1=nl.maximum",
        (TYPICAL,),
    ),
    Mutant(
        "the law handed out is not normalised (kernel)",
        "kernels/sample_tokens.py",
        "weight = tensor_tensor(share, sampled, nl.multiply)",
        "weight = sampled",
        (SAMPLE,),
    ),
    Mutant(
        "raw log-probabilities are read after processing (kernel)",
        "kernels/token_logprobs.py",
        "(masked_logits, scale, limits) if which == 0 else (target_logits, ones, None)",
        "(masked_logits, scale, limits) if which == 0 else (target_logits, scale, [])",
        ("tests/test_token_logprobs.py",),
    ),
    Mutant(
        "a masked token is as likely as an unlikely one (kernel)",
        "kernels/mask_logits.py",
        'on_false=float("-inf")',
        "on_false=-30.0",
        ("tests/test_mask_logits.py", "tests/test_token_logprobs.py"),
    ),
    Mutant(
        "raw log-probabilities are masked (kernel)",
        "kernels/token_logprobs.py",
        "else (target_logits, ones, None)",
        "else (masked_logits, ones, None)",
        ("tests/test_token_logprobs.py::test_of_a_trees_path_too_cut_and_masked",),
    ),
    Mutant(
        "a grammar's bits are read from the top of a word (kernel)",
        "kernels/mask_logits.py",
        "operand0=bit,",
        "operand0=HALF - 1 - bit,",
        ("tests/test_mask_logits.py",),
    ),
    Mutant(
        "ranks give local ids (kernel)",
        "kernels/shards.py",
        "pattern=[[width, num_shards], [size, lanes]]",
        "pattern=[[0, num_shards], [size, lanes]]",
        ("tests/test_combine_shards.py::test_a_spoiled_row_on_one_rank_is_flagged_on_all",),
    ),
    Mutant(
        "a rank's deep rows keep the threshold of their candidates",
        "bindings/parallel.py",
        "torch.where(deep[..., None] > 0, corrected, cuts)",
        "torch.where(deep[..., None] > 1, corrected, cuts)",
        (f"{SHARDS}::test_cuts_over_ranks_are_exact_thresholds",),
    ),
    Mutant(
        "ranks count entries where they should weigh them (kernel)",
        "kernels/shard_weights.py",
        "tile, masses, on_lanes[:, column], above)",
        "tile, None, on_lanes[:, column], above)",
        (f"{SHARDS}::test_cuts_over_ranks_are_exact_thresholds",),
    ),
    Mutant(
        "ranks draw the last token from the law uncut (kernel)",
        "kernels/shard_draws.py",
        "draft_kind, cuts, shard",
        "draft_kind, None, shard",
        (f"{SHARDS}::test_ranks_of_whole_groups_cut_rows_as_one_core_does",),
    ),
    Mutant(
        "of the draft ids of one target id the last counts (reference)",
        "reference/project_draft_law.py",
        "laws[b, row, is_known] += law[draft_ids[is_known]]",
        "laws[b, row, is_known] = law[draft_ids[is_known]]",
        (PROJECT,),
    ),
    Mutant(
        "of the draft ids of one target id the last counts (kernel)",
        "kernels/project_draft_law.py",
        "nisa.tensor_tensor(dst=sums, data1=sums, data2=by_lane, op=nl.add)",
        "nisa.tensor_copy(dst=sums, src=by_lane)",
        (f"{PROJECT}::test_the_kernels_projection_leaves_the_target_law_as_it_is",),
    ),
    Mutant(
        "the second part of a law is looked up from one id too far (kernel)",
        "kernels/project_draft_law.py",
        "operand0=float(1 - first_id)",
        "operand0=float(1 - first_id + (first_id > 0))",
        (f"{PROJECT}::test_a_law_that_does_not_fit_on_the_chip_is_gathered_in_parts",),
    ),
    Mutant(
        "a core's indices are taken for listed lane by lane (kernel)",
        "kernels/project_draft_law.py",
        "by_lane = gathered.permute((0, 2, 1))",
        "by_lane = gathered.reshape((NUM_GROUPS, CORE, width))",
        (f"{PROJECT}::test_kernel_sums_what_the_reference_sums",),
    ),
    Mutant(
        "what is no draft id gets the last one's mass (kernel)",
        "kernels/project_draft_law.py",
        "op0=nl.less_equal, operand0=float(num_ids), op1=nl.multiply, operand1=place",
        "op0=nl.minimum, operand0=float(num_ids), op1=nl.minimum, operand1=place",
        (f"{PROJECT}::test_kernel_sums_what_the_reference_sums",),
    ),
    Mutant(
        "a projected law is not normalised (kernel)",
        "kernels/project_draft_law.py",
        'select(has_law, weight, float("NaN"))',
        'select(has_law, has_law, float("NaN"))',
        (f"{PROJECT}::test_kernel_processes_logits_in_the_drafts_vocabulary",),
    ),
]
