"""The short way of a functional of two operands, taken where they are tensors of one type and shape.

Most are, and such a layer needs no inference: rewriting makes one in half the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from intarsia.network.network import Tensor, here
from intarsia.network.ops.core import Operand
from intarsia.network.signature import FLayerInfoMemo, Form, record_signature

Binary = Callable[[Operand, Operand], Tensor]

_new = object.__new__


def of_two(functional: Binary, op_type: str, makes: ir.DataType | None) -> Binary:
    """`record_signature` of a functional that adds one layer of this kind and nothing else.

    The layer makes the dtype of its operands, unless it always `makes` another.
    """
    anyhow = record_signature(functional)
    form, hint = Form.of(functional), op_type.lower()

    @functools.wraps(functional)
    def recorded(a: Operand, b: Operand) -> Tensor:
        net = here.net
        if net is None or type(a) is not Tensor or type(b) is not Tensor:
            return anyhow(a, b)
        x: Any = a.value
        y: Any = b.value
        shape, kind, other = x._shape, x._type, y._type
        if shape is None or shape is not y._shape or kind is None or other is None:
            return anyhow(a, b)
        dtype = kind._dtype
        if dtype is not other._dtype or not shape._frozen:
            return anyhow(a, b)
        node: Any = net.add_alike(op_type, hint, (x, y), makes or dtype, shape)
        memo = net.memo or FLayerInfoMemo.of(net)
        memo.infos[node._name] = (form, node, memo.clock)
        made = _new(Tensor)
        made.value = node._outputs[0]
        return made

    return recorded
