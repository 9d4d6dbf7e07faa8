"""Edits of a graph: they keep its layers in order, refuse cycles, and can be undone."""
