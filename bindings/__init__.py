"""Speculative decoding on AWS Trainium2: verification attention, acceptance and KV-cache rollback, as NKI kernels."""

from draft_verify.greedy_acceptance import greedy_acceptance
from draft_verify.reference.acceptance import Acceptance
from draft_verify.rejection_sampling import rejection_sampling
from draft_verify.uniforms_for import uniforms_for

__all__ = ["Acceptance", "greedy_acceptance", "rejection_sampling", "uniforms_for"]
