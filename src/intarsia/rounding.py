"""The effect of rounding on the answers of a graph: their differences from a run in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intarsia.plain_tensors import slices_of
from intarsia.quantized import is_integer_product, magnitudes_of_products

_STEP = 4  # roundings by which values are changed in further runs
_TF32 = 2.0**-11  # the rounding of an operand: float32 is cut to 10 bits of mantissa
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_PRODUCTS = ("linear", "mm", "bmm", "addmm", "baddbmm", "matmul", "scaled_dot_product_attention")
# Operators that read the bits of a number, which differ in float64.
_READ_BITS = ("aten::view.dtype", "aten::nextafter", "aten::frexp")


class Rounding:
    """How much rounding changes each element of a graph's answers.

    A run in float64 shows the error of the `expected` answers, which PyTorch's own arithmetic causes. It does
    not show steps that are avoided by chance, such as an `argmax` among nearly equal values, nor the effect
    of arithmetic that is coarser than the graph's. So in further runs, every value is changed at random by
    some of its roundings, or of `coarsest`.
    """

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Any], expected: Sequence[Any], coarsest: float = 0.0
    ) -> None:
        self._runs, self._expected = _Runs(module, inputs, coarsest), expected
        self._places: Sequence[int] = range(len(expected))  # of the answers among those of the graph

    def of(self, expected: Sequence[Any], places: Sequence[int] | None = None) -> Rounding:
        """The rounding for another answer to the same inputs, or for the values at some `places` of it.

        The runs are shared.
        """
        other = Rounding.__new__(Rounding)
        other._runs, other._expected = self._runs, expected
        other._places = range(len(expected)) if places is None else places
        return other

    def error(self, index: int, answer: torch.Tensor) -> torch.Tensor | None:
        """The difference of each element of an output from float64; None if it is not known."""
        precise, place = self._runs.precise, self._places[index]
        return _change(answer, precise[place]) if place < len(precise) else None

    def change(self, index: int, further_runs: int) -> torch.Tensor | None:
        """The largest change of each element of an output by rounding; None if it is not known."""
        change = self.error(index, self._expected[index])
        if change is None:
            return None
        moved = self._runs.moved(further_runs)[self._places[index]] if further_runs else None
        return change if moved is None else torch.maximum(change, moved)


class _Runs:
    """The answers of a graph in float64, and their changes when its values are changed; both are cached."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any], coarsest: float) -> None:
        self._module, self._inputs, self._coarsest = module, inputs, coarsest
        self._count, self._moved = 0, list[torch.Tensor | None]()

    @functools.cached_property
    def precise(self) -> Sequence[Any]:
        """The answers in float64; empty if the graph cannot run in it."""
        try:
            return self._run(None)
        except Exception:  # an operator mixes dtypes, or needs too much memory
            return ()

    def moved(self, count: int) -> list[torch.Tensor | None]:
        """The largest change of each output in this many runs with changed values."""
        while self._count < count:
            generator = torch.Generator().manual_seed(self._count)
            pairs = zip(self._run(generator), self.precise, strict=True)
            changes = [_change(moved, precise) for moved, precise in pairs]
            before = self._moved or changes
            self._moved = [_larger(one, other) for one, other in zip(before, changes, strict=True)]
            self._count += 1
        return self._moved

    def _run(self, generator: torch.Generator | None) -> Sequence[Any]:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            answers: Sequence[Any] = _Precise(self._module, generator, self._coarsest).run(*self._inputs)
        return answers


