"""NKI kernels, one file per operation. Importing this package imports no kernel, so it needs no NKI.

What they rest on that no document settles, to be asked of a device first (UNVERIFIED; other such points stand where
they matter):

- NaN, infinities and denormals on the engines: comparisons with NaN are false, 0 times infinity is NaN, thresholds that
  are built bit by bit may be any of them; fp32 products by 1 and sums of few small integers are exact.
- Order through HBM: a read at a run-time address comes after the write of what it reads (work lists, ancestor tables,
  sums), and what a runtime loop stored is there when the kernel returns.
- Indirect DMAs whose rows are several runs (heads that lie apart, transposed keys), in runtime loops too; two-byte
  writes next to each other, by different descriptors, do not undo one another.
- A gather transposes hundreds of rows of several tokens at once, in runtime loops too.
- `ap` after `reshape` counts indices in the reshaped rows; an index may be a column of a tile.
- An instruction may read several banks of PSUM; several accumulation groups may be open in one bank, apart.
- Bit operations of tensor_scalar take an int32 operand for each partition.
- A DMA from SBUF to SBUF takes elements in row-major order on both sides.
"""
