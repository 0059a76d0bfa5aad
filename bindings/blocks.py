"""Paged bookkeeping: how many blocks a step needs and how many it gives back. Plain arithmetic, no backend.

Allocate `blocks_needed` before a step and free `blocks_to_free` after it, from the end of the sequence's table, and a
sequence always owns ceil(length / P) blocks. Share or hash (prefix caching) only whole blocks of committed tokens,
never one that a window reaches into.
"""

from __future__ import annotations

from typing import Any

from draft_verify.arrays import from_lists
from draft_verify.checks.general import dtype_name, expect, whole_number


def blocks_needed(seq_lens: Any, num_draft_tokens: Any, block_size: int) -> Any:
    """Blocks that each sequence lacks for a window of K drafts: ceil((L + K + 1) / P) - ceil(L / P).

    Args:
        seq_lens: [B] int32 tokens in the cache, L; a number, a NumPy array or a tensor anywhere.
        num_draft_tokens: K, or [B] draft_lens; -1 is an empty slot, which needs none.
        block_size: P.

    Returns:
        [B] of the same kind.

    Raises:
        ValueError: no whole numbers, or not as many as sequences.
    """
    lengths, drafts = _whole(seq_lens=seq_lens, num_draft_tokens=num_draft_tokens)
    return _blocks(lengths + drafts + 1, block_size) - _blocks(lengths, block_size)


def blocks_to_free(seq_lens: Any, num_accepted: Any, num_draft_tokens: Any, block_size: int) -> Any:
    """Blocks that only rejected rows reached: ceil((L + K + 1) / P) - ceil((L + num_accepted + 1) / P).

    Args:
        seq_lens: [B] int32 tokens in the cache before the step, L.
        num_accepted: [B] int32; -1 is an empty slot, which frees none (its draft_lens is -1 too).
        num_draft_tokens: K, or [B] draft_lens, as given to `blocks_needed`.
        block_size: P.

    Returns:
        [B] of the same kind.

    Raises:
        ValueError: no whole numbers, or not as many as sequences.
    """
    lengths, accepted, drafts = _whole(seq_lens=seq_lens, num_accepted=num_accepted, num_draft_tokens=num_draft_tokens)
    return _blocks(lengths + drafts + 1, block_size) - _blocks(lengths + accepted + 1, block_size)


def draft_cache_lens(seq_lens: Any, num_accepted: Any, draft_lens: Any) -> Any:
    """Tokens whose keys the draft model's own cache holds after a step, of seq_lens + num_accepted + 1 committed ones.

    A draft model that proposes K tokens runs on row 0 and on its first K - 1 proposals: the K-th is never fed to it.
    Where all K were accepted, its key is therefore missing from the draft's cache (with no drafts, row 0's is). Feed
    the draft everything from position draft_cache_lens on, the missing token and the new row 0, before it proposes.

    Args:
        seq_lens: [B] int32 tokens in both caches before the step.
        num_accepted: [B] int32.
        draft_lens: [B] int32 drafts proposed.

    Returns:
        [B]: seq_lens + min(num_accepted + 1, draft_lens); an empty slot keeps its length.

    Raises:
        ValueError: no whole numbers, or not as many as sequences.
    """
    lengths, accepted, drafts = _whole(seq_lens=seq_lens, num_accepted=num_accepted, draft_lens=draft_lens)
    return lengths + accepted + (accepted < drafts) + (accepted < 0)


def _whole(**arguments: Any) -> list[Any]:
    """Checked: whole numbers, or arrays of them of one shape."""
    values = [from_lists(name, value) for name, value in arguments.items()]
    shapes = [tuple(value.shape) for value in values if getattr(value, "shape", ())]
    for name, value in zip(arguments, values):
        whole = "int" in dtype_name(value) if hasattr(value, "dtype") else hasattr(value, "__index__")
        expect(whole, name, repr(value), "whole numbers")
        shape = tuple(getattr(value, "shape", ()))
        expect(shape in ((), shapes[0] if shapes else ()), name, f"shape {shape}", f"one of {shapes[:1]} or a number")
    return values


def _blocks(length: Any, block_size: int) -> Any:
    whole_number("block_size", block_size, 1, 2**31 - 1)
    return (length + block_size - 1) // block_size
