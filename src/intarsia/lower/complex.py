"""Complex tensors as pairs of real ones, since engines have no complex type.

view_as_complex -> mul -> view_as_real      a product of complex numbers
mul, mul, sub, mul, mul, add, stack         the same over [..., 2]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

aten = torch.ops.aten
Decomposition = Callable[..., Any]
Spelling = TypeVar("Spelling", bound=Decomposition)
COMPLEX_DECOMPOSITIONS: dict[Any, Decomposition] = {}


def is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


# Composite operators that compute with complex tensors, whatever their inputs and results are.
_INSIDE = ("fft_", "_fft_", "stft", "istft")


def has_complex(graph: fx.Graph) -> bool:
    """Whether any value of the graph is complex, or an operator computes with complex tensors."""
    return any(is_complex(node.meta.get("val")) or _is_inside(node.target) for node in graph.nodes)


def _is_inside(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._opname.startswith(_INSIDE)


def cancel_views(graph: fx.Graph) -> None:
    """Remove pairs of `view_as_complex` and `view_as_real` that cancel each other."""
    inverse = {
        aten.view_as_real.default: aten.view_as_complex.default,
        aten.view_as_complex.default: aten.view_as_real.default,
    }
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in inverse:
            continue
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is inverse[node.target]:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def spells(*overloads: Any) -> Callable[[Spelling], Spelling]:
    """Register a rule for calls with a complex tensor; other calls are not decomposed."""

    def decorate(function: Spelling) -> Spelling:
        def only_complex(*args: Any, **kwargs: Any) -> Any:
            flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else (arg,))]
            if not any(is_complex(item) for item in flat):
                return NotImplemented
            return function(*args, **kwargs)

        for overload in overloads:
            COMPLEX_DECOMPOSITIONS[overload] = only_complex
        return function

    return decorate


def parts(x: Any) -> tuple[Any, Any]:
    """Real and imaginary part; a real tensor or number has the imaginary part zero."""
    if is_complex(x):
        pair = torch.view_as_real(x)
        return pair.select(-1, 0), pair.select(-1, 1)
    if isinstance(x, complex):
        return x.real, x.imag
    return x, 0.0


def join(real: Tensor, imaginary: Tensor) -> Tensor:
    """The complex tensor of two parts, which are broadcast."""
    real, imaginary = torch.broadcast_tensors(real, imaginary)  # type: ignore[no-untyped-call]
    return paired(real, imaginary)


def paired(real: Tensor, imaginary: Tensor) -> Tensor:
    """The complex tensor of two parts of one shape."""
    return torch.view_as_complex(torch.stack((real, imaginary), -1))


@spells(aten.mul.Tensor, aten.mul.Scalar)
def _mul(a: Any, b: Any) -> Tensor:
    if not is_complex(a):
        a, b = b, a
    real, imaginary = parts(a)
    if not is_complex(b) and not isinstance(b, complex):
        return join(real * b, imaginary * b)
    c, d = parts(b)
    return join(real * c - imaginary * d, real * d + imaginary * c)


@spells(aten.add.Tensor, aten.add.Scalar)
def _add(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    (ar, ai), (br, bi) = parts(a), parts(b if alpha == 1 else b * alpha)
    return join(ar + br, ai + bi)


@spells(aten.sub.Tensor, aten.sub.Scalar)
def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    (ar, ai), (br, bi) = parts(a), parts(b if alpha == 1 else b * alpha)
    return join(ar - br, ai - bi)


@spells(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sub(b, a, alpha=alpha)


@spells(aten.div.Tensor, aten.div.Scalar)
def _div(a: Any, b: Any) -> Tensor:
    if isinstance(b, complex):
        return _mul(a, 1 / b)
    if is_complex(b):
        return _mul(_reciprocal(b), a)
    real, imaginary = parts(a)
    return join(real / b, imaginary / b)


@spells(aten.reciprocal.default)
def _reciprocal(x: Tensor) -> Tensor:
    real, imaginary = parts(x)
    # Scaled first, as in torch, since the square of a large number would be infinite.
    scale = torch.maximum(real.abs(), imaginary.abs())
    real, imaginary = real / scale, imaginary / scale
    norm = (real * real + imaginary * imaginary) * scale
    return join(real / norm, -imaginary / norm)


_CONJUGATES = (aten._conj, aten.conj, aten.conj_physical, aten._conj_physical, aten._conj_copy)
# What an operator of one tensor makes of its real and imaginary part.
_OF_PARTS: dict[Any, Decomposition] = {
    aten.abs: torch.hypot,
    aten.angle: lambda real, imaginary: torch.atan2(imaginary, real),
    aten.exp: lambda real, imaginary: _polar(torch.exp(real), imaginary),
    aten.imag: lambda real, imaginary: imaginary,
    aten.real: lambda real, imaginary: real,
    **dict.fromkeys(_CONJUGATES, lambda real, imaginary: paired(real, -imaginary)),
}


def _of_parts(rule: Decomposition) -> Decomposition:
    return lambda x: rule(*parts(x))


for _packet, _rule in _OF_PARTS.items():
    spells(_packet.default)(_of_parts(_rule))


@spells(aten.neg.default)
def _neg(x: Tensor) -> Tensor:
    return torch.view_as_complex(-torch.view_as_real(x))


@spells(aten.resolve_conj.default, aten.clone.default, aten.alias.default, aten.detach.default)
def _same(x: Tensor, *, memory_format: Any = None) -> Tensor:
    return torch.view_as_complex(torch.view_as_real(x))


def _complex(real: Tensor, imag: Tensor) -> Tensor:
    return join(real, imag)


def _polar(abs: Tensor, angle: Tensor) -> Tensor:
    return join(abs * torch.cos(angle), abs * torch.sin(angle))


COMPLEX_DECOMPOSITIONS[aten.complex.default] = _complex
COMPLEX_DECOMPOSITIONS[aten.polar.default] = _polar


def _product(a: Tensor, b: Tensor) -> Tensor:
    (ar, ai), (br, bi) = parts(a), parts(b)
    if not is_complex(a):
        return join(ar @ br, ar @ bi)
    if not is_complex(b):
        return join(ar @ br, ai @ br)
    return join(ar @ br - ai @ bi, ar @ bi + ai @ br)


for _overload in (aten.mm.default, aten.bmm.default, aten.matmul.default):
    spells(_overload)(_product)


# Operators that move, join or sum elements treat both parts alike.


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    """Both parts as tensors, zeros for a real tensor's imaginary part."""
    return parts(x) if is_complex(x) else (x, torch.zeros_like(x))


