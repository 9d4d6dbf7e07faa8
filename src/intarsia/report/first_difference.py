"""The first node of a model's graph whose value a candidate (a callable, or a file) computes differently."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intarsia.build.builder import part_of, values_of
from intarsia.build.judge import Judge
from intarsia.build.repair import bisect_failure
from intarsia.build.trial import Case, Failure, case_of, rewriter, try_piece
from intarsia.capture.example import Call, bound_arguments, copied_call
from intarsia.compare import disagreement
from intarsia.engines import NetworkEngine, RuntimeFile, known_engines
from intarsia.errors import InputError, IntarsiaError, error_text
from intarsia.graph.nodes import compute_nodes, module_path, op_name, source_line
from intarsia.graph.piece import Piece
from intarsia.graph.segment import PYTORCH
from intarsia.lower.lowered import Lowered, example_inputs
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.fallback import WithFallback

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """A callable that should compute the same as a model.

    `call` takes the model's arguments. A file is `flat`: it returns tensors without the structure of the
    model's results. `inside` returns every inner value of a file, by name.
    """

    name: str
    call: Callable[..., Any]
    flat: bool = False
    inside: Callable[..., Values] | None = None

    @property
    def compiled(self) -> Compiled | None:
        """The candidate, if it is a module that Intarsia compiled; its segments can run alone."""
        return self.call if isinstance(self.call, Compiled) else None

    @property
    def recompile(self) -> Callable[[nn.Module], Callable[..., Any]] | None:
        """For a module of torch.compile, a function that compiles another module in the same way."""
        # `dynamo_ctx` is private (torch 2.11 to 2.13); without it, only the results are compared.
        context = getattr(self.call, "dynamo_ctx", None)
        return context if callable(context) and hasattr(self.call, "_orig_mod") else None

    @property
    def source(self) -> nn.Module | None:
        """The module that the candidate calls: itself, or the module inside a module of torch.compile."""
        source = getattr(self.call, "_orig_mod", self.call)  # private (torch 2.11 to 2.13)
        return source if isinstance(source, nn.Module) else None


def candidate_of(candidate: Any, model: nn.Module) -> Candidate:
    """The candidate for a callable, or for the path of an engine's file, a `.pt2` file or a saved file."""
    if isinstance(candidate, str | os.PathLike):
        return _from_file(Path(candidate), model)
    if not callable(candidate):
        raise InputError(f"candidate is a {type(candidate).__name__}; give a callable or the path of a file")
    if isinstance(candidate, Compiled):
        return Candidate("the compiled model", candidate)
    return Candidate(getattr(candidate, "__name__", type(candidate).__name__), candidate)


def _from_file(path: Path, model: nn.Module) -> Candidate:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    for name, kind in known_engines().items():
        if issubclass(kind, NetworkEngine) and kind.file_suffix == path.suffix and kind.based_on is None:
            engine = kind()
            if (reason := engine.unavailable()) is not None:
                raise InputError(f"{path} needs {name}: {reason}")
            return _flat(path, engine.open(path), model)
    if path.suffix == ".pt2":
        return Candidate(path.name, torch.export.load(path).module())
    from intarsia.archive import load

    return Candidate(path.name, load(path))


def _flat(path: Path, file: RuntimeFile, model: nn.Module) -> Candidate:
    def arrays(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        named = _by_name(path.name, file.inputs, _named(model, args, kwargs))
        try:
            return {name: value.detach().cpu().contiguous().numpy() for name, value in named.items()}
        except TypeError as error:
            raise InputError(f"the inputs have a dtype that numpy lacks: {error}") from error

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in file.run(arrays(args, kwargs))]

    def inside(*args: Any, **kwargs: Any) -> Values:
        values = file.run_inside(arrays(args, kwargs))
        return {name: torch.from_numpy(x) for name, x in values.items() if x.dtype.kind in "fiub"}

    return Candidate(path.name, call, flat=True, inside=inside)


def _named(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """The tensors of a call by the names of arguments. Nested values have names like `pair.0`."""
    bound = bound_arguments(model, args, kwargs)  # None, for example, for an exported module
    by_place = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    leaves, _ = pytree.tree_flatten_with_path(by_place if bound is None else dict(bound.arguments))
    return {
        ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path): value
        for path, value in leaves
        if isinstance(value, torch.Tensor)
    }


def _by_name(file: str, names: Sequence[str], values: Values) -> Values:
    """The inputs of a file, matched by name, or by order if their number is the same."""
    if set(names) <= set(values):
        return {name: values[name] for name in names}
    if len(names) == len(values):
        return dict(zip(names, values.values(), strict=True))
    raise InputError(f"{file} takes {', '.join(names)}; the model is called with {', '.join(values)}")


