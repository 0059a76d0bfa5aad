"""NKI kernels, one file per operation. Importing this package imports no kernel, so it needs no NKI."""
