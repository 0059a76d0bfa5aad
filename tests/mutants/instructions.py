"""The emulator's instructions with the readings of the documentation that other simulators have had."""

from __future__ import annotations

from tests.mutants import Mutant

EMULATOR = "reference/emulator"
MOVEMENT = "tests/emulator/test_isa_movement.py"
VECTOR = "tests/emulator/test_isa_vector.py"
SELECT = "tests/emulator/test_isa_select.py"
SCALAR = "tests/emulator/test_isa_scalar.py"
GPSIMD = "tests/emulator/test_isa_gpsimd.py"
TENSOR = "tests/emulator/test_isa_tensor.py"
REFUSALS = "tests/emulator/test_reject_operands.py"

MUTANTS = [
    Mutant(
        "float32 becomes an integer by truncation",
        f"{EMULATOR}/numerics.py",
        "np.clip(np.rint(wide), limits.min, limits.max)",
        "np.clip(np.trunc(wide), limits.min, limits.max)",
        (MOVEMENT,),
    ),
    Mutant(
        "float8 rounds twice, through bfloat16",
        f"{EMULATOR}/numerics.py",
        "(bits >> np.uint32(16)) | ((bits & np.uint32(0xFFFF)) != 0)",
        "bits >> np.uint32(16)",
        (MOVEMENT,),
    ),
    Mutant(
        "32-bit integers go through float32 everywhere",
        f"{EMULATOR}/isa_vector.py",
        "    elif engine == engines.gpsimd and all(",
        "    elif False and all(",
        (VECTOR,),
    ),
    Mutant(
        "shifts are arithmetic",
        f"{EMULATOR}/operators.py",
        'unsigned = np.dtype(f"u{left.dtype.itemsize}")',
        "unsigned = left.dtype",
        (VECTOR,),
    ),
    Mutant(
        "the vector accumulators survive an idle instruction",
        f"{EMULATOR}/isa_select.py",
        "        registers[:] = np.nan\n",
        "        pass\n",
        (VECTOR,),
    ),
    Mutant(
        "a scan rounds its state to the dtype of dst",
        f"{EMULATOR}/isa_vector.py",
        "            running[:, step] = state\n",
        "            running[:, step] = state = state.astype(dst.dtype).astype(np.float32)\n",
        (f"{VECTOR}::test_a_narrow_dst_does_not_round_the_state_of_a_scan",),
    ),
    Mutant(
        "activation reduces without being told to",
        f"{EMULATOR}/accumulators.py",
        "    if command in (reduce_cmds.reset, reduce_cmds.reset_reduce):\n",
        "    if command != reduce_cmds.reduce:\n",
        (SCALAR, VECTOR),
    ),
    Mutant(
        "the logarithm of zero is minus infinity",
        f"{EMULATOR}/operators.py",
        "        return self.activation(np.where(outside, np.float32(np.nan), x)), True\n",
        "        return self.activation(x), True\n",
        (SCALAR,),
    ),
    Mutant(
        "find_index8 gives every repeated value the first position",
        f"{EMULATOR}/isa_select.py",
        "        if earlier.any():\n",
        "        if False:\n",
        (SELECT,),
    ),
    Mutant(
        "match_replace8 serves repeated values in ascending order",
        f"{EMULATOR}/isa_select.py",
        "    for slot in reversed(range(8)):\n",
        "    for slot in range(8):\n",
        (SELECT,),
    ),
    Mutant(
        "local_gather lists indices partition by partition",
        f"{EMULATOR}/isa_gpsimd.py",
        'rows[core].ravel(order="F")',
        "rows[core].ravel()",
        (GPSIMD,),
    ),
    Mutant(
        "a transpose multiplies by the identity",
        f"{EMULATOR}/isa_tensor.py",
        "    if is_transpose:\n        dst",
        "    if False:\n        dst",
        (TENSOR,),
    ),
    Mutant(
        "a shuffle zeroes what its mask keeps",
        f"{EMULATOR}/isa_movement.py",
        "    dst[moved] = src[sources[moved]]",
        "    dst[~moved] = 0\n    dst[moved] = src[sources[moved]]",
        (MOVEMENT,),
    ),
    Mutant(
        "partial overlaps are not looked for",
        f"{EMULATOR}/rules.py",
        "            if _same_elements(read, written) or not _meet(read, written):\n",
        "            if True:\n",
        (REFUSALS,),
    ),
    Mutant(
        "any partition may be the first",
        f"{EMULATOR}/rules.py",
        "    if start % step or start >= PARTITIONS:\n",
        "    if start >= PARTITIONS:\n",
        (REFUSALS,),
    ),
]
