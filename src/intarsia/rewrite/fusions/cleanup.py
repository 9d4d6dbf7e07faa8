"""Patterns that only remove layers: identities, casts, equal layers, constants.

Passes on the FX graph fold constants and merge equal nodes too, for all engines. These patterns do so for
layers that converters add: 12 and 4 times in BERT's 89 layers, 57 and 6 times in Llama's 184.
`onnx_ir.passes` edits a graph without the journal, so such a rewrite could not be undone.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from intarsia.network import Layer, Network, Tensor, dtypes
from intarsia.network import functional as F
from intarsia.network.attributes import from_attr
from intarsia.network.ops import MAY_BE_IDENTITY
from intarsia.network.value import OPSET, ir_version
from intarsia.rewrite.fusions.fusion import Fusion, given
from intarsia.rewrite.pattern import PatternRewriter, Refusal, refuse, rule
from intarsia.rewrite.term import is_transparent

_LARGEST = 1 << 16  # elements of a folded constant; engines fold larger ones themselves
_READERS = 64

_FOLDABLE = frozenset(
    "Abs Add And Cast Ceil Concat Cos Div Equal Erf Exp Expand Floor Gather Greater GreaterOrEqual"  # noqa: SIM905
    " Identity Less LessOrEqual Log Max Min Mod Mul Neg Not Or Pow Range Reciprocal ReduceMax ReduceMean"
    " ReduceMin ReduceProd ReduceSum Reshape Shape Sign Sin Slice Sqrt Squeeze Sub Tanh Tile Transpose"
    " Trilu Unsqueeze Where CumSum".split()
)


class Unchanged(PatternRewriter):
    """Layers that return their input unchanged."""

    reach: int | None = 1

    def __init__(self) -> None:
        super().__init__("identity", MAY_BE_IDENTITY, True)

    def match(self, layer: Layer) -> bool | Refusal:
        if not is_transparent(layer.node):
            return refuse(f"{layer.name} changes its input")
        x, y = layer.node.inputs[0], layer.node.outputs[0]
        assert x is not None
        if y.is_graph_output() and (x.producer() is None or x.is_graph_output()):
            return refuse(f"the network's output {y.name} needs a layer that makes it")
        return True

    def rewrite(self, layer: Layer) -> None:
        x = layer.get_inputs(0)[0]
        assert x is not None
        layer.get_outputs(0)[0].replace_all_uses_with(x)
        layer.mark_as_removed()


def _some_identities(rng: np.random.Generator, large: bool) -> None:
    x = given("x", 2, 512 if large else 3)
    y = F.op("Cast", F.identity(F.neg(x)), to=ir.DataType.FLOAT)
    F.relu(F.transpose(F.reshape(y, tuple(int(d) for d in x.shape)), (0, 1))).mark_output("y")  # type: ignore[arg-type]


def _fits(inner: ir.DataType, outer: ir.DataType) -> bool:
    """Whether every value of one dtype is a value of the other."""
    a, b = dtypes.to_numpy(inner), dtypes.to_numpy(outer)
    if ir.DataType.BFLOAT16 in (inner, outer):
        return outer in (ir.DataType.FLOAT, ir.DataType.DOUBLE) and inner == ir.DataType.BFLOAT16
    if outer == ir.DataType.DOUBLE and a.itemsize == 8 and inner != outer:
        return False  # numpy calls this safe, but 2^53 + 1 is rounded
    return bool(np.can_cast(a, b, "safe"))


@rule(lambda op, x: op.Cast(op.Cast(x, to=op.any, _name="inner", _shared=True), to=op.any, _name="outer"))
def redundant_casts(net: Network, x: Tensor, inner: Layer, outer: Layer) -> object:
    """Two casts are one, if the dtype between them can represent all values of the first."""
    middle, target = inner.get_outputs(0)[0].dtype, outer.get_outputs(0)[0].dtype
    if x.dtype in dtypes.FLOATS and middle in dtypes.FLOATS and target in dtypes.INTEGERS:
        return refuse(f"casts of {middle.name} and {x.dtype.name} to {target.name} differ out of its range")
    if not _fits(x.dtype, middle):
        return refuse(f"{middle.name} does not hold every {x.dtype.name}")
    return F.cast(x, target)


def _two_casts(rng: np.random.Generator, large: bool) -> None:
    x = given("x", 2, 512 if large else 3)
    whole = F.cast(x * 3.0, ir.DataType.INT32)
    F.cast(F.cast(whole, ir.DataType.INT64), ir.DataType.FLOAT).mark_output("y")


class EqualWork(PatternRewriter):
    """A layer that computes the same as an earlier one."""

    reach: int | None = 1

    def __init__(self) -> None:
        super().__init__("common_subexpression")

    def find(self, layer: Layer) -> ir.Node | Refusal:
        """An earlier layer that computes the same."""
        node = layer.node
        if node.op_type.startswith("Random") or node.op_type in ("Dropout", "Bernoulli", "Multinomial"):
            return refuse(f"{node.op_type} returns another result at each call")
        if any(value.is_graph_output() for value in node.outputs):
            return refuse(f"{node.name} makes an output of the network")
        first = next((v for v in node.inputs if v is not None and v.const_value is None), None)
        count = 0 if first is None else len(first.uses())
        if first is None or count < 2:
            return refuse("nothing else reads its input")
        if count > _READERS:
            return refuse(f"{first.name} has {count} readers")
        order = layer.network.order
        for other in first.consumers():
            if (
                other is not node
                and other.op_type == node.op_type
                and other.graph is node.graph
                and other.domain == node.domain
                and other.inputs == node.inputs
                and len(other.outputs) == len(node.outputs)
                and _attributes(other) == _attributes(node)
                and order.of(other) < order.of(node)
            ):
                return other
        return refuse("no other layer does the same")

    def perform(self, layer: Layer, found: ir.Node) -> bool:
        for old, new in zip(layer.node.outputs, found.outputs, strict=True):
            Tensor.of(old).replace_all_uses_with(Tensor.of(new))
        layer.mark_as_removed()
        return True


def _attributes(node: ir.Node) -> dict[str, object]:
    return {name: from_attr(attr) for name, attr in node.attributes.items()}


def _twins(rng: np.random.Generator, large: bool) -> None:
    x = given("x", 2, 512 if large else 3)
    (F.neg(F.softmax(x)) * F.exp(F.softmax(x))).mark_output("y")


class Folded(PatternRewriter):
    """A layer with constant inputs, which its result replaces."""

    reach: int | None = 1

    def __init__(self) -> None:
        super().__init__("constant_folding", _FOLDABLE)

    def match_and_rewrite(self, layer: Layer) -> bool | Refusal:
        node, result = layer.node, layer.get_outputs(0)[0]
        if result.is_output():
            return refuse(f"{layer.name} makes an output of the network")
        if layer.kind == "Shape":
            return self._shape(layer)
        if not node.inputs or any(v is not None and v.const_value is None for v in node.inputs):
            return refuse("not all of its inputs are constant")
        size = int(np.prod([d if isinstance(d, int) else _LARGEST + 1 for d in result.shape], initial=1))
        if size > _LARGEST:
            return refuse(f"it makes {size} elements, more than {_LARGEST}")
        array = _evaluate(node)
        result.replace_all_uses_with(F.constant(array, result.dtype))
        layer.mark_as_removed()
        return True

    def _shape(self, layer: Layer) -> bool | Refusal:
        x = layer.get_inputs(0)[0]
        assert x is not None
        picked = x.shape[slice(layer.attribute("start", 0), layer.attribute("end"))]
        if not all(isinstance(d, int) for d in picked):
            return refuse(f"{x!r} has sizes that are not known")
        layer.get_outputs(0)[0].replace_all_uses_with(F.ints([int(d) for d in picked]))  # type: ignore[arg-type]
        layer.mark_as_removed()
        return True


def _evaluate(node: ir.Node) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """The result of a layer with constant inputs, by ONNX's reference."""
    from onnx.reference import ReferenceEvaluator

    arrays = [None if value is None else value.const_value for value in node.inputs]
    inputs = [
        None if x is None else ir.Value(name=f"i{n}", type=ir.TensorType(x.dtype), shape=ir.Shape(x.shape))  # type: ignore[arg-type]
        for n, x in enumerate(arrays)
    ]
    output = ir.Value(name="result", type=node.outputs[0].type, shape=node.outputs[0].shape)
    alone = ir.Node("", node.op_type, inputs, list(node.attributes.values()), outputs=[output])
    given_inputs = [value for value in inputs if value is not None]
    graph = ir.Graph(given_inputs, [output], nodes=[alone], opset_imports={"": OPSET}, name="fold")
    feeds = {
        str(v.name): x.numpy() for v, x in zip(inputs, arrays, strict=True) if v is not None and x is not None
    }
    proto = ir.to_proto(ir.Model(graph, ir_version=ir_version(graph)))
    (result,) = ReferenceEvaluator(proto).run(None, feeds)
    return np.asarray(result)


def _constants(rng: np.random.Generator, large: bool) -> None:
    x = given("x", 2, 512 if large else 3)
    scale = F.sqrt(F.cast(F.size(x, 1), ir.DataType.FLOAT))
    (x / scale).mark_output("y")


FUSIONS = (
    Fusion("identity", Unchanged(), _some_identities, 100, free=True),
    Fusion("constant_folding", Folded(), _constants, 100, free=True),
    Fusion("common_subexpression", EqualWork(), _twins, 95, free=True),
    Fusion("redundant_casts", redundant_casts, _two_casts, 90, free=True),
)
