"""Twins of a model's modules: they share everything but the places where parameters and submodules stand."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.tree_stage import TreeStage


@dataclass(frozen=True)
class Twins:
    """The twins of one stage: by the module each stands for, and the places where they were put."""

    made: dict[nn.Module, nn.Module] = field(default_factory=dict)
    replaced: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    def put_in(self, stage: TreeStage, parameter: nn.Parameter) -> None:
        """Put twins in place of the model's own modules that hold `parameter`, so that they can lose it.

        A stage cut along the module tree would change the model otherwise.
        """
        for target in dict.fromkeys(str(n.target) for n in stage.graph.nodes if n.op == "call_module"):
            module = stage.get_submodule(target)
            if any(p is parameter for p in module.parameters()) and module not in self.made.values():
                path, _, leaf = target.rpartition(".")
                holder = stage.get_submodule(path)
                self.replaced.append((holder, leaf, module))
                holder._modules[leaf] = _twin(module, self.made, target)

    def take_out(self) -> None:
        """Put the model's own modules back."""
        for holder, leaf, module in reversed(self.replaced):
            holder._modules[leaf] = module


def _twin(module: nn.Module, twins: dict[nn.Module, nn.Module], name: str) -> nn.Module:
    """A module of the same class and state, with its buffers, whose parameters can be taken out."""
    if module in twins:
        return twins[module]
    if isinstance(module, torch.jit.ScriptModule):
        raise PartitionError(f"{name} is a TorchScript module, which holds its parameters for itself")
    made = twins[module] = module.__class__.__new__(module.__class__)
    made.__dict__.update(module.__dict__)
    made.__dict__["_parameters"] = dict(module._parameters)
    made.__dict__["_modules"] = {
        leaf: child if child is None else _twin(child, twins, f"{name}.{leaf}")
        for leaf, child in module._modules.items()
    }
    return made
