"""`run_on`: the user's word, inside `forward`, on which engine a part should run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import fx
from torch.fx import traceback

from intarsia.errors import CaptureError

RUN_ON = "intarsia_run_on"  # the key under a node's `meta["custom"]`


def run_on(engine: str) -> AbstractContextManager[None]:
    """Run the operators inside the `with` block on `engine`.

    The name of the engine is stored in the exported graph, at each node, and survives decomposition. If the
    engine refuses a node, the node runs in PyTorch, and the plan says why. In eager mode, the block has no
    effect.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         with intarsia.run_on("openvino"):
        ...             x = torch.relu(x)
        ...         return x + 1
    """
    if not isinstance(engine, str) or not engine:
        raise CaptureError(f"run_on({engine!r}): name an engine, such as 'openvino' or 'pytorch'")
    return _annotated(engine)


@contextmanager
def _annotated(engine: str) -> Iterator[None]:
    annotate = getattr(traceback, "annotate", None)
    if annotate is None:
        raise CaptureError(f"run_on needs torch.fx.traceback.annotate, which torch {torch.__version__} lacks")
    # In this order: leaving preserve_node_meta first lets annotate put back what was there before it.
    with annotate({RUN_ON: engine}), traceback.preserve_node_meta():
        yield


def wanted_engine(node: fx.Node) -> str | None:
    """The engine the user asked for with `run_on`, or None."""
    custom = node.meta.get("custom")
    wanted = custom.get(RUN_ON) if isinstance(custom, dict) else None
    return wanted if isinstance(wanted, str) else None
