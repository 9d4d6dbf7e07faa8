"""Operators that lowering replaced, kept with what took their place: users name what they wrote."""

from __future__ import annotations

from typing import Any

from torch import fx

_KEY = "intarsia.replaces"


def note_replaced(node: fx.Node, targets: list[Any]) -> None:
    """Let a node answer to the names of the operators it stands for, besides its own."""
    node.meta[_KEY] = tuple(dict.fromkeys([*node.meta.get(_KEY, ()), *map(str, targets)]))


def replaced_by(node: fx.Node) -> tuple[str, ...]:
    """The full names of the operators that a node stands for."""
    names: tuple[str, ...] = node.meta.get(_KEY, ())
    return names
