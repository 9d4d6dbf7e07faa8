"""Operators by name: looked up among those torch has, never carried by the file."""

from __future__ import annotations

import math
import operator
import re
from typing import Any

import torch

from intarsia.errors import ArchiveError

_OVERLOAD = re.compile(r"(\w+)::(\w+)\.(\w+)", re.ASCII)
_CONTROL_FLOW = ("cond", "while_loop", "scan", "map_impl", "associative_scan")
# It opens, and may make, the file that an argument names.
_REFUSED = frozenset({"aten::from_file.default", "aten::from_file.out"})

_OPERATORS = """getitem add sub mul truediv floordiv mod pow neg pos abs lt le eq ne ge gt and_ or_ xor not_
 invert lshift rshift"""
_MATH = "floor ceil trunc sqrt log log2 exp sin cos tan asin acos atan sinh cosh tanh pow fabs"
_SYMBOLIC = """sym_float sym_int sym_max sym_min sym_not sym_ite sym_sum _sym_sqrt _sym_log2 _sym_cos
 _sym_cosh _sym_sin _sym_sinh _sym_tan _sym_tanh _sym_asin _sym_acos _sym_atan"""
# Functions of sizes; none of them can do anything but compute.
_FUNCTIONS: dict[str, Any] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"math.{name}": getattr(math, name) for name in _MATH.split()},
    **{f"builtins.{kind.__name__}": kind for kind in (min, max, abs, int, float, bool, round)},
    **{f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split() if hasattr(torch, name)},
}
_NAMES = {id(function): name for name, function in _FUNCTIONS.items()}


def name_of(target: Any) -> str:
    """The name of an operator; ArchiveError for what cannot be found again by one."""
    if isinstance(target, torch._ops.OpOverload):
        name = f"{target.namespace}::{target._opname}.{target._overloadname}"
        if name in _REFUSED:
            raise ArchiveError(f"{name} reads a file, which a loaded model must not")
        return name
    if isinstance(target, torch._ops.HigherOrderOperator) and target.__name__ in _CONTROL_FLOW:
        return f"higher_order::{target.__name__}"
    if id(target) in _NAMES:
        return _NAMES[id(target)]
    raise ArchiveError(f"{target} is not an operator of torch's registry, so that it cannot be saved by name")


def find_operator(name: str) -> Any:
    """The operator of that name; ArchiveError where it is refused, or not registered in this process."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    space, _, rest = name.partition("::")
    if space == "higher_order" and rest in _CONTROL_FLOW:
        return getattr(torch.ops.higher_order, rest)
    parts = _OVERLOAD.fullmatch(name)
    if parts is None or name in _REFUSED:
        raise ArchiveError(f"the archive names {name!r}, which is not an operator that may be loaded")
    try:
        operator = getattr(getattr(getattr(torch.ops, parts[1]), parts[2]), parts[3])
    except (AttributeError, RuntimeError):
        operator = None
    if not isinstance(operator, torch._ops.OpOverload):
        raise ArchiveError(
            f"the archive uses the operator {name}, which is not registered in this process; import the"
            " package that defines it, then load"
        )
    return operator
