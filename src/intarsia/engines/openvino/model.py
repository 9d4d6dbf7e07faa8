"""A network as an OpenVINO model over shared weights, with the guards it needs; which networks it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.cache.machine import is_arm
from intarsia.engines.guards.float16 import LARGEST_HALF, in_float16
from intarsia.engines.guards.kinds import (
    AnyGuard,
    Checks,
    Guards,
    Index,
    NonZero,
    Product,
    Quotient,
    ValueGuard,
)
from intarsia.engines.guards.planner import LOOKED_AT, plan_guards
from intarsia.engines.openvino.arm import add_up_in_parts, mend
from intarsia.engines.openvino.core import core, last_line, settings
from intarsia.engines.openvino.corrections import (
    PackedWeight,
    as_inputs,
    correct,
    fold,
    fold_tables,
    has_short_weights,
    put_in,
    separate,
)
from intarsia.engines.openvino.halves import shorten
from intarsia.engines.openvino.idioms import show_norms, show_rotations
from intarsia.engines.openvino.limits import OpenVINOLimits, refuses
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
    model, weights, packed = read(net)
    if rounded:
        fold_tables(model)
    elif net.is_quantized() or has_short_weights(model):
        fold(model)  # with integers OpenVINO would round activations as well
    shorten(model)
    show_rotations(model)
    separate(model)
    limits = OpenVINOLimits(net, rounded)
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
    """The part of each network that the plugin refuses; None if it accepts all.

    Each query costs about the same, so all networks are checked as independent parts of one model. Networks
    without a result are then checked one by one.
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
    """The ids of the models that are accepted as parts of one."""
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
    except Exception:  # one of them, or all together: each is checked by itself, and the engine says which
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


# Guards looked at: of inputs before the engine runs, of other tensors by layers of the model itself.

_HALF_SCALE = 2.0**-20  # so that a million numbers can be added up in float16


def add_checks(net: Network, model: Any, guards: Guards, *, float16: bool = False) -> Checks:
    """Let the model compute a number for each guard that is not of an input, in one more output.

    If OpenVINO computes in `float16`, the numbers are scaled to fit.
    """
    from openvino import opset13 as ov

    tensors = {
        name: output
        for operation in model.get_ordered_ops()
        if operation.get_type_name() != "Result"
        for output in operation.outputs()
        for name in output.get_names()
    }
    inputs = {t.name for t in net.get_inputs() if t.dtype in LOOKED_AT}
    # Sizes that the reader knows it has computed itself, with 64 bits.
    folded = guards.sizes - set(tensors)
    on_inputs, others = guards.by_input(inputs)
    computed = [guard for guard in others if not folded.intersection(guard.tensors)]
    for name, index in guards.held.items():
        if name in tensors:
            _hold(ov, tensors[name], index, tensors)
    for name in guards.divided:
        if name in tensors:
            _enlarge(ov, tensors[name].get_node())
    number_of = _number_in_float16 if float16 else _number
    numbers = [number_of(ov, guard, tensors) for guard in computed]
    if numbers:
        flat = [ov.reshape(number, ov.constant(np.array([1], np.int64)), False) for number, _ in numbers]
        model.add_results([ov.result(ov.concat(flat, 0) if len(flat) > 1 else flat[0])])
        model.validate_nodes_and_infer_types()
    return Checks(on_inputs, computed, np.array([most for _, most in numbers], dtype=np.float32))


def _number(ov: Any, guard: AnyGuard, tensors: dict[str, Any]) -> tuple[Any, float]:
    """A scalar, and the most it may be; NaN is more than anything."""
    if isinstance(guard, ValueGuard) and guard.total:
        x = tensors[guard.tensor]
        return ov.reduce_l1(_float(ov, x), _axes(ov, x), False), guard.high
    return _count(ov, _holds(ov, guard, tensors)), 0.5


def _number_in_float16(ov: Any, guard: AnyGuard, tensors: dict[str, Any]) -> tuple[Any, float]:
    """The same in float16, where a limit that is larger than all numbers would hold for infinity, too."""
    x = tensors[guard.tensors[0]]
    if not isinstance(guard, ValueGuard) or x.get_element_type().is_integral_number():
        raise EngineError(f"{guard}, and float16 cannot hold such numbers exactly")
    if guard.total:
        # Whether rounding leaves small numbers is all the same: infinities and NaN stay.
        scaled = ov.multiply(_float(ov, x), _scalar(ov, _HALF_SCALE))
        return _magnitudes(ov, scaled), min(guard.high * _HALF_SCALE, LARGEST_HALF)
    low, high = (
        bound if math.isinf(bound) else min(max(bound, -LARGEST_HALF), LARGEST_HALF)
        for bound in (guard.low, guard.high)
    )
    return _count(ov, _holds(ov, ValueGuard(guard.tensor, low, high), tensors)), 0.5


