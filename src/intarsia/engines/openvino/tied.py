"""Weights that several products read in different ways: OpenVINO packs them for one, and gives it to all.

OpenVINO knows packed weights by address and sizes. A square matrix that is multiplied by rows and by columns,
as in tied encoders and decoders, got the packed form of the first use. The copy costs the memory of one
weight.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from intarsia.engines.openvino.tables import fold, is_constant

_PRODUCTS = frozenset(
    {"Convolution", "ConvolutionBackpropData", "GroupConvolution", "GroupConvolutionBackpropData", "MatMul"}
)


def separate(model: Any) -> None:
    """Give memory of its own to every way in which products read one weight.

    OpenVINO (2026.4) knows packed weights by where they lie and by their sizes. Of a square matrix that is
    read by rows here and by columns there, and of filters that are used in both directions, there was one
    packed form: the others got wrong numbers. A matrix that is read in another shape may be mistaken, too.
    """
    import openvino

    for ways in _readers(model).values():
        for index, ports in enumerate(list(ways.values())[1:]):
            for port in ports:
                if port.get_source_output().get_node().get_type_name() != "Constant":
                    fold(openvino.Model([port.get_source_output()], [], "weight"))
            constant = ports[0].get_source_output().get_node()
            memory = openvino.Tensor(constant.get_element_type(), constant.get_output_shape(0))
            constant.get_tensor_view().copy_to(memory)
            copy = openvino.op.Constant(memory)
            copy.set_friendly_name(f"{constant.get_friendly_name()}_read_otherwise_{index}")
            for port in ports:
                port.replace_source_output(copy.output(0))


def _readers(model: Any) -> dict[object, dict[object, list[Any]]]:
    """The ports of products, by the place of the weight that they read and its packed sizes, and the way."""
    found: dict[object, dict[object, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for product in model.get_ordered_ops():
        if product.get_type_name() not in _PRODUCTS:
            continue
        attributes = product.get_attributes()
        flags = [attributes.get(name) for name in ("transpose_a", "transpose_b")]
        for port in product.inputs():
            value = port.get_source_output()
            if value.get_partial_shape().is_dynamic or not is_constant(value.get_node()):
                continue
            shape = tuple(value.get_shape())
            place, changes = _origin(value.get_node())
            way = (product.get_type_name(), port.get_index(), *flags, shape, changes)
            found[place, _packed_sizes(shape, way)][way].append(port)
    return found


def _packed_sizes(shape: tuple[int, ...], way: tuple[object, ...]) -> tuple[int, ...]:
    """Sizes that two ways must differ in, not to be mistaken for each other: of a matrix rows and columns."""
    kind, port, _, turned = way[:4]
    if kind != "MatMul" or port != 1 or len(shape) < 2:
        return tuple(sorted(shape))
    *rest, rows, columns = shape
    return (*rest, columns, rows) if turned else shape


def _origin(node: Any) -> tuple[int, tuple[object, ...]]:
    """Where the weight lies that a constant value is made of, and by which layers it is."""
    changes: list[object] = []
    while node.get_type_name() != "Constant":
        told = [value.get_node() for value in node.input_values()[1:]]
        numbers = [
            one.data.tobytes() if one.get_type_name() == "Constant" else one.get_name() for one in told
        ]
        changes.append((node.get_type_name(), repr(node.get_attributes()), *numbers))
        node = node.input_value(0).get_node()
    return node.data.ctypes.data, tuple(changes)
