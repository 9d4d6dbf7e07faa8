"""Tied weights of stages on different devices: one parameter, and a copy of it where it is used besides.

The copy is made by autograd at each forward pass, so gradients come back by themselves. A second parameter
would need hooks, which checkpointing refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.stages.stage import Stage
from intarsia.pipeline.stages.tied import Tied
from intarsia.pipeline.stages.tree_stage import TreeStage
from intarsia.pipeline.stages.twins import Twins

_LENT = "borrowed parameters"  # where a stage remembers what was taken out of it
_TWINS = "twins"  # and the modules that stand for the model's own


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
                    " stages one device, or cut elsewhere with cuts=..."
                )
