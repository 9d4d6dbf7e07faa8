"""A network as an OpenVINO model over shared weights, with the guards it needs; which networks are taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.engines.guards.float16 import in_float16
from intarsia.engines.guards.kinds import Checks
from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.openvino.arm import add_up_in_parts, mend
from intarsia.engines.openvino.checks import add_checks
from intarsia.engines.openvino.core import core, last_line, settings
from intarsia.engines.openvino.corrections import correct, fold, fold_tables, has_short_weights, separate
from intarsia.engines.openvino.halves import shorten
from intarsia.engines.openvino.idioms import show_norms, show_rotations
from intarsia.engines.openvino.limits import OpenVINOLimits, RoundedProductLimits, refuses
from intarsia.engines.openvino.packed import PackedWeight, as_inputs, put_in
from intarsia.engines.processor import is_arm
from intarsia.engines.quantized import is_quantized
from intarsia.errors import EngineError
from intarsia.network import Network
from intarsia.network.serialize import to_proto, weights_as_inputs

# A network as an OpenVINO model over shared weights, with the guards it needs.


def guarded(
    net: Network, guards: bool, *, rounded: bool = False, float16: bool = False
) -> tuple[Any, object, Checks | None]:
    """The model to compile, what keeps its weights alive, and what must be checked at a call.

    `rounded` says that products will round activations to integers, `float16` that OpenVINO will compute all
    in it.
    """
    model, weights, packed = read(net)
    if rounded:
        fold_tables(model)
    elif is_quantized(net) or has_short_weights(model):
        fold(model)  # with integers OpenVINO would round activations as well
    shorten(model)
    show_rotations(model)
    separate(model)
    limits = RoundedProductLimits(net) if rounded else OpenVINOLimits(net)
    checks = None
    if guards:
        planned = plan_guards(net, limits)
        checks = add_checks(net, model, in_float16(net, planned) if float16 else planned, float16=float16)
    if float16:
        show_norms(model)
    if float16 and is_arm():
        add_up_in_parts(model)
    if is_arm():
        mend(model)  # guards too are layers
    return model, (weights, put_in(model, packed)), checks


def read(net: Network) -> tuple[Any, object, list[PackedWeight]]:
    """The model, its weights put in as constants over torch's own memory; the reader would copy them.

    Weights in few bits are still inputs, and are returned.
    """
    import openvino

    reason = refuses(net)
    if reason is not None:
        raise EngineError(reason)
    proto, weights = to_proto(net)
    packed = as_inputs(net, proto, weights)
    weights_as_inputs(proto, weights)
    model = core().read_model(proto.SerializeToString(), b"")
    parameters = {name: p for p in model.get_parameters() for name in p.output(0).get_names()}
    remaining = []
    for name, array in weights.items():
        data = np.ascontiguousarray(array.numpy())
        remaining.append(data)
        constant = openvino.op.Constant(_shared(openvino, data, array.dtype))
        constant.set_friendly_name(name)
        parameter = parameters[name]
        constant.output(0).set_names(parameter.output(0).get_names())  # guards look for values by name
        for reader in parameter.output(0).get_target_inputs():
            reader.replace_source_output(constant.output(0))
        model.remove_parameter(parameter)
    correct(model)
    model.validate_nodes_and_infer_types()
    return model, remaining, packed


def _shared(openvino: Any, data: np.ndarray[Any, Any], dtype: ir.DataType) -> Any:
    if dtype == ir.DataType.BFLOAT16:
        return openvino.Tensor(data.view(np.uint16), data.shape, openvino.Type.bf16)
    return openvino.Tensor(data, shared_memory=True)


# Which small networks OpenVINO's CPU plugin takes, asked of many at once.
#
# Many nodes are asked about in one question, as parts of one model: `query_model` takes about as long for one
# node as for a hundred.


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
        model, weights, packed = read(net)
        memory = put_in(model, packed)
        if guards:
            plan_guards(net, OpenVINOLimits(net), floats=False)
    except Exception as error:
        return f"OpenVINO refuses it: {last_line(error)}"
    if any(op.get_type_name() == "FrameworkNode" for op in model.get_ops()):
        return "OpenVINO's ONNX reader does not know it"
    return model, (weights, memory)


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