def _larger(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return None if one is None or other is None else torch.maximum(one, other)


def _change(other: Any, precise: Any) -> torch.Tensor | None:
    """The difference of each element where both are finite; of integers and booleans, 1 where they differ."""
    if not isinstance(other, torch.Tensor) or not isinstance(precise, torch.Tensor):
        return None
    other, precise = _real(other), _real(precise)
    if other.shape != precise.shape or other.layout is not torch.strided:
        return None  # the number of elements depends on values
    if not other.is_floating_point():
        differs: torch.Tensor = other != precise
        return differs.double()
    change: torch.Tensor = torch.empty(other.shape, dtype=torch.double, device=other.device)
    for part, a, b in slices_of(change, other, precise):
        part.copy_(torch.nan_to_num_((a.double() - b).abs_(), nan=0.0, posinf=0.0))
    return change


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class _Precise(fx.Interpreter):
    """Runs a graph in float64, including weights and inputs.

    A node without a kernel for it, or that draws random numbers, runs in its own dtypes. With a generator,
    every float that is read or computed is changed at random.
    """

    def __init__(self, module: nn.Module, generator: torch.Generator | None, coarsest: float) -> None:
        super().__init__(module)
        self._generator, self._coarsest = generator, coarsest

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return self._nudged(n, pytree.tree_map_only(torch.Tensor, _copied, super().run_node(n)))
        if n.op != "call_function":
            return super().run_node(n)
        schema = getattr(n.target, "_schema", None)
        if schema is not None and schema.is_mutable:  # it may write to a weight in place
            for source in n.all_input_nodes:
                if source.op == "get_attr":
                    self.env[source] = _copied(self.env[source])
        value = self._widest(n)
        if self._generator is not None and is_integer_product(n):
            return value + self._noise_of_sums(n, value)
        is_view = schema is not None and any(result.alias_info is not None for result in schema.returns)
        return value if is_view else self._nudged(n, value)

    def _noise_of_sums(self, n: fx.Node, value: torch.Tensor) -> torch.Tensor:
        """The roundings of a product that the model may compute in floats, whose sums are not exact.

        Where integers add up to 0, floats leave a rest: it depends on the terms, not on the result.
        """
        x, weight, scale = map(self._wide, n.args[:3])
        step = _STEP * torch.finfo(torch.float32).eps
        noise = torch.empty(value.shape).uniform_(-step, step, generator=self._generator)
        return magnitudes_of_products(x, weight, scale) * noise.to(value)

    def _widest(self, n: fx.Node) -> Any:
        if not _keeps_types(n.target):
            try:
                return self._called(n, self._wide)
            except Exception:  # there is no kernel for float64
                pass
        return pytree.tree_map_only(torch.Tensor, _widened, self._called(n, self._in_own_type))

    def _called(self, n: fx.Node, argument: Callable[[Any], Any]) -> Any:
        args = fx.node.map_aggregate(n.args, argument)
        kwargs = fx.node.map_aggregate(n.kwargs, argument)
        return n.target(*args, **kwargs)  # type: ignore[operator]

    def _wide(self, argument: Any) -> Any:
        if isinstance(argument, torch.dtype):
            return _WIDE.get(argument, argument)
        value = self.env[argument] if isinstance(argument, fx.Node) else argument
        if isinstance(value, fx.GraphModule):
            return _Body(value, self._generator, self._coarsest)
        return pytree.tree_map_only(torch.Tensor, _widened, value)

    def _in_own_type(self, argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        value, own = self.env[argument], argument.meta.get("val")
        if isinstance(value, torch.Tensor) and isinstance(own, torch.Tensor):
            return value.to(own.dtype)
        return value

    def _nudged(self, n: fx.Node, value: Any) -> Any:
        """The value with each float changed by some roundings of its dtype in the graph.

        Integers are not changed: they are most likely exact, and a step must not change by a rounding that
        does not occur.
        """
        if self._generator is None:
            return value
        own = n.meta.get("val")
        is_float = isinstance(own, torch.Tensor) and own.is_floating_point()
        eps = torch.finfo(own.dtype if is_float else torch.float32).eps  # type: ignore[union-attr]
        step = _STEP * max(eps, self._coarsest, _TF32 if may_be_tf32(n) else 0.0)

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_complex():
                return torch.view_as_complex(move(torch.view_as_real(tensor.resolve_conj())))
            if not tensor.is_floating_point():
                return tensor
            noise = torch.empty(tensor.shape).uniform_(-step, step, generator=self._generator)
            moved = torch.addcmul(tensor, tensor, noise.to(tensor))
            return torch.where((tensor == tensor.trunc()) | ~tensor.isfinite(), tensor, moved)

        return pytree.tree_map_only(torch.Tensor, move, value)


class _Body(nn.Module):
    """The body of a control-flow operator, run in the same way."""

    def __init__(self, body: fx.GraphModule, generator: torch.Generator | None, coarsest: float) -> None:
        super().__init__()
        self._arguments = (body, generator, coarsest)

    def forward(self, *inputs: Any) -> Any:
        return _Precise(*self._arguments).run(*inputs)


def may_be_tf32(node: fx.Node) -> bool:
    """Whether torch's settings let a GPU compute this node in TF32, which is the default for convolutions.

    cuDNN decides by shapes, layouts and fusion whether a convolution uses it: PyTorch's own may be exact
    while an equal one, fused with a relu, differs by 7e-4 (torch 2.11, H200).
    """
    described = node.meta.get("val")
    if not isinstance(described, torch.Tensor) or described.dtype != torch.float32 or not described.is_cuda:
        return False
    name = getattr(node.target, "__name__", "")
    if "conv" in name:
        return torch.backends.cudnn.allow_tf32
    return name.startswith(_PRODUCTS) and torch.backends.cuda.matmul.allow_tf32


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    wide = _WIDE.get(tensor.dtype)
    return tensor if wide is None else tensor.to(wide)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64, which the graph may write to."""
    return tensor.detach().to(_WIDE.get(tensor.dtype, tensor.dtype), copy=True)


def _keeps_types(target: Any) -> bool:
    """Whether an operator runs in the dtypes of the graph: it draws random numbers, or reads bits."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    named = f"{schema.name}.{schema.overload_name}"
    return torch.Tag.nondeterministic_seeded in target.tags or named.startswith(_READ_BITS)
