"""Speculative decoding on AWS Trainium2: verification attention, acceptance and KV-cache rollback, as NKI kernels."""

from draft_verify.acceptance_stats import AcceptanceStats
from draft_verify.blocks import blocks_needed, blocks_to_free, draft_cache_lens
from draft_verify.check_pair import check_pair
from draft_verify.combine_shards import combine_shards, shard_draws, shard_statistics
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
from draft_verify.verify_step import CacheWindow, verify_step

__all__ = [
    "Acceptance",
    "AcceptanceStats",
    "CacheWindow",
    "Logprobs",
    "SampledTokens",
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
    "shard_draws",
    "shard_statistics",
    "shift_conv_window",
    "state_slots",
    "token_logprobs",
    "tree_acceptance",
    "typical_acceptance",
    "uniforms_for",
    "verify_attention",
    "verify_step",
]
