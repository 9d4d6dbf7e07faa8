"""What a functional was called with: `FLayerInfo`, kept per layer and true through rewrites."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.edit.journal import Recorded
from intarsia.network.edit.raw import name_of, producer_of
from intarsia.network.network import Layer, Network, Tensor, default_net, here

P = ParamSpec("P")
R = TypeVar("R")


class Form(NamedTuple):
    """What a functional is called, and with what."""

    kind: str
    signature: inspect.Signature

    @staticmethod
    def of(function: Callable[..., Any]) -> Form:
        return Form(function.__name__, inspect.signature(function))


# A call as it was: form, arguments, results, the layers it made, and the memo's clock then.
Call = tuple[Form, tuple[Any, ...], dict[str, Any], Any, list[ir.Node], int]

# Of functionals that are one layer without attributes: by operator and number of operands. Such a layer says
# itself what was called, so nothing is recorded.
_PLAIN: dict[tuple[str, int], Form] = {}


def plain_form(op_type: str, function: Callable[..., Any]) -> None:
    """Let a layer of this kind, with as many operands as the function takes, stand for its call."""
    form = Form.of(function)
    _PLAIN[op_type, len(form.signature.parameters)] = form


class FLayerInfo:
    """The call that made a layer: the functional's name, its arguments and its results.

    >>> import torch
    >>> from intarsia.network import FLayerInfoMemo, Network, Tensor, functional as F, net_guard
    >>> net = Network()
    >>> with net_guard(net):
    ...     y = F.softmax(Tensor("x", torch.float32, (2, 3)), axis=1)
    ...     info = FLayerInfoMemo.instance().get(y.get_parent())
    >>> info.layer_kind, info.get_input("axis")
    ('softmax', 1)
    """

    __slots__ = ("_call", "_made", "_memo", "_outputs", "_time", "layer_kind", "signature")

    def __init__(self, memo: FLayerInfoMemo, call: Call) -> None:
        form, args, kwargs, self._outputs, self._made, self._time = call
        self.layer_kind, self.signature = form
        self._call = (args, kwargs)
        self._memo = memo

    # Tensors that were replaced since the call are looked up when asked for: most never are.
    @property
    def raw_inputs(self) -> dict[str, Any]:
        """Every argument by name, defaults filled in, as the network stands now."""
        bound = self.signature.bind(*self._call[0], **self._call[1])
        bound.apply_defaults()
        return {name: _map(value, self._now) for name, value in bound.arguments.items()}

    @property
    def raw_outputs(self) -> Any:
        """The results, in the structure the functional gave them, as the network stands now."""
        return _map(self._outputs, self._now)

    def _now(self, tensor: Tensor) -> Tensor:
        return Tensor.of(self._memo.follow(tensor.value, self._time))

    def say(self, call: tuple[Any, ...], outputs: Any, time: int) -> None:
        """Let this be the call from now on, its tensors named as they were at `time`."""
        self._call, self._outputs, self._time = call, outputs, time

    def is_true(self) -> bool:
        """Whether every tensor it mentions is still in the network, and read where it was."""
        if any(self._memo.is_rewired(node, self._time) for node in self._made):
            return False
        return all(
            self._memo.follow(tensor.value, self._time).graph is not None
            for tensor in tensors_in((*self._call, self._outputs))
        )

    def get_input(self, name: str) -> Any:
        inputs = self.raw_inputs
        if name not in inputs:
            raise NetworkError(f"{self.layer_kind} has no argument {name!r}; it has {list(inputs)}")
        return inputs[name]

    def clone_inputs(self) -> dict[str, Any]:
        """The arguments, to be changed and passed to the functional anew."""
        return self.raw_inputs

    def replace_input_with(self, old: Tensor, new: Tensor) -> None:
        """Let this call, and the layers it made, read `new` where they read `old`."""
        if new.value.graph is None:
            raise NetworkError(f"{new.name} was removed and cannot be read")
        redirected = False
        for node in self._made:
            for index, value in enumerate(node.inputs):
                if value is old.value and node.graph is not None:
                    Layer(node).replace_input(index, new)
                    redirected = True
        if not redirected:
            raise NetworkError(f"{self.layer_kind} does not read {old.name}")
        self.mention(new.network, old, new)

    def mention(self, net: Network, old: Tensor, new: Tensor) -> None:
        """Say `new` where this said `old`."""
        if net.journal is not None:
            net.journal.append((Recorded, self, self._call, self._outputs, self._time))
        now = tuple(_map(part, self._now) for part in self._call)
        call = tuple(_map(part, lambda t: new if t == old else t) for part in now)
        self.say(call, self.raw_outputs, self._memo.clock)

    def made(self, node: ir.Node) -> bool:
        """Whether the call made this layer."""
        return node in self._made

    def claim(self, node: ir.Node) -> None:
        """Let this be the call that made a layer."""
        if node not in self._made:
            self._made = [*self._made, node]

    def stands_for(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether the call is this one layer and mentions this tensor once."""
        if self._made != [node] or self._memo.is_rewired(node, self._time):
            return False
        return [t.value for t in tensors_in(_map(self._call, self._now))].count(value) == 1

    def replace_outputs_uses_with(self, net: Network, new_outputs: Any) -> None:
        """Redirect the readers of this call's results to `new_outputs`, matched by position or key."""
        olds, news = list(tensors_in(self.raw_outputs)), list(tensors_in(new_outputs))
        if len(olds) != len(news):
            raise NetworkError(
                f"{self.layer_kind} made {len(olds)} tensors and {len(news)} are given instead"
            )
        for old, new in zip(olds, news, strict=True):
            net.replace_all_uses(old, new)

    replace_output_uses_with = replace_outputs_uses_with


