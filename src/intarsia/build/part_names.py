"""Names that a user gave for a model compiled in parts: what they mean in a part, and whether in any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

from torch import fx, nn

from intarsia.capture.call import Call as Call
from intarsia.capture.example import copied_call
from intarsia.capture.protect import undisturbed
from intarsia.capture.random_state import kept_random_state
from intarsia.errors import PartitionError
from intarsia.partition.names import (
    DispatchedOps,
    check_engine_names,
    check_op_names,
    module_matcher,
    near_names,
)
from intarsia.partition.options import ModuleName, PartitionOptions
from intarsia.runtime.shared_copy import shared_copy


def names_within(model: nn.Module, path: str, names: Iterable[ModuleName]) -> tuple[ModuleName, ...]:
    """The names of modules as they are called inside the part at `path`; \"\" means all of it."""
    around = [".".join(path.split(".")[:depth]) for depth in range(len(path.split(".")) + 1)]
    inside = [inner for inner, _ in model.get_submodule(path).named_modules() if inner]
    found: list[ModuleName] = []
    for name in names:
        means = _meaning(name, model)
        if any(map(means, around)):
            found.append("")
        found += [inner for inner in inside if means(f"{path}.{inner}")]
    return tuple(dict.fromkeys(found))


def _meaning(name: ModuleName, model: nn.Module) -> Callable[[str], bool]:
    if isinstance(name, str):
        return lambda path: path == name or fnmatchcase(path, name)
    return lambda path: type(model.get_submodule(path)) is name


def check_names_of_parts(
    model: nn.Module,
    call: Call,
    graphs: Sequence[fx.GraphModule],
    options: PartitionOptions,
    engines: Sequence[str],
) -> None:
    """Raise `PartitionError` for a name that means no module of the model, or no operator that it runs."""
    check_engine_names(options, engines)
    paths = [path for path, _ in model.named_modules()]
    for name in options.torch_executed_modules:
        module_matcher(name)  # says what may be a name
        if not any(map(_meaning(name, model), paths)):
            kinds = [type(module).__name__ for module in model.modules()]
            wanted, known = (name, paths) if isinstance(name, str) else (name.__name__, kinds)
            raise PartitionError(
                f"torch_executed_modules names {wanted!r}, which no module is{near_names(wanted, known)}"
            )
    check_op_names(graphs, options, lambda: _operators_run(model, call))


def _operators_run(model: nn.Module, call: Call) -> list[str]:
    """The operators that PyTorch runs for a call of the model."""
    copy = shared_copy(model)
    args, kwargs = copied_call(call)
    with undisturbed(copy), kept_random_state(), DispatchedOps() as ran:
        copy(*args, **kwargs)
    return [str(op) for op in ran.ops]
