"""Benchmarks, the cost model's tables, the window tuner and the demo on a real model."""
