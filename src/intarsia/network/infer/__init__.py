"""What each operator makes, by family; importing them registers the rules."""

from intarsia.network.infer import elementwise, index, linear, nn, quantize, reduce, resize, shape

__all__ = ["elementwise", "index", "linear", "nn", "quantize", "reduce", "resize", "shape"]
