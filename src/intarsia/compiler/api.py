"""`intarsia.compile`, the function that users call. Importing it does not import the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

if TYPE_CHECKING:
    from torch import nn

    from intarsia.choose.measured import Measured
    from intarsia.choose.precision import Precision
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
    """Cut a model into pieces, give each to an engine that can run it, inlay them as one module.

    The module computes what the model does in evaluation, for inputs like `args` and `kwargs` (sizes
    named in `dynamic_shapes` may vary). Where no engine takes an operator, PyTorch runs it, and
    `plan` says why. With `verify` the model is run on the example inputs, and at the ends of sizes that vary:
    the graph made of it, every piece on its engine, and the whole must answer alike (see `compare`), or the
    nodes at fault, and at worst the model, stay in PyTorch. An engine that takes longer than `build_limit_s`
    seconds to answer, build or first run a piece is given up; its thread cannot be ended and is left behind.
    `rewrite` chooses patterns: None those measured to pay here, True all, False none, or a list of shipped
    names, patterns and managers; `RewritePatternManager.instance()` holds those applied with None and True.
    On a GPU the whole module runs as one CUDA graph where it can be recorded; `cuda_graphs=False` turns that
    off, and with "static" a call returns the graph's own memory, which the next call overwrites.
    A model that torch.export cannot take is compiled in parts: the submodules that can be captured, largest
    first, run compiled, the rest as it is, and `notes` say what and why; with `fallback="eager"` all of it
    runs as it is, with "error" it is refused.
    `partition` is `Measured()`, the name of a strategy, or one of your own. With `Measured()` every engine
    alone, other options and the model as it is are measured on this machine, and the best is taken (see
    `docs/choosing.md`). It is the default where neither engines nor their order are named, unless
    the model is too small for it to pay; otherwise each node goes to the first engine that takes it.
    Results agree with the model's within rounding. With `tolerance=0.02` the error of each result may be up
    to that share of its largest value, in each row of a batch, on the example and on further `examples` of
    positional arguments. Then engines may also use bf16, fp16, int8, or weights of 8 or 4 bits
    ("int8-weights", "int4-weights"; or only what `precision` names, nothing with "fp32") where that is
    measured to be faster; blocks with the largest errors are kept exact, and the plan tells the error.
    `choices` are the fields of `PartitionOptions` (`min_block_size`, `torch_executed_ops`,
    `torch_executed_modules`, `require_full_compilation`, `atomic`, `memory_budget`, `backend_priority`,
    `backend_support_map`), given by name or together as `options`.

    >>> import torch, intarsia
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> fast = intarsia.compile(model, (torch.ones(1, 8),))
    >>> torch.allclose(fast(torch.ones(1, 8)), model(torch.ones(1, 8)), atol=1e-5)
    True
    """
    # The compiler imports onnx and sympy, which takes a second; naming this function should not.
    from intarsia.compiler.job import compile_with
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
