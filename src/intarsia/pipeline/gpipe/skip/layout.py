"""Which skip goes from which stage to which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from intarsia.pipeline.gpipe.skip.namespace import Namespace
from intarsia.pipeline.gpipe.skip.skippable import Skippable

Key = tuple[Namespace | None, str]


class SkipLayout:
    """The source and the destination stage of every skip.

    >>> layout = SkipLayout(2, {(None, "x"): (0, 1)})
    >>> list(layout.copy_policy(1)), layout.requires_copy(None, "x")
    ([(0, None, 'x')], True)
    """

    def __init__(self, num_partitions: int, skip_routes: Mapping[Key, tuple[int, int]]) -> None:
        self.by_ns_name: dict[Key, tuple[int, int]] = dict(skip_routes)
        self.by_partition: list[list[tuple[int, Namespace | None, str]]] = [[] for _ in range(num_partitions)]
        for (ns, name), (source, destination) in skip_routes.items():
            self.by_partition[destination].append((source, ns, name))
        for arrivals in self.by_partition:
            arrivals.sort(key=lambda arrival: arrival[0])

    def copy_policy(self, next_j: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """The skips that stage `next_j` takes from other stages, by source stage."""
        return (arrival for arrival in self.by_partition[next_j] if arrival[0] != next_j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether a skip leaves its stage."""
        source, destination = self.by_ns_name.get((ns, name), (-1, -1))
        return source != destination


def inspect_skip_layout(partitions: Iterable[nn.Sequential]) -> SkipLayout:
    """The layout of a partitioned module."""
    sources: dict[Key, int] = {}
    routes: dict[Key, tuple[int, int]] = {}
    count = 0
    for j, partition in enumerate(partitions):
        count = j + 1
        for layer in partition.modules():
            if not isinstance(layer, Skippable):
                continue
            for key in layer.stashable():
                sources[key] = j
            for key in layer.poppable():
                routes[key] = (sources[key], j)
    return SkipLayout(count, routes)
