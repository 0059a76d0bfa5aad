"""compact_window: for engines that write the whole window into the cache before it is verified."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch
from draft_verify.caches import as_layers, by_layers, full_like_lengths, one_or_layers, written
from draft_verify.reference.compact_window import compact_window as reference


@public
def compact_window(
    key_cache: Any,
    value_cache: Any,
    seq_lens: Any,
    path: Any,
    num_accepted: Any,
    *,
    draft_lens: Any = None,
    block_table: Any = None,
    cache_layout: str = "BHSD",
    scrub: bool = False,
    ring: bool = False,
    backend: str = "auto",
    lnc: int | None = None,
) -> tuple[Any, Any]:
    """Moves the accepted rows of a window, written to slots seq_lens.. before it was verified, to be contiguous.

    What position seq_lens[b] + path[b, j] holds goes to seq_lens[b] + j, j = 0..num_accepted[b], in place; source and
    destination may overlap. A chain's accepted rows are contiguous already: only a tree needs it.

    Args:
        key_cache, value_cache: any float dtype, fp8 included (moved as bits), one array or a tuple with one a layer:
            "BHSD" [B, Hkv, S, D]; "BHDS" the same with keys [B, Hkv, D, S]; "NHPD" [N, Hkv, P, D] and "NPHD"
            [N, P, Hkv, D] blocks of P tokens.
        seq_lens: [B] int32, tokens in the cache before the step.
        path: [B, T] int32, the window rows kept, starting with 0 and rising (`Acceptance.path`); T <= 128.
        num_accepted: [B] int32, 0..T-1; -1 is an empty slot, which is left alone.
        draft_lens: [B] int32, the last window row written, 0..T-1 (path and `scrub` go no further); default T - 1.
        block_table: [B, M] int32 ids of each sequence's blocks.
        cache_layout: see above.
        scrub: also set the rejected positions, up to seq_lens + draft_lens, to zero.
        ring: position p is in slot p mod S, seq_lens stays absolute (below 2^24 - T). T is at most S; for attention to
            have read the window from the cache, S is `ring_slots(W, K, "write_first")` or more.
        backend, lnc: see the package.

    Returns:
        (key_cache, value_cache), the same memory as came in.

    Raises:
        ValueError: a shape, dtype or value that does not fit; nothing is written then. On a device, a sequence with
            bad values is left alone like an empty slot.
    """
    key_caches, value_caches = as_layers(key_cache, value_cache)
    checks.caches.compact_window(
        key_caches, value_caches, seq_lens, path, num_accepted, draft_lens, block_table, cache_layout, ring
    )
    if backend == "reference":
        reference(
            key_caches,
            value_caches,
            seq_lens,
            path,
            num_accepted,
            draft_lens=draft_lens,
            block_table=block_table,
            cache_layout=cache_layout,
            scrub=scrub,
            ring=ring,
        )
    else:
        if draft_lens is None:
            draft_lens = full_like_lengths(seq_lens, path.shape[1] - 1)

        def launch_some(some: slice) -> tuple:
            return launch(
                "compact_window",
                one_or_layers(key_caches[some]),
                one_or_layers(value_caches[some]),
                seq_lens,
                path,
                num_accepted,
                draft_lens,
                block_table,
                cache_layout,
                scrub,
                ring,
                backend=backend,
                lnc=lnc,
            )

        outputs = by_layers(launch_some, value_caches, cache_layout, path.shape[0] * path.shape[1])
        key_caches, value_caches = map(written, (key_caches, value_caches), outputs)
    layered = isinstance(key_cache, tuple | list)
    return (key_caches, value_caches) if layered else (key_caches[0], value_caches[0])
