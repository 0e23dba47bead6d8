"""Triton kernels; the only place that imports Triton. Each has its plain-PyTorch form in `kernels.reference` or `kernels.lists`."""
