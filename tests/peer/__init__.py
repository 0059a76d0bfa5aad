"""Other people's kernels, read from their checkouts at run time, on the emulator: `make test-peer NKI_LIBRARY=<checkout>`."""
