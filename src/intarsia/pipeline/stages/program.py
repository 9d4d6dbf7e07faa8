"""The program of a stage: its device, nodes that draw by key, and modules recomputed in the backward pass.

Models on the meta device are here too: their graphs name that device.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from intarsia.errors import CaptureError, PartitionError, PipelineError
from intarsia.graph.line import Line, training_line
from intarsia.graph.nodes import bodies_of, modules
from intarsia.graph.piece import pieces_at
from intarsia.pipeline.gpipe.checkpoint import enable_recomputing, is_recomputing
from intarsia.pipeline.gpipe.keyed_random import current_key, draws_of, keyed_draw, using_key


@dataclass(frozen=True)
class Draws:
    """The draws of a node: the number of its first draw in the model, and their count."""

    number: int
    count: int


def number_draws(graph: fx.Graph) -> dict[str, Draws]:
    """The draws of nodes, by name. A node in the body of an operator has the operator's name as a prefix."""
    draws: dict[str, Draws] = {}
    total = 0

    def walk(inner: fx.Graph, prefix: str) -> None:
        nonlocal total
        for node in inner.nodes:
            if node.op != "call_function":
                continue
            for i, body in enumerate(bodies_of(node)):
                walk(body.graph, f"{prefix}{node.name}/{i}/")
            count = draws_of(node.target, node.args, node.kwargs)
            if count:
                draws[prefix + node.name] = Draws(total, count)
                total += count

    walk(graph, "")
    return draws


def keyed_program(program: nn.Module, draws: Mapping[str, Draws], prefix: str = "") -> nn.Module:
    """The graph with nodes that draw by key; the graph itself if no node draws.

    A dispatch mode, as for stages cut along modules, would intercept every operator of the stage.
    """
    drawing = {name.removeprefix(prefix).split("/")[0] for name in draws if name.startswith(prefix)}
    if not isinstance(program, fx.GraphModule) or drawing.isdisjoint(
        node.name for node in program.graph.nodes if node.op == "call_function"
    ):
        return program
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    bodies: dict[str, nn.Module] = {}
    for node in program.graph.nodes:
        for i, body in enumerate(bodies_of(node) if node.op == "call_function" else ()):
            (target,) = (
                str(n.target)
                for n in node.all_input_nodes
                if n.op == "get_attr" and operator.attrgetter(str(n.target))(program) is body
            )
            bodies[target] = keyed_program(body, draws, f"{prefix}{node.name}/{i}/")
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        own = draws.get(prefix + node.name)
        if own is not None and node.op == "call_function":  # in a later stage, an input has the name
            copy.args = (node.target, own.number, own.count, *copy.args)
            copy.target = keyed_draw
    attributes: dict[str, Any] = {
        str(n.target): bodies.get(str(n.target)) or operator.attrgetter(str(n.target))(program)
        for n in graph.nodes
        if n.op in ("get_attr", "call_module")
    }
    return fx.GraphModule(attributes, graph)


def module_names(program: fx.GraphModule) -> set[str]:
    """The names of the modules in which a stage's nodes were traced."""
    return {path for node in program.graph.nodes for path, _ in modules(node) if path}


def recomputed_program(
    program: fx.GraphModule,
    states: Mapping[str, bool],
    written: frozenset[str],
    names: Sequence[str],
    draws: Mapping[str, Draws],
) -> nn.Module:
    """The program in which modules with `names` (or patterns, `h.*.mlp`) are recomputed for their gradient.

    `states` tells for the program's weights and buffers whether they need a gradient; `written` are those
    that it changes. Nodes in `draws` draw by key.
    """
    placeholders = program.graph.find_nodes(op="placeholder")
    line = training_line(program.graph, {n: states[n.name] for n in placeholders if n.name in states})
    spans = _spans(line, names)
    if not spans:
        return keyed_program(program, draws)
    return _RecomputedProgram(program, line, spans, written, draws)


