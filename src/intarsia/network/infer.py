"""What ONNX defines of operators: defaults of attributes, and outputs by ONNX's own shape inference.

ONNX checks the number and the dtypes of the inputs, too. `infers` registers a rule for operators that ONNX
does not define.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import defs, helper, numpy_helper, shape_inference

from intarsia.errors import NetworkError
from intarsia.network.attributes import to_attr
from intarsia.network.value import MICROSOFT, OPSET, Shape, TypedValue

Types = list[tuple[ir.DataType, Shape]]
ShapeRule = Callable[[Sequence[TypedValue | None], Mapping[str, Any], int], Types]

_RULES: dict[tuple[str, str], ShapeRule] = {}
# Constants that shapes depend on, such as sizes, axes and scales, are at most this long. Longer ones are
# weights.
_LONGEST_ARGUMENT = 64


def infers(*op_types: str, domain: str = "") -> Callable[[ShapeRule], ShapeRule]:
    """Register a shape rule for operators that ONNX does not define.

    >>> @infers("Twice", domain="docs.infers")
    ... def twice(inputs, attributes, outputs):
    ...     return [(inputs[0].dtype, inputs[0].shape)]
    """

    def register(rule: ShapeRule) -> ShapeRule:
        for op_type in op_types:
            _RULES[domain, op_type] = rule
        return rule

    return register


def has_rule(domain: str, op_type: str) -> bool:
    """Whether the outputs of an operator can be inferred; those of layers with bodies cannot."""
    return (domain, op_type) in _RULES or (not domain and _onnx_schema(op_type) is not None)


def infer(
    domain: str,
    op_type: str,
    inputs: Sequence[TypedValue | None],
    attributes: Mapping[str, Any],
    outputs: int,
) -> Types:
    """Dtype and shape of every output."""
    rule = _RULES.get((domain, op_type))
    if rule is not None:
        return rule(inputs, attributes, outputs)
    schema = None if domain else _onnx_schema(op_type)
    if schema is None:
        raise NetworkError(f"no shape rule for {domain + '::' if domain else ''}{op_type}")
    try:
        return _by_onnx(schema, inputs, attributes, outputs)
    except (shape_inference.InferenceError, onnx.checker.ValidationError) as error:
        operands = ", ".join("nothing" if x is None else repr(x) for x in inputs)
        reason = str(error).partition("] ")[2] or str(error)
        raise NetworkError(f"{op_type} of {operands}: {reason}") from None


@functools.cache
def _onnx_schema(op_type: str) -> Any:
    """ONNX's definition at our opset, or the first newer one; None if it has no shape inference."""
    if not defs.has(op_type, ""):
        return None
    try:
        schema = defs.get_schema(op_type, OPSET, "")
    except defs.SchemaError:
        schema = defs.get_schema(op_type, "")
    has_body = any(one.type == defs.OpSchema.AttrType.GRAPH for one in schema.attributes.values())
    return schema if schema.has_type_and_shape_inference_function and not has_body else None


# Equal layers of a model, its conversions for other engines, and trial conversions ask the same question.
_answers: dict[tuple[Any, ...], Types] = {}
_MOST_ANSWERS = 10_000


def _by_onnx(
    schema: Any, inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int
) -> Types:
    if not all(_has_exact_text(value) for value in attributes.values()):
        return _asked(schema, inputs, attributes, outputs)
    arguments = tuple(None if x is None else (x.dtype, x.shape, _bytes_of_argument(x)) for x in inputs)
    key = (schema.name, arguments, repr(sorted(attributes.items())), outputs)
    answer = _answers.get(key)
    if answer is None:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        answer = _answers[key] = _asked(schema, inputs, attributes, outputs)
    return list(answer)


def _has_exact_text(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_has_exact_text, value))
    return isinstance(value, bool | int | float | str)


def _argument(x: TypedValue) -> np.ndarray[Any, Any] | None:
    """The constant that shapes may depend on, if it is one."""
    size = x.shape[0] if x.ndim == 1 else 1 if x.ndim == 0 else None
    return x.constant if isinstance(size, int) and size <= _LONGEST_ARGUMENT else None


def _bytes_of_argument(x: TypedValue) -> bytes | None:
    constant = _argument(x)
    return None if constant is None else constant.tobytes()


def _asked(
    schema: Any, inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int
) -> Types:
    names = ["" if x is None else f"i{place}" for place, x in enumerate(inputs)]
    node = helper.make_node(schema.name, names, [f"o{place}" for place in range(outputs)])
    node.attribute.extend(ir.to_proto(to_attr(name, value)) for name, value in attributes.items())
    types: dict[str, onnx.TypeProto] = {}
    arguments: dict[str, onnx.TensorProto] = {}
    for name, x in zip(names, inputs, strict=True):
        if x is None:
            continue
        types[name] = helper.make_tensor_type_proto(int(x.dtype), x.shape)
        if (constant := _argument(x)) is not None:
            arguments[name] = numpy_helper.from_array(constant, name)
    opset = [helper.make_opsetid("", max(OPSET, schema.since_version))]
    inferred = shape_inference.infer_node_outputs(schema, node, types, arguments, opset_imports=opset)
    return [_type_of(schema.name, inferred.get(name)) for name in node.output]


def _type_of(op_type: str, proto: onnx.TypeProto | None) -> tuple[ir.DataType, Shape]:
    if proto is None or not proto.tensor_type.HasField("shape"):
        raise NetworkError(f"{op_type} whose number of dimensions cannot be inferred")
    tensor = proto.tensor_type
    sizes = (d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in tensor.shape.dim)
    return ir.DataType(tensor.elem_type), tuple(sizes)


# onnx 1.23 defines the first two by other operators and infers nothing for them.
@infers("GroupNormalization", "MeanVarianceNormalization")
@infers("Gelu", "FastGelu", "BiasGelu", "QuickGelu", domain=MICROSOFT)
def _like_first(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Types:
    assert inputs[0] is not None
    return [(inputs[0].dtype, inputs[0].shape)]


@infers("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def _skip_norm(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Types:
    assert inputs[0] is not None
    dtype, shape = inputs[0].dtype, inputs[0].shape
    moment = (ir.DataType.FLOAT, (*shape[:-1], 1))
    return [(dtype, shape), moment, moment, (dtype, shape)][:outputs]


@infers("MatMulNBits", domain=MICROSOFT)
def _matmul_nbits(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Types:
    assert inputs[0] is not None
    return [(inputs[0].dtype, (*inputs[0].shape[:-1], attributes["N"]))]


@infers("MatMulIntegerToFloat", domain=MICROSOFT)
def _integers(inputs: Sequence[TypedValue | None], attributes: Mapping[str, Any], outputs: int) -> Types:
    assert inputs[0] is not None and inputs[1] is not None
    return [(ir.DataType.FLOAT, (*inputs[0].shape[:-1], inputs[1].shape[-1]))]


@functools.cache
def attribute_defaults(domain: str, op_type: str) -> dict[str, Any]:
    """The defaults of an operator's attributes at this package's opset; none if ONNX does not define it."""
    if domain or not defs.has(op_type, ""):
        return {}
    try:
        schema = defs.get_schema(op_type, OPSET, "")
    except defs.SchemaError:
        return {}  # newer than our opset: the layer has a version of its own
    defaults = {
        name: helper.get_attribute_value(attr.default_value)
        for name, attr in schema.attributes.items()
        if attr.default_value.type
    }
    return {name: v.decode() if isinstance(v, bytes) else v for name, v in defaults.items()}
