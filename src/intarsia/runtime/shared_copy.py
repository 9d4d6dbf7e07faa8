"""A model's tree of modules, copied; its weights are shared."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from intarsia.capture.protect import evaluating

# Weights and hooks: a model may install hooks when it is first run, which must not run in its copy's stead.
_TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, dict))


def shared_copy(model: nn.Module) -> nn.Module:
    """The tree of modules copied, in evaluation mode; weights and TorchScript's modules are shared."""
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in copies:
            twin = copies[id(module)] = module.__class__.__new__(module.__class__)
            twin.__dict__.update(module.__dict__)
            for table in _TABLES:
                if table in module.__dict__:
                    twin.__dict__[table] = module.__dict__[table].copy()
            twin.__dict__["_modules"] = {
                name: child if child is None else copied(child) for name, child in module._modules.items()
            }
            twin.training = False
            if inspect.ismethod(own := module.__dict__.get("forward")) and own.__self__ is module:
                twin.__dict__["forward"] = own.__func__.__get__(twin)
        return copies[id(module)]

    with evaluating(model):  # a module may do more in eval() than set a flag
        return copied(model)
