"""What crosses between stages cut along the module tree: found by running one micro-batch, in order.

Such a model decides by its data, which fake tensors do not have, so one micro-batch runs in order on the
ranks that hold its stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError, PipelineError
from intarsia.pipeline.distributed.precision import uncached_autocast
from intarsia.pipeline.distributed.world import World
from intarsia.pipeline.stages.compiled import CompiledStage
from intarsia.pipeline.stages.signature import Fixed, TensorSpec
from intarsia.pipeline.stages.tree_stage import TreeStage
from intarsia.pipeline.stages.trial import trial

_PLAIN = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, slice, range)


@dataclass(frozen=True)
class BorderForm:
    """How the values at a border are put together from tensors, and from numbers that every rank knows."""

    spec: pytree.TreeSpec
    leaves: tuple[TensorSpec | Fixed, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that cross."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def flatten(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors of these values; refuses values of another form than the ranks agreed on."""
        given, spec = pytree.tree_flatten(tuple(values))
        if spec != self.spec:
            raise PipelineError(f"a stage gives values of form {spec}, but the ranks agreed on {self.spec}")
        tensors = []
        for value, leaf in zip(given, self.leaves, strict=True):
            if isinstance(leaf, TensorSpec) and isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(leaf, TensorSpec) or type(value) is not type(leaf.value) or value != leaf.value:
                had = leaf if isinstance(leaf, TensorSpec) else repr(leaf.value)
                raise PipelineError(
                    f"{leaf.name} is {_said(value)} in this micro-batch, and was {had} in the one by which"
                    " the ranks found what crosses; only the values of tensors may differ: cut elsewhere"
                )
        return tuple(tensors)

    def unflatten(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The values at the border."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf.value for leaf in self.leaves]
        values: tuple[Any, ...] = pytree.tree_unflatten(leaves, self.spec)
        return values


def border_form(values: Sequence[Any], names: Sequence[str]) -> BorderForm:
    """The form of a border's values; what cannot be told to another process is refused."""
    found: list[TensorSpec | Fixed] = []
    for name, value in zip(names, values, strict=True):
        leaves = pytree.tree_leaves(value)
        for i, leaf in enumerate(leaves):
            label = name if len(leaves) == 1 else f"{name}[{i}]"
            if isinstance(leaf, DTensor):
                raise PartitionError(
                    f"{label} is a DTensor, of which each rank holds a part, and crosses a border: let the"
                    " plan's module give a plain tensor (use_local_output=True)"
                )
            if isinstance(leaf, Tensor):
                found.append(TensorSpec(label, tuple(leaf.shape), leaf.dtype))
            elif isinstance(leaf, _PLAIN):
                found.append(Fixed(label, leaf))
            else:
                raise PartitionError(
                    f"{label}, {_said(leaf)}, crosses a border; it cannot travel between processes: cut"
                    " elsewhere with cuts=..."
                )
    form = BorderForm(pytree.tree_structure(tuple(values)), tuple(found))
    if not form.tensors:
        raise PartitionError("no tensor crosses a border; choose other cuts with cuts=...")
    return form


class FlatStage(nn.Module):
    """A stage of modules that takes and gives tensors alone."""

    reuses_weights = True  # perhaps: see TreeStage

    def __init__(self, stage: nn.Module, takes: BorderForm, gives: BorderForm) -> None:
        super().__init__()
        self.stage: nn.Module = stage
        self.takes: BorderForm = takes
        self.gives: BorderForm = gives
        self.training: bool = stage.training

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the next border."""
        return self.gives.flatten(self.stage(*self.takes.unflatten(tensors)))


def find_forms(
    parts: Mapping[int, nn.Module],
    stage_ranks: Sequence[int],
    inputs: Sequence[Tensor],
    world: World,
    device: torch.device,
) -> list[BorderForm]:
    """What crosses each border, the first and the last included, for micro-batches like `inputs`.

    The stages run once, in order, on the first rank's micro-batch; statistics and random numbers stay as they
    were. What one stage raises is raised by all ranks of the pipeline.
    """
    values: tuple[Any, ...] = tuple(inputs)
    forms: list[BorderForm] = []
    for i, owner in enumerate(stage_ranks):
        told: list[Any] = [None, None, None]  # the form before the first stage, the form behind, or why not
        error: Exception | None = None
        if owner == world.rank:
            try:
                stage = parts[i]
                assert isinstance(stage, TreeStage | CompiledStage)
                before = None if i else border_form(values, stage.input_names)
                with trial(stage), torch.no_grad(), uncached_autocast(device):
                    values = stage(*values)
                outputs = tuple(f"output {n}" for n in range(len(values)))
                names = stage.output_names if stage.answer is None else outputs
                told = [before, border_form(values, names), None]
            except Exception as raised:
                error, told = raised, [None, None, f"{type(raised).__name__} in stage {i}: {raised}"]
        dist.broadcast_object_list(told, world.mine[owner], group=world.pipeline)
        if error is not None:
            raise error
        if told[2] is not None:
            raise PipelineError(f"rank {world.mine[owner]} failed with {told[2]}")
        forms += [form for form in told[:2] if form is not None]
        if i + 1 < len(stage_ranks):
            values = _hand_over(values, forms[-1], owner, stage_ranks[i + 1], world, device)
    return forms


def _hand_over(
    values: tuple[Any, ...], form: BorderForm, sender: int, taker: int, world: World, device: torch.device
) -> tuple[Any, ...]:
    """The values of a border, on the rank of the next stage."""
    if sender == taker:
        return values
    if world.rank == sender:
        tensors = [t.detach().cpu() for t in form.flatten(values)]
        dist.send_object_list([tensors], world.mine[taker], group=world.pipeline)
    elif world.rank == taker:
        box: list[Any] = [None]
        dist.recv_object_list(box, world.mine[sender], group=world.pipeline)
        return form.unflatten([t.to(device) for t in box[0]])
    return values


def _said(value: Any) -> str:
    return f"{value!r}" if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
