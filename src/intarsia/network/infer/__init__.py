"""What each operator makes, by family; importing them registers the rules."""

from intarsia.network.infer import elementwise, index, linear, nn, reduce, shape

__all__ = ["elementwise", "index", "linear", "nn", "reduce", "shape"]
