"""`intarsia.compile`, the function that users call. Importing it does not import the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

if TYPE_CHECKING:
    from torch import nn

    from intarsia.choose.measured import Measured, Precision
    from intarsia.engines import Engine
    from intarsia.partition import PartitionOptions, Strategy
    from intarsia.partition.options import PartitionChoices
    from intarsia.rewrite import Patterns
    from intarsia.runtime.compiled import Compiled
    from intarsia.runtime.partly import PartlyCompiled


def compile(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    engines: Sequence[Engine | str] | Engine | str | None = None,
    partition: str | Strategy | Measured | None = None,
    precision: Precision | None = None,
    tolerance: float | None = None,
    examples: Sequence[Sequence[Any]] = (),
    options: PartitionOptions | None = None,
    rewrite: Patterns = None,
    verify: bool = True,
    cuda_graphs: bool | Literal["static"] | None = None,
    build_limit_s: float | None = 600.0,
    fallback: Literal["parts", "eager", "error"] = "parts",
    **choices: Unpack[PartitionChoices],
) -> Compiled | PartlyCompiled:
    """Cut a model into pieces, give each piece to an engine, and return them as one module.

    The module computes what the model computes in evaluation, for inputs like `args` and `kwargs`. Where no
    engine takes an operator, PyTorch runs it. `plan` says what runs where and why, and `notes` what else a
    user should know.

    Args:
        model: the model.
        args: an example of its arguments by position. An `Input` stands for a tensor whose size varies.
        kwargs: an example of its arguments by name.
        dynamic_shapes: sizes that may vary, as for `torch.export.export`.
        engines: engines by name or as objects, in the order of preference. By default, all that are
            installed.
        partition: `Measured()`, the name of a strategy (`"greedy"`, `"dependency"`, `"hierarchical"`), or a
            function. With `Measured()`, plans are timed on this machine and the fastest is kept. This is the
            default if neither engines nor their order are named and the model is large enough for it to pay.
            Otherwise each node goes to the first engine that takes it.
        precision: the shorter arithmetic that engines may use within `tolerance`: `"bf16"`, `"fp16"`,
            `"int8"`, `"int8-weights"` or `"int4-weights"`. `"fp32"` allows none. By default, all are tried.
        tolerance: the largest error of each result, as a share of its largest value in each row of a batch.
            By default, results agree with the model's within rounding.
        examples: further calls, by position, on which the tolerance must hold.
        options: a `PartitionOptions`; or give its fields by name.
        rewrite: rewriting patterns. None applies those that were measured to pay on this machine, True all,
            False none. A list holds names, patterns and managers.
        verify: compare the graph, every piece and the whole with the model, at the example and at the ends of
            sizes that vary. Nodes that answer differently stay in PyTorch.
        cuda_graphs: False launches kernel by kernel on a GPU. `"static"` returns the memory of the graph,
            which the next call overwrites. By default, the module is one CUDA graph, and results are
            copied out.
        build_limit_s: seconds after which an engine that does not answer is given up.
        fallback: what happens to a model that `torch.export` cannot take. `"parts"` compiles its submodules,
            `"eager"` returns the model as it is, `"error"` raises.
        choices: `min_block_size`, `torch_executed_ops`, `torch_executed_modules`, `require_full_compilation`,
            `atomic`, `memory_budget`, `backend_priority`, `backend_support_map`; see `PartitionOptions`.

    >>> import torch, intarsia
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> fast = intarsia.compile(model, (torch.ones(1, 8),))
    >>> torch.allclose(fast(torch.ones(1, 8)), model(torch.ones(1, 8)), atol=1e-5)
    True
    """
    # The compiler imports onnx and sympy, which takes a second; naming this function should not.
    from intarsia.compiler.entry import compile_with
    from intarsia.options import CompileOptions

    checked = CompileOptions.of(
        engines=engines,
        partition=partition,
        precision=precision,
        tolerance=tolerance,
        examples=examples,
        options=options,
        rewrite=rewrite,
        verify=verify,
        cuda_graphs=cuda_graphs,
        build_limit_s=build_limit_s,
        fallback=fallback,
        **choices,
    )
    return compile_with(checked, model, args, kwargs, dynamic_shapes)
