"""Drawing a random model and the options it is compiled with, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.fuzz.operators import (
    TEMPLATES,
    NoOperand,
    Scope,
    Template,
    branch,
    in_place,
    mode,
    quantized,
    rounded,
)
from tests.fuzz.program import Program, Statement, Value

_EXAMPLE_SIZE = 3
_MOST_ELEMENTS = 4096
_ENGINES = (
    ("onnxruntime",),
    ("openvino",),
    ("openvino", "onnxruntime"),
    ("onnxruntime", "openvino"),
    ("mnn",),
    ("mnn", "onnxruntime"),
    ("pytorch",),
)


@dataclass(frozen=True)
class Options:
    """How a model is compiled, whether its first size varies, and what happens to the model.

    `training`: it is in training mode when it is compiled, which means in evaluation. `step`: after the calls
    a fused optimizer steps, which the compiled module has to notice.
    """

    engines: tuple[str, ...] = ("onnxruntime",)
    partition: str = "dependency"
    min_block_size: int | None = 1
    rewrite: bool = True
    dynamic: bool = False
    training: bool = False
    step: bool = False


@dataclass(frozen=True)
class Case:
    """One trial: a model and its options."""

    program: Program
    options: Options


def draw_case(seed: int, engines: tuple[tuple[str, ...], ...] = _ENGINES) -> Case:
    """The case of a seed, the same on every machine with the same torch.

    >>> draw_case(3) == draw_case(3)
    True
    """
    dice, more = random.Random(seed), random.Random(f"{seed}, and what was added to the fuzzer later")
    options = Options(
        engines=dice.choice(engines),
        partition=dice.choice(("dependency", "greedy", "hierarchical")),
        min_block_size=dice.choice((1, 1, 2, 4, None)),
        rewrite=dice.random() < 0.7,
        dynamic=dice.random() < 0.3,
        training=more.random() < 0.15,
        step=more.random() < 0.2,
    )
    templates = [*TEMPLATES, *([mode] * 8 if options.training else [])]
    templates += [branch] * 6 if more.random() < 0.2 else []
    templates += [quantized] * 8 if random.Random(f"quantized {seed}").random() < 0.2 else []
    templates += [rounded] * 8 if random.Random(f"rounded {seed}").random() < 0.15 else []
    program = _draw_program(dice, options.dynamic, templates)
    container = more.choice(("list", "dict", "inside")) if more.random() < 0.2 else None
    return Case(replace(program, container=container), options)


def _draw_program(dice: random.Random, dynamic: bool, templates: Sequence[Template]) -> Program:
    inputs = _draw_inputs(dice, dynamic)
    buffers = (Value("b0", "torch.ones(3)"),) if dice.random() < 0.15 else ()
    module = torch.nn.Module().eval()  # what `self` is while a line is tried
    known: dict[str, Any] = {"torch": torch, "F": torch.nn.functional, "self": module}
    given = {"g": torch.Generator().manual_seed(0), "n": _EXAMPLE_SIZE, "torch": torch}
    tensors: dict[str, torch.Tensor] = {}
    for value in (*inputs, *buffers):
        given[value.name] = tensors[value.name] = eval(value.expression, dict(given))
    scope = Scope(dice, tensors)
    statements: list[Statement] = []
    mutates = dice.random() < 0.25
    for _ in range(dice.randint(2, 12)):
        made = _draw_statement(scope, known, len(statements), mutates, templates)
        if made is not None:
            statements.append(made)
    return Program(
        inputs,
        tuple(Value(name, expression) for name, expression in scope.weights),
        buffers,
        tuple(statements),
        _draw_result(scope, statements),
    )


def _draw_inputs(dice: random.Random, dynamic: bool) -> tuple[Value, ...]:
    inputs: list[Value] = []
    for number in range(dice.randint(1, 3)):
        rank = dice.choice((1, 2, 2, 3, 3, 4))
        sizes = [str(dice.choice((1, 2, 3, 4, 5, 8))) for _ in range(rank)]
        if dynamic or dice.random() < 0.5:
            sizes[0] = "n"
        if inputs and dice.random() < 0.1:
            inputs.append(Value(f"x{number}", inputs[0].name, inputs[0].dynamic))  # one tensor given twice
            continue
        shape = ", ".join(sizes)
        kinds = ("float", "float", "float", "float", "whole", "strided", "int", "int32", "bool", "half")
        turned = ", ".join(reversed(sizes))
        order = ", ".join(str(axis) for axis in reversed(range(rank)))
        forms = {
            "float": f"torch.randn({shape}, generator=g)",
            "whole": f"torch.randint(-3, 4, ({shape},), generator=g).float()",
            "strided": f"torch.randn({turned}, generator=g).permute({order})",
            "int": f"torch.randint(-5, 6, ({shape},), generator=g)",
            "int32": f"torch.randint(-5, 6, ({shape},), generator=g, dtype=torch.int32)",
            "bool": f"torch.rand({shape}, generator=g) > 0.5",
            "half": f"torch.randn({shape}, generator=g).half()",
        }
        expression = forms[dice.choice(kinds) if number else dice.choice(kinds[:6])]
        inputs.append(Value(f"x{number}", expression, (0,) if sizes[0] == "n" else ()))
    return tuple(inputs)


def _draw_statement(
    scope: Scope, known: dict[str, Any], number: int, mutates: bool, templates: Sequence[Template]
) -> Statement | None:
    """One more line that eager PyTorch can run, or None when ten tries found none."""
    for _ in range(10):
        before = len(scope.weights)
        in_line = mutates and scope.dice.random() < 0.2
        try:
            expression = (in_place if in_line else scope.dice.choice(templates))(scope)
        except NoOperand:
            continue
        drawn = {"torch": torch, "g": torch.Generator().manual_seed(7)}
        weights = {name: eval(made, drawn) for name, made in scope.weights}
        try:
            with torch.no_grad():
                made = eval(expression, {**known, **scope.tensors, **weights})
        except Exception:  # eager refuses it: another line
            del scope.weights[before:]
            continue
        if in_line:
            return Statement(expression)
        if isinstance(made, torch.Tensor) and 0 < made.numel() <= _MOST_ELEMENTS and made.ndim <= 5:
            name = f"v{number}"
            scope.tensors[name] = made
            return Statement(expression, name)
        del scope.weights[before:]
    return None


def _draw_result(scope: Scope, statements: list[Statement]) -> str:
    dice = scope.dice
    made = [s.target for s in statements if s.target] or list(scope.tensors)
    last = made[-1]
    others = [dice.choice(made) for _ in range(dice.randint(0, 2))]
    if dice.random() < 0.1:
        others.append("x0")  # an input handed back
    forms = ("{0}", "({0}, {1})", "{{'a': {0}, 'b': ({1},)}}", "[{0}, {{'c': ({1},)}}, None, 3]")
    if not others:
        return last
    return dice.choice(forms).format(last, ", ".join(others))