class _RecomputedProgram(nn.Module):
    """The pieces of a program, in order; `torch.utils.checkpoint` runs some of them."""

    def __init__(
        self,
        program: fx.GraphModule,
        line: Line,
        spans: Sequence[tuple[int, int]],
        written: frozenset[str],
        draws: Mapping[str, Draws],
    ) -> None:
        super().__init__()
        ends = {0, len(line.nodes)}
        places = sorted({place for span in spans for place in span} - ends)
        starts = [0, *places]
        pieces = pieces_at(program, line, places)
        begins = {first for first, _ in spans}
        self.again = [i < len(starts) and starts[i] in begins for i in range(len(pieces))]
        self.runs = nn.ModuleList(keyed_program(piece.module, draws) for piece in pieces)
        # Names of nodes: nodes themselves have fake tensors, which cannot be copied.
        self.takes = [tuple(n.name for n in piece.inputs) for piece in pieces]
        self.gives = [tuple(n.name for n in piece.outputs) for piece in pieces]
        self.written = [tuple(n.name in written for n in piece.inputs) for piece in pieces]
        self.inputs = [n.name for n in program.graph.nodes if n.op == "placeholder"]
        results: Any = program.graph.output_node().args[0]
        self.results = [(v.name, None) if isinstance(v, fx.Node) else (None, v) for v in results]

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """The program's results."""
        scope: dict[str, Any] = dict(zip(self.inputs, values, strict=True))
        for takes, gives, module, again, written in zip(
            self.takes, self.gives, self.runs, self.again, self.written, strict=True
        ):
            arguments = [scope[name] for name in takes]
            again = again and torch.is_grad_enabled()
            results = _checkpointed(module, arguments, written) if again else module(*arguments)
            scope.update(zip(gives, results, strict=True))
        return tuple(constant if name is None else scope[name] for name, constant in self.results)


def _checkpointed(module: nn.Module, values: Sequence[Any], written: Sequence[bool]) -> tuple[Any, ...]:
    """Run a piece under `torch.utils.checkpoint`. Its second run sees the buffers of the first."""
    buffers = [v if w else None for v, w in zip(values, written, strict=True)]
    before = [None if v is None else v.detach().clone() for v in buffers]

    def run(*inputs: Any) -> tuple[Any, ...]:
        rest = iter(inputs)
        again = is_recomputing()
        arguments = []
        for value, earlier, changes in zip(buffers, before, written, strict=True):
            if not changes:
                arguments.append(next(rest))
            else:
                arguments.append(earlier.clone() if again and earlier is not None else value)
        return tuple(module(*arguments))

    return recomputed(run, *(v for v, w in zip(values, written, strict=True) if not w))


def recomputed(function: Callable[..., Any], *values: Any) -> tuple[Any, ...]:
    """The results of a function that runs again for the gradient. It must not change its inputs."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    versions = [v._version for v in tensors]
    # With a key, the generators' states do not matter, and other threads may use the generators.
    rng = current_key() is None
    results = checkpoint(
        function,
        *values,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _Recomputing()),
        preserve_rng_state=rng,
    )
    if [v._version for v in tensors] != versions:
        raise PipelineError("a recomputed part of the model changes its input in place")
    return tuple(results)


class _Recomputing(AbstractContextManager[None]):
    """The context of later runs: the stage does not change its buffers, and draws by the first run's key.

    A split backward pass enters it twice.
    """

    def __init__(self) -> None:
        self.key = current_key()

    def __enter__(self) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(enable_recomputing())
        self.stack.enter_context(using_key(self.key))

    def __exit__(self, *error: Any) -> None:
        self.stack.close()


def _spans(line: Line, names: Sequence[str]) -> list[tuple[int, int]]:
    """The stretches of the line inside named modules, as pairs of places where it may be cut."""
    labels = [_label(node, names) for node in line.nodes]
    allowed = [0, *line.allowed, len(line.nodes)]
    spans: list[tuple[int, int]] = []
    start = 0
    while start < len(labels):
        if not labels[start]:
            start += 1
            continue
        end = start
        while end < len(labels) and labels[end] == labels[start]:
            end += 1
        first = min(p for p in allowed if p >= start)
        last = max(p for p in allowed if p <= end)
        if first < last:
            spans.append((first, last))
        elif any(n not in line.recomputed for n in line.nodes[start:end]):
            reason = line.closed.get(start) or line.closed.get(end) or "the graph cannot be cut around it"
            raise PartitionError(f"{labels[start]} cannot be recomputed alone: {reason}")
        start = end
    return spans


def _label(node: fx.Node, names: Sequence[str]) -> str:
    """The outermost module of a node that `names` match; empty if there is none."""
    for path, _ in modules(node):
        if path and any(fnmatchcase(path, name) for name in names):
            return path
    return ""


META = torch.device("meta")


def on_device(value: Any, device: torch.device) -> Any:
    """A node's arguments with every device replaced, also in the bodies of higher-order operators.

    >>> on_device({"dtype": torch.int64, "device": META}, torch.device("cpu"))
    {'dtype': torch.int64, 'device': device(type='cpu')}
    """
    if isinstance(value, torch.device):
        return device
    if isinstance(value, tuple | list):
        return type(value)(on_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: on_device(v, device) for k, v in value.items()}
    if isinstance(value, fx.GraphModule):  # the body of a higher-order operator
        body = copy.deepcopy(value)
        retarget(body, device)
        return body
    return value


def retarget(program: nn.Module, device: torch.device) -> None:
    """Make a graph create its tensors (by `arange`, `zeros`) on `device`."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.args = on_device(node.args, device)
                node.kwargs = on_device(node.kwargs, device)
            module.recompile()


