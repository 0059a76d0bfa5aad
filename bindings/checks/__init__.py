"""Every check of shapes, dtypes, layouts and values, in one place: one function per operation.

All raise ValueError naming the argument, what came and what was expected, before anything is written.
"""

from draft_verify.checks import acceptance, attention, caches, general, shards

__all__ = ["acceptance", "attention", "caches", "general", "shards"]
