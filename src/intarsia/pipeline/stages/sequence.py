"""The stages of a model in order, which run, train, save and load like the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from intarsia.drawing import bytes_text
from intarsia.errors import InputError
from intarsia.graph.line import Waist
from intarsia.pipeline.cost import Cost
from intarsia.pipeline.stages.signature import CallSignature, TensorSpec
from intarsia.pipeline.stages.tied import Tied, find_tied
from intarsia.pipeline.stages.tree_stage import called_modules


@dataclass(frozen=True)
class SplitReport:
    """How a model was cut: the way, the cost of each stage, and the tensors that cross each border."""

    way: str  # "graph" or "modules"
    reason: str  # why the model was not cut by the graph; empty if it was
    by: str
    costs: tuple[Cost, ...]
    borders: tuple[tuple[TensorSpec | str, ...], ...]
    crossing: tuple[int, ...]
    tied: tuple[Tied, ...]
    cuts: tuple[Waist, ...] = ()  # where the graph was cut
    source: str = ""  # how the times were measured or computed
    changed: tuple[str, ...] = ()  # buffers that a forward pass changes
    checkpointed: tuple[str, ...] = ()  # modules that the model itself recomputes in its backward pass
    not_recomputed: str = ""  # why some stage does not recompute them
    mixes: str = ""  # why a batch cannot be divided into micro-batches, if it cannot

    @property
    def balance(self) -> float:
        """The mean load divided by the largest; 1.0 is perfect."""
        loads = [c.seconds if self.by == "time" else float(c.saved + c.weights) for c in self.costs]
        return sum(loads) / len(loads) / max(loads) if max(loads) > 0 else 1.0

    def __str__(self) -> str:
        source = f" ({self.source})" if self.source else ""
        lines = [f"cut by the {self.way}, balanced by {self.by}{source} to {self.balance:.0%}"]
        if self.reason:
            lines.append(f"  not by the graph: {self.reason}")
        for i, cost in enumerate(self.costs):
            lines.append(
                f"  stage {i}: forward {cost.forward * 1e3:.2f} ms, backward {cost.backward * 1e3:.2f} ms,"
                f" weights {bytes_text(cost.weights)}, saved for backward {bytes_text(cost.saved)}"
            )
            if i < len(self.borders):
                values = ", ".join(map(str, self.borders[i]))
                lines.append(f"    | {values} ({bytes_text(self.crossing[i])})")
        lines += [f"  tied: {tie}" for tie in self.tied]
        if self.checkpointed:
            lines.append(f"  recomputed for the gradient, as in the model: {', '.join(self.checkpointed)}")
        if self.not_recomputed:
            lines.append(f"  not recomputed: {self.not_recomputed}")
        if self.mixes:
            lines.append(f"  for one micro-batch only: {self.mixes}")
        if self.changed:
            lines.append(f"  changed by every micro-batch's forward pass: {', '.join(self.changed)}")
        if any(name.endswith("running_mean") for name in self.changed):
            lines.append(
                "  batch norm uses the statistics of each micro-batch; with"
                " deferred_batch_norm=True, the running statistics are those of the whole batch"
            )
        return "\n".join(lines)


class StageSequence(nn.Module):
    """The stages of one model, in order. A call runs them one after the other.

    `state_dict`, `load_state_dict`, `named_parameters` and `named_buffers` use the plain model's names, for
    any cut. The parameters are the plain model's own objects.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        signature: CallSignature,
        report: SplitReport,
        keys: Sequence[str],
        buffer_values: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        for i, stage in enumerate(stages):
            self.add_module(str(i), stage)
        self.signature = signature
        self.report = report
        self.keys: tuple[str, ...] = tuple(keys)
        # Computed here: a stage that is loaded without the others has a parameter of its own.
        self.tied: tuple[Tied, ...] = find_tied(stages)
        # For a model on the meta device: the values of buffers that are in no file of weights.
        self.buffer_values: dict[str, Any] = dict(buffer_values or {})
        self.training: bool = stages[0].training
        self.layer_names: tuple[str, ...] = tuple(dict.fromkeys(n for s in stages for n in called_modules(s)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs."""
        values: Sequence[Any] = self.signature.flatten(args, kwargs)
        self.signature.lengths(values)
        self.check_memory()
        for stage in self:
            values = stage(*values)
        return self.signature.unflatten(values)

    def layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """The modules of `model`, a model like this one, that stages call, by name. See `keyed_random`.

        Empty if the model was cut by the graph, where each node draws by its own key.
        """
        return {name: model.get_submodule(name) for name in self.layer_names}

    def check_memory(self) -> None:
        """Raise InputError for stages that are still on the meta device."""
        for i, stage in enumerate(self):
            for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
                if tensor.is_meta:
                    raise InputError(
                        f"{name} of stage {i} is on the meta device: load weights by load(path), or by"
                        " distributed(..., weights=path), which loads a rank's own stages"
                    )

    @property
    def why_not_padded(self) -> str:
        """Why a batch must not be padded with copies of a sample; empty if it may be."""
        for i, stage in enumerate(self):
            if stage.writes:
                form = getattr(stage, "form", None)
                names = [] if form is None else sorted(form.states.keys() & form.written)
                state = form.states[names[0]] if form is not None and names else "its buffers"
                return f"stage {i} updates {state}, which copies for padding would change"
        for spec in self.signature.results:
            if not self.signature.splits(spec):
                return f"output {spec} has no batch dimension, so copies for padding could not be removed"
        return ""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children_in_order())

    def __getitem__(self, index: int) -> nn.Module:
        return self.children_in_order()[index]

    def children_in_order(self) -> list[nn.Module]:
        """The stages as a list (the same object may be in it twice)."""
        return [m for m in self._modules.values() if m is not None]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under the plain model's names."""
        yield from self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers under the plain model's names."""
        yield from self._named("named_buffers", prefix, recurse, remove_duplicate)

    def _named(
        self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Any]]:
        if not recurse:
            return
        values: dict[str, Any] = {}
        for stage in self:
            for name, value in getattr(stage, kind)(remove_duplicate=False):
                values.setdefault(name, value)
        # In the plain model's order, since an optimizer's state is saved by position.
        place = {key: i for i, key in enumerate(self.keys)}
        seen: set[int] = set()
        for name in sorted(values, key=lambda n: place.get(n, len(place))):
            if remove_duplicate and id(values[name]) in seen:
                continue
            seen.add(id(values[name]))
            yield (f"{prefix}.{name}" if prefix else name), values[name]

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The plain model's `state_dict`, key for key, in its order."""
        state: dict[str, Any] = {}
        for stage in self:
            for key, value in stage.state_dict(keep_vars=keep_vars).items():
                state.setdefault(key, value)
        result = destination if destination is not None else {}
        for key in [*(k for k in self.keys if k in state), *(k for k in state if k not in set(self.keys))]:
            result[prefix + key] = state[key]
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the `state_dict` of the plain model, or of any cut of it."""
        missing: list[str] = []
        expected: set[str] = set()
        for stage in self:
            keys = set(stage.state_dict())
            expected |= keys
            part = {k: v for k, v in state_dict.items() if k in keys}
            missing += stage.load_state_dict(part, strict=False, assign=assign).missing_keys
        unexpected = [k for k in state_dict if k not in expected]
        missing = list(dict.fromkeys(missing))
        if strict and (missing or unexpected):
            raise InputError(f"state_dict does not fit: missing {missing}, unexpected {unexpected}")
        return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)
