"""Known-wrong variants of attention."""

from tests.mutants import Mutant

_AGREES = (
    "tests/test_verify_attention.py::test_the_kernel_agrees_with_the_reference_on_any_combination",
    "tests/test_verify_attention.py::test_the_kernel_agrees_at_sizes_that_need_more_than_one_tile",
)
_TRAPS = ("tests/test_verify_attention.py",)

MUTANTS = [
    Mutant(
        "the last row's sliding window for all rows",
        "kernels/attention_softmax.py",
        "dst=position, data=constants.depth, op0=nl.add, operand0=current.position[0:count]",
        "dst=position, data=constants.depth, op0=nl.maximum, operand0=float(shape.window - 1), op1=nl.add, "
        "operand1=current.position[0:count]",
        ("tests/test_verify_attention.py::test_each_row_has_its_own_sliding_window_t38",),
    ),
    Mutant(
        "zeroed instead of masked window keys",
        "kernels/attention_softmax.py",
        "        on_false=MASKED,",
        "        on_false=0.0,",
        ("tests/test_verify_attention.py::test_a_row_sees_itself_and_the_rows_before_it",),
    ),
    Mutant(
        "an older sibling is seen",
        "kernels/attention_tree.py",
        "data=column, op0=nl.equal, operand0=parent",
        "data=column, op0=nl.less, operand0=row",
        ("tests/test_verify_attention.py::test_siblings_do_not_see_each_other_t42",),
    ),
    Mutant(
        "slots past the length are weighed by zero, not silenced",
        "kernels/attention_loads.py",
        "dst=keep, data=slot, op0=nl.less, operand0=here",
        "dst=keep, data=slot, op0=nl.less, operand0=1e9",
        ("tests/test_verify_attention.py::test_nan_in_slots_never_written_does_not_spread_t54",),
    ),
    Mutant(
        "window rows of padding are weighed by zero, not silenced",
        "kernels/attention_passes.py",
        "operand0=current.live_rows[0 : shape.window]",
        "operand0=1e9",
        ("tests/test_verify_attention.py::test_nan_in_slots_never_written_does_not_spread_t54",),
    ),
    Mutant(
        "the sink does not count in the denominator",
        "kernels/attention_softmax.py",
        "nisa.memset(dst=fresh.total[0 : rows.rows], value=1.0)",
        "nisa.memset(dst=fresh.total[0 : rows.rows], value=0.0)",
        _AGREES,
    ),
    Mutant(
        "earlier passes are not rescaled to the new maximum",
        "kernels/attention_softmax.py",
        "operand0=decay[0 : rows.rows]",
        "operand0=1.0",
        _AGREES,
    ),
    Mutant(
        "the last pass counts slots again that the one before had",
        "kernels/attention_work.py",
        "dst=left, data1=latest, data2=lengths.base",
        "dst=left, data1=lengths.cached, data2=lengths.base",
        _AGREES,
    ),
    Mutant(
        "the streams of a row do not share their maximum",
        "kernels/attention_softmax.py",
        "        raised = over_streams(rows, raised, nl.minimum, nisa.engine.vector)",
        "        raised = raised",
        _AGREES,
    ),
    Mutant(
        "only the first stream's weights are summed",
        "kernels/attention_output.py",
        "over_streams(rows, state.total, nl.add, engine)[0 : rows.rows]",
        "state.total[0 : rows.rows]",
        _AGREES,
    ),
    Mutant(
        "the other core's weights keep their own maximum",
        "kernels/attention_output.py",
        "    for part in (state, theirs):",
        "    for part in (state,):",
        _AGREES,
    ),
    Mutant(
        "both cores take the same slots",
        "kernels/attention_plan.py",
        "own, segments, PARTITIONS, run, streams, core * own,",
        "own, segments, PARTITIONS, run, streams, 0,",
        _AGREES,
    ),
    Mutant(
        "a ring forgets its older lap",
        "kernels/attention_lengths.py",
        "nisa.tensor_tensor(dst=older[2], data1=older[2], data2=older[0], op=nl.minimum)",
        "nisa.tensor_copy(dst=older[2], src=older[0])",
        _AGREES,
    ),
    Mutant(
        "a paged run is looked for at the start of its block",
        "kernels/attention_blocks.py",
        "nisa.tensor_tensor(dst=rows, data1=rows, data2=offset, op=nl.add)",
        "nisa.tensor_copy(dst=rows, src=rows)",
        _AGREES,
    ),
    Mutant(
        "keys past the end of a last run spread to other streams",
        "kernels/attention_passes.py",
        "dst=dead, data=last_run, op0=nl.greater_equal, operand0=current.end",
        "dst=dead, data=last_run, op0=nl.greater_equal, operand0=1e9",
        _AGREES,
    ),
    Mutant(
        "blocks past the last one are taken to exist",
        "kernels/attention_blocks.py",
        "op0=nl.greater_equal, operand0=float(num_blocks), op1=nl.add",
        "op0=nl.greater_equal, operand0=1e30, op1=nl.add",
        ("tests/test_verify_attention.py::test_on_the_device_a_sequence_with_a_bad_block_is_an_empty_slot",),
    ),
    Mutant(
        "a listed item is taken twice, the next one left out",
        "kernels/attention_many.py",
        "fetch_entry(work, item, 2, after)",
        "fetch_entry(work, item, 1, after)",
        _AGREES,
    ),
    Mutant(
        "both cores take the same listed passes",
        "kernels/attention_work.py",
        "range(OWN + shard * COLUMNS, entry.shape[1], cores * COLUMNS)",
        "range(OWN, entry.shape[1], cores * COLUMNS)",
        _AGREES,
    ),
    Mutant(
        "window values are not brought to the cache's units",
        "kernels/attention_loads.py",
        "    if inverse_scales != None:  # noqa: E711",
        "    if False:",
        _AGREES,
    ),
    Mutant(
        "a shard that saw nothing is not silenced",
        "kernels/merge_attention.py",
        "dst=empty, data=logs, op0=nl.less, operand0=MASKED",
        "dst=empty, data=logs, op0=nl.greater, operand0=1e30",
        ("tests/test_merge_attention.py",),
    ),
    Mutant(
        "merged log-sum-exps without the largest",
        "kernels/attention_output.py",
        "nisa.tensor_tensor(dst=result, data1=result, data2=negative_max, op=nl.subtract)",
        "nisa.tensor_tensor(dst=result, data1=result, data2=negative_max, op=nl.add)",
        ("tests/test_merge_attention.py",),
    ),
    Mutant(
        "the reference lets a row see cached positions after its own",
        "reference/verify_attention.py",
        "(cached + start >= oldest) & (cached + start <= position)",
        "(cached + start >= oldest)",
        _TRAPS,
    ),
]
