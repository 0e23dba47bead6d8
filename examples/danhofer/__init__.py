"""Danhofer (2024), learned 2:4 masks: table 3's and 4's protocol and mask learning, on networks from a checkpoint, or on a small one trained here."""
