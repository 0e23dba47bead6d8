"""The ops on a CPU, by PyTorch's own matmuls over the kept blocks alone; nothing is compiled."""
