"""Parameters that several stages hold: found, their gradients summed over ranks, copied to other devices.

On several devices of one process the copy is made by autograd at each forward pass, so gradients come back by
themselves. A second parameter would need hooks, which checkpointing refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.stage import Stage
from intarsia.pipeline.stages.tree_stage import TreeStage


@dataclass(frozen=True)
class Tied:
    """One parameter, by its name, and the stages that hold it."""

    name: str
    stages: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} is held by stages {', '.join(map(str, self.stages))}"


def find_tied(stages: Sequence[nn.Module]) -> tuple[Tied, ...]:
    """The parameters that are one object in more than one stage.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> print(*find_tied([nn.Sequential(layer), nn.Sequential(layer)]))
    0.weight is held by stages 0, 1
    """
    names: dict[int, str] = {}
    homes: dict[int, list[int]] = {}
    for i, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            names.setdefault(id(parameter), name)
            homes.setdefault(id(parameter), []).append(i)
    return tuple(Tied(names[key], tuple(home)) for key, home in homes.items() if len(home) > 1)


class TiedGradients:
    """Keeps parameters that live on several ranks equal: the same start, and the sum of all gradients."""

    def __init__(
        self,
        tied: Sequence[Tied],
        homes: Sequence[int],
        parts: Mapping[int, nn.Module],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._shared: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for tie in tied:
            ranks = tuple(sorted({homes[s] for s in tie.stages}))
            if len(ranks) == 1:
                continue  # one object on one rank: autograd sums by itself
            members = tuple(global_rank(r, group) for r in ranks)
            # Every rank of the world makes every group, in the same order, whether it is a member or not.
            if members not in groups:
                if group is None:
                    groups[members] = dist.new_group(list(members))
                elif dist.get_rank() in members:  # beside other pipelines, which know nothing of this one
                    groups[members] = dist.new_group(list(members), use_local_synchronization=True)
            stage = next((s for s in tie.stages if s in parts), None)
            if stage is None:
                continue
            parameter = dict(parts[stage].named_parameters(remove_duplicate=False))[tie.name]
            dist.broadcast(parameter.data, members[0], group=groups[members])
            self._shared.append((parameter, groups[members]))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A step: on its way out, the gradients it made are summed over the ranks."""
        learning = [(p, group) for p, group in self._shared if p.requires_grad]
        with gradients_of_step([p for p, _ in learning]):
            yield
            for parameter, group in learning:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)


@contextmanager
def gradients_of_step(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients of a step alone, to be summed over ranks; what was accumulated before is already a sum."""
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, earlier in zip(parameters, before, strict=True):
        if earlier is not None and parameter.grad is not None:
            parameter.grad = earlier.add_(parameter.grad)


def global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    """A rank of a group by its number in torch.distributed, as messages name it."""
    return rank if group is None else dist.get_global_rank(group, rank)


_LENT = "borrowed parameters"  # where a stage remembers what was taken out of it
_TWINS = "twins"  # and the modules that stand for the model's own


@dataclass(frozen=True)
class Twins:
    """The twins of one stage: by the module each stands for, and the places where they were put."""

    by_module: dict[nn.Module, nn.Module] = field(default_factory=dict)
    replaced: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    def put_in(self, stage: TreeStage, parameter: nn.Parameter) -> None:
        """Put twins in place of the model's own modules that hold `parameter`, so that they can lose it.

        A stage cut along the module tree would change the model otherwise.
        """
        for target in dict.fromkeys(str(n.target) for n in stage.graph.nodes if n.op == "call_module"):
            module = stage.get_submodule(target)
            if any(p is parameter for p in module.parameters()) and module not in self.by_module.values():
                path, _, leaf = target.rpartition(".")
                holder = stage.get_submodule(path)
                self.replaced.append((holder, leaf, module))
                holder._modules[leaf] = _twin(module, self.by_module, target)

    def take_out(self) -> None:
        """Put the model's own modules back."""
        for holder, leaf, module in reversed(self.replaced):
            holder._modules[leaf] = module


@dataclass(frozen=True)
class Borrowed:
    """A weight that a stage takes from another one's device; autograd adds its gradient to the owner's."""

    owner: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]  # where the stage looks it up
    device: torch.device

    def refresh(self) -> None:
        """Copy the owner's present value.

        With a gradient always: what is computed again in a backward pass finds the copy of the last forward
        pass, whatever mode that ran in.
        """
        with torch.enable_grad():
            copied = self.owner.to(self.device, copy=True)
        for holder, name in self.places:
            holder.__dict__[name] = copied


def place_stages(
    stages: Sequence[nn.Module], tied: Sequence[Tied], devices: Sequence[torch.device]
) -> list[Borrowed]:
    """Move every stage to its device; of a weight that would be on several, the first stage keeps it."""
    for stage in stages:
        _give_back(stage)
    _refuse_shared_buffers(stages, devices)
    spread = [tie for tie in tied if len({devices[s] for s in tie.stages}) > 1]
    taken = []
    for tie in spread:
        first, *others = tie.stages
        owner = dict(stages[first].named_parameters(remove_duplicate=False))[tie.name]
        for i in others:
            if devices[i] != devices[first]:
                taken.append((owner, _take_out(stages[i], owner), devices[i]))
    for stage, device in zip(stages, devices, strict=True):
        if isinstance(stage, Stage):
            stage.to_device(device)
    borrowed = [Borrowed(*each) for each in taken]
    for each in borrowed:
        each.refresh()
    return borrowed


def _take_out(stage: nn.Module, parameter: nn.Parameter) -> tuple[tuple[nn.Module, str], ...]:
    """Unregister a parameter of a stage, under all its names."""
    if isinstance(stage, TreeStage):
        stage.__dict__.setdefault(_TWINS, Twins()).put_in(stage, parameter)
    places = [(m, name) for m in stage.modules() for name, p in m._parameters.items() if p is parameter]
    for holder, name in places:
        del holder._parameters[name]
    stage.__dict__.setdefault(_LENT, []).extend((*place, parameter) for place in places)
    return tuple(places)


def _give_back(stage: nn.Module) -> None:
    """Register again what an earlier placing took out."""
    for holder, name, parameter in stage.__dict__.pop(_LENT, ()):
        del holder.__dict__[name]
        holder.register_parameter(name, parameter)
    stage.__dict__.pop(_TWINS, Twins()).take_out()


def _refuse_shared_buffers(stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Refuse a buffer of the model's own modules that would have to be on two devices."""
    homes: dict[int, int] = {}
    for i, stage in enumerate(stages):
        for name, buffer in stage.named_buffers() if isinstance(stage, TreeStage) else ():
            first = homes.setdefault(id(buffer), i)
            if devices[first] != devices[i]:
                raise PartitionError(
                    f"stages {first} and {i} both hold the buffer {name}, on {devices[first]} and"
                    f" {devices[i]}; in stages cut along the module tree it is the model's own: give these"
                    " stages one device, or choose other cuts with cuts=..."
                )


def _twin(module: nn.Module, twins: dict[nn.Module, nn.Module], name: str) -> nn.Module:
    """A module of the same class and state, with its buffers, whose parameters can be taken out."""
    if module in twins:
        return twins[module]
    if isinstance(module, torch.jit.ScriptModule):
        raise PartitionError(f"{name} is a TorchScript module, which holds its parameters for itself")
    twin = twins[module] = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_modules"] = {
        leaf: child if child is None else _twin(child, twins, f"{name}.{leaf}")
        for leaf, child in module._modules.items()
    }
    return twin
