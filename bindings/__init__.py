"""Speculative decoding on AWS Trainium2: verification attention, acceptance and KV-cache rollback, as NKI kernels.

Every operation takes NumPy arrays or torch tensors and returns the same kind (tensors where both come); lists of
numbers are arrays of int32, or of float32 where fractions are meant. What is written in place is written in the
caller's own memory. Two arguments are common to all:

backend: where it runs.
    "auto" (the default): "device" for tensors on a Neuron device, "reference" for everything else.
    "reference": NumPy loops in float64, the specification of the kernels.
    "emulator": the kernel, on this project's emulator of NKI, on a CPU.
    "simulator": the kernel, through `nki.simulate` of an installed Neuron SDK, on a CPU.
    "device": the kernel, on the Neuron device that the tensors are on.
lnc: physical cores that share a logical one, 1 or 2 (Neuron's logical NeuronCore configuration); None, the default,
    takes NEURON_LOGICAL_NC_CONFIG from the environment, else 1. The reference has no cores.

Bad input raises ValueError, naming the argument, what came and what was expected, before anything is written. Values
that cannot be looked at, on a device or under tracing, make a sequence an empty slot with `invalid` set instead.

Float8 caches are trn2's float8_e4m3, whose largest number is 240: ml_dtypes.float8_e4m3 in NumPy, and in torch
float8_e4m3fn taken by its bits. What torch writes there above 240 (its own type goes to 448) is NaN or infinity on
trn2: clamp to 240 before `.to(torch.float8_e4m3fn)`. `commit_window` saturates. torch has no other type for these bits;
NumPy has, so that ml_dtypes.float8_e4m3fn, in which the same bits mean more, is refused: `.view(ml_dtypes.float8_e4m3)`
of an array without entries above 240 is the same memory under the right name.
"""

from draft_verify.acceptance_stats import AcceptanceStats
from draft_verify.blocks import blocks_needed, blocks_to_free, draft_cache_lens
from draft_verify.check_pair import Finding, PairReport, check_pair
from draft_verify.combine_shards import (
    combine_shards,
    shard_cuts,
    shard_draws,
    shard_excess,
    shard_statistics,
    shard_weights,
)
from draft_verify.commit_window import commit_window
from draft_verify.compact_window import compact_window
from draft_verify.greedy_acceptance import greedy_acceptance
from draft_verify.mask_logits import mask_logits
from draft_verify.merge_attention import merge_attention
from draft_verify.project_draft_law import invert_draft_to_target, project_draft_law
from draft_verify.reference.acceptance import Acceptance
from draft_verify.reference.sample_tokens import SampledTokens
from draft_verify.reference.token_logprobs import Logprobs
from draft_verify.rejection_sampling import rejection_sampling
from draft_verify.ring import restore_ring, ring_slots, save_ring
from draft_verify.sample_tokens import sample_tokens
from draft_verify.select_hidden import select_hidden
from draft_verify.select_state import select_state, shift_conv_window, state_slots
from draft_verify.token_logprobs import token_logprobs
from draft_verify.tree_acceptance import tree_acceptance
from draft_verify.typical_acceptance import typical_acceptance
from draft_verify.uniforms_for import uniforms_for
from draft_verify.verify_attention import verify_attention
from draft_verify.verify_step import CacheWindow, Step, verify_step

__all__ = [
    "Acceptance",
    "AcceptanceStats",
    "CacheWindow",
    "Finding",
    "Logprobs",
    "PairReport",
    "SampledTokens",
    "Step",
    "blocks_needed",
    "blocks_to_free",
    "check_pair",
    "combine_shards",
    "commit_window",
    "compact_window",
    "draft_cache_lens",
    "greedy_acceptance",
    "invert_draft_to_target",
    "mask_logits",
    "merge_attention",
    "project_draft_law",
    "rejection_sampling",
    "restore_ring",
    "ring_slots",
    "sample_tokens",
    "save_ring",
    "select_hidden",
    "select_state",
    "shard_cuts",
    "shard_draws",
    "shard_excess",
    "shard_statistics",
    "shard_weights",
    "shift_conv_window",
    "state_slots",
    "token_logprobs",
    "tree_acceptance",
    "typical_acceptance",
    "uniforms_for",
    "verify_attention",
    "verify_step",
]
