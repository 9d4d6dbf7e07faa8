"""Symbolic shapes: what each segment's inputs and outputs look like, and over which range."""

from __future__ import annotations

from typing import Any

import torch


def size_hint(size: Any, default: int = 1) -> int:
    """A size as a number: a symbolic one gives the value the example had, or else `default`."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = getattr(size.node, "hint", None)
    return int(hint) if isinstance(hint, int) else default
