"""A plan as JSON that Google's Model Explorer opens: modules as layers, engines and reasons as attributes.

    pip install ai-edge-model-explorer && model-explorer plan.json

The format is that of `ai-edge-model-explorer-adapter` 0.1: graphs of nodes, each with its incoming edges.
"""

from __future__ import annotations

import json
from typing import Any

from intarsia.drawing.drawing import Drawing, DrawnNode


def model_explorer(drawing: Drawing, name: str = "intarsia") -> str:
    """The JSON text; bodies of control flow are graphs of their own."""
    drawings = {name: drawing, **{f"{name}/{body}": inner for body, inner in drawing.bodies.items()}}
    graphs = [
        {"id": key, "nodes": [_node(number, node, each) for number, node in enumerate(each.nodes)]}
        for key, each in drawings.items()
    ]
    return json.dumps({"label": name, "graphs": graphs}, indent=1)


def _node(number: int, node: DrawnNode, drawing: Drawing) -> dict[str, Any]:
    segment = "" if node.segment < 0 else str(node.segment)
    attributes = {
        "name": node.name,
        "engine": node.engine,
        "segment": segment,
        "source": node.source,
        **{f"not on {engine}": reason for engine, reason in node.reasons.items()},
    }
    drawn: dict[str, Any] = {
        "id": str(number),
        "label": node.op,
        "namespace": node.module.replace(".", "/"),
        "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": str(read), "sourceNodeOutputId": "0", "targetNodeInputId": str(place)}
            for place, read in enumerate(node.inputs)
        ],
        "outputsMetadata": [{"id": "0", "attrs": [{"key": "tensor_shape", "value": node.shape}]}],
    }
    if node.engine:
        drawn["style"] = {"backgroundColor": drawing.colours[node.engine]}
    return drawn
