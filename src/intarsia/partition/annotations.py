"""Reading `intarsia.run_on` annotations off nodes."""

from __future__ import annotations

from torch import fx

RUN_ON = "intarsia_run_on"
"""The key under a node's `meta["custom"]`."""


def wanted_engine(node: fx.Node) -> str | None:
    """The engine the user asked for with `run_on`, or None."""
    custom = node.meta.get("custom")
    wanted = custom.get(RUN_ON) if isinstance(custom, dict) else None
    return wanted if isinstance(wanted, str) else None
