"""The tensors that cross each border, known before a step: under autocast, and between stages of modules.

Receive buffers must exist before the first tensor arrives. The captured graph tells shapes, but dtypes under
autocast are other ones, and stages of modules may depend on data. So one micro-batch runs through the stages
in order, on the ranks that hold them: for stages of the graph, once for each precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from intarsia.errors import PartitionError, PipelineError
from intarsia.pipeline.distributed.wire import wire_spec
from intarsia.pipeline.distributed.world import World
from intarsia.pipeline.gpipe.effects import trial
from intarsia.pipeline.stages.signature import CallSignature, Fixed, TensorSpec, value_name
from intarsia.pipeline.stages.stage import Stage
from intarsia.pipeline.stages.tree_stage import CompiledStage, TreeStage

Specs = tuple[TensorSpec | str, ...]
Borders = list[tuple[Specs, Specs]]  # the inputs and outputs of each stage
Precision = torch.dtype | None


def current_precision(device: torch.device) -> Precision:
    """The present dtype of autocast on a device; None without autocast."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


@contextmanager
def uncached_autocast(device: torch.device) -> Iterator[None]:
    """The caller's autocast without its cache of weights, which would connect the graphs of micro-batches."""
    dtype = current_precision(device)
    if dtype is None:
        yield
        return
    with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
        yield


def refuse_autocast(stages: Sequence[nn.Module], device: torch.device) -> None:
    """Raise for autocast around compiled stages."""
    if current_precision(device) is not None and any(isinstance(s, CompiledStage) for s in stages):
        raise PartitionError(
            "compiled stages compute in the precision they were compiled in; call without autocast"
        )


def borders_in_precision(borders: Borders, forms: Sequence[BorderForm]) -> Borders:
    """The borders of stages of the graph, with the dtypes of a run."""
    sides = [borders[0][0], *(gives for _, gives in borders)]
    present: list[Specs] = []
    for specs, form in zip(sides, forms, strict=True):
        tensors = iter(form.tensors)
        present.append(
            tuple(replace(s, dtype=next(tensors).dtype) if isinstance(s, TensorSpec) else s for s in specs)
        )
    return list(pairwise(present))


def checked_spec(
    spec: TensorSpec, shape: Sequence[int], dtype: torch.dtype, lengths: Mapping[str, int], stage: int
) -> TensorSpec:
    """The spec with the dtype of a run. Raises PartitionError if the run has another shape."""
    if tuple(shape) != spec.sizes(lengths):
        raise PartitionError(f"stage {stage} returns shape {tuple(shape)} for {spec}")
    return replace(spec, dtype=dtype)


_PLAIN = (bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device, slice, range)


