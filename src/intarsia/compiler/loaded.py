"""Refit of a loaded module: the graph in its file is exported again.

An `ExportedProgram` cannot be read without unpickling, so a file holds the graph alone. If the second export
differs from that graph, the refit raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from intarsia.build.judge import Answer, Example, Judge
from intarsia.capture.example import Call
from intarsia.capture.export import capture
from intarsia.capture.protect import kept_random_state
from intarsia.compare import disagreement
from intarsia.compiler.entry import COMPILING
from intarsia.compiler.job import CompileJob, Request
from intarsia.compiler.refit import Refit
from intarsia.engines import Engine, Program, PyTorch
from intarsia.engines.base import GraphProgram
from intarsia.errors import RefitError, error_text
from intarsia.lower.lowered import Role, example_inputs
from intarsia.options import CompileOptions
from intarsia.runtime.call_interface import Check, ConstantCheck, IntegerCheck
from intarsia.runtime.compiled import Compiled, Weights
from intarsia.runtime.fallback import WithFallback
from intarsia.runtime.inlay import Inlay


def make_refittable(loaded: Compiled, captured: fx.GraphModule) -> None:
    """Let a loaded module be refitted.

    The file holds no example. Engines are tried on inputs drawn for the compiled shapes: normal numbers for
    floats, and ones, or zeros if those fail, for integers. The refitted module is compared with the captured
    graph.
    """
    judge = Judge(captured)
    flat, truth = _inputs(loaded, judge)
    is_comparable = judge.is_deterministic((flat, {}), truth)
    varying = [Dim.DYNAMIC if isinstance(check, IntegerCheck) else None for check in loaded.checks]
    with COMPILING:
        program = capture(captured, flat, dynamic_shapes=varying if any(varying) else None)
    args, kwargs = pytree.tree_unflatten(flat, loaded.lowered.in_spec)
    example = Example(
        (args, kwargs), example_inputs(loaded.lowered, args, kwargs), truth if is_comparable else None
    )
    options = CompileOptions.of(partition="dependency", min_block_size=1)  # the file holds no options
    job = CompileJob(None, Request(((), {})), tuple(_engines(loaded)), options, options.placement)
    refit = Refit(job, [example])

    def refitted(old: Compiled, weights: Weights) -> Compiled:
        compiled = refit(old, weights)
        fault = _fault(compiled, captured, weights, (args, kwargs)) if is_comparable else None
        if fault is not None:
            raise RefitError(f"with these weights the compiled module {fault}; compile the model again")
        compiled.refit_by(refitted)
        return compiled

    loaded.refit_by(refitted, program)


def _fault(compiled: Compiled, captured: nn.Module, weights: Weights, call: Call) -> str | None:
    """How the refitted module differs from the captured program with the new weights."""
    program, flat = compiled.lowered.program, tuple(pytree.tree_leaves(call))
    assert program is not None
    new = weights.state_dict() if isinstance(weights, nn.Module) else weights
    state = {name: new.get(name, tensor) for name, tensor in program.state_dict.items()}
    copied = dict(zip(state, _copies(state.values()), strict=True))  # a program may write to its buffers
    with torch.no_grad():
        expected = torch.func.functional_call(captured, copied, tuple(_copies(flat)), tie_weights=False)
        results = compiled.results(_copies(example_inputs(compiled.lowered, *call)))
    outputs = zip(results, compiled.lowered.outputs, strict=True)
    return disagreement([x for x, output in outputs if output.role is Role.USER], list(expected))


def _copies(values: Iterable[Any]) -> list[Any]:
    return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in values]


def _engines(loaded: Compiled) -> list[Engine]:
    origins = [p.origin for p in _programs(loaded.inlay) if isinstance(p, WithFallback)]
    engines = {origin.engine.name: origin.engine for origin in origins}
    for name, engine in engines.items():
        if not engine.is_exact:
            raise RefitError(
                f"{name} computes within a tolerance, which the file does not contain; compile the model"
                " again"
            )
    return [*engines.values(), PyTorch()]


def _programs(inlay: Inlay) -> Iterator[Program]:
    """The programs of all pieces, and of the pieces in bodies of control flow."""
    for step in inlay.steps:
        yield step.program
        module = step.program.module if isinstance(step.program, GraphProgram) else None
        for body in () if module is None else module.children():
            if isinstance(body, Inlay):
                yield from _programs(body)


def _inputs(loaded: Compiled, judge: Judge) -> tuple[tuple[Any, ...], Answer]:
    """Inputs on which the program runs, and its answer."""
    fault = ""
    for integer in (1, 0):
        with kept_random_state():
            torch.manual_seed(0)
            flat = tuple(_input(check, integer) for check in loaded.checks)
        try:
            return flat, judge.answer((flat, {}))
        except Exception as error:
            fault = error_text(error)
    raise RefitError(f"there are no inputs for the program of the file ({fault}); compile again")


def _input(check: Check, integer: int) -> Any:
    if isinstance(check, ConstantCheck):
        return check.value
    if isinstance(check, IntegerCheck):
        return check.example
    if check.static is None:
        raise RefitError(
            f"the sizes of {check.name} vary, so this loaded module cannot be refitted;"
            " compile the model with its new weights, and save it"
        )
    strides = check.strides or torch.empty(check.static, device="meta").stride()
    tensor = torch.empty_strided(check.static, strides, dtype=check.dtype, device=check.device)
    is_real = check.dtype.is_floating_point or check.dtype.is_complex
    return tensor.copy_(torch.randn(check.static)) if is_real else tensor.fill_(integer)
