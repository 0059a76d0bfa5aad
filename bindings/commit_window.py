"""commit_window: the caches as if only the accepted tokens had ever been processed."""

from __future__ import annotations

from typing import Any

from draft_verify import checks
from draft_verify.arrays import public
from draft_verify.backends import launch
from draft_verify.caches import as_layers, by_layers, layer_scales, one_or_layers, written
from draft_verify.reference.commit_window import commit_window as reference


@public
def commit_window(
    key_cache: Any,
    value_cache: Any,
    key: Any,
    value: Any,
    seq_lens: Any,
    num_accepted: Any,
    *,
    path: Any = None,
    block_table: Any = None,
    cache_layout: str = "BHSD",
    ring: bool = False,
    key_scale: Any = None,
    value_scale: Any = None,
    backend: str = "auto",
    lnc: int | None = None,
) -> tuple[Any, Any]:
    """Writes the accepted rows' keys and values, and nothing else, into the cache, in place.

    Row path[b, j] of sequence b's window goes to position seq_lens[b] + j, j = 0..num_accepted[b]: row 0 and the
    accepted drafts. The recovered or bonus token has no key yet; it is row 0 of the next window.

    Layers stacked in one array [layers * B, ...] may come as so many sequences, lengths repeated and block ids shifted
    by each layer's first block: a few DMAs then serve them all, where every entry of a tuple takes its own.

    Args:
        key_cache, value_cache: fp32, bf16 or fp8, one array or a tuple with one a layer (then `key` and `value` too):
            "BHSD" [B, Hkv, S, D]; "BHDS" the same with keys [B, Hkv, D, S]; "NHPD" [N, Hkv, P, D] and "NPHD"
            [N, P, Hkv, D] blocks of P tokens.
        key, value: [B, Hkv, T, D] fp32 or bf16, the cache's dtype unless that is fp8; D as rotated, B and T <= 128.
        seq_lens: [B] int32, tokens in the cache before the step.
        num_accepted: [B] int32, accepted drafts, 0..T-1; -1 is an empty slot, of which nothing is written.
        path: [B, P] int32, the window rows kept, starting with 0 and rising (`Acceptance.path`, or its first columns,
            as many as a tree is deep: each costs time whether it is used or not); default 0, 1, 2, ...
        block_table: [B, M] int32 ids of each sequence's blocks; entries past the last row written may be -1.
        cache_layout: see above.
        ring: position p lives in slot p mod S; only the last S accepted rows are kept. Positions below 2^24.
        key_scale, value_scale: fp8 caches hold the value divided by it, saturated at 240: a number, [Hkv], or
            [layers, Hkv] fp32; default 1.
        backend, lnc: see the package.

    Returns:
        (key_cache, value_cache), the same memory as came in.

    Raises:
        ValueError: a shape, dtype or value that does not fit; nothing is written then. On a device, a sequence with
            bad values is left alone like an empty slot.
    """
    layered = isinstance(key_cache, tuple | list)
    key_caches, value_caches, keys, values = as_layers(key_cache, value_cache, key, value)
    checks.caches.commit_window(
        key_caches,
        value_caches,
        keys,
        values,
        seq_lens,
        num_accepted,
        path,
        block_table,
        cache_layout,
        ring,
        key_scale,
        value_scale,
    )
    layers, heads = len(keys), keys[0].shape[1]
    key_scale = layer_scales(key_scale, key_caches[0], layers, heads)
    value_scale = layer_scales(value_scale, value_caches[0], layers, heads)
    if backend == "reference":
        reference(
            key_caches,
            value_caches,
            keys,
            values,
            seq_lens,
            num_accepted,
            path=path,
            block_table=block_table,
            cache_layout=cache_layout,
            ring=ring,
            key_scale=key_scale,
            value_scale=value_scale,
        )
    else:

        def launch_some(some: slice) -> tuple:
            return launch(
                "commit_window",
                *(one_or_layers(entries[some]) for entries in (key_caches, value_caches, keys, values)),
                seq_lens,
                num_accepted,
                path,
                block_table,
                *(scale if scale is None else scale[some] for scale in (key_scale, value_scale)),
                cache_layout,
                path is None,
                ring,
                backend=backend,
                lnc=lnc,
            )

        rows = keys[0].shape[0] * (keys[0].shape[2] if path is None else path.shape[1])
        outputs = by_layers(launch_some, value_caches, cache_layout, rows)
        key_caches, value_caches = map(written, (key_caches, value_caches), outputs)
    return (key_caches, value_caches) if layered else (key_caches[0], value_caches[0])
