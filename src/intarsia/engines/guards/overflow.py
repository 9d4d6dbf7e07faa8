"""Where numbers too large for float16 would go unseen: guards look there, and the call is PyTorch's."""

from __future__ import annotations

from intarsia.engines.guards.kinds import ValueGuard
from intarsia.network import Layer, Network, Tensor, dtypes

LARGEST_HALF = 65504.0
_CALM = 2.0**36  # the sum of a million such numbers
# Layers that show an infinity in their result, or make of it what they make of the number it stands for.
# fmt: off
_SHOWS = frozenset(
    {
        "Abs", "Add", "Attention", "AveragePool", "BatchNormalization", "Celu", "Concat", "Conv",
        "ConvTranspose", "CumSum", "DepthToSpace", "Elu", "Erf", "Exp", "Expand", "Flatten", "Gather",
        "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool", "HardSigmoid", "HardSwish",
        "Identity", "LeakyRelu", "LogSoftmax", "MatMul", "MaxPool", "Mish", "Mul", "Neg",
        "PRelu", "Pad", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape",
        "ScatterElements", "ScatterND", "Selu", "Sigmoid", "Slice", "Softmax", "Softplus", "SpaceToDepth",
        "Split", "Sqrt", "Squeeze", "Sub", "Swish", "Tanh", "Tile", "Transpose", "Unsqueeze", "Where",
    }
)
# fmt: on
_BOUNDS = frozenset({"Clip", "Max", "Min"})


def overflow_guards(net: Network) -> list[ValueGuard]:
    """Guards of a network that is computed in float16 though its numbers are of a longer type.

    An infinity stays one, or becomes NaN, up to the outputs, where it is seen; but not behind a layer that
    divides by it, compares it, or scales by it, as norms do, nor behind a bound that is as large.
    """
    watched: dict[str, ValueGuard] = {}
    inputs = {tensor.value for tensor in net.get_inputs()}
    hidden = [
        tensor
        for layer in net.get_layers()
        if layer.kind not in _SHOWS and not _bounds(layer)
        for index, tensor in enumerate(layer.get_inputs())
        if not (layer.kind == "Div" and index == 0)
    ]
    for tensor in (*hidden, *net.get_outputs()):
        if tensor is not None and _is_computed(tensor):
            of_call = tensor.value in inputs  # those are looked at one by one, and not by their sum
            high = LARGEST_HALF if of_call else _CALM
            watched[tensor.name] = ValueGuard(tensor.name, -high, high, total=not of_call)
    return list(watched.values())


def _bounds(layer: Layer) -> bool:
    """Whether a layer keeps numbers below a bound that float16 holds."""
    if layer.kind not in _BOUNDS:
        return False
    given = [tensor.constant for tensor in layer.get_inputs() if tensor is not None]
    return all(bound is None or bool((abs(bound) < LARGEST_HALF).all()) for bound in given)


def _is_computed(tensor: Tensor) -> bool:
    return tensor.dtype in dtypes.FLOATS and tensor.constant is None and 0 not in tensor.shape
