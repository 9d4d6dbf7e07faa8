"""The names in a pipeline's state dict: `partitions.<stage>.<layer>.<rest>`, whatever the balance."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

_STAGED = re.compile(r"partitions\.\d+\.(.+)")


def plain_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the plain module, from that of a pipeline.

    >>> plain_state_dict({"partitions.1.2.weight": 0})
    {'2.weight': 0}
    """
    return {_plain(key): value for key, value in state_dict.items()}


def fit_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename, before it is loaded, a state dict of the plain module or of another balance."""
    partitions = module.get_submodule("partitions")
    stages = {
        layer: j for j, stage in enumerate(partitions.children()) for layer, _ in stage.named_children()
    }
    renamed: dict[str, Any] = {}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        plain = _plain(key.removeprefix(prefix))
        layer = plain.split(".", 1)[0]
        name = f"partitions.{stages[layer]}.{plain}" if layer in stages else key.removeprefix(prefix)
        renamed[prefix + name] = state_dict.pop(key)
    state_dict.update(renamed)


def _plain(key: str) -> str:
    staged = _STAGED.fullmatch(key)
    return staged[1] if staged else key
