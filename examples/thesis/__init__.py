"""Reproductions of the thesis' tables and figures, and the parser of its configuration strings."""
