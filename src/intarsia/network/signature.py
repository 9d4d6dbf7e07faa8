"""The call of a functional, `FLayerInfo`, recorded on the layers it made and valid while they are edited."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.edit.graph import Replacements
from intarsia.network.network import Layer, Network, Tensor, default_net, under_guard

P = ParamSpec("P")
R = TypeVar("R")
_INFO = "intarsia.call"  # key of a layer's `meta` for the call that made it


class Form(NamedTuple):
    """The name of a functional and its parameters."""

    kind: str
    signature: inspect.Signature

    @staticmethod
    def of(function: Callable[..., Any]) -> Form:
        return Form(function.__name__, inspect.signature(function))


class FLayerInfo:
    """The call that made a layer: the functional's name, its arguments and its results.

    The layers say what the arguments are now: each tensor is what they read in its place.

    >>> import torch
    >>> from intarsia.network import FLayerInfoMemo, Network, Tensor, functional as F, net_guard
    >>> net = Network()
    >>> with net_guard(net):
    ...     y = F.softmax(Tensor("x", torch.float32, (2, 3)), axis=1)
    ...     info = FLayerInfoMemo.instance().get(y.get_parent())
    >>> info.layer_kind, info.get_input("axis")
    ('softmax', 1)
    """

    __slots__ = ("_arguments", "_log", "_outputs", "_reads", "_time", "layer_kind", "signature")

    def __init__(
        self,
        log: Replacements,
        form: Form,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        outputs: Any,
        nodes: list[ir.Node],
    ) -> None:
        self._log, self._time = log, log.clock
        self.layer_kind: str = form.kind
        self.signature: inspect.Signature = form.signature
        self._arguments, self._outputs = arguments, outputs
        self._reads = [(node, node.inputs) for node in nodes]

    @property
    def raw_inputs(self) -> dict[str, Any]:
        """Every argument by name, with defaults, as the network is now."""
        args, kwargs = self._current_arguments()
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    @property
    def raw_outputs(self) -> Any:
        """The results in the functional's own structure, as the network is now."""
        return _map(self._outputs, self._follow)

    def _follow(self, tensor: Tensor) -> Tensor:
        return Tensor.of(self._log.follow(tensor.value, self._time))

    def _current_arguments(self) -> Any:
        now = self._now() or {}
        return _map(self._arguments, lambda t: now[t] if t in now else self._follow(t))

    def _now(self) -> dict[Tensor, Tensor] | None:
        """The current tensor for each that the layers read; None if one became two, or they read others."""
        now: dict[Tensor, Tensor] = {}
        arguments = {*tensors_in(self._arguments)}
        for node, before in self._reads:
            for old, new in zip(before, node.inputs, strict=False):  # a removed layer reads nothing
                if old is None or new is None:
                    continue
                was, known = Tensor.of(old), Tensor.of(new)
                if now.setdefault(was, known) != known or (
                    was not in arguments and self._follow(was) != known
                ):
                    return None
        return now

    def is_true(self) -> bool:
        """Whether a layer of it and all its tensors are still in the network, and its arguments are known."""
        if self._now() is None or all(node.graph is None for node, _ in self._reads):
            return False
        tensors = tensors_in((*self._current_arguments(), self.raw_outputs))
        return all(tensor.value.graph is not None for tensor in tensors)

    def get_input(self, name: str) -> Any:
        inputs = self.raw_inputs
        if name not in inputs:
            raise NetworkError(f"{self.layer_kind} has no argument {name!r}; it has {list(inputs)}")
        return inputs[name]

    def clone_inputs(self) -> dict[str, Any]:
        """A copy of the arguments, which can be changed and passed to the functional."""
        return self.raw_inputs

    def replace_input_with(self, old: Tensor, new: Tensor) -> None:
        """Replace `old` by `new` in this call, and in the layers that it made."""
        if new.value.graph is None:
            raise NetworkError(f"{new.name} was removed and cannot be read")
        reads = [
            (node, index)
            for node, _ in self._reads
            for index, value in enumerate(node.inputs)
            if value is old.value and node.graph is not None
        ]
        if not reads:
            raise NetworkError(f"{self.layer_kind} does not read {old.name}")
        for node, index in reads:
            Layer(node).replace_input(index, new)

    def add_node(self, node: ir.Node) -> None:
        """Count another layer among those that the call made."""
        self._reads.append((node, node.inputs))

    def has_made(self, node: ir.Node) -> bool:
        """Whether the call made this layer."""
        return any(node is one for one, _ in self._reads)

    def replace_outputs_uses_with(self, net: Network, new_outputs: Any) -> None:
        """Replace this call's results by `new_outputs` in all readers, matched by position or key."""
        olds, news = list(tensors_in(self.raw_outputs)), list(tensors_in(new_outputs))
        if len(olds) != len(news):
            raise NetworkError(f"{self.layer_kind} has {len(olds)} results; {len(news)} replace them")
        for old, new in zip(olds, news, strict=True):
            net.replace_all_uses(old, new)