@dataclass(frozen=True)
class BorderForm:
    """The structure of the values at a border: their tensors, and constants that every rank knows."""

    spec: pytree.TreeSpec
    leaves: tuple[TensorSpec | Fixed, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that cross."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def flatten(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        """The tensors of these values. Raises PipelineError for values of another form."""
        leaves, spec = pytree.tree_flatten(tuple(values))
        if spec != self.spec:
            raise PipelineError(f"a stage returns the structure {spec}, but the ranks agreed on {self.spec}")
        tensors = []
        for value, leaf in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, TensorSpec) and isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(leaf, TensorSpec) or type(value) is not type(leaf.value) or value != leaf.value:
                first = leaf if isinstance(leaf, TensorSpec) else repr(leaf.value)
                raise PipelineError(
                    f"{leaf.name} is {_text(value)} in this micro-batch, and was {first} in the first one;"
                    " between micro-batches, only the values of tensors may differ: choose other cuts"
                )
        return tuple(tensors)

    def unflatten(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The values at the border, from their tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorSpec) else leaf.value for leaf in self.leaves]
        values: tuple[Any, ...] = pytree.tree_unflatten(leaves, self.spec)
        return values


def border_form(values: Sequence[Any], names: Sequence[str]) -> BorderForm:
    """The form of a border's values. Raises PartitionError if they cannot be sent to another process."""
    entries: list[TensorSpec | Fixed] = []
    for name, value in zip(names, values, strict=True):
        leaves = pytree.tree_leaves(value)
        for i, leaf in enumerate(leaves):
            label = name if len(leaves) == 1 else f"{name}[{i}]"
            if isinstance(leaf, DTensor):
                raise PartitionError(
                    f"{label} crosses a border and is a DTensor, of which each rank holds a part: make the"
                    " plan's module return a plain tensor (use_local_output=True)"
                )
            if isinstance(leaf, Tensor):
                entries.append(TensorSpec(label, tuple(leaf.shape), leaf.dtype))
            elif isinstance(leaf, _PLAIN):
                entries.append(Fixed(label, leaf))
            else:
                raise PartitionError(
                    f"{label}, {_text(leaf)}, crosses a border; it cannot be sent between processes: choose"
                    " other cuts with cuts=..."
                )
    form = BorderForm(pytree.tree_structure(tuple(values)), tuple(entries))
    if not form.tensors:
        raise PartitionError("no tensor crosses a border; choose other cuts with cuts=...")
    return form


def find_forms(
    parts: Mapping[int, nn.Module],
    stage_ranks: Sequence[int],
    inputs: Sequence[Tensor],
    world: World,
    device: torch.device,
) -> list[BorderForm]:
    """The form of each border, with the model's inputs and outputs, for micro-batches like `inputs`.

    The stages run once, in order, on the first rank's micro-batch. Statistics and random numbers are restored
    after it. If a stage raises, all ranks of the pipeline raise.
    """
    values: tuple[Any, ...] = tuple(inputs)
    forms: list[BorderForm] = []
    for i, owner in enumerate(stage_ranks):
        # The form before the stage (only for the first stage), the form after it, and the text of an error.
        message: list[Any] = [None, None, None]
        error: Exception | None = None
        if owner == world.rank:
            try:
                stage = parts[i]
                takes, gives = _names(stage)
                before = None if i else border_form(values, takes)
                with trial(stage), torch.no_grad(), uncached_autocast(device):
                    values = stage(*values)
                message = [before, border_form(values, gives or _numbered(values)), None]
            except Exception as raised:
                error, message = raised, [None, None, f"{type(raised).__name__} in stage {i}: {raised}"]
        dist.broadcast_object_list(message, world.mine[owner], group=world.pipeline)
        if error is not None:
            raise error
        if message[2] is not None:
            raise PipelineError(f"rank {world.mine[owner]} failed with {message[2]}")
        forms += [form for form in message[:2] if form is not None]
        if i + 1 < len(stage_ranks):
            values = _send(values, forms[-1], owner, stage_ranks[i + 1], world, device)
    return forms


def _names(stage: nn.Module) -> tuple[Sequence[str], Sequence[str]]:
    """The names of the values before a stage and after it; none for the outputs of a model."""
    if isinstance(stage, Stage):
        return list(map(value_name, stage.form.takes)), list(map(value_name, stage.form.gives))
    assert isinstance(stage, TreeStage | CompiledStage)
    return stage.input_names, stage.output_names if stage.answer is None else ()


def _numbered(values: Sequence[Any]) -> list[str]:
    return [f"output {n}" for n in range(len(values))]


def _send(
    values: tuple[Any, ...], form: BorderForm, sender: int, receiver: int, world: World, device: torch.device
) -> tuple[Any, ...]:
    """Send the values of a border from the sender to the receiver, where they are returned."""
    if sender == receiver:
        return values
    if world.rank == sender:
        tensors = [t.detach().cpu() for t in form.flatten(values)]
        dist.send_object_list([tensors], world.mine[receiver], group=world.pipeline)
    elif world.rank == receiver:
        received: list[Any] = [None]
        dist.recv_object_list(received, world.mine[sender], group=world.pipeline)
        return form.unflatten([t.to(device) for t in received[0]])
    return values


def _text(value: Any) -> str:
    return f"{value!r}" if isinstance(value, _PLAIN) else f"a {type(value).__name__}"


def tree_borders(
    forms: Sequence[BorderForm], signature: CallSignature, lengths: Mapping[str, int]
) -> Borders:
    """The borders of stages of modules. The model's outputs have the dtypes of the run."""
    last = len(forms) - 1
    outputs = tuple(
        checked_spec(spec, crossing.sizes({}), crossing.dtype, lengths, last - 1)
        for spec, crossing in zip(signature.results, forms[-1].tensors, strict=True)
    )
    for spec in (spec for form in forms[1:last] for spec in form.tensors):
        wire_spec(spec, lengths)  # raises for tensors that cannot be sent
    sides = [signature.tensors, *(form.tensors for form in forms[1:last]), outputs]
    return list(pairwise(sides))


def border_specs(stage: nn.Module) -> tuple[Specs, Specs]:
    """The inputs and outputs of a stage of the graph; empty for a stage of modules (see `find_forms`)."""
    form = getattr(stage, "form", None)
    if form is None:
        return (), ()
    return form.takes, form.gives
