"""What is looked at before stages run over processes: options that name stages, and what cannot be right."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from intarsia.errors import PartitionError
from intarsia.pipeline.distributed.loss import mean_inside
from intarsia.pipeline.stages.compiled import CompiledStage
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import TensorSpec
from intarsia.pipeline.stages.stage import Stage, recompute_modules
from intarsia.pipeline.stages.tree_stage import TreeStage


def recomputed_stages(checkpoint: bool | Collection[int | str], stages: StageSequence) -> frozenset[int]:
    """The stages to compute again; modules that are named are told to their stages."""
    if isinstance(checkpoint, str) or not isinstance(checkpoint, bool | Collection):
        raise PartitionError(
            f"checkpoint={checkpoint!r} must be True, False, or a list of"
            " numbers of stages and names of modules"
        )
    chosen = range(len(stages)) if checkpoint is True else () if checkpoint is False else checkpoint
    strange = [one for one in chosen if not isinstance(one, int | str)]
    if strange:
        raise PartitionError(f"checkpoint names {strange[0]!r}, which is neither a stage nor a module")
    numbers = [i for i in chosen if isinstance(i, int)]
    wrong = [i for i in numbers if i not in range(len(stages))]
    if wrong:
        raise PartitionError(f"checkpoint names stage {wrong[0]}; there are {len(stages)}")
    names = [name for name in chosen if isinstance(name, str)]
    if names:
        recompute_modules(stages, names)
    return frozenset(numbers)


def why_whole(stages: StageSequence) -> str:
    """Why a micro-batch may not be filled up with copies of a sample; empty if it may."""
    for i, stage in enumerate(stages):
        if writes_buffers(stage):
            form = getattr(stage, "form", None)
            names = [] if form is None else sorted(form.states.keys() & form.written)
            state = form.states[names[0]] if form is not None and names else "its buffers"
            return f"stage {i} updates {state}, which copies that fill it up would enter"
    signature = stages.signature
    for spec in signature.outputs:
        if isinstance(spec, TensorSpec) and not signature.splits(spec):
            return f"output {spec} has no batch, so copies that fill it up could not be taken off again"
    return ""


def writes_buffers(stage: nn.Module) -> bool:
    """Whether a stage changes buffers in its forward pass."""
    if isinstance(stage, Stage):
        return bool(stage.form.states.keys() & stage.form.written)
    return isinstance(stage, TreeStage) and stage.writes


def refuse_shared_statistics(stages: StageSequence, ranks: Sequence[int]) -> None:
    """Refuse buffers that several ranks would update, each for itself: a module called in two stages."""
    homes: dict[int, int] = {}
    for i, stage in enumerate(stages):
        if isinstance(stage, TreeStage) and stage.writes:
            for name, buffer in stage.named_buffers():
                if ranks[homes.setdefault(id(buffer), i)] != ranks[i]:
                    raise PartitionError(
                        f"stages {homes[id(buffer)]} and {i} both hold {name}, which running them may change,"
                        " on different ranks: choose other cuts with cuts=..."
                    )


def refuse_compiled(stages: StageSequence, trains: bool) -> None:
    """Refuse compiled stages where gradients are wanted."""
    for i, stage in enumerate(stages):
        if isinstance(stage, CompiledStage) and trains:
            raise PartitionError(f"stage {i} is compiled, for inference: leave out loss_fn and call infer")


def refuse_mean_inside(stages: StageSequence) -> None:
    node = next((n for n in map(mean_inside, stages) if n is not None), None)
    if node is not None:
        raise PartitionError(
            f"the model computes a mean over tokens itself ({node}), and micro-batches may average over"
            " different numbers of them: give loss_weight=, a function of a micro-batch's target (with"
            " target=labels, say lambda labels: (labels != -100).sum()), or loss_weight='equal'"
        )
