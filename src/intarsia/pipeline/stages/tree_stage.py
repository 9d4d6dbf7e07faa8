"""A stage of a model that is cut between calls of its modules.

Such a model has no graph: `torch.export` refuses it. The stage runs the modules themselves, and what a
`Stage` reads in its graph (what is written and drawn, which values cross a border) is seen on the example.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError
from intarsia.graph.piece import Piece
from intarsia.pipeline.gpipe.checkpoint import is_recomputing
from intarsia.pipeline.gpipe.effects import BufferSnapshot, owned_buffers
from intarsia.pipeline.gpipe.keyed_random import call_layer, numbered_draws
from intarsia.pipeline.stages.stage import NamedStage, Stage, StageForm, part_at
from intarsia.pipeline.stages.trace import tensor_names


@dataclass(frozen=True)
class RandomPlaces:
    """The random places of nodes: names for calls of modules, the number of the first draw for others."""

    calls: Mapping[str, str]
    draws: Mapping[str, int]


def called_modules(stage: nn.Module) -> list[str]:
    """The names of the modules that a stage calls; empty for stages cut by the graph."""
    nodes = stage.graph.nodes if isinstance(stage, TreeStage) else ()
    return [str(node.target) for node in nodes if node.op == "call_module"]


class TreeStage(NamedStage):
    """A stage that calls the model's own modules, under their names.

    The values at its borders may be of any type. The last stage returns the tensors of the model's outputs.
    Outputs that are not tensors must be equal to the example's.
    """

    def __init__(self, piece: Piece, root: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        object.__setattr__(self, "graph", piece.graph)
        self.arguments: tuple[Any, ...] = tuple(node.name for node in piece.inputs)
        self.results: tuple[Any, ...] = tuple(node.name for node in piece.outputs)
        self.input_names: tuple[str, ...] = tuple(inputs)
        self.output_names: tuple[str, ...] = tuple(outputs)
        self.captured_training: bool = root.training
        self.mean_node: str | None = None  # the call that computes a mean over tokens
        self.writes = False  # whether the example changed a buffer
        self.answer: tuple[Any, ...] | None = None  # on the last stage: the leaves of the example's outputs
        self.random_places = RandomPlaces({}, {})
        for node in piece.graph.nodes:
            if node.op == "call_module":
                self.graft_module(str(node.target), root.get_submodule(str(node.target)))
            elif node.op == "get_attr":
                share(self, str(node.target), root)
        self.training: bool = root.training

    graph: fx.Graph
    # A module may use a weight several times, which its call does not show.
    reuses_weights = True

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """The values of the border after the stage, from those of the border before it."""
        if self.training != self.captured_training:
            raise InputError(
                "this stage was cut in the other mode; split the model again after train() or eval()"
            )
        scope = dict(zip(self.input_names, values, strict=True))
        with self._unchanged_statistics():
            results = _KeyedRun(self).run(*(scope[name] for name in self.arguments))
        scope.update(zip(self.results, results, strict=True))
        outputs = tuple(scope[name] for name in self.output_names)
        return outputs if self.answer is None else _tensors(outputs, self.answer)

    def _unchanged_statistics(self) -> AbstractContextManager[None]:
        """In a recomputation, the modules get copies of buffers: the first run has updated the statistics."""
        if not (self.writes and is_recomputing()):
            return nullcontext()
        return BufferSnapshot.take(owned_buffers(self)).replayed()

    def extra_repr(self) -> str:
        """The values at both borders."""
        return f"({', '.join(self.input_names)}) -> ({', '.join(self.output_names)})"


class _KeyedRun(fx.Interpreter):
    """Runs a stage's graph. If there is a key, modules and nodes draw by it."""

    def __init__(self, stage: TreeStage) -> None:
        super().__init__(stage, graph=stage.graph)
        self.places = stage.random_places

    def fetch_attr(self, target: str) -> Any:
        return part_at(self.module, target)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_module":
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return call_layer(self.fetch_attr(str(n.target)), self.places.calls[n.name], *args, **kwargs)
        if n.name in self.places.draws:
            with numbered_draws(self.places.draws[n.name]):
                return super().run_node(n)
        return super().run_node(n)


def _tensors(outputs: Sequence[Any], answer: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    leaves = pytree.tree_leaves(outputs)
    if len(leaves) != len(answer):
        raise InputError(
            f"the model returns {len(leaves)} values; for the example, it returned {len(answer)}"
        )
    for leaf, example in zip(leaves, answer, strict=True):
        if isinstance(leaf, torch.Tensor) != isinstance(example, torch.Tensor):
            raise InputError(f"the model returns {leaf!r}; for the example, it returned {example!r}")
        if not isinstance(leaf, torch.Tensor) and leaf is not example and leaf != example:
            raise InputError(
                f"the model returns {leaf!r}; for the example, it returned {example!r}. A value that is not a"
                " tensor is fixed when the model is cut; return a tensor"
            )
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def share(stage: NamedStage, name: str, model: nn.Module) -> None:
    """Register a tensor of the model in the stage."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    stage.graft_tensor(name, getattr(owner, leaf), leaf not in owner._non_persistent_buffers_set)


def keep_the_rest(model: nn.Module, parts: Sequence[TreeStage]) -> None:
    """Register unused tensors in the first stage, and the parameters of every stage under all their names."""
    used = {name for part in parts for name in [*dict(part.named_parameters()), *dict(part.named_buffers())]}
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        if name not in used:
            share(parts[0], name, model)
    names = tensor_names(model)
    for part in parts:
        here = dict(part.named_parameters(remove_duplicate=False))
        for parameter in dict.fromkeys(here.values()):
            for name in names.get(id(parameter), ()):
                if name not in here:
                    share(part, name, model)


def note_writes(parts: Sequence[TreeStage], changed: Collection[int]) -> None:
    """Set `writes` of the stages with a buffer that the example changed; `changed` are ids."""
    for part in parts:
        part.writes = any(id(b) in changed for b in part.buffers())


class CompiledStage(nn.Module):
    """A stage that engines run. It returns a tuple."""

    def __init__(self, program: nn.Module, stage: nn.Module) -> None:
        super().__init__()
        self.program = program
        self.training = False
        object.__setattr__(self, "form", stage.form if isinstance(stage, Stage) else None)
        if isinstance(stage, TreeStage):
            self.input_names, self.output_names = stage.input_names, stage.output_names
            self.answer = stage.answer

    form: StageForm | None  # of a stage cut by the graph
    writes = False
    mean_node = None
    # Of a stage cut along modules: see TreeStage.
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()
    answer: tuple[Any, ...] | None = None

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """The values of the border after the stage."""
        outputs = self.program(*values)
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
