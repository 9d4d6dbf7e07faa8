"""The form of an object: its class and what its attributes hold, without the tensors and integers in it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Nested tuples that begin with a word, so that forms are equal where objects are alike.
Form = Any

_LEAVES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_PLAIN = (type(None), bool, float, str, torch.device, *_NAMED)


class NoFormError(Exception):
    """An object is more than its attributes, or holds what is."""


def form_of(value: Any) -> tuple[Form, list[Any], list[Any]]:
    """The form of a value, its leaves in order, and all in it that can be changed; NoFormError of others.

    >>> form, leaves, parts = form_of([1, True, [torch.zeros(1)]])
    >>> form, leaves
    (('list', ('leaf',), ('plain', True), ('list', ('leaf',))), [1, tensor([0.])])
    """
    reader = _Reader()
    form = reader.form_of(value)
    return form, reader.leaves, reader.parts


class _Reader:
    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.parts: list[Any] = []
        self._met: dict[int, int] = {}  # the place of each part; they are held, so that no id is used again

    def form_of(self, value: Any) -> Form:
        if isinstance(value, _LEAVES) or type(value) is int:  # what is a number here is a size that may vary
            self.leaves.append(value)
            return ("leaf",)
        if type(value) in _PLAIN:
            return ("plain", value)
        if isinstance(value, type):
            return ("class", value)
        kind = type(value)
        if kind is tuple:
            return ("tuple", *map(self.form_of, value))
        if id(value) in self._met:
            return ("again", self._met[id(value)])
        self._met[id(value)] = len(self.parts)
        self.parts.append(value)
        if kind is list:
            return ("list", *map(self.form_of, value))
        if kind is dict:
            return ("dict", *((self.form_of(key), self.form_of(item)) for key, item in value.items()))
        if not _is_all_attributes(kind):
            raise NoFormError(f"a {kind.__name__} is more than its attributes")
        return ("object", kind, *((name, self.form_of(item)) for name, item in vars(value).items()))


def _is_all_attributes(kind: type) -> bool:
    """Whether an object of a class is made again by an empty one and its attributes."""
    bases = [vars(base) for base in kind.__mro__[:-1]]
    special = any("__new__" in base or "__del__" in base or base.get("__slots__") for base in bases)
    return not special and kind.__dictoffset__ != 0


def restored(form: Form, leaves: Iterable[Any]) -> Any:
    """A new value of this form with these leaves."""
    return _restored(form, iter(leaves), [])


def _restored(form: Form, leaves: Iterator[Any], met: list[Any]) -> Any:
    word, *parts = form
    match word:
        case "leaf":
            return next(leaves)
        case "plain" | "class":
            return parts[0]
        case "again":
            return met[parts[0]]
        case "tuple":
            return tuple(_restored(part, leaves, met) for part in parts)
    restored: Any = [] if word == "list" else {} if word == "dict" else object.__new__(parts[0])
    met.append(restored)
    if word == "list":
        restored += [_restored(part, leaves, met) for part in parts]
    elif word == "dict":
        for key, item in parts:
            name = _restored(key, leaves, met)
            restored[name] = _restored(item, leaves, met)
    else:
        for name, item in parts[1:]:
            vars(restored)[name] = _restored(item, leaves, met)
    return restored


def leaf_names(form: Form) -> list[str]:
    """Where each leaf is: attributes, keys and places, joined by dots.

    >>> leaf_names(("list", ("leaf",), ("dict", (("plain", "a"), ("leaf",)))))
    ['0', '1.a']
    """
    word, *parts = form
    if word == "leaf":
        return [""]
    if word == "object":
        named = parts[1:]
    elif word == "dict":
        named = []
        for at, (key, item) in enumerate(parts):
            named += [(f"{at}.key", key), (str(key[1] if key[0] == "plain" else at), item)]
    else:
        named = [(str(at), part) for at, part in enumerate(parts)] if word in ("list", "tuple") else []
    return [f"{name}.{inner}".rstrip(".") for name, item in named for inner in leaf_names(item)]


def form_to_json(form: Form) -> Any:
    """The form as lists, with classes and torch's constants by their names."""
    word, *parts = form
    if word == "plain":
        return [word, *_plain_to_json(parts[0])]
    if word in ("class", "object"):
        held = [[name, form_to_json(item)] for name, item in parts[1:]]
        name = f"{parts[0].__module__}:{parts[0].__qualname__}"
        if _class(name, word) is not parts[0]:
            raise NotImplementedError(f"{name} is another class.")
        return [word, name, *held]
    if word == "dict":
        return [word, *([form_to_json(key), form_to_json(item)] for key, item in parts)]
    return [word, *(part if isinstance(part, int) else form_to_json(part) for part in parts)]


def form_from_json(entry: Any) -> Form:
    """The form; its classes must be there in modules that are imported already."""
    word, *parts = entry
    if word == "plain":
        return (word, _plain_from_json(*parts))
    if word in ("class", "object"):
        return (word, _class(parts[0], word), *((name, form_from_json(item)) for name, item in parts[1:]))
    if word == "dict":
        return (word, *((form_from_json(key), form_from_json(item)) for key, item in parts))
    if word not in ("again", "leaf", "list", "tuple"):
        raise NotImplementedError(f"No object has a {word!r}.")
    return (word, *(part if isinstance(part, int) else form_from_json(part) for part in parts))


def _plain_to_json(value: Any) -> list[Any]:
    if isinstance(value, _NAMED):
        return ["torch", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    return ["float", repr(value)] if isinstance(value, float) else ["as it is", value]


def _plain_from_json(kind: str, value: Any) -> Any:
    if kind == "torch":
        constant = vars(torch).get(value)
        if not isinstance(constant, _NAMED):
            raise NotImplementedError(f"torch has no constant {value!r}.")
        return constant
    if kind not in ("as it is", "device", "float"):
        raise NotImplementedError(f"No object has a plain {kind!r}.")
    return value if kind == "as it is" else {"device": torch.device, "float": float}[kind](value)


def _class(name: str, word: str) -> type:
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    if not isinstance(value, type) or (word == "object" and not _is_all_attributes(value)):
        raise NotImplementedError(f"No class {name} is known.")
    return value
