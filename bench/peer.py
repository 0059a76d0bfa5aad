"""AWS's `attention_tkg` of a checkout of aws-neuron/nki-library, traced on the emulator for comparison.

Nothing of theirs is part of this project: the checkout is imported where it lies, unmodified.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import ml_dtypes
import numpy as np

from draft_verify.reference import emulator

SBUF_RESERVED = 16 * 1024  # what their own tests leave to the compiler


def module(checkout: str | Path, name: str) -> ModuleType:
    """A module of the library, such as "core.attention.attention_tkg", imported over the emulator.

    Raises FileNotFoundError where `checkout` is no checkout of nki-library.
    """
    source = Path(checkout) / "src"
    if not (source / "nkilib_src" / "nkilib").is_dir():
        raise FileNotFoundError(f"{checkout}: no checkout of https://github.com/aws-neuron/nki-library")
    nki = {key: value for key, value in sys.modules.items() if key == "nki" or key.startswith("nki.")}
    for key in nki:
        del sys.modules[key]
    sys.path.insert(0, str(source))
    emulator.install()
    try:
        return importlib.import_module(f"nkilib_src.nkilib.{name}")
    finally:
        sys.path.remove(str(source))
        for key in emulator.modules():
            sys.modules.pop(key, None)
        sys.modules.update(nki)


def attention_tkg(
    checkout: str | Path, batch: int, heads: int, rows: int, slots: int, head_size: int, *, lnc: int = 1
) -> emulator.Program:
    """Their token-generation attention for `batch` sequences of `rows` rows and `heads` query heads on one KV head.

    bfloat16, keys stored transposed, masks made in the kernel where it can, caches of `slots` slots that are all live.
    """
    kernels = module(checkout, "core.attention.attention_tkg")
    allocator = module(checkout, "core.utils.allocator")
    logging = module(checkout, "core.utils.logging")
    nl, nisa = emulator.modules()["nki.language"], emulator.modules()["nki.isa"]
    # Sharding over the batch cannot make masks from positions.
    by_batch = lnc == 2 and batch % 2 == 0 and (batch * heads * rows > 128 or slots < 256)
    cfg = kernels.AttnTKGConfig(
        bs=batch, q_head=heads, s_active=rows, curr_sprior=slots, full_sprior=slots, d_head=head_size,
        tp_k_prior=False, use_pos_id=not by_batch, qk_in_sb=True,
    )  # fmt: skip

    def attention(query, key, value, key_cache, value_cache, mask, positions):
        quiet = logging.Logger("peer", logging.LogLevel.WARN)
        manager = allocator.SbufManager(0, nl.tile_size.total_available_sbuf_size - SBUF_RESERVED, quiet)
        manager.open_scope()
        out = nl.ndarray((batch, heads, head_size, rows), dtype=query.dtype, buffer=nl.shared_hbm)
        query_tile = manager.alloc_stack(query.shape, dtype=query.dtype, buffer=nl.sbuf)
        key_tile = manager.alloc_stack(key.shape, dtype=key.dtype, buffer=nl.sbuf)
        nisa.dma_copy(query_tile, query)
        nisa.dma_copy(key_tile, key)
        out, _ = kernels.attention_tkg(
            query_tile, key_tile, value, key_cache, value_cache, mask, out, cfg, manager, rope_pos_ids=positions
        )
        manager.close_scope()
        return out

    mask_rows = rows if cfg.use_pos_id else slots
    kernel = emulator.jit(attention)
    return emulator.trace(
        kernel[2] if lnc == 2 else kernel,
        _shaped((head_size, batch * heads * rows)),
        _shaped((head_size, batch * rows)),
        _shaped((batch, 1, rows, head_size)),
        _shaped((batch, 1, head_size, slots)),
        _shaped((batch, 1, slots, head_size)),
        _shaped((mask_rows, batch, heads, rows), np.uint8),
        _shaped((batch, rows), np.float32),
    )


def _shaped(shape: tuple[int, ...], dtype=ml_dtypes.bfloat16) -> np.ndarray:
    """An array that takes no memory, for tracing."""
    return np.broadcast_to(np.zeros((), dtype), shape)
