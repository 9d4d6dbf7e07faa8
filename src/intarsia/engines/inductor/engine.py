"""TorchInductor: whole segments compiled to C++ or Triton, with the weights frozen in.

Inductor is called below Dynamo, with weights as buffers: they are frozen, nothing is traced twice, and no
guards run at a call. Random operators stay with PyTorch, so that they are eager's.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx, nn

from intarsia.cache.machine import has_bfloat16_tiles
from intarsia.engines.base import Engine, GraphEngine, Program, Workload
from intarsia.engines.graph_rewrites import (
    REWRITES,
    apply_rewrites,
    has_only_bfloat16_products,
    has_only_one_row_products,
    own_copy,
)
from intarsia.engines.inductor.compiler import (
    InductorProgram,
    compile_graph,
    package_graph,
    read_package,
    unknown_option,
)
from intarsia.engines.inductor.described import empty_like, has_fixed_sizes, unfit_size
from intarsia.errors import EngineError, error_text, first_line
from intarsia.graph.nodes import is_control_flow, is_ordered
from intarsia.quantized import bits_of

# Inductor folds batch norms itself, and knows no fused convolutions.
GPU_REWRITES = (
    "patch_convolutions", "row_products", "merged_products", "activation_epilogues",
    "flash_attention", "split_products",
)  # fmt: skip
_VECTORS = ("vector_products",)
# torch 2.13: `x - floor(x / y) * y` and `floor(x / y)`, where eager uses `fmod`.
_QUOTIENTS = (
    torch.ops.aten.remainder.Tensor, torch.ops.aten.remainder.Scalar, torch.ops.aten.remainder.Scalar_Tensor,
    torch.ops.aten.floor_divide.default, torch.ops.aten.floor_divide.Scalar,
)  # fmt: skip


@dataclass(frozen=True)
class Inductor(GraphEngine):
    """Compiles pieces with TorchInductor.

    Args:
        freezing: treat weights as constants.
        max_autotune: try more kernels while building.
        rewrites: changes to the graph before it is compiled (see `engines.graph_rewrites`). By default, those
            for GPUs on a GPU. On a CPU, matrix products of one row in bfloat16 become products with vectors
            if the graph has no other products; their weights are not frozen by default.
        options: options of `torch._inductor.config`.

    A build takes from seconds to minutes. So Inductor is used only if you name it, if it is measured, or if
    the model is on a GPU.

    >>> from intarsia.engines import Inductor
    >>> Inductor(max_autotune=True).name
    'inductor'
    """

    freezing: bool | None = None
    max_autotune: bool = False
    rewrites: tuple[str, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    name: ClassVar[str] = "inductor"
    libraries: ClassVar[tuple[str, ...]] = ("torch",)
    capturable: ClassVar[bool] = True
    slow_to_build: ClassVar[bool] = True
    runs_packages: ClassVar[bool] = True

    def unavailable(self) -> str | None:
        if not _has_compiler():
            return "TorchInductor needs a C++ compiler (g++, clang++ or $CXX), and none is installed"
        if torch.cuda.is_available() and importlib.util.find_spec("triton") is None:
            return "TorchInductor needs Triton on a GPU; pip install triton"
        for name in self.rewrites or ():
            if name not in REWRITES:
                return f"there is no rewrite {name!r}; known are {', '.join(REWRITES)}"
        return unknown_option(self.options)

    @classmethod
    def is_default(cls, device: str) -> bool:
        # A GPU's time goes into launching kernels and moving memory, which is what Inductor saves. On a CPU
        # it gains less than it takes to build.
        return device == "cuda"

    def runs_on(self, device: str) -> bool:
        return device in ("cpu", "cuda")

    def variants(self, workload: Workload) -> list[tuple[str, Engine]]:
        """On a GPU, without the rewrites that apply there: without all, and if time allows without each."""
        if self.rewrites is not None or not workload.on_gpu:
            return []
        counts = apply_rewrites(own_copy(workload.module), GPU_REWRITES)
        applied = [name for name, count in counts.items() if count]
        if not applied:
            return []
        variants: list[tuple[str, Engine]] = [("no rewrites", replace(self, rewrites=()))]
        for name in applied if workload.thorough else ():
            others = tuple(other for other in GPU_REWRITES if other != name)
            variants.append((f"without {name}", replace(self, rewrites=others)))
        return variants

    def may_pay(self, model: object) -> bool:
        return isinstance(model, nn.Module) and any(p.dtype == torch.bfloat16 for p in model.parameters())

    def is_known_to_pay(self, workload: Workload) -> bool:
        """In bfloat16 on a CPU, for single rows or on a processor with tiles of it.

        Other engines round between their float32 kernels.
        """
        if workload.on_gpu or not has_only_bfloat16_products(workload.module):
            return False
        return has_only_one_row_products(workload.module) or has_bfloat16_tiles()

    def refusal(self, node: fx.Node) -> str | None:
        if is_control_flow(node):
            return "control flow runs in PyTorch; its bodies run on engines"
        if is_ordered(node):
            return "it draws random numbers or has effects, which are left to PyTorch"
        for read in (*node.all_input_nodes, node):
            if (reason := unfit_size(read)) is not None:
                return reason
        described = node.meta.get("val")
        if node.target in _QUOTIENTS and _is_float_on_cpu(described):
            return "its code for CPUs rounds the quotient, and is wrong where that is large or infinite"
        for value in described if isinstance(described, list | tuple) else [described]:
            if isinstance(value, torch.SymInt):
                continue  # a size, which others of its piece read
            if not isinstance(value, torch.Tensor):
                return f"it makes a {type(value).__name__}, not a tensor"
            if value.is_quantized or value.layout is not torch.strided:
                return f"it returns a tensor of layout {value.layout}"
        return None

    def build(self, module: fx.GraphModule) -> Program:
        described = [_described(node) for node in module.graph.nodes if node.op == "placeholder"]
        if not described and not any(node.op == "call_function" for node in module.graph.nodes):
            raise EngineError("there is nothing to compile")
        try:
            graph, config = self._rewritten(module, described)
            compiled = compile_graph(graph, described, config)
        except EngineError as error:
            raise EngineError(f"Inductor is not used: {error}") from error
        except Exception as error:  # whatever Inductor throws concerns this piece alone
            raise EngineError(f"Inductor failed to compile: {error_text(error)}") from error
        return InductorProgram(compiled, described, own_copy(module))

    def package(self, module: fx.GraphModule) -> bytes:
        example = [_example(node) for node in module.graph.nodes if node.op == "placeholder"]
        if any(tensor.device.type != "cpu" for tensor in example):
            raise EngineError("packages of AOTInductor are made of segments on the CPU only")
        try:
            graph, config = self._rewritten(module, example)
            data = package_graph(graph, example, config)
            program = InductorProgram(read_package(data), example)
            inputs = [_filled(tensor) for tensor in example]
            with torch.no_grad():
                expected = module(*inputs)
            pairs = list(zip(program(*inputs), expected, strict=True))
        except Exception as error:
            raise EngineError(f"AOTInductor failed: {error_text(error)}") from error
        if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in pairs):
            raise EngineError("AOTInductor's package gives other answers than the segment")
        return data

    def load_package(self, data: bytes, module: fx.GraphModule) -> Program:
        example = [_example(node) for node in module.graph.nodes if node.op == "placeholder"]
        try:
            return InductorProgram(read_package(data), example)
        except Exception as error:
            raise EngineError(f"AOTInductor refuses its package: {first_line(error)}") from error

    def _rewritten(
        self, module: fx.GraphModule, example: Sequence[torch.Tensor]
    ) -> tuple[fx.GraphModule, dict[str, Any]]:
        """The graph after its rewrites, and Inductor's configuration for it."""
        graph, on_gpu = own_copy(module), any(tensor.is_cuda for tensor in example)
        rewrites = self.rewrites
        if rewrites is None:
            rewrites = GPU_REWRITES if on_gpu else _VECTORS if has_only_one_row_products(module) else ()
        counts = apply_rewrites(graph, rewrites)
        config: dict[str, Any] = {"freezing": self.freezing is not False, "max_autotune": self.max_autotune}
        if counts.get(*_VECTORS) and not on_gpu:
            # Freezing would keep the weights widened to float32, and read twice the memory; and what makes
            # the vector would be computed again for every row of the weight if it were not stored.
            config |= {"freezing": bool(self.freezing), "realize_reads_threshold": 0}
        if any(bits_of(node) for node in graph.graph.nodes):
            config["freezing"] = bool(self.freezing)  # it would keep weights in few bits as floats
        return graph, config | dict(self.options)


def _is_float_on_cpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "cpu"


def _described(node: fx.Node) -> torch.Tensor:
    """The tensor of a placeholder: sizes and layout, which is all that Inductor reads."""
    value = node.meta.get("val")
    if value is None:
        raise EngineError(f"the sizes of input {node.name} vary, and the graph does not say how")
    if not isinstance(value, torch.Tensor):
        raise EngineError(f"input {node.name} is a {type(value).__name__}, not a tensor")
    return value


def _example(node: fx.Node) -> torch.Tensor:
    """A tensor as a placeholder describes it."""
    value = _described(node)
    if not has_fixed_sizes(value):
        raise EngineError(f"input {node.name} has sizes that vary: {tuple(map(str, value.shape))}")
    return empty_like(value)


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """Values to compare by: in steps from -1 to 1, and zeros for possible indices."""
    tensor.zero_()
    if tensor.is_floating_point():
        tensor.copy_(torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape))
    return tensor


def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
