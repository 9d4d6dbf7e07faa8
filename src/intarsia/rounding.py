"""How far rounding alone may move a graph's answers: it is run again, every value nudged."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from intarsia.graph_tail import Tail
from intarsia.slices import SLICE, slices_of

_POOL = 1 << 20  # random numbers that are drawn once and read from random places: drawing costs most of a run
_LONGEST = 4096  # sums of more terms are taken to be added up in blocks
_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "mv", "dot", "addmv", "addbmm", "einsum"}
    | {"scaled_dot_product_attention"}
)


class Rounding:
    """The spread of each output of a graph over runs in which every float is rounded a little differently.

    An engine adds up in another order, fuses, or takes another formula: each of its values is off by about
    one rounding. A run with every value off by one rounding, at random, shows what becomes of that at the
    outputs, element by element: cancellation and depth show as they are. Numbers that are whole stay as they
    are, since they are most likely exact, and a step must not flip for a rounding that nobody makes.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        expected: Sequence[Any],
        coarsest: float = 0.0,
        tail: Tail | None = None,
    ) -> None:
        self._module, self._inputs, self._expected, self._tail = module, inputs, expected, tail
        self._coarsest = coarsest  # rounding of an engine that computes in a shorter type than the graph's
        self._generator = torch.Generator().manual_seed(0)
        self._samples = 0
        self._spread: list[torch.Tensor | None] = [None] * len(expected)
        self._late: list[torch.Tensor | None] | None = None

    def least(self, index: int) -> float:
        """What a run would move an output by at least, as a share of itself, root mean square; 0 if unknown.

        Whatever else is moved, the output itself is, by the rounding of the operator that makes it.
        """
        made = self._module.graph.output_node().args[0]
        node = made[index] if isinstance(made, list | tuple) else made
        while isinstance(node, fx.Node) and node.op == "call_function" and _moves(node.target):
            # What is written in place is not moved anew.
            node = None if node.target._schema.is_mutable else node.args[0]  # type: ignore[union-attr]
        if not isinstance(node, fx.Node) or node.op != "call_function":
            return 0.0
        *given, value = (each.meta.get("val") for each in (*node.all_input_nodes, node))
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return 0.0
        eps = torch.finfo(value.dtype).eps
        if eps < torch.finfo(self._expected[index].dtype).eps:  # a conversion rounds most moves away
            return 0.0
        if any(type(n) is not int for x in (*given, value) if isinstance(x, torch.Tensor) for n in x.shape):
            return 0.0
        terms = _terms(_name(node), given, value)
        return _step(_name(node), value.dtype, terms, self._coarsest) / math.sqrt(3)

    def late(self, index: int) -> torch.Tensor | None:
        """The change of an output in a run of the graph's last part alone; None where that is not known.

        It costs a part of a run, and is less than what becomes of all roundings: who is within it is right.
        """
        if self._tail is None:
            return None
        if self._late is None:
            self._late = self._changes(dict(self._tail.known))
        return self._late[index]

    def spread(self, samples: int) -> list[torch.Tensor | None]:
        """The largest change of each element in so many runs; None for what is no tensor."""
        while self._samples < samples:
            self._samples += 1
            for index, change in enumerate(self._changes()):
                before = self._spread[index]
                if change is not None and before is not None:
                    change = torch.maximum(before, change)
                self._spread[index] = change
        return self._spread

    def _changes(self, known: dict[fx.Node, Any] | None = None) -> list[torch.Tensor | None]:
        nudged = _Nudged(self._module, self._generator, self._coarsest)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            made = nudged.run(*self._inputs, initial_env=known)
        pairs = zip(made, self._expected, strict=True)
        return [_change(other, truth) if isinstance(truth, torch.Tensor) else None for other, truth in pairs]


