"""`fxmask.graphed`: a training step as one CUDA graph."""
