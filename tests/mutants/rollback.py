"""Rollback operations with the faults that others' have had, and some that ours could have."""

from __future__ import annotations

from tests.mutants import Mutant

COMMIT = "tests/test_commit_window.py::test_the_kernel_leaves_every_byte_of_every_cache_as_the_reference_does"
RUNS = "tests/test_commit_window.py::test_the_kernel_agrees_where_rows_need_more_than_one_tile"
COMPACT = "tests/test_compact_window.py::test_the_kernel_leaves_every_byte_of_every_cache_as_the_reference_does"
RING = "tests/test_ring.py::test_the_kernels_save_and_restore_every_byte_as_the_references_do"
DEVICE = "tests/test_commit_window.py::test_on_the_device_a_sequence_with_bad_values_is_an_empty_slot"
FP8 = "tests/test_commit_window.py::test_fp8_rows_are_divided_by_their_heads_scale_and_saturate_at_240"
STATE = "tests/test_select.py::test_the_state_after_the_last_accepted_row_is_copied_bit_for_bit"
CONV = "tests/test_select.py::test_the_convolution_window_ends_at_the_last_accepted_row"

ROWS = "kernels/cache_rows.py"

MUTANTS = [
    Mutant(
        "commit_window forgets the last accepted row",
        ROWS,
        "op0=nl.less_equal, operand0=accepted)",
        "op0=nl.less, operand0=accepted)",
        (COMMIT,),
    ),
    Mutant(
        "every row of a window goes to the block of its first (the plugin's slots[0] + i)",
        ROWS,
        "nisa.nc_n_gather(dst=block, data=table, indices=chosen)",
        "nisa.tensor_copy(dst=block, src=table[:, 0:1].broadcast(1, window))",
        (COMMIT,),
    ),
    Mutant(
        "a ring's window does not wrap",
        ROWS,
        "        _, position = divide(position, slots)\n",
        "        divide(position, slots)\n",
        (COMMIT,),
    ),
    Mutant(
        "more rows than a ring has slots: the first win",
        ROWS,
        "op0=nl.greater, operand0=oldest)",
        "op0=nl.greater_equal, operand0=0.0)",
        ("tests/test_commit_window.py::test_a_ring_keeps_the_last_rows_where_the_window_is_longer_than_the_ring",),
    ),
    Mutant("only layer 0 is rolled back", ROWS, "range(len(targets))", "range(1)", (COMMIT,)),
    Mutant(
        "the second core leaves its half to the first",
        ROWS,
        "% nl.num_programs(0) == nl.program_id(0)",
        "% nl.num_programs(0) == 0",
        (COMMIT,),
    ),
    Mutant(
        "bad values are not looked for on the device",
        ROWS,
        "nisa.tensor_scalar(dst=good, data=good, op0=nl.equal, operand0=0.0)",
        "nisa.tensor_scalar(dst=good, data=good, op0=nl.greater_equal, operand0=0.0)",
        (DEVICE,),
    ),
    Mutant(
        "a run of rows does not end where its ring does",
        "kernels/window_runs.py",
        "return num_slots(cache, cache_layout, block_table) if ring else 0",
        "return 0",
        (RUNS,),
    ),
    Mutant(
        "a run of rows does not end where its block does",
        "kernels/window_runs.py",
        "        return cache.shape[2]\n",
        "        return 0\n",
        (RUNS,),
    ),
    Mutant(
        "runs do not skip the rows of other sizes",
        "kernels/window_runs.py",
        "nisa.tensor_tensor(dst=start, data1=start, data2=before, op=nl.subtract)",
        "nisa.tensor_tensor(dst=start, data1=start, data2=start, op=nl.subtract)",
        (RUNS,),
    ),
    Mutant(
        "every run starts at row 0",
        "kernels/window_runs.py",
        "dst=first, data1=step, data2=skipped, op=nl.add",
        "dst=first, data1=step, data2=step, op=nl.subtract",
        (RUNS,),
    ),
    Mutant(
        "a segment starts at row 0, whichever rows move",
        "kernels/window_runs.py",
        "dst=begin, data1=last, data2=total, op=nl.subtract",
        "dst=begin, data1=last, data2=last, op=nl.subtract",
        (RUNS,),
    ),
    Mutant(
        "where sequences fill the partitions, each moves its first run alone",
        "kernels/row_moves.py",
        "rows[:, group, column]",
        "rows[:, group, 0]",
        (RUNS,),
    ),
    Mutant(
        "where rows are spread over the partitions, one is gathered here and written from there",
        "kernels/row_moves.py",
        "rows[:, :, :, 0, len(sources)]",
        "rows[:, :, :, spread - 1, len(sources)]",
        (COMMIT,),
    ),
    Mutant(
        "a tree's run is its first row over and over",
        "kernels/window_moves.py",
        "op0=nl.add, operand0=float(number)",
        "op0=nl.add, operand0=0.0",
        (RUNS,),
    ),
    Mutant(
        "a segment of transposed keys is written a row too short",
        "kernels/column_moves.py",
        "op0=nl.add, operand0=1.0, op1=nl.equal",
        "op0=nl.add, operand0=2.0, op1=nl.equal",
        (RUNS,),
    ),
    Mutant(
        "transposed keys take a tree's rows in window order",
        "kernels/column_moves.py",
        "source_rows = slots_of(entry.reshape(columns), row)",
        "source_rows = entry.reshape(columns)",
        (RUNS,),
    ),
    Mutant(
        "heads and rows of a token's line change places",
        "kernels/row_moves.py",
        ".permute((0, 2, 1, 3))",
        ".permute((0, 1, 2, 3))",
        (RUNS,),
    ),
    Mutant(
        "every part of a transposed key goes to the first's place",
        "kernels/row_moves.py",
        "stride = cache.shape[2] // parts * cache.shape[3]",
        "stride = 0",
        (RUNS,),
    ),
    Mutant(
        "a gather overwrites what has not been scattered yet",
        "kernels/row_moves.py",
        "depth = -(-2 * ahead // len(kinds))",
        "depth = 1",
        (COMMIT,),
    ),
    Mutant(
        "an empty slot's saved rows are some sequence's",
        "kernels/save_ring.py",
        "op0=nl.multiply, operand0=live)",
        "op0=nl.multiply, operand0=1.0)",
        (RING,),
    ),
    Mutant(
        "what no row is saved for is not zero",
        "kernels/save_ring.py",
        "zero = constant((nl.tile_size.pmax, 1), 0)",
        "zero = constant((nl.tile_size.pmax, 1), 1)",
        (RING,),
    ),
    Mutant(
        "a ring's columns are restored from the first row on",
        "kernels/window_moves.py",
        "move_columns(moves, row, slot, length, end, longest, zero)",
        "move_columns(moves, row, slot, length, length, longest, zero)",
        ("tests/test_ring.py::test_rings_of_many_sequences_are_saved_and_restored",),
    ),
    Mutant("fp8 saturates at torch's largest", "kernels/row_moves.py", "= 240.0", "= 448.0", (FP8,)),
    Mutant(
        "fp8 is multiplied by its scale",
        "kernels/row_moves.py",
        "nisa.reciprocal(dst=inverse, data=inverse)",
        "nisa.tensor_copy(dst=inverse, src=inverse)",
        (FP8,),
    ),
    Mutant(
        "the rows that should move stay, and those that should stay move",
        "kernels/compact_window.py",
        "op=nl.not_equal",
        "op=nl.equal",
        (COMPACT,),
    ),
    Mutant(
        "a tree that wraps around its ring is compacted as if it did not",
        "kernels/compact_window.py",
        "target_slot, outside, _ = locate(add_lengths(seq_len, rows), cache, cache_layout, block_table, ring)",
        "target_slot, outside, _ = locate(add_lengths(seq_len, rows), cache, cache_layout, block_table, False)",
        (COMPACT,),
    ),
    Mutant(
        "scrubbing goes past what was written",
        "kernels/compact_window.py",
        "op0=nl.less_equal, operand0=last)",
        "op0=nl.less_equal, operand0=128.0)",
        ("tests/test_compact_window.py::test_t46_scrubbing_touches_no_block_that_the_sequence_does_not_own",),
    ),
    Mutant(
        "rows that were never written are compacted",
        "kernels/compact_window.py",
        "flag(wrong, paths, nl.greater, last)",
        "flag(wrong, paths, nl.greater, 128.0)",
        ("tests/test_compact_window.py::test_on_the_device_a_sequence_with_bad_values_is_an_empty_slot",),
    ),
    Mutant(
        "rejected rows are compacted too (the reference forgets num_accepted)",
        "reference/compact_window.py",
        "for row in path[b, :kept]",
        "for row in range(kept)",
        ("tests/test_compact_window.py::test_writing_first_and_compacting_reaches_what_committing_the_path_reaches",),
    ),
    Mutant(
        "a ring padded by a hard-coded 4",
        "bindings/ring.py",
        '"read_first": window - 1 + num_draft_tokens',
        '"read_first": window - 1 + 4',
        ("tests/test_ring.py::test_t45_the_ring_is_as_large_as_the_formula_says_and_no_larger",),
    ),
    Mutant(
        "the last accepted row is undone as well",
        "kernels/restore_ring.py",
        "op0=nl.greater,",
        "op0=nl.greater_equal,",
        (RING,),
    ),
    Mutant(
        "a step without drafts reads state slot 0",
        "kernels/select_rows.py",
        "op0=nl.multiply, operand0=float(parts)",
        "op0=nl.multiply, operand0=0.0",
        (STATE,),
    ),
    Mutant(
        "the convolution window keeps one row too few",
        "kernels/shift_conv_window.py",
        "[1, width]], offset=1)",
        "[1, width]], offset=0)",
        (CONV,),
    ),
    Mutant(
        "blocks by the rule L % P == 1",
        "bindings/blocks.py",
        "return _blocks(lengths + drafts + 1, block_size) - _blocks(lengths, block_size)",
        "return lengths % block_size == 1",
        ("tests/test_blocks.py",),
    ),
    Mutant(
        "the draft's cache is taken to hold every accepted token",
        "bindings/blocks.py",
        "(accepted < drafts)",
        "(accepted >= 0)",
        (
            "tests/test_blocks.py::test_t47_the_row_missing_after_all_drafts_were_accepted_is_fed_before_the_next_proposal",
        ),
    ),
]
