"""Trees of drafts on partition 0: [1, B, T], a value a window row."""

import nki.isa as nisa
import nki.language as nl

from .vocabulary import floats, tensor_scalar, tensor_tensor


def load_row_tokens(draft_tokens, first, count, rows):
    """[1, B, T] fp32: each row's own draft, -1 for the root."""
    tokens = floats((1, count, rows))
    nisa.memset(dst=tokens, value=-1.0)
    if rows > 1:
        loaded = nl.ndarray((1, count, rows - 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=draft_tokens.expand_dim(0)[:, first : first + count, :])
        nisa.tensor_copy(dst=tokens[:, :, 1:rows], src=loaded)
    return tokens


def load_parents(tree, first, count, rows):
    """[1, B, T] fp32 from [B, T], or from the [T] that all share."""
    loaded = nl.ndarray((1, count, rows), dtype=nl.int32, buffer=nl.sbuf)
    if len(tree.shape) == 1:
        nisa.dma_copy(dst=loaded, src=tree.ap(pattern=[[rows, 1], [0, count], [1, rows]], offset=0))
    else:
        nisa.dma_copy(dst=loaded, src=tree.expand_dim(0)[:, first : first + count, :])
    parents = floats((1, count, rows))
    nisa.tensor_copy(dst=parents, src=loaded)
    return parents


def require_tree(good, active, parents, counted, row_number):
    """Clears good and active [1, B] where a counted row's parent is no earlier row and not -2, or the root's not -1."""
    _, count, _ = parents.shape
    fits = tensor_tensor(parents, row_number, nl.less)
    not_below = tensor_scalar(parents, nl.greater_equal, -2.0)
    nisa.tensor_tensor(dst=fits, data1=fits, data2=not_below, op=nl.multiply)
    is_root = tensor_scalar(row_number, nl.equal, 0.0)
    is_minus_one = tensor_scalar(parents, nl.equal, -1.0)
    same = tensor_tensor(is_root, is_minus_one, nl.equal)
    nisa.tensor_tensor(dst=fits, data1=fits, data2=same, op=nl.multiply)
    nisa.tensor_tensor(dst=fits, data1=fits, data2=counted, op=nl.multiply)
    nisa.tensor_tensor(dst=fits, data1=counted, data2=fits, op=nl.subtract)
    wrong = floats((1, count))
    nisa.tensor_reduce(dst=wrong, op=nl.maximum, data=fits, axis=2)
    right = tensor_scalar(wrong, nl.equal, 0.0)
    nisa.tensor_tensor(dst=good, data1=good, data2=right, op=nl.multiply)
    nisa.tensor_tensor(dst=active, data1=active, data2=right, op=nl.multiply)
