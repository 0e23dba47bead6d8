"""One step recorded on fake tensors, and what each op of it costs."""
