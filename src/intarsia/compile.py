"""The whole flow: capture, lower, ask, partition, convert, rewrite, build, stitch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack

import torch
from torch import nn

from intarsia.build.builder import Builder, Rewrite, run_in_pytorch
from intarsia.capture.device import device_kind
from intarsia.capture.input import resolve_call
from intarsia.capture.random_state import keeps_random_state
from intarsia.convert import registry
from intarsia.engines import Engine, NetworkEngine, resolve_engines
from intarsia.errors import InputError
from intarsia.lower import Lowered
from intarsia.lower.generalize import Call, lower_model
from intarsia.lower.lowered import example_inputs
from intarsia.lower.range_ends import corners
from intarsia.network import Network
from intarsia.partition import PartitionOptions, Strategy, find_strategy
from intarsia.partition.names import check_names
from intarsia.partition.options import PartitionChoices, partition_options
from intarsia.partition.support import support_table
from intarsia.rewrite import Patterns, apply, patterns_by_engine
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.cuda_graphs import use_cuda_graphs


@keeps_random_state
def compile(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    engines: Sequence[Engine | str] | Engine | str | None = None,
    partition: str | Strategy = "dependency",
    options: PartitionOptions | None = None,
    rewrite: Patterns = None,
    verify: bool = True,
    cuda_graphs: bool | Literal["static"] | None = None,
    **choices: Unpack[PartitionChoices],
) -> Compiled:
    """Cut a model into pieces, give each to an engine that can run it, inlay them as one module.

    The module computes what the model does in evaluation, for inputs like `args` and `kwargs` (sizes
    named in `dynamic_shapes` may vary). Where no engine takes an operator, PyTorch runs it, and
    `plan` says why. With `verify` every piece is run once on the example inputs and compared.
    `rewrite` chooses patterns: None those measured to pay here, True all, False none, or a list of shipped
    names, patterns and managers; `RewritePatternManager.instance()` holds those applied with None and True.
    On a GPU the whole module runs as one CUDA graph where it can be recorded; `cuda_graphs=False` turns that
    off, and with "static" a call returns the graph's own memory, which the next call overwrites.
    `choices` are the fields of `PartitionOptions` (`min_block_size`, `torch_executed_ops`,
    `torch_executed_modules`, `require_full_compilation`, `atomic`, `memory_budget`, `backend_priority`,
    `backend_support_map`), given by name or together as `options`.

    >>> import torch, intarsia
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> fast = intarsia.compile(model, (torch.ones(1, 8),))
    >>> torch.allclose(fast(torch.ones(1, 8)), model(torch.ones(1, 8)), atol=1e-5)
    True
    """
    wishes, strategy = partition_options(options, choices), find_strategy(partition)
    args, kwargs, dynamic_shapes = resolve_call(model, args, kwargs or {}, dynamic_shapes)
    device = device_kind(model, args, kwargs)
    usable, notes = resolve_engines(engines, device)
    if cuda_graphs is not None and cuda_graphs is not False and device != "cuda":
        raise InputError(
            f"cuda_graphs={cuda_graphs!r} needs a model on a CUDA device; this one is on {device}"
        )
    lowered, call = lower_model(
        model, args, kwargs, dynamic_shapes, has_converter=registry.__contains__, drop_guards=verify
    )
    check_names(lowered.module, wishes, [engine.name for engine in usable])
    builder = Builder(
        lowered.module,
        usable,
        wishes,
        strategy,
        rewrite=None if rewrite is False else _rewriter(rewrite, usable),
        examples=_examples(lowered, call, (args, kwargs), notes) if verify else (),
    )
    plan, pieces, programs = builder.run(support_table(lowered.module, usable))
    signature = inspect.signature(model.forward) if isinstance(model, nn.Module) else None
    notes = [*notes, *lowered.notes, *builder.notes]
    compiled = Compiled(lowered, plan, pieces, programs, notes, signature, builder.body_plans)
    if device == "cuda" and cuda_graphs is not False:
        use_cuda_graphs(
            compiled,
            lowered.module.graph,
            capturable=all(engine.capturable for engine in usable if engine.name in plan.engines),
            results="static" if cuda_graphs == "static" else "fresh",
            example=example_inputs(lowered, *call),
        )
    return compiled


def _examples(lowered: Lowered, call: Call, given: Call, notes: list[str]) -> list[list[Any]]:
    """The call that was captured, the user's own, and the same at the least and largest sizes it may have."""
    example = example_inputs(lowered, *call)
    found = [example] if call[0] is given[0] else [example, example_inputs(lowered, *given)]
    for corner in corners(lowered, example, notes):
        try:
            run_in_pytorch(lowered.module, corner)
        except Exception as error:  # PyTorch itself cannot run the model so: there is no answer to compare
            sizes = ", ".join(str(tuple(x.shape)) for x in corner if isinstance(x, torch.Tensor))
            notes.append(
                f"not verified at {sizes}, where PyTorch itself fails: {type(error).__name__}: {error}"
            )
            continue
        found.append(corner)
    return found


def _rewriter(patterns: Patterns, engines: Sequence[Engine]) -> Rewrite:
    names = [engine.name for engine in engines if isinstance(engine, NetworkEngine)]
    chosen = patterns_by_engine(patterns, names)

    def rewrite(net: Network, engine: NetworkEngine) -> None:
        apply(net, engine=engine.name, patterns=chosen[engine.name], build=engine.build)

    return rewrite
