"""A cluster of equal devices: their number, memory and speed, and the links between them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from intarsia.errors import PartitionError, near_names


@dataclass(frozen=True)
class Link:
    """A link between two devices: bytes per second, and seconds until the first byte arrives."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, count: float) -> float:
        """The seconds that `count` bytes take.

        >>> Link(bandwidth=1e9, latency=1e-3).seconds(1e6)
        0.002
        """
        return self.latency + count / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """A cluster of `devices`, with `per_host` on each host. Units are bytes, seconds and bytes per second.

    `speed` is relative to the device where costs were measured. `handover` is the seconds of each pass on a
    micro-batch that are not computation: receiving and sending tensors, Python.
    """

    devices: int
    memory: int
    within: Link  # between devices of a host
    between: Link  # between hosts
    per_host: int
    speed: float = 1.0
    handover: float = 0.0

    @staticmethod
    def read(path: str | Path) -> Cluster:
        """The cluster that a JSON file describes. Raises PartitionError for unknown or impossible entries."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PartitionError(f"the cluster {path} cannot be read: {error.strerror}") from error
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise PartitionError(f"the cluster {path} is not JSON: {error}") from error
        return Cluster.of(data)

    @staticmethod
    def of(data: Any) -> Cluster:
        """The cluster that parsed JSON describes.

        >>> Cluster.of({"devices": 4, "memory": 16e9, "link": {"bandwidth": 1e10}}).per_host
        4
        """
        names = {*(f.name for f in fields(Cluster)), "link"}
        entries = _object(data, "the cluster", names)
        for name in ("devices", "memory"):
            if name not in entries:
                raise PartitionError(f"the cluster has no {name!r}")
        devices = _whole(entries["devices"], "devices")
        per_host = _whole(entries.get("per_host", devices), "per_host")
        if "link" in entries and ("within" in entries or "between" in entries):
            raise PartitionError("the cluster has 'link', for all, and 'within' or 'between' too; give one")
        inside = entries.get("link", entries.get("within"))
        outside = entries.get("link", entries.get("between"))
        if inside is None and per_host > 1 and devices > 1:
            raise PartitionError("the cluster has no 'within': the link between devices of a host")
        if outside is None and per_host < devices:
            raise PartitionError(
                f"the cluster has no 'between': the link between hosts ({per_host} of {devices} devices each)"
            )
        unused = Link(math.inf)
        return Cluster(
            devices,
            _whole(entries["memory"], "memory"),
            unused if inside is None else _link(inside, "within"),
            unused if outside is None else _link(outside, "between"),
            per_host,
            _number(entries.get("speed", 1.0), "speed"),
            _number(entries.get("handover", 0.0), "handover", zero=True),
        )

    def link(self, first: int, second: int) -> Link:
        """The link between two devices, by number."""
        return self.within if first // self.per_host == second // self.per_host else self.between

    def chain(self, ranks: int, replicas: int) -> list[Link]:
        """For each rank, the link to the next rank, and from the last rank to the first.

        Replica k has the devices from k * ranks on. The link is the slowest among all replicas.
        """
        slow = [False] * ranks
        for replica in range(min(replicas, math.lcm(ranks, self.per_host) // ranks)):
            begin = replica * ranks
            for r in range(ranks):
                if self.link(begin + r, begin + (r + 1) % ranks) is self.between:
                    slow[r] = True
        return [self.between if s else self.within for s in slow]

    def averaging(self, ranks: int, replicas: int) -> Link:
        """The link over which replicas of a stage average their gradients."""
        return self.within if ranks * replicas <= self.per_host else self.between


def _object(data: Any, what: str, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PartitionError(f"{what} must be a JSON object, not {type(data).__name__}")
    for name in data:
        if name not in names:
            hint = near_names(name, names) or f"; its entries are {', '.join(sorted(names))}"
            raise PartitionError(f"{what} has an unknown entry {name!r}{hint}")
    return data


def _link(data: Any, name: str) -> Link:
    entries = _object(data, name, {"bandwidth", "latency"})
    if "bandwidth" not in entries:
        raise PartitionError(f"{name} has no 'bandwidth', in bytes per second")
    latency = _number(entries.get("latency", 0.0), f"{name}.latency", zero=True)
    return Link(_number(entries["bandwidth"], f"{name}.bandwidth"), latency)


def _number(value: Any, name: str, *, zero: bool = False) -> float:
    """The value as a float. Raises PartitionError if it is no positive number (or 0, with `zero`)."""
    finite = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not finite or value < 0 or (value == 0 and not zero):
        raise PartitionError(f"{name}={value!r} must be a number of {'at least' if zero else 'more than'} 0")
    return float(value)


def _whole(value: Any, name: str) -> int:
    number = _number(value, name)
    if number != int(number):
        raise PartitionError(f"{name}={value!r} must be a whole number")
    return int(number)
