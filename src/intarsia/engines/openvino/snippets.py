"""Where OpenVINO may not put elementwise layers together (its "snippets"), and where it cannot.

OpenVINO 2026.4 reads a null pointer, and the process ends, where attention is one snippet and another
elementwise layer reads it (in `query_model` too). Of 900 random models with attention 51 ended the process;
none did without snippets. No model of the zoo is concerned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intarsia.engines.openvino.core import core
from intarsia.engines.processor import is_arm

_OFF = {"SNIPPETS_MODE": "DISABLE"}
_CONVOLUTIONS = frozenset({"Convolution", "GroupConvolution"})
_PROJECTIONS = _CONVOLUTIONS | {"MatMul"}


def settings(model: Any) -> dict[str, str]:
    """What a model must be compiled with, beside what the user wishes.

    Where attention (products around a softmax) has become one snippet, and a layer takes its result together
    with that of an elementwise layer, OpenVINO's tokenizer reads a null pointer and the process ends:
    `relu(relu(x) + scaled_dot_product_attention(x, x, x))`, if a guard looks at both summands too.

    On ARM the SiLU of a convolution becomes a snippet of its own, where the convolution's kernel would do it.
    """
    return dict(_OFF) if _joins_attention(model) or (is_arm() and _activates_convolutions(model)) else {}


def compiled(model: Any, config: Mapping[str, Any]) -> Any:
    """The compiled model, without snippets where one of them asks for more registers than there are."""
    try:
        return core().compile_model(model, "CPU", dict(config))
    except RuntimeError as error:
        if "registers for a snippet" not in str(error):
            raise
        return core().compile_model(model, "CPU", {**config, **_OFF})


def _activates_convolutions(model: Any) -> bool:
    """Whether the result of a convolution, with its bias or without, is multiplied by its own sigmoid."""
    for operation in model.get_ops():
        if operation.get_type_name() != "Sigmoid":
            continue
        value = operation.input_value(0)
        source = value.get_node()
        if source.get_type_name() == "Add":
            source = source.input_value(0).get_node()
        readers = {port.get_node().get_friendly_name() for port in value.get_target_inputs()}
        gated = {port.get_node().get_friendly_name() for port in operation.output(0).get_target_inputs()}
        if source.get_type_name() in _CONVOLUTIONS and readers & gated:
            return True
    return False


def _joins_attention(model: Any) -> bool:
    """Whether a layer reads what was made of the result of one attention alone, and something else."""
    constant, soft = set[str](), set[str]()
    attention: dict[str, str] = {}  # what is made of one attention alone, and of which
    for operation in model.get_ordered_ops():
        name, kind = operation.get_friendly_name(), operation.get_type_name()
        read = {value.get_node().get_friendly_name() for value in operation.input_values()}
        if kind == "Constant" or (read and read <= constant):
            constant.add(name)
            continue
        live = {
            value.get_node().get_friendly_name()
            for value in operation.input_values()
            if not value.get_element_type().is_integral_number()  # sizes and places
        } - constant
        sources = {attention.get(value) for value in live}
        if len(sources) > 1:
            return True
        if kind == "ScaledDotProductAttention" or (kind == "MatMul" and len(live) > 1 and live & soft):
            attention[name] = name
        elif kind not in _PROJECTIONS and (source := next(iter(sources), None)) is not None:
            attention[name] = source
        elif kind == "Softmax" or (kind not in _PROJECTIONS and live & soft):
            soft.add(name)
    return False
