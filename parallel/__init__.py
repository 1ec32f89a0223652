"""Parallel layouts. Empty until the layouts land; it holds the place in the import order (nn <- parallel <- infer)."""
