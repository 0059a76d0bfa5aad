"""Ring caches: how many slots a window needs, and undoing what rejected rows overwrote."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch
from draft_verify.caches import as_layers, by_layers, one_or_layers, written
from draft_verify.checks.caches import MAX_RING_POSITION
from draft_verify.checks.general import expect, whole_number
from draft_verify.reference import ring as reference


def ring_slots(window: int, num_draft_tokens: int, mode: str = "accepted_only") -> int:
    """Slots that a ring needs so that no step loses a key that a later read can see.

    Args:
        window: W, the sliding window: a row sees itself and the W - 1 positions before it.
        num_draft_tokens: K, the most drafts of a step.
        mode: "accepted_only": only accepted rows are written, after attention (`commit_window`): W - 1;
            "read_first": all K + 1 rows are written, after attention has read the cache: W - 1 + K;
            "write_first": they are written before attention reads them from the cache: W + K.

    Returns:
        The number of slots; fewer lose keys (with "read_first", `save_ring` and `restore_ring` make up for it).

    Raises:
        ValueError: W < 2 (such a window needs no cache), K < 0, or an unknown mode.
    """
    whole_number("window", window, 2, MAX_RING_POSITION)
    whole_number("num_draft_tokens", num_draft_tokens, 0, MAX_RING_POSITION)
    slots = {
        "accepted_only": window - 1,
        "read_first": window - 1 + num_draft_tokens,
        "write_first": window + num_draft_tokens,
    }
    expect(mode in slots, "mode", repr(mode), f"one of {', '.join(slots)}")
    return slots[mode]


@public
def save_ring(
    key_cache: Any,
    value_cache: Any,
    seq_lens: Any,
    num_rows: int,
    *,
    block_table: Any = None,
    cache_layout: str = "BHSD",
    backend: str = "auto",
    lnc: int | None = None,
) -> tuple[Any, Any]:
    """Copies what a window is about to overwrite in a ring, for `restore_ring`.

    Args:
        key_cache, value_cache: rings of any float dtype and layout (see `commit_window`), one array or a tuple with
            one a layer.
        seq_lens: [B] int32, tokens before the step, below 2^24 - T; -1 is an empty slot, saved as zeros.
        num_rows: T, rows of the window, at most the ring's slots and 128.
        block_table: [B, M] int32 for paged layouts, all entries in use.
        cache_layout: "BHSD", "BHDS", "NHPD" or "NPHD".
        backend, lnc: see the package.

    Returns:
        (keys, values) [B, Hkv, T, D] of the cache's dtype, or a tuple of each with one a layer.

    Raises:
        ValueError: a shape, dtype or value that does not fit.
    """
    key_caches, value_caches = as_layers(key_cache, value_cache)
    checks.caches.ring_window(key_caches, value_caches, seq_lens, num_rows, block_table, cache_layout)
    if backend == "reference":
        keys, values = reference.save_ring(
            key_caches, value_caches, seq_lens, num_rows, block_table=block_table, cache_layout=cache_layout
        )
    else:

        def launch_some(some: slice) -> tuple:
            return launch(
                "save_ring",
                one_or_layers(key_caches[some]),
                one_or_layers(value_caches[some]),
                seq_lens,
                block_table,
                num_rows,
                cache_layout,
                backend=backend,
                lnc=lnc,
            )

        keys, values = by_layers(launch_some, value_caches, cache_layout, seq_lens.shape[0] * num_rows)
    return (keys, values) if isinstance(key_cache, tuple | list) else (keys[0], values[0])


@public
def restore_ring(
    key_cache: Any,
    value_cache: Any,
    saved_key: Any,
    saved_value: Any,
    seq_lens: Any,
    num_accepted: Any,
    *,
    block_table: Any = None,
    cache_layout: str = "BHSD",
    backend: str = "auto",
    lnc: int | None = None,
) -> tuple[Any, Any]:
    """Brings back what the rejected rows of a window overwrote in a ring, in place.

    For engines that write all T rows, after attention, into a ring of fewer than W - 1 + K slots: there a rejected
    row may push out a key that the next step's window still sees.

    Args:
        key_cache, value_cache, saved_key, saved_value: rings and what `save_ring` returned for them.
        seq_lens: [B] int32, as given to `save_ring`.
        num_accepted: [B] int32; rows after it are undone. -1 is an empty slot, which is left alone.
        block_table, cache_layout, backend, lnc: as given to `save_ring`.

    Returns:
        (key_cache, value_cache), the same memory as came in.

    Raises:
        ValueError: a shape, dtype or value that does not fit; nothing is written then.
    """
    key_caches, value_caches, saved_keys, saved_values = as_layers(key_cache, value_cache, saved_key, saved_value)
    checks.caches.restore_ring(
        key_caches, value_caches, saved_keys, saved_values, seq_lens, num_accepted, block_table, cache_layout
    )
    if backend == "reference":
        reference.restore_ring(
            key_caches,
            value_caches,
            saved_keys,
            saved_values,
            seq_lens,
            num_accepted,
            block_table=block_table,
            cache_layout=cache_layout,
        )
    else:

        def launch_some(some: slice) -> tuple:
            return launch(
                "restore_ring",
                *(one_or_layers(entries[some]) for entries in (key_caches, value_caches, saved_keys, saved_values)),
                seq_lens,
                num_accepted,
                block_table,
                cache_layout,
                backend=backend,
                lnc=lnc,
            )

        rows = saved_keys[0].shape[0] * saved_keys[0].shape[2]
        outputs = by_layers(launch_some, value_caches, cache_layout, rows)
        key_caches, value_caches = map(written, (key_caches, value_caches), outputs)
    layered = isinstance(key_cache, tuple | list)
    return (key_caches, value_caches) if layered else (key_caches[0], value_caches[0])
