"""`torch.compile(model, backend="fxmask")`."""
