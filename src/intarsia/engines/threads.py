"""How many threads an engine gets: as many as torch, so that engines that take turns share the cores."""

from __future__ import annotations

import torch


def thread_count(asked: int | None) -> int:
    """The user's number, or torch's."""
    return torch.get_num_threads() if asked is None else asked