def _magnitudes(ov: Any, x: Any) -> Any:
    """Their sum; of images within each channel first, as they lie in memory."""
    if len(x.get_output_partial_shape(0)) == 4:
        within = ov.reduce_l1(x, ov.constant(np.array([2, 3])), True)
        return ov.reduce_l1(within, ov.constant(np.array([0, 1])), True)
    return ov.reduce_l1(
        ov.reshape(x, ov.constant(np.array([1, -1])), False), ov.constant(np.array([1])), True
    )


def _holds(ov: Any, guard: AnyGuard, tensors: dict[str, Any]) -> Any:
    """Where a guard holds, element by element; comparisons with NaN are false."""
    if isinstance(guard, Product):
        product = ov.multiply(_float(ov, tensors[guard.one]), _float(ov, tensors[guard.other]))
        return ov.less_equal(ov.abs(product), _scalar(ov, guard.high))
    x = _float(ov, tensors[guard.tensors[0]])
    if isinstance(guard, Quotient):
        size, divisor = ov.abs(x), ov.abs(_float(ov, tensors[guard.divisor]))
        few = ov.less(size, ov.multiply(divisor, _scalar(ov, 2.0**24)))
        plain = ov.logical_and(ov.less(_scalar(ov, 1e-30), divisor), ov.less(divisor, _scalar(ov, 1e30)))
        return ov.logical_or(ov.logical_and(few, plain), ov.less(size, divisor))
    if isinstance(guard, NonZero):
        return ov.not_equal(x, _scalar(ov, 0.0))
    if isinstance(guard, Index):
        # From -n to n - 1: twice the index and one, at most 2 n - 1 in magnitude.
        twice = ov.add(ov.multiply(x, _scalar(ov, 2.0)), _scalar(ov, 1.0))
        sizes = _float(ov, _sizes(ov, guard, tensors))
        most = ov.subtract(ov.multiply(sizes, _scalar(ov, 2.0)), _scalar(ov, 1.0))
        return ov.less_equal(ov.abs(twice), most)
    assert isinstance(guard, ValueGuard)
    if guard.low == -math.inf:
        return ov.less_equal(x, _scalar(ov, guard.high))
    if guard.high == math.inf:
        return ov.less_equal(ov.negative(x), _scalar(ov, -guard.low))
    middle, reach = (guard.high + guard.low) / 2, (guard.high - guard.low) / 2
    shifted = ov.subtract(x, _scalar(ov, middle)) if middle else x
    return ov.less_equal(ov.abs(shifted), _scalar(ov, reach))


def _hold(ov: Any, output: Any, index: Index, tensors: dict[str, Any]) -> None:
    """Clamp a layer's indices, because its kernel would access memory out of bounds."""
    indices = tensors[index.tensor]
    sizes = ov.convert(_sizes(ov, index, tensors), indices.get_element_type())
    one = ov.constant(np.array(1), indices.get_element_type())
    inside = ov.maximum(ov.minimum(indices, ov.subtract(sizes, one)), ov.negative(sizes))
    output.get_node().input(1).replace_source_output(inside.output(0))


def _enlarge(ov: Any, division: Any) -> None:
    """Multiply both operands of a division by 2**64 where the divisor's reciprocal would overflow.

    Both products are exact, unless the dividend's is infinite, and then so is the quotient.
    """
    dividend, divisor = division.input_value(0), division.input_value(1)
    kind = divisor.get_element_type()
    small = ov.less(ov.abs(divisor), ov.constant(np.array(2.0**-100), kind))
    factor = ov.select(small, ov.constant(np.array(2.0**64), kind), ov.constant(np.array(1.0), kind))
    division.input(0).replace_source_output(ov.multiply(dividend, factor).output(0))
    division.input(1).replace_source_output(ov.multiply(divisor, factor).output(0))


def _sizes(ov: Any, index: Index, tensors: dict[str, Any]) -> Any:
    axes = index.axes[0] if len(index.axes) == 1 else list(index.axes)
    shape = ov.shape_of(tensors[index.data])
    rank = len(tensors[index.data].get_partial_shape())
    picked = np.array(axes, dtype=np.int64) % rank
    return ov.gather(shape, ov.constant(picked), ov.constant(np.int64(0)))


def _count(ov: Any, holds: Any) -> Any:
    """The number of elements for which a condition does not hold."""
    misses = ov.select(holds, _scalar(ov, 0.0), _scalar(ov, 1.0))
    return ov.reduce_sum(misses, _axes(ov, misses.output(0)), False)


def _axes(ov: Any, output: Any) -> Any:
    return ov.constant(np.arange(len(output.get_partial_shape()), dtype=np.int64))


def _float(ov: Any, output: Any) -> Any:
    return output if output.get_element_type().get_type_name() == "f32" else ov.convert(output, "f32")


def _scalar(ov: Any, value: float) -> Any:
    return ov.constant(np.float32(value))
