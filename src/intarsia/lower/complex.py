"""Complex tensors as pairs of real ones: engines have no complex type, so arithmetic is spelled out.

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
Rule = TypeVar("Rule", bound=Decomposition)
COMPLEX_DECOMPOSITIONS: dict[Any, Decomposition] = {}


def is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_complex


def has_complex(graph: fx.Graph) -> bool:
    """Whether any value of the graph is complex."""
    return any(is_complex(node.meta.get("val")) for node in graph.nodes)


def cancel_views(graph: fx.Graph) -> None:
    """A pair seen as complex and at once as a pair again is the pair."""
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


def _spells(*overloads: Any) -> Callable[[Rule], Rule]:
    """Register a rule for calls that take a complex tensor (or make one); others stay as they are."""

    def decorate(function: Rule) -> Rule:
        def only_complex(*args: Any, **kwargs: Any) -> Any:
            flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else (arg,))]
            if not any(is_complex(item) for item in flat):
                return NotImplemented
            return function(*args, **kwargs)

        for overload in overloads:
            COMPLEX_DECOMPOSITIONS[overload] = only_complex
        return function

    return decorate


def _parts(x: Any) -> tuple[Any, Any]:
    """Real and imaginary part; of a real tensor or number, itself and zero."""
    if is_complex(x):
        pair = torch.view_as_real(x)
        return pair.select(-1, 0), pair.select(-1, 1)
    if isinstance(x, complex):
        return x.real, x.imag
    return x, 0.0


def _join(real: Tensor, imaginary: Tensor) -> Tensor:
    real, imaginary = torch.broadcast_tensors(real, imaginary)  # type: ignore[no-untyped-call]
    return torch.view_as_complex(torch.stack((real, imaginary), -1))


def _structural(function: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """An operation that only moves elements, done to both parts."""
    real, imaginary = _parts(x)
    return _join(function(real, *args), function(imaginary, *args))


@_spells(aten.mul.Tensor, aten.mul.Scalar)
def _mul(a: Any, b: Any) -> Tensor:
    if not is_complex(a):
        a, b = b, a
    real, imaginary = _parts(a)
    if not is_complex(b) and not isinstance(b, complex):
        return _join(real * b, imaginary * b)
    c, d = _parts(b)
    return _join(real * c - imaginary * d, real * d + imaginary * c)


@_spells(aten.add.Tensor, aten.add.Scalar)
def _add(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    (ar, ai), (br, bi) = _parts(a), _parts(b if alpha == 1 else b * alpha)
    return _join(ar + br, ai + bi)


@_spells(aten.sub.Tensor, aten.sub.Scalar)
def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Tensor:
    (ar, ai), (br, bi) = _parts(a), _parts(b if alpha == 1 else b * alpha)
    return _join(ar - br, ai - bi)


@_spells(aten.rsub.Scalar, aten.rsub.Tensor)
def _rsub(a: Any, b: Any, alpha: Any = 1) -> Tensor:
    return _sub(b, a, alpha=alpha)


@_spells(aten.div.Tensor, aten.div.Scalar)
def _div(a: Any, b: Any) -> Tensor:
    if isinstance(b, complex):
        return _mul(a, 1 / b)
    if is_complex(b):
        return _mul(_reciprocal(b), a)
    real, imaginary = _parts(a)
    return _join(real / b, imaginary / b)


@_spells(aten.reciprocal.default)
def _reciprocal(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    # Scaled first, as torch does: the square of a large number would be infinite.
    scale = torch.maximum(real.abs(), imaginary.abs())
    real, imaginary = real / scale, imaginary / scale
    norm = (real * real + imaginary * imaginary) * scale
    return _join(real / norm, -imaginary / norm)


@_spells(aten.neg.default)
def _neg(x: Tensor) -> Tensor:
    return torch.view_as_complex(-torch.view_as_real(x))


@_spells(aten._conj.default, aten.conj.default, aten.conj_physical.default, aten._conj_copy.default)
def _conj(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    return _join(real, -imaginary)


@_spells(aten.resolve_conj.default, aten.clone.default, aten.alias.default, aten.detach.default)
def _same(x: Tensor, *, memory_format: Any = None) -> Tensor:
    return torch.view_as_complex(torch.view_as_real(x))


@_spells(aten.real.default)
def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x).select(-1, 0)


@_spells(aten.imag.default)
def _imag(x: Tensor) -> Tensor:
    return torch.view_as_real(x).select(-1, 1)


@_spells(aten.abs.default)
def _abs(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    return torch.hypot(real, imaginary)


@_spells(aten.angle.default)
def _angle(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    return torch.atan2(imaginary, real)


@_spells(aten.exp.default)
def _exp(x: Tensor) -> Tensor:
    real, imaginary = _parts(x)
    size = torch.exp(real)
    return _join(size * torch.cos(imaginary), size * torch.sin(imaginary))


def _complex(real: Tensor, imag: Tensor) -> Tensor:
    return _join(real, imag)


def _polar(abs: Tensor, angle: Tensor) -> Tensor:
    return _join(abs * torch.cos(angle), abs * torch.sin(angle))


COMPLEX_DECOMPOSITIONS[aten.complex.default] = _complex
COMPLEX_DECOMPOSITIONS[aten.polar.default] = _polar


@_spells(aten.reshape.default, aten.view.default, aten._unsafe_view.default)
def _reshape(x: Tensor, shape: Sequence[Any]) -> Tensor:
    return _structural(torch.reshape, x, shape)


@_spells(aten.transpose.int)
def _transpose(x: Tensor, dim0: int, dim1: int) -> Tensor:
    return _structural(torch.transpose, x, dim0, dim1)


@_spells(aten.permute.default)
def _permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    return _structural(torch.permute, x, dims)


@_spells(aten.expand.default)
def _expand(x: Tensor, size: Sequence[Any], *, implicit: bool = False) -> Tensor:
    return _structural(lambda part: part.expand(*size), x)


@_spells(aten.unsqueeze.default)
def _unsqueeze(x: Tensor, dim: int) -> Tensor:
    return _structural(torch.unsqueeze, x, dim)


@_spells(aten.squeeze.dim)
def _squeeze(x: Tensor, dim: int) -> Tensor:
    return _structural(torch.squeeze, x, dim)


@_spells(aten.select.int)
def _select(x: Tensor, dim: int, index: Any) -> Tensor:
    return _structural(torch.select, x, dim, index)


@_spells(aten.slice.Tensor)
def _slice(x: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Tensor:
    return _structural(lambda part: aten.slice.Tensor(part, dim, start, end, step), x)


@_spells(aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    parts = [_parts(t) if is_complex(t) else (t, torch.zeros_like(t)) for t in tensors]
    return _join(torch.cat([r for r, _ in parts], dim), torch.cat([i for _, i in parts], dim))


@_spells(aten.sum.dim_IntList)
def _sum(x: Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    if dtype is not None:
        return NotImplemented  # type: ignore[no-any-return]
    return _structural(lambda part: torch.sum(part, dim, keepdim), x)


def _product(a: Tensor, b: Tensor) -> Tensor:
    (ar, ai), (br, bi) = _parts(a), _parts(b)
    if not is_complex(a):
        return _join(ar @ br, ar @ bi)
    if not is_complex(b):
        return _join(ar @ br, ai @ br)
    return _join(ar @ br - ai @ bi, ar @ bi + ai @ br)


for _overload in (aten.mm.default, aten.bmm.default, aten.matmul.default):
    _spells(_overload)(_product)
