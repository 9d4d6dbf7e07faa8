"""A call that torch.compile does not trace. Importing this module loads Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def untraced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call from a function that torch.compile traces: a break there, since engines are no torch code."""
    return function(*args, **kwargs)
