"""What each operator makes, by family; importing them registers the rules."""

from intarsia.network.rules import elementwise, index, linear, nn, reduce, shape

__all__ = ["elementwise", "index", "linear", "nn", "reduce", "shape"]
