"""`fxmask.guard`, and the steps and layers that get past it."""
