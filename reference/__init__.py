"""NumPy references: one file per operation, plain float64 loops that are the specification of the kernels."""
