"""Which linears there are, which of them are chosen, and who reads their weights."""
