"""Other people's kernels, from their checkouts, on the emulator: `make test-peer NKI_LIBRARY=<checkout>`."""
