"""What a measurement is remembered by: the contents of a graph, whatever its nodes and weights are called."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import fx

from intarsia.graph.sizes import size_hint

_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_SMALL = 64  # a whole-number constant of so few elements may steer a converter by its values


def contents(module: fx.GraphModule) -> str:
    """A digest, equal for graphs of the same operators, arguments, edges, dtypes and sizes.

    Weights count by dtype and shape, not by value: equal layers of a model have one digest.

    >>> one, other = (torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2))
    >>> graphs = [torch.export.export(m, (torch.ones(1, 4),)).module() for m in (one, other)]
    >>> contents(graphs[0]) == contents(graphs[1])
    True
    """
    return digest(*_lines(module))


def digest(*parts: str) -> str:
    """One short name for some text."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def _lines(module: fx.GraphModule) -> list[str]:
    number: dict[fx.Node, int] = {}
    symbols: dict[str, str] = {}
    lines = []
    for node in module.graph.nodes:
        number[node] = len(number)
        if node.op == "get_attr":
            lines.append(f"constant {_constant(_attribute(module, str(node.target)), symbols)}")
            continue
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        arguments = f"{_argument(node.args, number)} {_argument(node.kwargs, number)}"
        lines.append(f"{node.op} {target} {arguments} {_value(node.meta.get('val'), symbols)}")
    return lines


def _argument(value: Any, number: dict[fx.Node, int]) -> str:
    if isinstance(value, fx.Node):
        return f"%{number[value]}"
    if isinstance(value, list | tuple):
        return f"({','.join(_argument(item, number) for item in value)})"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_argument(item, number)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_argument((value.start, value.stop, value.step), number)}"
    return f"{type(value).__name__} {value}"


def _value(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return f"{value.dtype} {value.layout} {tuple(value.shape)}"
        sizes = ",".join(_size(size, symbols) for size in (*value.shape, *value.stride()))
        return f"{value.dtype} {value.device.type} {sizes}"
    if isinstance(value, list | tuple):
        return f"({';'.join(_value(item, symbols) for item in value)})"
    if isinstance(value, torch.SymInt):
        return _size(value, symbols)
    return f"{type(value).__name__} {value}"


def _size(size: Any, symbols: dict[str, str]) -> str:
    """A size; symbols are called by the order in which they appear, and tell the example's value."""
    if isinstance(size, int):
        return str(size)
    text = _SYMBOL.sub(lambda found: symbols.setdefault(found[0], f"n{len(symbols)}"), str(size))
    return f"{text}={size_hint(size)}"


def _constant(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, fx.GraphModule):
        return contents(value)
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}"
    text = _value(value, symbols)
    plain = value.layout is torch.strided and not value.is_floating_point() and not value.is_complex()
    return f"{text} {value.tolist()}" if plain and 0 < value.numel() <= _SMALL else text


def _attribute(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value