@dataclass(frozen=True)
class FirstDifference:
    """The first node whose value differs, its module and source line, and how it differs."""

    node: str
    op: str
    module: str
    source: str
    fault: str
    last_equal: str = ""  # the last equal value, if values are matched by content
    reproduction: str | None = None  # the path of a program of torch.export with its inputs

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.module, self.source)))
        lines = [f"first difference: {self.node} ({self.op}){f' [{where}]' if where else ''}: {self.fault}"]
        if self.last_equal:
            lines.append(f"  the last value that both compute is {self.last_equal}")
        if self.reproduction:
            lines.append(f"  reproduction: {self.reproduction}")
        return "\n".join(lines)


def first_difference(
    judge: Judge,
    lowered: Lowered | None,
    call: Call,
    candidate: Candidate,
    reproduction: str | os.PathLike[str] | None = None,
) -> FirstDifference | str:
    """The first difference of a candidate on a call, or the reason why it is unknown."""
    compiled = candidate.compiled
    if compiled is not None and compiled.stands_for_model:
        lowered = compiled.lowered
    if lowered is None:
        return _by_modules(judge, call, candidate) or "the model has no graph"
    try:
        inputs = example_inputs(lowered, *copied_call(call))
        values = values_of(lowered.module, inputs)
    except Exception as error:  # sizes that the graph does not take
        return f"its graph does not run on this call: {type(error).__name__}"
    if compiled is not None:
        difference = _in_segments(compiled, values)
    elif candidate.recompile is not None:
        difference = _in_graph(lowered.module, "torch.compile", values, _recompiled(candidate.recompile))
    elif candidate.inside is not None:
        return _by_values(lowered.module, values, candidate.inside(*call[0], **call[1]), reproduction)
    elif candidate.source is None:
        return "a plain function shows only its results"
    else:
        difference = None
    if difference is not None:
        node, fault, part = difference
        return _difference(node, fault, part, values, reproduction)
    by_modules = None if compiled is not None else _by_modules(judge, call, candidate)
    if by_modules is not None:
        return _in_module(lowered.module, by_modules, values, reproduction)
    return "no node alone differs; small errors add up (`intarsia diff` shows how)"


def _difference(
    node: fx.Node,
    fault: str,
    part: Piece,
    values: dict[fx.Node, Any],
    reproduction: str | os.PathLike[str] | None,
    last_equal: str = "",
) -> FirstDifference:
    path = _written(part, values, reproduction)
    where = module_path(node), source_line(node)
    return FirstDifference(node.name, op_name(node), *where, fault, last_equal, path)


Difference = tuple[fx.Node, str, Piece]  # the node, how it differs, and the piece that reproduces it
Build = Callable[[fx.GraphModule], Callable[..., Sequence[Any]]]


def _in_segments(compiled: Compiled, values: dict[fx.Node, Any]) -> Difference | None:
    """The first node that an engine computes differently, with PyTorch's values as its segment's inputs."""
    for piece, step in zip(compiled.inlay.pieces, compiled.inlay.steps, strict=True):
        program = step.program
        if not isinstance(program, WithFallback):
            continue
        engine = program.origin.engine
        case = case_of(piece, dict(values))
        if _fault(step.program, case) is None:
            continue
        rewrite = rewriter(None, [engine])

        def build(module: fx.GraphModule, engine: Any = engine, rewrite: Any = rewrite) -> Any:
            tried = try_piece(module, engine, [], rewrite, None, [])
            if isinstance(tried, Failure):
                raise IntarsiaError(tried.reason)
            return tried.program

        inner = values_of(piece.module, case.inputs)
        difference = _in_graph(piece.module, engine.name, inner, build)
        if difference is None:
            continue
        own = {node.name: node for node in piece.segment.nodes}
        node, fault, part = difference
        values.update(inner)
        return own.get(node.name, node), fault, part
    return None


def _in_graph(
    module: fx.GraphModule, engine: str, values: dict[fx.Node, Any], build: Build
) -> Difference | None:
    """The first node that differs if runs of nodes are built alone, with PyTorch's values as inputs."""

    def fails(nodes: Sequence[fx.Node]) -> str | None:
        part = part_of(module, engine, nodes)
        try:
            return _fault(build(part.module), case_of(part, dict(values)))
        except IntarsiaError as error:
            return f"is refused: {error}"

    nodes = compute_nodes(module.graph)
    blamed = bisect_failure(nodes, fails, most=0)
    if not blamed:
        return None
    node = next(iter(blamed))
    # A short run that ends with the node and fails: alone, the node may not be fused, and be right.
    place, length = nodes.index(node), 1
    while length <= place and fails(nodes[place + 1 - length : place + 1]) is None:
        length *= 2
    return node, blamed[node], part_of(module, engine, nodes[max(0, place + 1 - length) : place + 1])


