"""FX passes, one idea a file: find linears, choose among them, mask them."""
