"""Speculative decoding on AWS Trainium2: verification attention, acceptance and KV-cache rollback, as NKI kernels."""