def _fault(program: Callable[..., Sequence[Any]], case: Case) -> str | None:
    try:
        with torch.no_grad():
            outputs = list(program(*case.inputs))
    except Exception as error:
        return f"fails: {error_text(error)}"
    return disagreement(outputs, case.expected, case.rounding(0.0))


def _recompiled(recompile: Callable[[nn.Module], Callable[..., Any]]) -> Build:
    def build(module: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        torch.compiler.reset()  # otherwise, many small graphs exceed the limit of recompilations
        return recompile(module)

    return build


def _by_values(
    module: fx.GraphModule,
    values: dict[fx.Node, Any],
    inside: dict[str, torch.Tensor],
    reproduction: str | os.PathLike[str] | None,
) -> FirstDifference | str:
    """The node after the last node whose value is equal to a value of a file.

    The names in a file are arbitrary, so values are matched by content. A runtime may fuse nodes, which then
    have no value in the file.
    """
    shapes: dict[tuple[int, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, value in inside.items():
        shapes.setdefault(tuple(value.shape), []).append((name, value))
    nodes = [n for n in compute_nodes(module.graph) if _is_distinctive(values.get(n))]
    last, twin = -1, ""
    for place, node in enumerate(nodes):
        value = values[node]
        same = (
            name
            for name, other in shapes.get(tuple(value.shape), [])
            if disagreement([other.to(value.dtype)], [value]) is None
        )
        same_value = next(same, None)
        if same_value is not None:
            last, twin = place, same_value
    if last + 1 >= len(nodes):
        return "the file has every value of the model's graph"
    node = nodes[last + 1]
    equal = f"{nodes[last].name} [{source_line(nodes[last])}], named {twin} in the file" if twin else ""
    part = part_of(module, PYTORCH, [node])
    return _difference(node, "no value of the file is equal to it", part, values, reproduction, equal)


def _is_distinctive(value: Any) -> bool:
    """Whether a value can be matched by content: it has floats that are not all equal."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() < 2:
        return False
    return not bool((value == value.flatten()[0]).all())


def _by_modules(judge: Judge, call: Call, candidate: Candidate) -> FirstDifference | None:
    """The first module whose output differs from that of the candidate's module of the same name."""
    if candidate.source is None:
        return None
    outputs = _module_values(judge, candidate.source, call)
    for name, value in _module_values(judge, judge.model, call).items():
        if name not in outputs:
            continue
        fault = disagreement(pytree.tree_leaves(outputs[name]), pytree.tree_leaves(value))
        if name and fault is not None:
            kind = type(judge.model.get_submodule(name)).__name__
            return FirstDifference(name, kind, name, "", fault)
    return None


def _in_module(
    module: fx.GraphModule,
    difference: FirstDifference,
    values: dict[fx.Node, Any],
    reproduction: str | os.PathLike[str] | None,
) -> FirstDifference:
    """A module that differs, with the source line of its first node, and its nodes as the reproduction."""
    nodes = [n for n in compute_nodes(module.graph) if f"{module_path(n)}.".startswith(f"{difference.node}.")]
    if not nodes:
        return difference
    path = _written(part_of(module, PYTORCH, nodes), values, reproduction)
    return replace(difference, source=source_line(nodes[0]), reproduction=path)


def _module_values(judge: Judge, model: nn.Module, call: Call) -> dict[str, Any]:
    """The output of each module in its first call, in the order in which the calls end."""
    values: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            copied = pytree.tree_map_only(torch.Tensor, lambda value: value.detach().clone(), result)
            values.setdefault(name, copied)

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules()]
    try:
        judge.answer(call, model)
    finally:
        for handle in handles:
            handle.remove()
    return values


def _written(part: Piece, values: dict[fx.Node, Any], path: str | os.PathLike[str] | None) -> str | None:
    """Write a piece and its inputs as a program of torch.export; None if torch cannot export it."""
    if path is None:
        return None
    inputs = tuple(values[node] for node in part.inputs)
    try:
        program = torch.export.export(part.module, inputs, strict=False)
    except Exception:  # export does not always accept a program that it returned
        return None
    torch.export.save(program, Path(path))
    return os.fspath(path)