def is_on_meta(model: nn.Module) -> bool:
    """Whether the model's parameters are on the meta device. Raises CaptureError if only some are."""
    meta = [name for name, p in model.named_parameters() if p.is_meta]
    real = [name for name, p in model.named_parameters() if not p.is_meta]
    if meta and real:
        raise CaptureError(
            f"{meta[0]} is on the meta device and {real[0]} is not; build all parameters there"
        )
    return bool(meta)


def to_meta(example: Any) -> Any:
    """An example call, or the states of a graph, on the meta device; parameters stay parameters."""
    return pytree.tree_map_only(torch.Tensor, _meta_tensor, example)


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Move a model's real buffers to the meta device for a while. Yields their values by name.

    A model on the meta device may have computed buffers, such as rotary tables: their values are kept.
    """
    values = {n: b for n, b in model.named_buffers(remove_duplicate=False) if not b.is_meta}
    before = [(m, dict(m._buffers)) for m in model.modules()]
    moved: dict[int, torch.Tensor] = {}
    for module, buffers in before:
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(META))
    try:
        yield values
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


def _meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().to(META), requires_grad=tensor.requires_grad)
    return tensor.to(META)


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The values of non-persistent buffers on the meta device, if the model can compute them.

    `_init_weights` of Hugging Face models fills the buffers of a module; `from_pretrained` calls it for the
    same purpose. It runs twice, on memory with different contents. If the results are equal, they depend only
    on the model's configuration. Other buffers are not in the result.
    """
    fill = getattr(model, "_init_weights", None)
    values: dict[str, Tensor] = {}
    if not callable(fill):
        return values
    for path, module in model.named_modules():
        buffers = {n: module._buffers.get(n) for n in module._non_persistent_buffers_set}
        names = [n for n, buffer in buffers.items() if buffer is not None and buffer.is_meta]
        if not names:
            continue
        runs = [_filled(fill, module, names, start) for start in (0, 1)]
        for name in names:
            first, second = (run.get(name) for run in runs)
            if first is not None and second is not None and torch.equal(first, second):
                values[f"{path}.{name}" if path else name] = first
    return values


def _filled(fill: Any, module: nn.Module, names: list[str], start: int) -> dict[str, Tensor]:
    """The module's buffers after `fill` on a copy of the module, in which only these buffers have memory."""
    twin = copy.copy(module)
    twin._buffers = dict(module._buffers)
    for name in names:
        twin._buffers[name] = torch.full_like(module._buffers[name], start, device="cpu")  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        fill(twin)
    return {name: b for name in names if (b := twin._buffers[name]) is not None}
