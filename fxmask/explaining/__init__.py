"""`fxmask.explain` and `fxmask.masks`: what became of every layer, and why."""
