"""Drawings for the tests of pictures."""

from __future__ import annotations

from intarsia.drawing import Drawing, DrawnLayers, DrawnNode, DrawnSegment, DrawnTrial

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><b>&amp;"


def two_engines() -> Drawing:
    """An input and three nodes on two engines; every text of the model is hostile."""
    reasons = {"openvino": HOSTILE}
    layers = DrawnLayers(HOSTILE, "one layer")
    nodes = (
        DrawnNode("x", "input", shape="float32[2]"),
        DrawnNode(HOSTILE, "aten.relu.default", "encoder.layer.0", HOSTILE, HOSTILE, "openvino", 0, (0,)),
        DrawnNode("i0", "aten.i0.default", "encoder.layer.1", "model.py:7", "", "pytorch", 1, (1,), reasons),
        DrawnNode("tanh", "aten.tanh.default", HOSTILE, "model.py:8", "", "openvino", 2, (2,)),
    )
    segments = (
        DrawnSegment("openvino", 1, HOSTILE, ("x",), (HOSTILE,), 0, 2048, layers=layers),
        DrawnSegment("pytorch", 1, "aten.i0.default", seconds=0.002),
        DrawnSegment("openvino", 1, "aten.tanh.default"),
    )
    inner = Drawing("inner", (DrawnNode("body", "op", engine="pytorch", segment=0),), segments[1:2])
    return Drawing(
        heading=f"Plan {HOSTILE}",
        nodes=nodes,
        segments=segments,
        engine_seconds={"openvino": 0.001, "pytorch": 0.002},
        timed_how="in a test",
        trials=(
            DrawnTrial("mix", 0.003, 0.0001, 3, True, True),
            DrawnTrial("pytorch", 0.004, 0.0, 1, False, True),
        ),
        measured_how="measured in 2 s",
        advice=(f"if {HOSTILE} took it",),
        notes=(HOSTILE,),
        bodies={"cond.true": inner},
    )


def large(layers: int = 500) -> Drawing:
    """Ten nodes a layer, in modules of three levels; every seventh layer reads the first one too."""
    nodes = [DrawnNode("x", "input")]
    for layer in range(layers):
        for part in range(10):
            inputs = (len(nodes) - 1, *((1,) if part == 0 and layer % 7 == 6 else ()))
            module = f"model.layers.{layer}.{'attention' if part < 6 else 'mlp'}"
            name = f"layer{layer}_part{part}"
            nodes.append(DrawnNode(name, "aten.add.Tensor", module, "m.py:1", "", "openvino", 0, inputs))
    return Drawing("large", tuple(nodes), (DrawnSegment("openvino", len(nodes) - 1, "aten.add.Tensor"),))


def flat(count: int = 5000) -> Drawing:
    """A chain without modules."""
    nodes = [DrawnNode("x", "input")]
    for number in range(1, count):
        nodes.append(DrawnNode(f"node{number}", "op", engine="pytorch", segment=0, inputs=(number - 1,)))
    return Drawing("flat", tuple(nodes), (DrawnSegment("pytorch", count - 1, "op"),))
