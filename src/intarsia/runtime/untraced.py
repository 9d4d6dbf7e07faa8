"""A call that torch.compile does not trace. Importing this module imports Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def untraced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with a graph break, since torch.compile cannot trace engines."""
    return function(*args, **kwargs)
