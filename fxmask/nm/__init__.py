"""N:M masks of layers."""
