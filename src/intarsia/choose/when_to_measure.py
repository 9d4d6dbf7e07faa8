"""Whether a model is worth measuring when nobody asked for it.

The work is estimated from the graph, so that the outcome does not depend on the clock.
"""

from __future__ import annotations

import os

from torch import fx

from intarsia.errors import InputError
from intarsia.partition.blocks import work

LEAST_WORK = 100.0  # units of about one small eager operator, or a megaflop: about a millisecond
SETTING = "INTARSIA_MEASURE"


def is_measuring() -> bool:
    """Whether `compile` measures where no engines and no partition are named; 0 in the environment says no.

    >>> is_measuring() == (os.environ.get(SETTING, "1") == "1")
    True
    """
    setting = os.environ.get(SETTING, "1")
    if setting not in ("0", "1"):
        raise InputError(f"{SETTING}={setting!r} in the environment; give 0 or 1")
    return setting == "1"


def too_small_to_measure(module: fx.GraphModule) -> str | None:
    """Why measuring a graph cannot pay, in a sentence; None where it may."""
    total = sum(work(node) for node in module.graph.nodes if node.op == "call_function")
    if total >= LEAST_WORK:
        return None
    return (
        f"plans were not measured: the model has {total:.0f} units of work, and measuring starts at"
        f" {LEAST_WORK:g}; partition=Measured() measures it"
    )
