"""The experiments of A. Lo, "Efficient Sparse Training with Structured Dropout" (2024), whose method is SparseDrop, with `fxmask.BlockDropout`."""
