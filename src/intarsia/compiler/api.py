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
    from intarsia.runtime.forwards import PartlyCompiled


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

    The module computes what the model computes in evaluation, for inputs like `args` and `kwargs`. Operators
    that no engine takes run in PyTorch. `plan` says what runs where and why, and `notes` has further
    information.

    Args:
        model: the model.
        args: an example of its arguments by position. Use an `Input` for a tensor whose size varies.
        kwargs: an example of its arguments by name.
        dynamic_shapes: sizes that may vary, as for `torch.export.export`. What is not named does not vary.
        engines: engines by name or as objects, in the order of preference. By default, all installed engines.
        partition: `Measured()`, the name of a strategy (`"greedy"`, `"dependency"`, `"hierarchical"`), or a
            function. With `Measured()`, plans are timed on this machine, and the fastest one is kept. This is
            the default if you name neither engines nor their order, and the model takes more than about 1 ms.
            Otherwise each node goes to the first engine that takes it.
        precision: the shorter arithmetic that engines may use within `tolerance`: `"bf16"`, `"fp16"`,
            `"int8"`, `"int8-weights"` or `"int4-weights"`. `"fp32"` allows none. By default, all of them are
            tried.
        tolerance: the largest error of each result, as a share of its largest value in each row of a batch.
            By default, results equal the model's within rounding.
        examples: further calls, by position, on which the tolerance must hold.
        options: a `PartitionOptions`. You can also pass its fields by name.
        rewrite: rewriting patterns. None applies the patterns that are faster on this machine, True all,
            False none. A list may contain names, patterns and managers.
        verify: compare every piece and the whole with the model, at the example and at the ends of sizes that
            vary. Nodes that answer differently stay in PyTorch.
        cuda_graphs: by default, the module runs as one CUDA graph on a GPU, and results are copied out of it.
            `"static"` returns the memory of the graph, which the next call overwrites. False launches the
            kernels one by one.
        build_limit_s: seconds after which an engine that is still building is not used.
        fallback: what happens to a model that `torch.export` cannot capture. `"parts"` compiles its
            submodules, `"eager"` returns the model as it is, `"error"` raises.
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
