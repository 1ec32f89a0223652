"""Recipes, data, methods, optimiser, callbacks and export."""
