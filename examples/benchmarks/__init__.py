"""Times of whole steps of training, and of the optimiser's alone."""
