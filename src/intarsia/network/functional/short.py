"""The short way of functionals that are one layer, taken where its type is plain to see.

It mostly is: of one operand it is that operand's, of two tensors of one type and shape theirs. Such a layer
needs no inference, and it says itself what it was called with: rewriting makes one in half the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from intarsia.network.functional.core import Operand
from intarsia.network.network import Tensor, here
from intarsia.network.schema import schema_of
from intarsia.network.signature import plain_form, record_signature

Unary = Callable[[Operand], Tensor]
Binary = Callable[[Operand, Operand], Tensor]

_new = object.__new__


def of_one(functional: Unary, op_type: str, makes: ir.DataType | None) -> Unary:
    """`record_signature` of a functional that adds one layer of this kind and nothing else.

    The layer makes the dtype of its operand, unless it always `makes` another.
    """
    anyhow, hint, takes = record_signature(functional), op_type.lower(), _takes(op_type)
    plain_form(op_type, functional)

    @functools.wraps(functional)
    def recorded(x: Operand) -> Tensor:
        net = here.net
        if net is None or type(x) is not Tensor:
            return anyhow(x)
        value: Any = x.value
        shape, kind = value._shape, value._type
        if shape is None or kind is None or not shape._frozen or kind._dtype not in takes:
            return anyhow(x)
        return _made(net.add_alike(op_type, hint, (value,), makes or kind._dtype, shape))

    return recorded


def of_two(functional: Binary, op_type: str, makes: ir.DataType | None) -> Binary:
    """`of_one` of a functional of two operands, which have one dtype."""
    anyhow, hint, takes = record_signature(functional), op_type.lower(), _takes(op_type)
    plain_form(op_type, functional)

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
        if dtype is not other._dtype or not shape._frozen or dtype not in takes:
            return anyhow(a, b)
        return _made(net.add_alike(op_type, hint, (x, y), makes or dtype, shape))

    return recorded


def _takes(op_type: str) -> frozenset[ir.DataType]:
    """The dtypes that all operands may have."""
    schema = schema_of("", op_type)
    return frozenset.intersection(*(one.dtypes for one in schema.inputs)) if schema else frozenset()


def _made(node: Any) -> Tensor:
    """What a layer makes."""
    view = _new(Tensor)
    view.value = node._outputs[0]
    return view
