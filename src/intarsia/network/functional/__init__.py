"""Functionals: the operations that converters, patterns and hand-written networks add layers by.

>>> import torch
>>> from intarsia.network import Network, Tensor, functional as F, net_guard
>>> net = Network("score")
>>> with net_guard(net):
...     q, k = (Tensor(name, torch.float32, (2, 4, 8)) for name in "qk")
...     F.softmax(F.matmul(q, F.transpose(k, (0, 2, 1))) * 0.5).mark_output("y")
>>> print(net)
score(q: f32[2, 4, 8], k: f32[2, 4, 8]) -> (y: f32[2, 4, 4])
  transpose = Transpose(k) {perm=[0, 2, 1]}
  matmul = MatMul(q, transpose)
  mul = Mul(matmul, 0.5)
  y = Softmax(mul) {axis=-1}
"""

from __future__ import annotations

from typing import Any

from intarsia.network.functional.core import *  # noqa: F403
from intarsia.network.functional.elementwise import *  # noqa: F403
from intarsia.network.functional.elementwise import (
    add,
    div,
    greater,
    greater_equal,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    mul,
    neg,
    pow,
    sub,
)
from intarsia.network.functional.nn import *  # noqa: F403
from intarsia.network.functional.nn import matmul
from intarsia.network.functional.shape import *  # noqa: F403
from intarsia.network.network import Tensor


def _overload(name: str, functional: Any) -> None:
    def forward(self: Tensor, other: Any) -> Tensor:
        return functional(self, other)  # type: ignore[no-any-return]

    def reflected(self: Tensor, other: Any) -> Tensor:
        return functional(other, self)  # type: ignore[no-any-return]

    setattr(Tensor, f"__{name}__", forward)
    if name not in ("lt", "gt", "le", "ge"):
        setattr(Tensor, f"__r{name}__", reflected)


for _name, _functional in {
    "add": add,
    "sub": sub,
    "mul": mul,
    "truediv": div,
    "pow": pow,
    "matmul": matmul,
    "lt": less,
    "gt": greater,
    "le": less_equal,
    "ge": greater_equal,
    "and": logical_and,
    "or": logical_or,
}.items():
    _overload(_name, _functional)
Tensor.__neg__ = lambda self: neg(self)  # type: ignore[method-assign]
Tensor.__invert__ = lambda self: logical_not(self)  # type: ignore[method-assign]
