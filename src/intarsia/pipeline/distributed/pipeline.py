"""Stages on several processes, run by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.distributed.placement import (
    check_agreement,
    connect,
    default_device,
    is_folded,
    placed,
    schedule_class,
    stage_ranks,
)
from intarsia.pipeline.distributed.wire import WiredStage, wire_spec
from intarsia.pipeline.stages.sequence import StageSequence
from intarsia.pipeline.stages.signature import TensorSpec
from intarsia.pipeline.stages.tied import TiedGradients

Loss = Callable[..., torch.Tensor]

_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed? ?out|pair is not connected|NCCL", re.IGNORECASE
)


@dataclass(frozen=True)
class StepResult:
    """What one step gave: on the rank of the last stage, the loss and the outputs; elsewhere None."""

    loss: torch.Tensor | None
    output: Any


class DistributedPipeline:
    """One rank's part of a pipeline: its stages, and `step`.

    Made by `Stages.distributed` on every rank, inside an initialised process group. The gradients after
    `step` are the plain model's: of the mean loss over the batch (`reduction="mean"`) or of the sum.
    Parameters held by several ranks begin equal and get the sum of their gradients. A batch of another
    length makes new buffers; one that micro-batches do not divide is refused on every rank before it runs.
    """

    def __init__(
        self,
        stages: StageSequence,
        schedule: str = "1F1B",
        n_microbatches: int = 8,
        *,
        loss_fn: Loss | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise PartitionError(
                "no process group: run under torchrun and call torch.distributed.init_process_group first"
            )
        if reduction not in ("mean", "sum"):
            raise PartitionError(f"reduction={reduction!r} is neither 'mean' nor 'sum'")
        self.signature, self.loss_fn, self.group = stages.signature, loss_fn, group
        self.n_microbatches, self.reduction = n_microbatches, reduction
        if n_microbatches > 1:
            self.signature.check_divisible(front=True)
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device(device) if device is not None else default_device()
        self.schedule_class = schedule_class(schedule)
        self.stage_ranks = stage_ranks(len(stages), self.world, self.schedule_class)
        check_agreement(stages, group, self.device)
        connect(self.stage_ranks, group, self.device)
        self._borders = [_border_specs(s) for s in stages]
        self._indices = [i for i, rank in enumerate(self.stage_ranks) if rank == self.rank]
        self._parts = [placed(stages[i], self.device) for i in self._indices]
        self._count = len(stages)
        self._tied = TiedGradients(
            stages.tied, self.stage_ranks, dict(zip(self._indices, self._parts, strict=True)), group
        )
        self._built: dict[tuple[bool, tuple[tuple[str, int], ...]], Any] = {}
        self._targets: list[Any] = []
        # Every border is checked now, so that nothing is refused in the middle of a step.
        for takes, _ in self._borders[1:]:
            for spec in takes:
                wire_spec(spec, self.signature.example)

    @property
    def modules(self) -> nn.ModuleList:
        """This rank's stages; their `state_dict`s have the plain model's keys."""
        return nn.ModuleList(self._parts)

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once: what its optimizer takes."""
        return list(dict.fromkeys(p for part in self._parts for p in part.parameters()))

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the plain model's `state_dict`."""
        found: dict[str, Any] = {}
        for part in self._parts:
            found.update(part.state_dict())
        return found

    @property
    def held(self) -> list[int]:
        """The numbers of this rank's stages."""
        return list(self._indices)

    @property
    def is_first(self) -> bool:
        """Whether this rank takes the inputs."""
        return 0 in self._indices

    @property
    def is_last(self) -> bool:
        """Whether this rank takes the target and gives the loss and the outputs."""
        return self._count - 1 in self._indices

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Forward and backward over one batch.

        Every rank calls it. The first rank must give the model's inputs and the last the target (a tensor, or
        any structure of tensors with the batch in front); other ranks may give them or not.
        """
        if self.loss_fn is None:
            raise PartitionError("step needs loss_fn; without one call infer")
        return self._run(args, kwargs, target, learn=True)

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Forward alone over one batch; the outputs, on the rank of the last stage."""
        with torch.no_grad():
            return self._run(args, kwargs, None, learn=False).output

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, learn: bool) -> StepResult:
        tensors, lengths = self._agree(args, kwargs, target)
        losses: list[torch.Tensor] = []
        try:
            run, last = self._schedule(learn, lengths)
            options: dict[str, Any] = {}
            if self.is_last and learn:
                self._targets = _chunks(target, self.n_microbatches)
                options = {"target": torch.arange(self.n_microbatches), "losses": losses}
            with self._tied.collecting() if learn else torch.no_grad(), _dense_gradients(self.parameters()):
                run.step(*(tensors if self.is_first else ()), **options)
        except RuntimeError as error:
            if _LOST.search(str(error)):
                raise PipelineError(
                    f"rank {self.rank} lost another rank in the middle of a step: {error}"
                ) from error
            raise
        finally:
            self._targets = []
        if last is None:
            return StepResult(None, None)
        loss = torch.stack([x.detach() for x in losses]).sum() if losses else None
        output = self._join(last.take())
        return StepResult(loss, output)

    def _agree(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any
    ) -> tuple[list[torch.Tensor], dict[str, int]]:
        """Let every rank know the lengths of this batch, or that some rank refused it."""
        names = sorted(self.signature.example)
        tensors: list[torch.Tensor] = []
        lengths: dict[str, int] = {}
        refusal = ""
        try:
            if self.is_first:
                tensors, lengths = self._divide(args, kwargs)
            if self.is_last and target is not None:
                _chunks(target, self.n_microbatches)
        except InputError as error:
            refusal = str(error)
        mine = torch.tensor([int(bool(refusal)), *(lengths.get(n, -1) for n in names)], device=self.device)
        gathered = [torch.empty_like(mine) for _ in range(self.world)]
        try:
            dist.all_gather(gathered, mine, group=self.group)
        except RuntimeError as error:
            raise PipelineError(f"rank {self.rank} lost another rank before a step: {error}") from error
        refused = [r for r, t in enumerate(gathered) if int(t[0])]
        if refusal:
            raise InputError(refusal)
        if refused:
            raise InputError(f"rank {refused[0]} refused this batch; its own error says why")
        first = gathered[self.stage_ranks[0]]
        return tensors, {n: int(v) for n, v in zip(names, first[1:], strict=True)}

    def _divide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], dict[str, int]]:
        """This batch's tensors, ready to be cut in equal parts, and the lengths of one part."""
        tensors = self.signature.flatten(args, kwargs)
        m = self.n_microbatches
        parts, wires = [], []
        for spec, tensor in zip(self.signature.tensors, tensors, strict=True):
            if not self.signature.splits(spec):
                parts.append(tensor)
                wires.append(tensor.to(self.device).unsqueeze(0).expand(m, *tensor.shape).contiguous())
                continue
            if tensor.shape[0] % m:
                raise InputError(
                    f"{spec.name} holds {tensor.shape[0]} samples, which n_microbatches={m} does not divide;"
                    " drop or pad the rest of the last batch"
                )
            parts.append(tensor[: tensor.shape[0] // m])
            wires.append(tensor.to(self.device).contiguous())
        return wires, self.signature.lengths(parts)

    def _schedule(self, learn: bool, lengths: Mapping[str, int]) -> tuple[Any, _OutputRecorder | None]:
        """torch's schedule for batches of these lengths; made once for each."""
        key = (learn, tuple(sorted(lengths.items())))
        if key not in self._built:
            self._built.clear()  # the buffers of another length are not kept
            self._built[key] = self._build(learn, lengths)
        return self._built[key]  # type: ignore[no-any-return]

    def _build(self, learn: bool, lengths: Mapping[str, int]) -> tuple[Any, _OutputRecorder | None]:
        made: list[PipelineStage] = []
        keep: _OutputRecorder | None = None
        for i, part in zip(self._indices, self._parts, strict=True):
            takes, gives = self._borders[i]
            first, last = i == 0, i == self._count - 1
            whole = [not self.signature.splits(s) for s in takes] if first else [False] * len(takes)
            module: nn.Module = WiredStage(part, takes, whole, first, last)
            if last:
                module = keep = _OutputRecorder(module)
            inputs = [
                _plain(s, lengths, w) if first else wire_spec(s, lengths)
                for s, w in zip(takes, whole, strict=True)
            ]
            outputs = [_plain(s, lengths, s.shape == ()) if last else wire_spec(s, lengths) for s in gives]
            made.append(
                PipelineStage(
                    module,
                    i,
                    self._count,
                    self.device,
                    input_args=tuple(inputs),
                    output_args=tuple(outputs),
                    group=self.group,
                    dw_builder=None if SPLITS_BACKWARD else _nothing_left,
                )
            )
        if is_folded(self.schedule_class):
            # Before 2.13 torch begins by letting neighbours greet each other, and on a fold a rank greets
            # itself, which gloo refuses. The connections are open already.
            for stage in made:
                if hasattr(stage, "_get_init_p2p_neighbors_ops"):
                    stage._get_init_p2p_neighbors_ops = list  # type: ignore[method-assign]
        single = issubclass(self.schedule_class, schedules.PipelineScheduleSingle)
        run = self.schedule_class(
            made[0] if single else made,
            n_microbatches=self.n_microbatches,
            loss_fn=self._loss if learn else None,
            # torch divides a parameter's gradient once for each of its stages, and what was there before
            # too; we scale the loss.
            scale_grads=False,
        )
        return run, keep

    def _loss(self, outputs: Sequence[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
        """The user's loss of one micro-batch, scaled so that the sum over all is the batch's."""
        assert self.loss_fn is not None
        answer = self.signature.unflatten(_bare(outputs, self._borders[-1][1]))
        target = self._targets[int(index)]
        loss = self.loss_fn(answer, target) if target is not _NONE else self.loss_fn(answer)
        return loss / self.n_microbatches if self.reduction == "mean" else loss * 1

    def _join(self, chunks: Sequence[Sequence[torch.Tensor]]) -> Any:
        """The outputs of all micro-batches as the model gives them; those without a batch are stacked."""
        joined = []
        specs = self._borders[-1][1]
        for spec, column in zip(specs, zip(*(_bare(c, specs) for c in chunks), strict=True), strict=True):
            joined.append(torch.cat(column) if self.signature.splits(spec) else torch.stack(column))
        return self.signature.unflatten(joined)


class _OutputRecorder(nn.Module):
    """Keeps what the last stage gives, micro-batch by micro-batch."""

    def __init__(self, border: nn.Module) -> None:
        super().__init__()
        self.border = border
        self.kept: list[tuple[torch.Tensor, ...]] = []

    def forward(self, *wires: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, noted in passing."""
        outputs = self.border(*wires)
        self.kept.append(tuple(o.detach() for o in outputs))
        return outputs  # type: ignore[no-any-return]

    def take(self) -> list[tuple[torch.Tensor, ...]]:
        """What was kept, once; numbers without the dimension they were given."""
        kept, self.kept = self.kept, []
        return kept


_NONE = object()

# Before 2.13 torch's separate pass for the weights adds up the gradients of a node's several outputs as if
# they were one, so there the whole backward pass runs where the inputs' would.
SPLITS_BACKWARD = tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 13)


def _nothing_left() -> Callable[..., None]:
    return lambda: None


def _contiguous(grad: torch.Tensor) -> torch.Tensor:
    return grad.contiguous()


@contextmanager
def _dense_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients with memory of their own: torch's split backward adds in place to expanded views."""
    hooks = [p.register_hook(_contiguous) for p in parameters if p.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _bare(outputs: Sequence[torch.Tensor], specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    return [o.reshape(()) if s.shape == () else o for o, s in zip(outputs, specs, strict=True)]


def _plain(spec: TensorSpec, lengths: Mapping[str, int], front: bool) -> torch.Tensor:
    shape = spec.sizes(lengths)
    return torch.empty((1, *shape) if front else shape, dtype=spec.dtype, device="meta")


def _chunks(target: Any, count: int) -> list[Any]:
    """A target cut in equal parts along the batch, whatever its structure."""
    if target is None:
        return [_NONE] * count
    leaves, spec = pytree.tree_flatten(target)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] % count:
            found = (
                f"a {type(leaf).__name__}"
                if not isinstance(leaf, torch.Tensor)
                else f"shape {tuple(leaf.shape)}"
            )
            raise InputError(f"the target has {found}, which n_microbatches={count} does not divide")
    columns = [leaf.chunk(count) for leaf in leaves]
    return [pytree.tree_unflatten([c[i] for c in columns], spec) for i in range(count)]


def _border_specs(stage: nn.Module) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    form = getattr(stage, "form", None)
    if form is None:
        raise PartitionError(
            "stages cut along the module tree run in one process only; see stages.report.reason"
        )
    return form.takes, form.gives
