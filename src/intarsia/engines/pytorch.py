"""PyTorch's own kernels: as they are, and on an NVIDIA GPU with convolutions fused as cuDNN has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from intarsia.engines.base import Engine, GraphEngine, GraphProgram, Program, Workload
from intarsia.engines.graph_rewrites import (
    REWRITES,
    apply_rewrites,
    image_convolutions,
    one_row_products,
    own_copy,
    paying,
)
from intarsia.errors import EngineError
from intarsia.graph.nodes import is_control_flow


@dataclass(frozen=True)
class PyTorch(GraphEngine):
    """Runs a piece operator by operator, after the given `rewrites` (see `graph_rewrites`). It is asked last.

    >>> PyTorch().unavailable() is None
    True
    """

    rewrites: tuple[str, ...] = ()
    name: ClassVar[str] = "pytorch"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    capturable: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        unknown = [name for name in self.rewrites if name not in REWRITES]
        return f"there is no rewrite {unknown[0]!r}; known are {', '.join(REWRITES)}" if unknown else None

    @classmethod
    def is_default(cls, device: str) -> bool:
        return True

    def runs_on(self, device: str) -> bool:
        return True

    def variants(self, workload: Workload) -> list[tuple[str, Engine]]:
        """With rewrites that would change something. They cost no build, so no budget is needed."""
        if self.rewrites:
            return []
        rewrites: list[tuple[str, ...]] = []
        if one_row_products(workload.module):
            rewrites.append(("vector_products",))
        if image_convolutions(workload.module):  # folded batch norms leave fewer tensors to lay out
            rewrites.append(("batch_norms", "channels_last"))
        return [(names[-1], replace(self, rewrites=names)) for names in rewrites]

    def build(self, module: fx.GraphModule) -> Program:
        if not self.rewrites:
            return GraphProgram(module)
        copy = own_copy(module)
        apply_rewrites(copy, self.rewrites)
        return GraphProgram(copy)


@dataclass(frozen=True)
class CuDNN(GraphEngine):
    """Runs a piece operator by operator after rewriting it.

    `rewrites` are the names of rewrites, in order. By default, those that are faster on this GPU are applied.
    Batch norms are folded, convolutions are fused with the addition and relu after them, and images are in
    channels_last. It is made for convolutional networks in half precision.
    """

    rewrites: tuple[str, ...] | None = None
    name: ClassVar[str] = "cudnn"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    capturable: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        if not torch.cuda.is_available():
            return "there is no NVIDIA GPU"
        if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            return "this torch has no cuDNN"
        unknown = [name for name in self.rewrites or () if name not in REWRITES]
        if unknown:
            return f"there is no rewrite {unknown[0]!r}; known are {', '.join(REWRITES)}"
        return None

    @classmethod
    def is_default(cls, device: str) -> bool:
        return False  # it is measured beside Inductor, which is faster for most models on a GPU

    def runs_on(self, device: str) -> bool:
        return device == "cuda"

    def refusal(self, node: fx.Node) -> str | None:
        return "control flow runs in PyTorch; its bodies run on engines" if is_control_flow(node) else None

    def build(self, module: fx.GraphModule) -> Program:
        copy = own_copy(module)
        try:
            chosen = paying(module, tuple(REWRITES)) if self.rewrites is None else self.rewrites
            apply_rewrites(copy, chosen)
        except Exception as error:
            raise EngineError(f"rewriting failed: {type(error).__name__}: {error}") from error
        return GraphProgram(copy)
