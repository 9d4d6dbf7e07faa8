"""Measurements on disk, by everything that they depend on: whole searches by model, costs by block.

A search is stored, and not its plan: the fastest plan is built and verified again. If the result differs,
everything is measured again. With a tolerance, the key has a digest of weights and examples, since errors
depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx

from intarsia.cache.machine import digest, machine_key, package_version
from intarsia.cache.store import JsonStore, cache_directory
from intarsia.choose.findings import Findings
from intarsia.engines import Engine
from intarsia.graph.sizes import size_hint

_SYMBOL = re.compile(r"\b[a-z]+\d+\b")
_SMALL = 64  # elements of an integer constant whose values may decide what a converter does


def contents(module: fx.GraphModule, graph: fx.Graph | None = None) -> str:
    """A digest that is equal for graphs with the same operators, arguments, edges, dtypes and sizes.

    `graph` is the module's own, or another that reads the module's constants.

    Weights count by dtype and shape and not by value, so equal layers of a model have one digest. (The build
    cache has a digest of its own, `of_lowered`: a stored program depends on names and on every weight.)

    >>> one, other = (torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2))
    >>> graphs = [torch.export.export(m, (torch.ones(1, 4),)).module() for m in (one, other)]
    >>> contents(graphs[0]) == contents(graphs[1])
    True
    """
    return digest(*_lines(module, graph or module.graph))


def _lines(module: fx.GraphModule, graph: fx.Graph) -> list[str]:
    number: dict[fx.Node, int] = {}
    symbols: dict[str, str] = {}
    lines = []
    for node in graph.nodes:
        number[node] = len(number)
        if node.op == "get_attr":
            lines.append(f"constant {_constant(attrgetter(str(node.target))(module), symbols)}")
            continue
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        arguments = argument_text(
            (tuple(node.args), dict(node.kwargs)),
            lambda read: f"%{number[read]}",
            lambda leaf: f"{type(leaf).__name__} {leaf}",
        )
        lines.append(f"{node.op} {target} {arguments} {_value(node.meta.get('val'), symbols)}")
    return lines


def argument_text(value: Any, node_text: Callable[[fx.Node], str], leaf_text: Callable[[Any], str]) -> str:
    """An argument of a node as text; what is no collection by `leaf_text`.

    >>> argument_text((1, {"a": [2.0]}), str, repr)
    "tuple(1,{'a':list(2.0)})"
    """

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return node_text(value)
        if isinstance(value, list | tuple):
            return f"{type(value).__name__}({','.join(map(text, value))})"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key!r}:{text(item)}' for key, item in value.items())}}}"
        if isinstance(value, slice):
            return f"slice{text((value.start, value.stop, value.step))}"
        return leaf_text(value)

    return text(value)


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
    """A size as text. Symbols are named in the order of their first use, with the example's value."""
    if isinstance(size, int):
        return str(size)
    text = _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"n{len(symbols)}"), str(size))
    return f"{text}={size_hint(size)}"


def _constant(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, fx.GraphModule):
        return contents(value)
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}"
    text = _value(value, symbols)
    plain = value.layout is torch.strided and not value.is_floating_point() and not value.is_complex()
    return f"{text} {value.tolist()}" if plain and 0 < value.numel() <= _SMALL else text


_MOST = 2000  # searches, and costs; the oldest are removed


class Memory:
    """Two tables in the cache directory. A key has everything that a measurement depends on.

    >>> import tempfile
    >>> memory = Memory(Path(tempfile.mkdtemp()))
    >>> memory.keep_cost("a block on an engine", 0.25)
    >>> memory.cost("a block on an engine"), memory.cost("another")
    (0.25, None)
    """

    def __init__(self, directory: Path | None = None) -> None:
        folder = cache_directory() if directory is None else directory
        self._searches = JsonStore(folder / "choices.json")
        self._costs = JsonStore(folder / "costs.json")

    def findings(self, key: str) -> Findings | None:
        """The result of an earlier search; None if there is none, or it cannot be read."""
        entry = self._searches.read().get(key)
        if not isinstance(entry, dict):
            return None
        try:
            return Findings.from_dict(entry)
        except (AttributeError, KeyError, TypeError, ValueError):  # another version's, or damaged
            return None

    def keep_findings(self, key: str, findings: Findings) -> None:
        """Store a search."""
        self._searches.update({key: findings.as_dict()}, keep=_MOST)

    def cost(self, key: str) -> float | None:
        """The stored seconds of a measurement; None if there are none."""
        cost = self._costs.read().get(key)
        return float(cost) if isinstance(cost, int | float) and cost >= 0 else None

    def keep_cost(self, key: str, seconds: float) -> None:
        """Store the seconds of a measurement."""
        self._costs.update({key: seconds}, keep=_MOST)


def key_of(what: str, engines: Sequence[Engine], *more: str) -> str:
    """The key of a measurement: what was measured, with which engines and options, on which machine."""
    running = [f"{engine.key()} {engine.version()}" for engine in engines]
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return digest(what, machine_key(), package_version("torch"), *gpu, *running, *more)
