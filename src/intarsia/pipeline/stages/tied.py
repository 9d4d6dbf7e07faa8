"""Tied parameters, which several stages have: the sum of their gradients over ranks, and copies on devices.

On several devices of one process, each forward pass copies the parameter through autograd, so its gradients
return to the owner. A second parameter would need hooks, which checkpointing refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.stage import Stage, part_at
from intarsia.pipeline.stages.tree_stage import TreeStage


@dataclass(frozen=True)
class Tied:
    """The name of a parameter, and the stages that have it."""

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
    """Keeps parameters on several ranks equal: the same initial values, and the sum of all gradients."""

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
                continue  # one object on one rank: autograd sums its gradients
            members = tuple(global_rank(r, group) for r in ranks)
            # Every rank of the world creates every group, in the same order, also if it is no member.
            if members not in groups:
                if group is None:
                    groups[members] = dist.new_group(list(members))
                elif dist.get_rank() in members:  # ranks of other pipelines do not take part
                    groups[members] = dist.new_group(list(members), use_local_synchronization=True)
            stage = next((s for s in tie.stages if s in parts), None)
            if stage is None:
                continue
            parameter = dict(parts[stage].named_parameters(remove_duplicate=False))[tie.name]
            dist.broadcast(parameter.data, members[0], group=groups[members])
            self._shared.append((parameter, groups[members]))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """The context of a step, at whose end the gradients of the step are summed over the ranks."""
        trainable = [(p, group) for p, group in self._shared if p.requires_grad]
        with gradients_of_step([p for p, _ in trainable]):
            yield
            for parameter, group in trainable:
                dist.all_reduce(dense_gradient(parameter), group=group)


@contextmanager
def gradients_of_step(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The context of a step whose own gradients are summed over ranks; earlier ones are added at the end."""
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, earlier in zip(parameters, before, strict=True):
        if earlier is not None and parameter.grad is not None:
            parameter.grad = earlier.add_(parameter.grad)


def dense_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient in a form that ranks can sum; zeros if there is none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    parameter.grad = gradient.to_dense() if gradient.is_sparse else gradient
    return parameter.grad


def gradient_elements(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, which it must have; the stored elements of a sparse one, in its memory.

    Entries for one place are summed first: their sum counts in a norm, and it may overflow.
    """
    assert parameter.grad is not None
    if not parameter.grad.is_sparse:
        return parameter.grad
    parameter.grad = parameter.grad.coalesce()
    return parameter.grad.values()


def global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    """The number in torch.distributed of a rank of a group."""
    return rank if group is None else dist.get_global_rank(group, rank)


_REMOVED = "removed parameters"  # the attribute of a stage for parameters that were taken out of it
_TWINS = "twins"  # the attribute of a stage for modules that replace the model's own


@dataclass(frozen=True)
class Twins:
    """The twins of one stage, by the modules that they replace, and their places."""

    by_module: dict[nn.Module, nn.Module] = field(default_factory=dict)
    replaced: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    def put_in(self, stage: TreeStage, parameter: nn.Parameter) -> None:
        """Replace the model's modules that have `parameter` by twins, from which it can be removed.

        Without twins, a stage cut along modules would change the model.
        """
        for target in dict.fromkeys(str(n.target) for n in stage.graph.nodes if n.op == "call_module"):
            module = part_at(stage, target)
            if any(p is parameter for p in module.parameters()) and module not in self.by_module.values():
                path, _, leaf = target.rpartition(".")
                holder = part_at(stage, path)
                self.replaced.append((holder, leaf, module))
                holder._modules[leaf] = _twin(module, self.by_module, target)

    def take_out(self) -> None:
        """Put the model's own modules back."""
        for holder, leaf, module in reversed(self.replaced):
            holder._modules[leaf] = module


@dataclass(frozen=True)
class Borrowed:
    """A copy of a weight on another stage's device; autograd adds its gradient to the owner's."""

    owner: nn.Parameter
    places: tuple[tuple[nn.Module, str], ...]  # (module, attribute) of the copy
    device: torch.device

    def refresh(self) -> None:
        """Copy the owner's present value.

        The copy always has a graph: a recomputation in a backward pass uses the copy of the last forward
        pass, which may have run without gradients.
        """
        with torch.enable_grad():
            copied = self.owner.to(self.device, copy=True)
        for holder, name in self.places:
            holder.__dict__[name] = copied


def place_stages(
    stages: Sequence[nn.Module], tied: Sequence[Tied], devices: Sequence[torch.device]
) -> list[Borrowed]:
    """Move every stage to its device. A tied weight stays in the first stage; others borrow copies of it."""
    for stage in stages:
        _restore(stage)
    _refuse_shared_buffers(stages, devices)
    borrowed = []
    for tie in tied:
        first, *others = tie.stages
        owner = dict(stages[first].named_parameters(remove_duplicate=False))[tie.name]
        for i in others:
            if devices[i] != devices[first]:
                borrowed.append(Borrowed(owner, _remove(stages[i], owner), devices[i]))
    for stage, device in zip(stages, devices, strict=True):
        if isinstance(stage, Stage):
            stage.to_device(device)
    for weight in borrowed:
        weight.refresh()
    return borrowed


def _remove(stage: nn.Module, parameter: nn.Parameter) -> tuple[tuple[nn.Module, str], ...]:
    """Unregister a parameter of a stage under all its names, and return its places."""
    if isinstance(stage, TreeStage):
        stage.__dict__.setdefault(_TWINS, Twins()).put_in(stage, parameter)
    places = [(m, name) for m in stage.modules() for name, p in m._parameters.items() if p is parameter]
    for holder, name in places:
        del holder._parameters[name]
    stage.__dict__.setdefault(_REMOVED, []).extend((*place, parameter) for place in places)
    return tuple(places)


def _restore(stage: nn.Module) -> None:
    """Register the parameters again that an earlier call of `place_stages` removed."""
    for holder, name, parameter in stage.__dict__.pop(_REMOVED, ()):
        del holder.__dict__[name]
        holder.register_parameter(name, parameter)
    stage.__dict__.pop(_TWINS, Twins()).take_out()


def _refuse_shared_buffers(stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raise PartitionError for a buffer of the model's own modules that would be on two devices."""
    homes: dict[int, int] = {}
    for i, stage in enumerate(stages):
        for name, buffer in stage.named_buffers() if isinstance(stage, TreeStage) else ():
            first = homes.setdefault(id(buffer), i)
            if devices[first] != devices[i]:
                raise PartitionError(
                    f"stages {first} and {i} both hold the buffer {name}, on {devices[first]} and"
                    f" {devices[i]}; stages cut along modules share the model's buffers: give these stages"
                    " one device, or choose other cuts with cuts=..."
                )


def _twin(module: nn.Module, twins: dict[nn.Module, nn.Module], name: str) -> nn.Module:
    """A module of the same class and state, with the same buffers, whose parameters can be removed."""
    if module in twins:
        return twins[module]
    if isinstance(module, torch.jit.ScriptModule):
        raise PartitionError(f"{name} is a TorchScript module, whose parameters cannot be moved")
    twin = twins[module] = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_modules"] = {
        leaf: child if child is None else _twin(child, twins, f"{name}.{leaf}")
        for leaf, child in module._modules.items()
    }
    return twin
