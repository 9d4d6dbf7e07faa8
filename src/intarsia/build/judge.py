"""The judge: the user's model, run eagerly. A compiled module must give the model's answers.

Engines are compared with the model and not with the lowered graph, which would hide a wrong decomposition or
a branch that capture does not take. This costs one eager run for each example.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call as Call
from intarsia.capture.example import copied_call
from intarsia.capture.output_objects import open_objects
from intarsia.capture.protect import undisturbed
from intarsia.compare import disagreement
from intarsia.lower import Lowered, Role
from intarsia.lower.lowered import example_inputs
from intarsia.rounding import Rounding


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: its results, and its arguments and the model's buffers afterwards."""

    leaves: list[Any]
    structure: pytree.TreeSpec
    inputs: list[Any]
    buffers: dict[str, torch.Tensor]
    seconds: float = 0.0  # that the call took

    def of(self, lowered: Lowered) -> Answer:
        """The answer without buffers that the graph does not write to, which would keep weights alive."""
        written = {output.target for output in lowered.outputs if output.role is Role.BUFFER}
        return replace(self, buffers={name: b for name, b in self.buffers.items() if name in written})

    def in_graph_order(self, lowered: Lowered) -> list[Any]:
        """The values in the order of the graph's outputs: those written back, and the results."""
        leaves = iter(self.leaves)
        places = {item.name: item.index for item in lowered.inputs}
        values: list[Any] = []
        for output in lowered.outputs:
            if output.role is Role.USER:
                values.append(next(leaves, None))
            elif output.role is Role.BUFFER:
                values.append(self.buffers.get(output.target or ""))
            else:
                values.append(self.inputs[places[output.target or ""] or 0])
        return values


class Judge:
    """Runs a model, or its compiled form, on copies of a call. The model does not change."""

    def __init__(self, model: nn.Module | ExportedProgram) -> None:
        self.model: nn.Module = model.module() if isinstance(model, ExportedProgram) else model

    def answer(self, call: Call, function: Callable[..., Any] | None = None) -> Answer:
        """The answer of the model, or of another function, such as the compiled module."""
        args, kwargs = copied_call(call)
        flat = pytree.tree_leaves((args, kwargs))
        with undisturbed(self.model) as value_of:
            began = time.perf_counter()
            results = (function or self._run)(*args, **kwargs)
            seconds = time.perf_counter() - began
            leaves, structure = pytree.tree_flatten(open_objects(results))
            # A result may share memory with a buffer, which is restored.
            leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]
            buffers = {name: value_of(buffer) for name, buffer in self._state()}
        return Answer(leaves, structure, flat, buffers, seconds)

    def answer_if_any(self, call: Call) -> Answer | None:
        """The answer of the model; None if it fails. Capture then fails, too, and reports the line."""
        try:
            return self.answer(call)
        except Exception:
            return None

    def fault(
        self,
        lowered: Lowered,
        truth: Answer,
        other: Answer | Sequence[Any],
        rounding: Rounding | None,
        tolerance: float | None = None,
        rows: int = 1,
    ) -> str | None:
        """How another answer differs from the model's, in a clause; None if they agree."""
        if isinstance(other, Answer):
            if len(other.leaves) != len(truth.leaves):
                return f"it gives {len(other.leaves)} results; the model gives {len(truth.leaves)}"
            other = other.in_graph_order(lowered)
        if truth.structure != lowered.out_spec:
            return f"it gives results as {lowered.out_spec}; the model as {truth.structure}"
        return disagreement(other, truth.in_graph_order(lowered), rounding, tolerance, rows)

    def is_deterministic(self, call: Call, truth: Answer) -> bool:
        """Whether the model gives the same answer with other random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.rand(1)
            return _are_alike(self.answer(call), truth)

    def repeats(self, call: Call) -> bool:
        """Whether two runs of the model with the same random numbers give the same answer."""
        return _are_alike(self.answer(call), self.answer(call))

    def graph_answer(self, lowered: Lowered, call: Call) -> tuple[Any, ...]:
        """The answer of the lowered graph, run in PyTorch."""
        with undisturbed(self.model):
            return tuple(lowered.module(*example_inputs(lowered, *copied_call(call))))

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # A graph prints the traceback before it raises (torch 2.13), also where a size is only tried.
        is_graph = isinstance(self.model, fx.GraphModule)
        return (partial(nn.Module.__call__, self.model) if is_graph else self.model)(*args, **kwargs)

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_buffers(remove_duplicate=False)
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}" if path else name, value


def _are_alike(one: Answer, other: Answer) -> bool:
    if one.structure != other.structure or len(one.leaves) != len(other.leaves):
        return False
    return disagreement(one.leaves, other.leaves) is None


def call_of(lowered: Lowered, inputs: Sequence[Any]) -> Call:
    """The call for which the graph has these inputs."""
    flat = {i.index: value for i, value in zip(lowered.inputs, inputs, strict=True) if i.index is not None}
    call: Call = pytree.tree_unflatten([flat[place] for place in range(len(flat))], lowered.in_spec)
    return call
