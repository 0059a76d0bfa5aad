"""Token trees at run time: which window rows each row descends from, and how deep it lies, from parents."""

import nki.isa as nisa
import nki.language as nl

from .attention_loads import repeat
from .attention_plan import psum, tile


def tree_matters(shape, with_window):
    """Whether rows of this core see by the tree: the window, if it is this core's, or slots, by positions that follow
    depth."""
    return with_window or shape.sliding_window > 0 or shape.positioned


def ancestor_table(shape, parents):
    """[trees, T, T + 1] fp32 in HBM: 1 where row t sees row j, itself or an ancestor, else 0; then row t's depth.

    `parents` [trees, T] int32, -1 for the root; what rows of padding get does not matter.
    """
    trees, window = parents.shape
    table = nl.ndarray((trees, window, window + 1), dtype=nl.float32, buffer=nl.private_hbm)
    column = tile((window, window))
    row = tile((window, 1))
    nisa.iota(dst=column, pattern=[[1, window]], offset=0, channel_multiplier=0)
    nisa.iota(dst=row, pattern=[[0, 1]], offset=0, channel_multiplier=1)

    def one_tree(tree):
        write_ancestors(shape, parents, table, column, row, tree)

    if trees == 1:
        write_ancestors(shape, parents, table, column, row, None)
    else:
        nl.fori_loop(nisa.register_alloc(0), trees, one_tree)
    return table


def write_ancestors(shape, parents, table, column, row, tree):
    """Entry `tree`, a register or None for 0, of the table."""
    window = shape.window
    size = (window, window)
    whole = tile((window, 1), nl.int32)
    parent = tile((window, 1))
    nisa.dma_copy(dst=whole, src=parents.ap(pattern=[[1, window], [1, 1]], scalar_offset=tree, indirect_dim=0))
    nisa.tensor_copy(dst=parent, src=whole)

    # One step up or none; its square two steps at most, and so on. Small integers: exact in bf16 once clipped to 1.
    reaches = tile(size, nl.bfloat16)
    itself = tile(size)
    nisa.tensor_scalar(dst=itself, data=column, op0=nl.equal, operand0=row)
    nisa.scalar_tensor_tensor(dst=reaches, data=column, op0=nl.equal, operand0=parent, op1=nl.add, operand1=itself)
    transposed = tile(size, nl.bfloat16)
    staged = psum(size, nl.bfloat16)
    nisa.nc_transpose(dst=staged, data=reaches, engine=nisa.engine.tensor)
    nisa.tensor_copy(dst=transposed, src=staged)
    steps = 1
    while steps < window - 1:
        # The transposed square is needed for another step, and for the depths.
        factors = [(transposed, reaches)]
        if 2 * steps < window - 1 or shape.sliding_window > 0:
            factors.append((reaches, transposed))
        squares = []
        for pair in factors:
            stationary, moving = pair
            product = psum(size)
            clipped = tile(size, nl.bfloat16)
            nisa.nc_matmul(dst=product, stationary=stationary, moving=moving, accumulate=False)
            nisa.activation(dst=clipped, op=nl.sign, data=product)
            squares.append(clipped)
        reaches = squares[0]
        transposed = squares[len(squares) - 1]
        steps *= 2

    entry = tile((window, window + 1))
    depth = entry[:, window : window + 1]
    sees = entry[:, 0:window]
    # Scalar, since Vector masks soon.
    nisa.activation(
        dst=sees, op=nl.copy, data=reaches, reduce_op=nl.add, reduce_res=depth, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    if shape.sliding_window > 0:
        ones = tile(size, nl.bfloat16)
        depths = psum(size)
        near = tile(size)
        nisa.memset(dst=ones, value=1.0)
        nisa.nc_matmul(dst=depths, stationary=ones, moving=transposed, accumulate=False)
        nisa.tensor_scalar(
            dst=near,
            data=depths,
            op0=nl.subtract,
            operand0=depth,
            op1=nl.greater,
            operand1=-float(shape.sliding_window),
        )
        nisa.tensor_tensor(dst=sees, data1=sees, data2=near, op=nl.multiply)
    nisa.tensor_scalar(dst=depth, data=depth, op0=nl.add, operand0=-1.0, engine=nisa.engine.scalar)
    nisa.dma_copy(
        dst=table.reshape((table.shape[0], window * (window + 1))).ap(
            pattern=[[window + 1, window], [1, window + 1]], scalar_offset=tree, indirect_dim=0
        ),
        src=entry,
    )


def load_ancestors(shape, rows, table, current):
    """What a row tile's rows see of the window, of streams the first, and their depth: [count, T] and [count, 1]."""
    window = shape.window
    entry = tile((rows.count, window + 1))
    if rows.streams > 1:
        nisa.memset(dst=entry, value=0.0)
    shared = table.shape[0] == 1
    entry_size = window * (window + 1)
    nisa.dma_copy(
        dst=entry[0 : rows.rows],
        src=table.reshape((table.shape[0], entry_size)).ap(
            pattern=[[0, rows.rows // window], [window + 1, window], [1, window + 1]],
            offset=0 if shared else current.sequence * entry_size,
            scalar_offset=None if shared else current.sequence_index,
            indirect_dim=0,
        ),
    )
    repeat(rows, entry[:, window : window + 1])
    return entry[:, 0:window], entry[:, window : window + 1]
