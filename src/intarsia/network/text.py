"""A network as readable text, one layer a line."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def kind_of(node: ir.Node) -> str:
    """The operator, with its domain where that is not ONNX's own."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def type_text(value: ir.Value) -> str:
    """The type of a value, such as `f32[2, n]`."""
    dtype = "?" if value.dtype is None else _short(value.dtype)
    if value.shape is None:
        return f"{dtype}[...]"
    dims = ["?" if not isinstance(d, int) and d.value is None else str(d) for d in value.shape]
    return f"{dtype}[{', '.join(dims)}]"


def _short(dtype: ir.DataType) -> str:
    return "bool" if dtype == ir.DataType.BOOL else dtype.short_name()


def operand_text(value: ir.Value | None) -> str:
    """The name of an operand; a small constant as its value, a large one as `name<type>`."""
    if value is None:
        return "_"
    array = value.const_value
    if array is None:
        return value.name or "?"
    if array.size <= 8 and value.shape is not None:
        data = array.numpy()
        if data.dtype.kind not in "biuf":
            data = data.astype(np.float32)
        return repr(data.tolist())
    return f"{value.name}<{type_text(value)}>"


def layer_text(node: ir.Node) -> str:
    """A layer, such as `y = Softmax(x) {axis=-1}`."""
    outputs = ", ".join(value.name or "?" for value in node.outputs)
    operands = ", ".join(operand_text(value) for value in node.inputs)
    attributes = ", ".join(f"{name}={_attr_text(attr)}" for name, attr in node.attributes.items())
    return f"{outputs} = {kind_of(node)}({operands})" + (f" {{{attributes}}}" if attributes else "")


def _attr_text(attr: ir.Attr) -> str:
    value = attr.value
    if isinstance(value, ir.Graph):
        return f"<{len(value)} layers>"
    if isinstance(value, float):
        return f"{value:.6g}"
    return repr(list(value)) if isinstance(value, tuple) else repr(value)


def graph_text(graph: ir.Graph) -> str:
    """The whole network, one layer a line."""
    inputs = ", ".join(f"{value.name}: {type_text(value)}" for value in graph.inputs)
    outputs = ", ".join(f"{value.name}: {type_text(value)}" for value in graph.outputs)
    lines = [f"{graph.name or 'network'}({inputs}) -> ({outputs})"]
    lines += [f"  {layer_text(node)}" for node in graph]
    return "\n".join(lines)


def dot_text(graph: ir.Graph) -> str:
    """The network in Graphviz's language: boxes are layers, ellipses its inputs and outputs."""

    def quoted(text: str | None) -> str:
        return '"' + (text or "?").replace("\\", "\\\\").replace('"', '\\"') + '"'

    ends = {value: f"input {value.name}" for value in graph.inputs}
    lines = [f"digraph {quoted(graph.name or 'network')} {{", "  node [shape=box];"]
    lines += [f"  {quoted(name)} [shape=ellipse];" for name in ends.values()]
    for node in graph:
        lines.append(f"  {quoted(node.name)} [label={quoted(f'{node.op_type} {node.name}')}];")
        for value in node.inputs:
            if value is None or value.const_value is not None:
                continue
            maker = value.producer()
            source = ends.get(value) if maker is None else maker.name
            lines.append(f"  {quoted(source)} -> {quoted(node.name)} [label={quoted(type_text(value))}];")
    for value in graph.outputs:
        maker = value.producer()
        source = ends.get(value, value.name) if maker is None else maker.name
        lines.append(f"  {quoted(f'output {value.name}')} [shape=ellipse];")
        lines.append(f"  {quoted(source)} -> {quoted(f'output {value.name}')};")
    return "\n".join([*lines, "}"]) + "\n"