# Functionals of one layer without attributes, by operator and number of operands. The layer itself says what
# the call was, so nothing is recorded.
_SINGLE_LAYER: dict[tuple[str, int], Form] = {}


def single_layer(op_type: str, function: Callable[..., Any]) -> None:
    """Register a functional whose calls are read from layers of this kind, with as many operands."""
    form = Form.of(function)
    _SINGLE_LAYER[op_type, len(form.signature.parameters)] = form


class FLayerInfoMemo:
    """The calls that made the layers of one network."""

    def __init__(self, net: Network) -> None:
        self._net = net

    @staticmethod
    def instance() -> FLayerInfoMemo:
        """The memo of the network under guard."""
        return FLayerInfoMemo(default_net())

    @staticmethod
    def of(net: Network) -> FLayerInfoMemo:
        return FLayerInfoMemo(net)

    def _node(self, layer: str | Layer) -> ir.Node | None:
        node = self._net.node_named(layer) if isinstance(layer, str) else layer.node
        return node if node is not None and node.graph is self._net.graph else None

    def add(self, layer: str | Layer, info: FLayerInfo) -> None:
        """Record the call that made a layer."""
        node = self._node(layer)
        if node is None:
            raise NetworkError(f"network {self._net.name} has no layer {layer}")
        if not info.has_made(node):
            info.add_node(node)
        node.meta[_INFO] = info

    def get(self, layer: str | Layer) -> FLayerInfo | None:
        """The call that made a layer's result; None if none is recorded or it is no longer true."""
        node = self._node(layer)
        if node is None:
            return None
        info: FLayerInfo | None = node.meta.get(_INFO)
        if info is None or not info.has_made(node):  # a copied layer has the call of its original
            form = _SINGLE_LAYER.get((node.op_type, len(node.inputs)))
            if form is None or node.domain or node.attributes or None in node.inputs:
                return None
            operands = tuple(Tensor.of(value) for value in node.inputs if value is not None)
            replacements = self._net.replacements
            result = Tensor.of(replacements.follow(node.outputs[0], 0))
            info = FLayerInfo(replacements, form, (operands, {}), result, [node])
        return info if info.is_true() else None

    def remove(self, layer: str | Layer) -> None:
        """Remove the record of the call that made a layer."""
        if (node := self._node(layer)) is not None:
            node.meta.pop(_INFO, None)


def record_signature(function: Callable[P, R]) -> Callable[P, R]:
    """Make a functional record its calls on the layers that make its results.

    If recorded functionals call each other, the outermost call is recorded.
    """
    form = Form.of(function)

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        net = under_guard.net
        if net is None:
            operand = next(tensors_in((args, kwargs)), None)
            if operand is None:
                return function(*args, **kwargs)  # it has no network to add layers to
            net = operand.network
        nodes: list[ir.Node] = []
        outer, net.new_nodes = net.new_nodes, nodes
        try:
            result = function(*args, **kwargs)
        finally:
            net.new_nodes = outer
        if not nodes:
            return result
        if outer is not None:
            outer += nodes
        info = FLayerInfo(net.replacements, form, (args, kwargs), result, nodes)
        for tensor in tensors_in(result):
            # A functional may return a tensor that existed before; that one keeps its own call.
            node = tensor.value.producer()
            if node is not None and node in nodes:
                node.meta[_INFO] = info
        return result

    return recorded


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a nested structure, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