def _structural(overload: Any) -> Decomposition:
    """The rule of an operator that treats both parts of its first tensor alike."""

    def rule(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        real, imaginary = parts(x)
        return paired(overload(real, *args, **kwargs), overload(imaginary, *args, **kwargs))

    return rule


for _overload in (
    *(aten.reshape.default, aten.transpose.int, aten.permute.default, aten.expand.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.select.int, aten.slice.Tensor),
    *(aten.flip.default, aten.roll.default, aten.index_select.default, aten.index.Tensor),
    aten.unfold.default,
):
    spells(_overload)(_structural(_overload))
# The parts lie apart in memory, where a view of the whole need not exist.
spells(aten.view.default, aten._unsafe_view.default)(_structural(aten.reshape.default))


def _reduction(overload: Any) -> Decomposition:
    """The rule of a sum or a mean; in another dtype, it is not decomposed."""

    def rule(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Any:
        return _structural(overload)(x, dim, keepdim) if dtype is None else NotImplemented

    return rule


def _join_of(overload: Any) -> Decomposition:
    """The rule of an operator that joins tensors."""

    def rule(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        reals, imaginaries = zip(*map(_both, tensors), strict=True)
        return paired(overload([*reals], dim), overload([*imaginaries], dim))

    return rule


for _overload in (aten.sum.dim_IntList, aten.mean.dim):
    spells(_overload)(_reduction(_overload))
for _overload in (aten.cat.default, aten.stack.default):
    spells(_overload)(_join_of(_overload))


@spells(aten.constant_pad_nd.default)
def _pad(x: Tensor, pad: Sequence[Any], value: Any = 0) -> Tensor:
    real, imaginary = parts(x)
    whole = complex(value)
    return paired(
        aten.constant_pad_nd.default(real, pad, whole.real),
        aten.constant_pad_nd.default(imaginary, pad, whole.imag),
    )


@spells(aten.where.self)
def _where(condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    (a, b), (c, d) = _both(x), _both(other)
    return join(torch.where(condition, a, c), torch.where(condition, b, d))
