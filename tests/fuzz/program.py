"""A random model as data: inputs, weights, statements, and what is returned; printed as runnable Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

_NAME = re.compile(r"\b[vxwb]\d+\b")


@dataclass(frozen=True)
class Value:
    """An input, parameter or buffer: its name, and the expression over `n`, `g` and `torch` that makes it."""

    name: str
    expression: str
    dynamic: tuple[int, ...] = ()  # the dimensions that are `n`


@dataclass(frozen=True)
class Statement:
    """`target = expression`, or the bare expression where it works in place."""

    expression: str
    target: str | None = None

    def __str__(self) -> str:
        return f"{self.target} = {self.expression}" if self.target else self.expression

    @property
    def reads(self) -> frozenset[str]:
        """The names it mentions."""
        return frozenset(_NAME.findall(self.expression))


@dataclass(frozen=True)
class Program:
    """A model: `forward` takes the inputs in order, runs the statements and returns `result`."""

    inputs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    buffers: tuple[Value, ...]
    statements: tuple[Statement, ...]
    result: str
    container: str | None = None  # what the inputs are given in: a "list", a "dict", or one "inside" another

    def source(self) -> str:
        """Python that defines `Model`, `inputs(n, seed)`, and `pack`, which makes a call of inputs."""
        lines = ["import torch", "import torch.nn.functional as F", "from torch import nn", "", ""]
        lines += ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += ["        g, n = torch.Generator().manual_seed(7), 3"]
        lines += [f"        {_registered(w)}" for w in self.parameters]
        lines += [f"        self.register_buffer({b.name!r}, {b.expression})" for b in self.buffers]
        taken, unpacked, call = _containers([x.name for x in self.inputs], self.container)
        lines += ["", f"    def forward({', '.join(['self', *taken])}):", *(f"        {s}" for s in unpacked)]
        lines += [f"        {_with_self(str(s))}" for s in self.statements]
        lines += [f"        return {_with_self(self.result)}", "", ""]
        lines += ["def inputs(n=3, seed=0):", "    g = torch.Generator().manual_seed(seed)"]
        lines += [f"    {x.name} = {x.expression}" for x in self.inputs]
        lines += [f"    return ({''.join(x.name + ', ' for x in self.inputs)})", "", ""]
        lines += [f"def pack({', '.join(x.name for x in self.inputs)}):", f"    return {call}", ""]
        return "\n".join(lines)

    def namespace(self) -> dict[str, Any]:
        """What running the source defines."""
        found: dict[str, Any] = {}
        exec(compile(self.source(), "<random model>", "exec"), found)
        return found

    def smaller(self) -> Iterator[Program]:
        """Programs with one thing less: a statement, an input or weight nobody reads."""
        for index in reversed(range(len(self.statements))):
            yield from _without(self, index)
        read = set(_NAME.findall(self.result)).union(*(s.reads for s in self.statements))
        kept = replace(
            self,
            inputs=tuple(x for x in self.inputs if x.name in read) or self.inputs,
            parameters=tuple(w for w in self.parameters if w.name in read),
            buffers=tuple(b for b in self.buffers if b.name in read),
        )
        if kept != self:
            yield kept
        if self.container is not None:
            yield replace(self, container=None)
        for name in dict.fromkeys(_NAME.findall(self.result)):
            if self.result != name:
                yield replace(self, result=name)


def _registered(weight: Value) -> str:
    if weight.expression.startswith("torch.randint"):
        return f"self.register_buffer({weight.name!r}, {weight.expression})"
    return f"self.{weight.name} = nn.Parameter({weight.expression})"


def _containers(names: list[str], container: str | None) -> tuple[list[str], list[str], str]:
    """What `forward` takes, how it takes that apart, and the call that it needs."""
    listed = ", ".join(names)
    if container == "list":
        return ["given"], [f"[{listed}] = given"], f"([{listed}],)"
    if container == "dict":
        return (
            ["given"],
            [f"{name} = given[{name!r}]" for name in names],
            "({" + ", ".join(f"{name!r}: {name}" for name in names) + "},)",
        )
    if container == "inside":
        rest = ", ".join(names[1:])
        unpacked = [f"[{rest}], _ = rest['held'], rest['none']"]
        return [names[0], "rest"], unpacked, f"({names[0]}, {{'held': [{rest}], 'none': ()}})"
    return names, [], f"({''.join(name + ', ' for name in names)})"


def _with_self(text: str) -> str:
    """Weights and buffers are attributes: `w0` and `b0` become `self.w0` and `self.b0`."""
    return re.sub(r"\b([wb]\d+)\b", r"self.\1", text)


def _without(program: Program, index: int) -> Iterator[Program]:
    """The program without one statement; what it made is read from one of its operands instead."""
    gone = program.statements[index]
    rest = program.statements[:index] + program.statements[index + 1 :]
    if gone.target is None:
        yield replace(program, statements=rest)
        return
    for name in sorted(gone.reads):
        word = re.compile(rf"\b{gone.target}\b")
        moved = tuple(Statement(word.sub(name, s.expression), s.target) for s in rest)
        yield replace(program, statements=moved, result=word.sub(name, program.result))
