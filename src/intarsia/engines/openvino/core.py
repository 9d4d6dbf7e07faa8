"""The OpenVINO runtime of this process: its processor, its settings, and files that it runs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intarsia.cache.machine import is_arm
from intarsia.engines.base import Arrays
from intarsia.errors import EngineError


@functools.cache
def core() -> Any:
    import openvino

    return openvino.Core()


def capabilities() -> list[str]:
    """The arithmetic that OpenVINO has kernels for on this processor: "FP32", "BF16", "INT8", ..."""
    return [str(name) for name in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")]


@functools.cache
def rounds_to_bfloat16() -> bool:
    """Whether OpenVINO rounds to bfloat16 on this processor, by numbers that it does not hold, tried once.

    On x86 without AVX-512, OpenVINO keeps their digits within a program, and cuts them off at its end. On ARM
    its results are wrong, too.
    """
    import openvino
    from openvino import opset13 as ov

    x = ov.parameter([64], openvino.Type.f32)
    short = ov.convert(x, "bf16")
    model = openvino.Model([ov.add(ov.convert(short, "f32"), x), short], [x])
    numbers = torch.linspace(1, 2, 64)
    sums, halves = core().compile_model(model, "CPU", _IN_FLOAT32)([numbers.numpy()]).values()
    at_end = torch.from_numpy(halves.view(np.int16).copy()).view(torch.bfloat16)
    rounded = numbers.bfloat16()
    return torch.equal(at_end, rounded) and torch.equal(torch.from_numpy(sums), rounded + numbers)


def last_line(error: Exception) -> str:
    """The line of OpenVINO's message that names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


# An OpenVINO model in a file, whoever wrote it, as OpenVINO runs it on the CPU in float32.


# By itself OpenVINO computes in bf16 or fp16 where the processor has it.
_IN_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


class OpenvinoFile:
    """A compiled model, with its inputs in the order of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._compiled = core().compile_model(core().read_model(path), "CPU", _IN_FLOAT32)
        except Exception as error:
            raise EngineError(f"OpenVINO cannot load {path}: {last_line(error)}") from error
        self.inputs: list[str] = [port.get_any_name() for port in self._compiled.inputs]

    def run(self, values: Mapping[str, Any]) -> list[Any]:
        """The outputs, in the order of the file."""
        result = self._compiled(dict(values))
        return [result[port].copy() for port in self._compiled.outputs]

    def run_inside(self, values: Mapping[str, Any]) -> Arrays:
        """The first result of every operation."""
        import openvino

        model = core().read_model(self._path)
        known = ("Parameter", "Constant", "Result")
        operations = [op for op in model.get_ordered_ops() if op.get_type_name() not in known]
        whole = openvino.Model([op.output(0) for op in operations], model.get_parameters())
        compiled = core().compile_model(whole, "CPU", _IN_FLOAT32)
        result = compiled(dict(values))
        names = [op.get_friendly_name() for op in operations]
        return dict(zip(names, [result[port].copy() for port in compiled.outputs], strict=True))


# Where OpenVINO may not put elementwise layers together (its "snippets"), and where it cannot.
#
# OpenVINO 2026.4 reads a null pointer, and the process ends, where attention is one snippet and another
# elementwise layer reads it (in `query_model` too). Of 900 random models with attention 51 ended the process;
# none did without snippets. No model of the zoo is concerned.


_OFF = {"SNIPPETS_MODE": "DISABLE"}
_CONVOLUTIONS = frozenset({"Convolution", "GroupConvolution"})
_PROJECTIONS = _CONVOLUTIONS | {"MatMul"}


def settings(model: Any) -> dict[str, str]:
    """The options that a model must be compiled with, besides the user's.

    Where attention (products around a softmax) has become one snippet, and a layer takes its result together
    with that of an elementwise layer, OpenVINO's tokenizer reads a null pointer and the process ends:
    `relu(relu(x) + scaled_dot_product_attention(x, x, x))`, if a guard looks at both summands too.

    On ARM the SiLU of a convolution becomes a snippet of its own, where the convolution's kernel would do it.
    """
    return dict(_OFF) if _joins_attention(model) or (is_arm() and _activates_convolutions(model)) else {}


def compile_model(model: Any, config: Mapping[str, Any]) -> Any:
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
