"""Module rewriting: submodules swapped by class or path, before the graph is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from intarsia.errors import RewriteError

Key = type[nn.Module] | str
Swap = Callable[[nn.Module], nn.Module]


class Swapped(NamedTuple):
    """One submodule that was swapped."""

    path: str
    old: str
    new: str


class Rewritten(NamedTuple):
    """The model with its submodules swapped, and which they were."""

    model: nn.Module
    swapped: list[Swapped]


def rewrite_modules(model: nn.Module, rules: Mapping[Key, Swap]) -> Rewritten:
    """Swap submodules: keys are classes (exact ones), paths or globs; values make the new from the old.

    The model given is left as it is; the one given back shares its parameters and all modules that
    did not change. A module used in several places is swapped once and used in them all. The first rule
    that names a module is its rule. What a swap puts in is not looked into again.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.ReLU()))
    >>> new, swapped = rewrite_modules(model, {nn.ReLU: lambda old: nn.SiLU()})
    >>> [type(m).__name__ for m in new], [s.path for s in swapped]
    (['Linear', 'SiLU', 'Sequential'], ['1', '2.0'])
    >>> new[0] is model[0]
    True
    """
    if not rules:
        raise RewriteError("no rule is given to swap modules by")
    swapped: list[Swapped] = []
    used: set[Key] = set()
    done: dict[int, nn.Module] = {}

    def visit(module: nn.Module, path: str) -> nn.Module:
        if id(module) in done:
            return done[id(module)]
        key = next((key for key in rules if _names(key, module, path)), None)
        if key is not None:
            used.add(key)
            new = rules[key](module)
            if not isinstance(new, nn.Module):
                raise RewriteError(f"the rule for {path or 'the model'} gave {new!r}, which is not a module")
            new.train(module.training)
            swapped.append(Swapped(path, type(module).__name__, type(new).__name__))
        else:
            new = _with_children(module, path, visit)
        done[id(module)] = new
        return new

    rewritten = visit(model, "")
    if unused := [key if isinstance(key, str) else key.__name__ for key in rules if key not in used]:
        raise RewriteError(f"no submodule is named by {unused}")
    return Rewritten(rewritten, swapped)


def _names(key: Key, module: nn.Module, path: str) -> bool:
    if isinstance(key, type):
        return type(module) is key
    return bool(path) and fnmatchcase(path, key)


def _with_children(module: nn.Module, path: str, visit: Callable[[nn.Module, str], nn.Module]) -> nn.Module:
    """The module itself if none of its children changed, else a shallow copy that has the new ones."""
    children = {
        name: child if child is None else visit(child, f"{path}.{name}" if path else name)
        for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    twin = copy.copy(module)  # parameters and buffers are shared; the tables that hold them are not
    for table in ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks"):
        twin.__dict__[table] = copy.copy(module.__dict__[table])
    twin._modules.update(children)
    return twin
