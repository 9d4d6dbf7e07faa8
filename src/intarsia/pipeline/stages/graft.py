"""Grafting: tensors and modules put into another module under their dotted names."""

from __future__ import annotations

import torch
from torch import nn


def graft_tensor(root: nn.Module, name: str, tensor: torch.Tensor | None, persistent: bool) -> None:
    """Register a parameter or buffer, making the modules on the way."""
    module, leaf = _holder(root, name)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(leaf, tensor)
    else:
        module.register_buffer(leaf, tensor, persistent=persistent)


def graft_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module, making the modules on the way."""
    holder, leaf = _holder(root, name)
    holder.add_module(leaf, module)


def _holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    module = root
    for part in path:
        if part not in module._modules:
            made = nn.Module()
            made.training = root.training
            module.add_module(part, made)
        module = module.get_submodule(part)
    return module, leaf
