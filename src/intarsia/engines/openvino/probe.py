"""Which small networks OpenVINO's CPU plugin takes, asked of many at once.

Many nodes are asked about in one question, as parts of one model: `query_model` takes about as long for one
node as for a hundred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.openvino.core import core, last_line
from intarsia.engines.openvino.limits import OpenVINOLimits
from intarsia.engines.openvino.model import read
from intarsia.engines.openvino.snippets import settings
from intarsia.network import Network

_Asked = tuple[Any, object]  # a model, and what keeps its weights alive


def refusals(nets: Sequence[Network], precision: str, guards: bool) -> list[str | None]:
    """What of each network the plugin does not take; None where it takes all.

    A question costs about the same whatever it is about, so all networks are asked about as parts of one
    model that have nothing to do with each other. What that leaves open is asked about by itself.
    """
    asked = [_read(net, guards) for net in nets]
    taken = _taken_together([one[0] for one in asked if not isinstance(one, str)], precision)
    return [one if isinstance(one, str) else _refusal(one[0], precision, taken) for one in asked]


def _read(net: Network, guards: bool) -> _Asked | str:
    """The model of a network, or why there is none."""
    try:
        model, weights = read(net)
        if guards:
            plan_guards(net, OpenVINOLimits(net), floats=False)
    except Exception as error:
        return f"OpenVINO refuses it: {last_line(error)}"
    if any(op.get_type_name() == "FrameworkNode" for op in model.get_ops()):
        return "OpenVINO's ONNX reader does not know it"
    return model, weights


def _taken_together(models: Sequence[Any], precision: str) -> set[int]:
    """Which of the models, by id, are taken as parts of one."""
    import openvino

    plain = [model for model in models if not settings(model)]
    if len(plain) < 2:
        return set()
    for place, model in enumerate(plain):
        for operation in model.get_ops():
            operation.set_friendly_name(f"{place}/{operation.get_friendly_name()}")
    results = [result for model in plain for result in model.get_results()]
    parameters = [parameter for model in plain for parameter in model.get_parameters()]
    try:
        supported = _supported(openvino.Model(results, parameters, "parts"), precision)
    except Exception:  # one of them, or all together: each is asked about by itself, and then it is told
        return set()
    return {id(model) for model in plain if not _left_out(model, supported)}


def _refusal(model: Any, precision: str, taken: set[int]) -> str | None:
    if id(model) in taken:
        return None
    try:
        left_out = _left_out(model, _supported(model, precision))
    except Exception as error:
        return f"OpenVINO refuses it: {last_line(error)}"
    return f"OpenVINO's CPU plugin does not take {left_out[0]}" if left_out else None


def _supported(model: Any, precision: str) -> Any:
    return core().query_model(model, "CPU", {"INFERENCE_PRECISION_HINT": precision, **settings(model)})


def _left_out(model: Any, supported: Any) -> list[str]:
    """Kinds of operations of a model that are not among the supported ones."""
    operations = model.get_ops()
    return [op.get_type_name() for op in operations if op.get_friendly_name() not in supported]
