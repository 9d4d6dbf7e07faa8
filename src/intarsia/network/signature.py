"""What a functional was called with: `FLayerInfo`, kept per layer and true through rewrites."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network.network import Layer, Network, Tensor, default_net

P = ParamSpec("P")
R = TypeVar("R")


class FLayerInfo:
    """The call that made a layer: the functional's name, its arguments and its results."""

    __slots__ = ("_bound", "_call", "layer_kind", "raw_outputs", "signature")

    def __init__(
        self,
        kind: str,
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Any,
    ) -> None:
        self.layer_kind = kind
        self.signature = signature
        self.raw_outputs = outputs
        self._call = (args, kwargs)
        self._bound: dict[str, Any] | None = None

    @property
    def raw_inputs(self) -> dict[str, Any]:
        """Every argument by name, defaults filled in; bound on first use, as most are never asked for."""
        if self._bound is None:
            bound = self.signature.bind(*self._call[0], **self._call[1])
            bound.apply_defaults()
            self._bound = dict(bound.arguments)
        return self._bound

    def get_input(self, name: str) -> Any:
        if name not in self.raw_inputs:
            raise NetworkError(f"{self.layer_kind} has no argument {name!r}; it has {list(self.raw_inputs)}")
        return self.raw_inputs[name]

    def clone_inputs(self) -> dict[str, Any]:
        """The arguments, to be changed and passed to the functional anew."""
        return dict(self.raw_inputs)

    def replace_input_with(self, old: Tensor, new: Tensor) -> None:
        """Let the recorded call mention `new` where it mentioned `old`."""
        self._bound = {name: _swap(value, old, new) for name, value in self.raw_inputs.items()}

    def replace_outputs_uses_with(self, net: Network, new_outputs: Any) -> None:
        """Redirect the readers of this call's results to `new_outputs`, matched by position or key."""
        olds, news = list(tensors_in(self.raw_outputs)), list(tensors_in(new_outputs))
        if len(olds) != len(news):
            raise NetworkError(
                f"{self.layer_kind} made {len(olds)} tensors and {len(news)} are given instead"
            )
        for old, new in zip(olds, news, strict=True):
            net.replace_all_uses(old, new)


class FLayerInfoMemo:
    """The calls of one network, by layer name."""

    def __init__(self) -> None:
        self._infos: dict[str, FLayerInfo] = {}
        self._mentions: dict[ir.Value, dict[FLayerInfo, None]] = {}

    @staticmethod
    def instance() -> FLayerInfoMemo:
        """The memo of the network under guard."""
        return FLayerInfoMemo.of(default_net())

    @staticmethod
    def of(net: Network) -> FLayerInfoMemo:
        if net.memo is None:
            net.memo = FLayerInfoMemo()
        return net.memo

    def add(self, layer_name: str, info: FLayerInfo) -> None:
        self._infos[layer_name] = info
        args, kwargs = info._call
        for tensor in tensors_in((args, kwargs)):
            self._mentions.setdefault(tensor.value, {})[info] = None

    def get(self, layer: str | Layer) -> FLayerInfo | None:
        return self._infos.get(layer if isinstance(layer, str) else layer.name)

    def remove(self, layer: str | Layer) -> None:
        self._infos.pop(layer if isinstance(layer, str) else layer.name, None)

    def uses_moved(self, old: Tensor, new: Tensor) -> None:
        """Called by the network when readers of `old` read `new` from now on."""
        infos = self._mentions.pop(old.value, None)
        if not infos:
            return
        for info in infos:
            info.replace_input_with(old, new)
        self._mentions.setdefault(new.value, {}).update(infos)


def record_signature(function: Callable[P, R]) -> Callable[P, R]:
    """Let a functional record its call on the layer that makes its result."""
    signature = inspect.signature(function)
    kind = function.__name__

    @functools.wraps(function)
    def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        info: FLayerInfo | None = None
        for tensor in tensors_in(result):
            node = tensor.value.producer()
            if node is None or node.graph is None:
                continue
            info = info or FLayerInfo(kind, signature, args, dict(kwargs), result)
            FLayerInfoMemo.of(Network.of(node.graph)).add(node.name or "", info)
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


def _swap(value: Any, old: Tensor, new: Tensor) -> Any:
    if isinstance(value, Tensor):
        return new if value == old else value
    if isinstance(value, dict):
        return {key: _swap(item, old, new) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_swap(item, old, new) for item in value)
    return value
