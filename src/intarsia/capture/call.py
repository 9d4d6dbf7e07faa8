"""A call of a model: its arguments by place and by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[Sequence[Any], Mapping[str, Any]]
