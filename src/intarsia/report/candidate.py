"""The candidates that are compared with a model: any callable, or a file of another runtime."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.example import bound_arguments
from intarsia.engines import NetworkEngine, RuntimeFile, known_engines
from intarsia.errors import InputError
from intarsia.runtime.compiled import Compiled

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
