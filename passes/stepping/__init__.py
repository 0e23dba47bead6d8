"""An optimiser's step on masked weights."""
