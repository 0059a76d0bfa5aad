"""Decisions over a chain of drafts, on partition 0: values [1, B] a sequence and [1, B, T] a window row.

A window is at most 128 rows and a chunk of sequences at most 128 rows, so these tiles are one instruction's minimum
wide; what they save is instructions. Flags are 0.0 or 1.0.
"""

import nki.isa as nisa
import nki.language as nl

from .vocabulary import (
    floats,
    tensor_scalar,
    tensor_tensor,
)

MAX_SEQUENCES = 16  # a chunk, so that a few values a sequence fit one transpose


def sequence_chunks(batch, rows, sequence_bytes, max_bytes):
    """(first, count, repeated) of the chunks of sequences this core verifies.

    A chunk has at most 128 rows and `max_bytes` a partition. The cores of LNC 2 verify equally many sequences, since
    their loops must match: in an odd batch the second repeats the first `repeated` of its chunk, and does not store
    them.
    """
    cores = nl.num_programs(0)
    share = (batch + cores - 1) // cores
    first = min(share * nl.program_id(0), batch - share)
    repeated = share * nl.program_id(0) - first
    largest = max(1, min(MAX_SEQUENCES, min(128 // rows, max_bytes // sequence_bytes)))
    num_chunks = (share + largest - 1) // largest
    chunks = []
    for i in range(num_chunks):
        start = share * i // num_chunks
        stop = share * (i + 1) // num_chunks
        chunks.append((first + start, stop - start, max(0, min(stop, repeated) - start)))
    return chunks


def load_sequences(values, first, count):
    """values[first:first + count] of [B] int32 or fp32 -> [1, count] fp32."""
    loaded = nl.ndarray((1, count), dtype=values.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=values.reshape((1, values.shape[0]))[:, first : first + count])
    if values.dtype == nl.float32:
        return loaded
    result = floats((1, count))
    nisa.tensor_copy(dst=result, src=loaded)
    return result


def load_tokens(draft_tokens, first, count, rows):
    """Drafts [1, count, rows] fp32 of window rows, row t holding the draft after it; -1 in the last row."""
    tokens = floats((1, count, rows))
    nisa.memset(dst=tokens, value=-1.0)
    drafts = rows - 1
    if drafts > 0:
        loaded = nl.ndarray((1, count, drafts), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=draft_tokens.expand_dim(0)[:, first : first + count, :])
        nisa.tensor_copy(dst=tokens[:, :, 0:drafts], src=loaded)
    return tokens


def row_numbers(count, rows):
    """[1, count, rows] fp32: 0, 1, 2, ... in every sequence."""
    numbers = floats((1, count, rows))
    nisa.iota(dst=numbers, pattern=[[0, count], [1, rows]], offset=0, channel_multiplier=0)
    return numbers


def over_rows(values, rows):
    """[1, B] as [1, B, rows], without a copy."""
    return values.expand_dim(2).broadcast(2, rows)


def select(predicate, on_true, on_false):
    """on_true where the flag is 1, else on_false (a tile or a number); a value not chosen may be NaN.

    UNVERIFIED: that memset takes NaN and infinities, which token_logprobs and project_draft_law ask for.
    """
    mask = nl.ndarray(predicate.shape, dtype=nl.uint32, buffer=nl.sbuf)
    result = floats(predicate.shape)
    nisa.tensor_copy(dst=mask, src=predicate)
    if isinstance(on_false, float):
        nisa.memset(dst=result, value=on_false)
    else:
        nisa.tensor_copy(dst=result, src=on_false)
    nisa.tensor_copy_predicated(dst=result, src=on_true, predicate=mask)
    return result


def proposed(tokens, draft_lens, row_number, vocab_size):
    """Flags of the rows [1, B, T] that a draft with an id of the vocabulary follows."""
    _, _, rows = tokens.shape
    flags = tensor_tensor(row_number, over_rows(draft_lens, rows), nl.less)
    known = tensor_scalar(tokens, nl.greater_equal, 0.0)
    nisa.tensor_tensor(dst=flags, data1=flags, data2=known, op=nl.multiply)
    nisa.tensor_scalar(dst=known, data=tokens, op0=nl.less, operand0=float(vocab_size))
    nisa.tensor_tensor(dst=flags, data1=flags, data2=known, op=nl.multiply)
    return flags


def leading_count(accept, row_number):
    """[1, B]: how many rows pass before the first that does not, from flags [1, B, T]."""
    _, count, rows = accept.shape
    # One scan over all sequences: what multiplies the running product is 0 where a sequence starts.
    starts = tensor_scalar(row_number, nl.equal, 0.0)
    nisa.tensor_tensor(dst=starts, data1=starts, data2=accept, op=nl.multiply)
    carries = tensor_tensor(accept, starts, nl.subtract)
    prefix = floats((1, count, rows))
    nisa.tensor_tensor_scan(
        dst=prefix.reshape((1, count * rows)),
        data0=carries.reshape((1, count * rows)),
        data1=starts.reshape((1, count * rows)),
        initial=0.0,
        op0=nl.multiply,
        op1=nl.add,
    )
    passed = floats((1, count))
    nisa.tensor_reduce(dst=passed, op=nl.add, data=prefix, axis=2)
    return passed


def at_row(values, chosen):
    """[1, k, B]: each of `values` [1, k, B, T] at the row that `chosen` [1, B, T] flags; the others may hold NaN."""
    _, kinds, count, rows = values.shape
    mask = nl.ndarray((1, count, rows), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mask, src=chosen)
    kept = floats((1, kinds, count, rows))
    nisa.memset(dst=kept, value=0.0)
    for kind in range(kinds):
        nisa.tensor_copy_predicated(dst=kept[:, kind], src=values[:, kind], predicate=mask)
    picked = floats((1, kinds, count))
    nisa.tensor_reduce(dst=picked, op=nl.add, data=kept, axis=3)
    return picked


def usable(draft_lens, max_drafts):
    """(good, active) [1, B]: draft_lens in -1..max_drafts, and not an empty slot either."""
    good = tensor_scalar(draft_lens, nl.greater_equal, -1.0)
    within = tensor_scalar(draft_lens, nl.less_equal, float(max_drafts))
    nisa.tensor_tensor(dst=good, data1=good, data2=within, op=nl.multiply)
    active = tensor_scalar(draft_lens, nl.greater_equal, 0.0)
    nisa.tensor_tensor(dst=active, data1=active, data2=good, op=nl.multiply)
    return good, active


def to_columns(values):
    """[1, k, n] fp32 -> [n, k]: each of the k rows of partition 0 becomes a column."""
    _, kinds, count = values.shape
    columns = nl.ndarray((count, kinds), dtype=nl.float32, buffer=nl.psum)
    for kind in range(kinds):
        nisa.nc_transpose(dst=columns[:, kind : kind + 1], data=values[:, kind], engine=nisa.engine.tensor)
    result = floats((count, kinds))
    nisa.tensor_copy(dst=result, src=columns)
    return result


def to_rows(columns):
    """[n, k] fp32 -> [1, k, n] on partition 0."""
    count, kinds = columns.shape
    # 128 columns each, so that none crosses a PSUM bank.
    turned = nl.ndarray((1, kinds, nl.tile_size.pmax), dtype=nl.float32, buffer=nl.psum)
    for kind in range(kinds):
        nisa.nc_transpose(dst=turned[:, kind, 0:count], data=columns[:, kind : kind + 1], engine=nisa.engine.tensor)
    result = floats((1, kinds, count))
    nisa.tensor_copy(dst=result, src=turned[:, :, 0:count])
    return result


def allocate_outputs(batch, rows):
    """tokens [B, T], num_accepted [B], path [B, T], invalid [B], all int32 in HBM."""
    tokens = nl.ndarray((batch, rows), dtype=nl.int32, buffer=nl.shared_hbm)
    num_accepted = nl.ndarray((batch,), dtype=nl.int32, buffer=nl.shared_hbm)
    path = nl.ndarray((batch, rows), dtype=nl.int32, buffer=nl.shared_hbm)
    invalid = nl.ndarray((batch,), dtype=nl.int32, buffer=nl.shared_hbm)
    return tokens, num_accepted, path, invalid


def store_int(output, first, repeated, values):
    """values [1, n, ...] fp32 whole numbers -> output[first:first + n], without the first `repeated`."""
    count = values.shape[1]
    if repeated < count:
        nisa.dma_copy(
            dst=output.expand_dim(0)[:, first + repeated : first + count], src=to_int(values)[:, repeated:count]
        )


def store_acceptance(outputs, first, repeated, tokens, path, accepted, emitted, active, good, invalid, row_number):
    """Accepted drafts, then the emitted token, then -1; nothing but -1 in slots that are not active.

    Args:
        tokens, path: [1, B, T], the accepted drafts' ids, and the rows kept from the root on.
        row_number: [1, B, T].
        accepted, emitted, active, good, invalid: [1, B]; what inactive slots hold is not looked at.
    """
    out_tokens, out_accepted, out_path, out_invalid = outputs
    _, _, rows = tokens.shape
    # accepted + 1 in an active slot, else 0: the rows that count.
    emitted_count = tensor_scalar(accepted, nl.add, 1.0)
    nisa.tensor_tensor(dst=emitted_count, data1=emitted_count, data2=active, op=nl.multiply)
    last_row = tensor_scalar(emitted_count, nl.subtract, 1.0)
    store_int(out_accepted, first, repeated, last_row)

    before = tensor_tensor(row_number, over_rows(last_row, rows), nl.less)
    at = tensor_tensor(row_number, over_rows(last_row, rows), nl.equal)
    kept = select(before, tokens, -1.0)
    store_int(out_tokens, first, repeated, select(at, over_rows(emitted, rows), kept))

    store_int(out_path, first, repeated, select(tensor_tensor(before, at, nl.add), path, -1.0))

    # invalid where active, 1 where the sequence's own values are bad.
    flagged = tensor_tensor(invalid, active, nl.multiply)
    nisa.tensor_tensor(dst=flagged, data1=flagged, data2=good, op=nl.subtract)
    nisa.tensor_scalar(dst=flagged, data=flagged, op0=nl.add, operand0=1.0)
    store_int(out_invalid, first, repeated, flagged)


def row_index(offset, base, stride):
    """[1, B] fp32: base + sequence * stride + offset."""
    index = floats(offset.shape)
    nisa.iota(dst=index, pattern=[[stride, offset.shape[1]]], offset=base, channel_multiplier=0)
    nisa.tensor_tensor(dst=index, data1=index, data2=offset, op=nl.add)
    return index


def to_int(values):
    whole = nl.ndarray(values.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=whole, src=values)
    return whole
