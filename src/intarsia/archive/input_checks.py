"""What a call is checked against: dtypes, devices, shapes with their symbols, ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from intarsia.archive.values import Devices, Json, from_json, to_json
from intarsia.errors import ArchiveError
from intarsia.runtime.input_checks import Check, ConstantCheck, TensorCheck

_FROM_TORCH = """FloorDiv ModularIndexing CleanDiv Mod PythonMod CeilToInt FloorToInt TruncToInt RoundToInt
 IntTrueDiv FloatTrueDiv PowByNatural ToFloat Max Min Where CeilDiv LShift RShift"""


@functools.cache
def _functions() -> dict[str, Any]:
    """What a size may be computed by; found by name, never evaluated as text."""
    import sympy  # which takes long to import: a module whose sizes are fixed does without
    from torch.utils._sympy import functions as torch_sympy

    return {
        **{kind.__name__: kind for kind in (sympy.Add, sympy.Mul, sympy.Pow, sympy.floor, sympy.ceiling)},
        **{name: getattr(torch_sympy, name) for name in _FROM_TORCH.split() if hasattr(torch_sympy, name)},
    }


@dataclass(frozen=True)
class Range:
    """The least and the largest size of a dimension that varies."""

    lower: float
    upper: float


def size_to_json(size: Any) -> Json:
    """A size: a number, a symbol, or an expression of them."""
    if isinstance(size, int) or size.is_Integer:
        return int(size)
    if size.is_Symbol:
        return size.name
    if size.is_Rational:
        return ["/", int(size.p), int(size.q)]
    if type(size).__name__ not in _functions():
        raise ArchiveError(f"the size {size} is computed by {type(size).__name__}, which has no form there")
    return [type(size).__name__, *(size_to_json(part) for part in size.args)]


def size_from_json(found: Json) -> Any:
    """The size as sympy has it; a plain number stays one."""
    if isinstance(found, int):
        return found
    import sympy

    if isinstance(found, str):
        return sympy.Symbol(found, integer=True, positive=True)
    name, *parts = found
    if name == "/":
        return sympy.Rational(*parts)
    return _functions()[name](*(sympy.sympify(size_from_json(part)) for part in parts))


def check_to_json(check: Check) -> Json:
    """What one input must be."""
    if check is None:
        return None
    if isinstance(check, ConstantCheck):
        return {"name": check.name, "constant": to_json(check.value)}
    return {
        "name": check.name,
        "dtype": to_json(check.dtype),
        "device": to_json(check.device),
        "shape": [size_to_json(size) for size in check.shape],
        "strides": None if check.strides is None else list(check.strides),
    }


def check_from_json(found: Json, devices: Devices) -> Check:
    """The check of one input."""
    if found is None:
        return None
    if "constant" in found:
        return ConstantCheck(found["name"], from_json(found["constant"], None, devices))
    shape = tuple(size_from_json(size) for size in found["shape"])
    static = torch.Size(shape) if all(isinstance(size, int) for size in shape) else None
    strides = None if found["strides"] is None else tuple(found["strides"])
    dtype, device = (from_json(found[key], None, devices) for key in ("dtype", "device"))
    return TensorCheck(found["name"], dtype, device, shape, static, strides)


def ranges_to_json(ranges: Mapping[Any, Any]) -> Json:
    """Ranges by the names of symbols; an end that is open is None."""
    return {str(symbol): [_end(r.lower), _end(r.upper)] for symbol, r in ranges.items() if symbol.is_Symbol}


def _end(value: Any) -> int | None:
    return int(value) if isinstance(value, int) or value.is_Integer else None


def ranges_from_json(found: Json) -> dict[Any, Range]:
    return {
        size_from_json(name): Range(
            -math.inf if low is None else int(low), math.inf if high is None else int(high)
        )
        for name, (low, high) in found.items()
    }
