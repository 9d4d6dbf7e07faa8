"""A network as an OpenVINO model over shared weights, with the guards it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.engines.guards.checks import Checks
from intarsia.engines.guards.overflow import in_float16
from intarsia.engines.guards.planner import plan_guards
from intarsia.engines.openvino.arm import mend
from intarsia.engines.openvino.checks import add_checks
from intarsia.engines.openvino.core import core
from intarsia.engines.openvino.exact import correct
from intarsia.engines.openvino.halves import shorten
from intarsia.engines.openvino.idioms import show_norms, show_rotations
from intarsia.engines.openvino.limits import OpenVINOLimits, RoundedProductLimits, refuses
from intarsia.engines.openvino.partial_sums import add_up_in_parts
from intarsia.engines.openvino.tables import fold, fold_tables, has_short_weights
from intarsia.engines.openvino.tied import separate
from intarsia.engines.processor import is_arm
from intarsia.engines.quantized import is_quantized
from intarsia.errors import EngineError
from intarsia.network import Network
from intarsia.network.serialize import to_proto, weights_as_inputs


def guarded(
    net: Network, guards: bool, *, rounded: bool = False, float16: bool = False
) -> tuple[Any, object, Checks | None]:
    """The model to compile, what keeps its weights alive, and what must be checked at a call.

    `rounded` says that products will round activations to integers, `float16` that OpenVINO will compute all
    in it.
    """
    model, weights = read(net)
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
    return model, weights, checks


def read(net: Network) -> tuple[Any, object]:
    """The model, its weights put in as constants over torch's own memory; the reader would copy them."""
    import openvino

    reason = refuses(net)
    if reason is not None:
        raise EngineError(reason)
    proto, weights = to_proto(net)
    weights_as_inputs(proto, weights)
    model = core().read_model(proto.SerializeToString(), b"")
    parameters = {name: p for p in model.get_parameters() for name in p.output(0).get_names()}
    kept = []
    for name, array in weights.items():
        data = np.ascontiguousarray(array.numpy())
        kept.append(data)
        constant = openvino.op.Constant(_shared(openvino, data, array.dtype))
        constant.set_friendly_name(name)
        parameter = parameters[name]
        constant.output(0).set_names(parameter.output(0).get_names())  # guards look for values by name
        for reader in parameter.output(0).get_target_inputs():
            reader.replace_source_output(constant.output(0))
        model.remove_parameter(parameter)
    correct(model)
    model.validate_nodes_and_infer_types()
    return model, kept


def _shared(openvino: Any, data: np.ndarray[Any, Any], dtype: ir.DataType) -> Any:
    if dtype == ir.DataType.BFLOAT16:
        return openvino.Tensor(data.view(np.uint16), data.shape, openvino.Type.bf16)
    return openvino.Tensor(data, shared_memory=True)