class _OwnRecord(FLayerInfo):
    """The call of a functional that is one layer, as the layer itself says it."""

    __slots__ = ("_node",)

    def __init__(self, memo: FLayerInfoMemo, form: Form, node: ir.Node) -> None:
        made = Tensor.of(memo.follow(node.outputs[0], 0))
        super().__init__(memo, (form, _reads(node), {}, made, [node], memo.clock))
        self._node = node

    @staticmethod
    def of(memo: FLayerInfoMemo, node: ir.Node) -> FLayerInfo | None:
        """None if the layer is not one functional's alone."""
        form = _PLAIN.get((node.op_type, len(node.inputs)))
        if form is None or node.domain or node.attributes or None in node.inputs:
            return None
        return _OwnRecord(memo, form, node)

    @property
    def raw_inputs(self) -> dict[str, Any]:
        if self._node.graph is None:
            return super().raw_inputs  # as it was when the layer was asked
        return dict(zip(self.signature.parameters, _reads(self._node), strict=True))

    def is_true(self) -> bool:
        return self._node.graph is not None and self.raw_outputs.value.graph is not None

    def mention(self, net: Network, old: Tensor, new: Tensor) -> None:
        pass  # it says what the layer reads


def _reads(node: ir.Node) -> tuple[Tensor, ...]:
    return tuple(Tensor.of(value) for value in node.inputs if value is not None)


