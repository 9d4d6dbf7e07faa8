"""Namespaces keep skips of the same name apart."""

from __future__ import annotations

import uuid


class Namespace:
    """A name that nothing else has; copies of a model keep it.

    >>> import copy
    >>> ns = Namespace()
    >>> copy.deepcopy(ns) == ns, Namespace() == ns
    (True, False)
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id: uuid.UUID = uuid.uuid4()

    def __repr__(self) -> str:
        return f"<Namespace {self.id}>"

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    # Namespaces stand in sorted keys beside None; the order means nothing, but must be one.
    def __lt__(self, other: Namespace | None) -> bool:
        return other is not None and self.id < other.id
