"""Rewrites of graphs, and what has to be known of a graph for them."""