def _change(other: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    if truth.is_complex():
        other, truth = torch.view_as_real(other.resolve_conj()), torch.view_as_real(truth.resolve_conj())
    if not truth.is_floating_point():
        return (other != truth).double()
    change = torch.zeros(truth.shape, dtype=torch.double, device=truth.device)
    if other.shape != truth.shape:  # as many as the values say, which were moved: of no element it is known
        return change
    for part, a, b in slices_of(change, other, truth):
        part.copy_(torch.nan_to_num_((a.double() - b.double()).abs_(), nan=0.0, posinf=0.0))
    return change


@functools.cache
def _pool(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    drawn = torch.empty(_POOL).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    return drawn.to(device=device, dtype=dtype)


def _noise_like(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers between -1 and 1, from a random place of the pool, which is repeated where it ends."""
    pool, count = _pool(value.dtype, value.device), value.numel()
    start = int(torch.randint(_POOL, (), generator=generator))
    if start + count <= _POOL:
        return pool[start : start + count].reshape(value.shape)
    # An odd period: a repetition must not fall on rows whose length is a power of two.
    odd = pool[: _POOL - 1 - 2 * int(torch.randint(_POOL // 4, (), generator=generator))]
    start %= len(odd)
    return odd.repeat(-(-(start + count) // len(odd)))[start : start + count].reshape(value.shape)


def _moved(value: torch.Tensor, noise: torch.Tensor, step: float) -> torch.Tensor:
    """Each number moved by `step` of itself times its noise; whole numbers, infinities and NaN stay.

    The same as `torch.where(value == value.trunc(), value, ...)`, whose kernel takes a branch an element:
    behind a ReLU, where half of them are zero, that is three times slower than these products.
    """
    if (
        value.numel() > SLICE
        and value.device.type == "cpu"
        and value.is_contiguous()
        and noise.is_contiguous()
    ):
        made = torch.empty_like(value)
        for part, numbers, noises in slices_of(made, value, noise):
            part.copy_(_moved(numbers, noises, step))
        return made
    largest = torch.finfo(value.dtype).max
    moves = value.trunc().ne_(value).mul_(noise)  # 0 for a whole number
    moved = torch.addcmul(value, value.clamp(-largest, largest), moves, value=step)
    return moved.copysign_(value)  # of a zero, the sum may have lost it


class _Nudged(fx.Interpreter):
    """Runs a graph with each float it reads or makes moved by about one rounding."""

    def __init__(self, module: fx.GraphModule, generator: torch.Generator, coarsest: float) -> None:
        super().__init__(module)
        self._generator, self._coarsest = generator, coarsest

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op not in ("placeholder", "call_function") or _moves(n.target):
            return value
        given = [self.env[source] for source in n.all_input_nodes]
        name = _name(n) if n.op == "call_function" else ""
        terms = _terms(name, given, value) if name else 1.0
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._nudge(tensor, name, terms), value)

    def _nudge(self, value: torch.Tensor, name: str, terms: float) -> torch.Tensor:
        if value.is_complex():
            parts = torch.view_as_real(value.resolve_conj())
            return torch.view_as_complex(self._nudge(parts, name, terms))
        if not value.is_floating_point() or not value.numel():
            return value
        on_cuda = value.is_cuda and value.dtype is torch.float32
        coarsest = max(self._coarsest, _tensor_float_rounding(name) if on_cuda else 0.0)
        step = _step(name, value.dtype, terms, coarsest)
        wide = value.float() if value.element_size() < 4 else value
        return _moved(wide, _noise_like(wide, self._generator), step).to(value.dtype)


def _step(name: str, dtype: torch.dtype, terms: float, coarsest: float) -> float:
    """By how much of itself a number is moved that an operator added up from so many terms.

    The roundings of a sum grow like the root of its terms. PyTorch adds up short floats in float32 and
    rounds once, at the end; only what adds to its result where it lies rounds each time.
    """
    own = torch.finfo(dtype).eps
    added = own if _adds_in_place(name) else min(own, torch.finfo(torch.float32).eps)
    return max(own + added * (math.sqrt(terms) - 1), coarsest * math.sqrt(terms))


def _adds_in_place(name: str) -> bool:
    return any(part in name for part in ("scatter", "index", "put"))


def _terms(name: str, given: Sequence[Any], made: Any) -> float:
    """About how many products or values an operator adds up to make one number of its result."""
    floats = [x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()]
    first = made[0] if isinstance(made, list | tuple) and made else made
    if not floats or not isinstance(first, torch.Tensor) or not first.numel():
        return 1.0
    terms = max(x.numel() for x in floats) / first.numel()
    if "conv" in name and len(floats) > 1:
        terms = max(terms, floats[1].numel() / max(1, floats[1].shape[0]))
    elif name in _PRODUCTS:
        terms = max(terms, *(x.shape[-1] for x in floats if x.ndim > 1))
    return min(max(terms, 1.0), _LONGEST)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rsplit(".", 1)[-1]


def _tensor_float_rounding(name: str) -> float:
    """The rounding of float32 products on a GPU, where torch lets them be computed in TF32; else 0."""
    if "conv" in name:
        allowed = torch.backends.cudnn.allow_tf32
    else:
        allowed = name in _PRODUCTS and torch.get_float32_matmul_precision() != "highest"
    return 2.0**-11 if allowed else 0.0


def _moves(target: Any) -> bool:
    """Whether an operator hands out what it is given, as views do."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