class FLayerInfoMemo:
    """The calls of one network, by layer name, but for those that the layers say themselves."""

    def __init__(self, net: Network) -> None:
        self._net = net
        self.infos: dict[str, FLayerInfo | Call] = {}  # most calls are never asked for
        self._moves: dict[ir.Value, tuple[Any, ...]] = {}  # of each value: time, new value, time, ...
        self._rewired: dict[ir.Node, tuple[int, ...]] = {}  # when single reads of a layer were redirected
        self.clock = 0  # counts moves, so that a call sees those made after it and no others

    @staticmethod
    def instance() -> FLayerInfoMemo:
        """The memo of the network under guard."""
        return FLayerInfoMemo.of(default_net())

    @staticmethod
    def of(net: Network) -> FLayerInfoMemo:
        return net.memo

    def add(self, layer_name: str, info: FLayerInfo) -> None:
        """Let this be the call that made a layer."""
        if (layer := self._net.get_layer_by_name(layer_name)) is not None:
            info.claim(layer.node)
        self.infos[layer_name] = info

    def get(self, layer: str | Layer) -> FLayerInfo | None:
        """The call that made this layer's result; None if none was recorded or it is true no more."""
        name = layer if isinstance(layer, str) else layer.name
        found = self._net.get_layer_by_name(name) if isinstance(layer, str) else layer
        if found is None or found.node.graph is not self._net.graph:
            return None
        info = self.infos.get(name)
        if isinstance(info, tuple):
            info = self.infos[name] = FLayerInfo(self, info)
        if info is None or not info.made(found.node):
            info = _OwnRecord.of(self, found.node)
        return info if info is not None and info.is_true() else None

    def remove(self, layer: str | Layer) -> None:
        self.infos.pop(layer if isinstance(layer, str) else layer.name, None)

    def restore(self, name: str, info: FLayerInfo | Call) -> None:
        self.infos[name] = info

    def uses_moved(self, old: ir.Value, new: ir.Value) -> None:
        """Called by the network when readers of `old` read `new` from now on."""
        self.clock = clock = self.clock + 1
        moves = self._moves
        moves[old] = (*moves[old], clock, new) if old in moves else (clock, new)

    def uses_moved_back(self, old: ir.Value) -> None:
        """Called by the network when the last move of `old` is undone."""
        self._moves[old] = self._moves[old][:-2]

    def read_moved(self, net: Network, node: ir.Node, old: ir.Value | None, new: ir.Value) -> None:
        """Called by the network when one read of a layer was redirected.

        The call of a functional that is this layer alone, and read `old` once, says `new` from now on.
        """
        info = self.infos.get(name_of(node))
        if isinstance(info, tuple):
            info = self.infos[name_of(node)] = FLayerInfo(self, info)
        told = old is not None and isinstance(info, FLayerInfo) and info.stands_for(node, old)
        self.clock += 1
        self._rewired[node] = (*self._rewired.get(node, ()), self.clock)
        if told and old not in node.inputs:
            info.mention(net, Tensor.of(old), Tensor.of(new))  # type: ignore[union-attr, arg-type]

    def read_moved_back(self, node: ir.Node) -> None:
        """Called by the network when the last redirection of one of a layer's reads is undone."""
        self._rewired[node] = self._rewired.get(node, ())[:-1]

    def is_rewired(self, node: ir.Node, time: int) -> bool:
        """Whether a single read of a layer was redirected after `time`."""
        return self._rewired.get(node, (0,))[-1:] > (time,)

    def follow(self, value: ir.Value, time: int) -> ir.Value:
        """What stands now for a value that was mentioned at `time`."""
        while moves := self._moves.get(value):
            later = next((place for place in range(0, len(moves), 2) if moves[place] > time), None)
            if later is None:
                return value
            time, value = moves[later : later + 2]
        return value


def record_signature(function: Callable[P, R]) -> Callable[P, R]:
    """Let a functional record its call on the layers that make its results.

    Where recorded functionals call each other, the outermost call is what the layer stands for.
    """
    form = Form.of(function)

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        net = here.net
        if net is None:
            given = next(tensors_in((args, kwargs)), None)
            if given is None:
                return function(*args, **kwargs)  # which has no network to add to either
            net = given.network
        made: list[ir.Node] = []
        outer, net.made = net.made, made
        try:
            result = function(*args, **kwargs)
        finally:
            net.made = outer
        if not made:
            return result
        if outer is not None:
            outer += made
        memo = net.memo
        call: Call = (form, args, kwargs, result, made, memo.clock)
        if type(result) is Tensor:
            # A functional may hand back a tensor that was there before: that one keeps its own call.
            tensor: Any = result
            node: Any = tensor.value._producer
            if node is made[-1] or node in made:
                memo.infos[node._name] = call
            return result
        info = FLayerInfo(memo, call)
        for tensor in tensors_in(result):
            node = producer_of(tensor.value)
            if node is not None and node in made:
                memo.infos[name_of(node)] = info
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
