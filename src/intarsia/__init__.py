"""Intarsia: cut a model into pieces, give each to the engine that runs it best, inlay them as one module."""
