"""ONNX operators and their traits: one row an operator, for guards, engines and rewriting alike.

A trait holds for every engine, and `tests/network/test_ops.py` runs every row against it. What only one
engine's kernels do, such as losing NaN, is stated at that engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import pi

Range = tuple[float, float]


@dataclass(frozen=True)
class Op:
    """The traits of an operator."""

    keeps_values: bool = False
    """The elements of its output are those of its first input, each at least once."""
    moves_data: bool = False
    """The elements of its output are elements of its inputs, or the value that fills gaps."""
    may_be_identity: bool = False
    """With some attributes and shapes it returns its first input unchanged."""
    operands: int = 0
    """It computes each element from this many inputs at the same position; 0: it is not elementwise. Further
    inputs (the bounds of Clip) apply to all elements."""
    compares: bool = False
    """It says of two elements which is larger, or whether they are equal."""
    commutative: bool = False
    """Its two operands can be exchanged."""
    range: Range | None = None
    """All of its numbers lie in this range (apart from NaN)."""
    counts: bool = False
    """Its integers are indices or sizes, never negative."""
    multiplies_weights: bool = False
    """It sums the products of its first input with its second, which usually is a weight."""
    normalizes: bool = False
    """It divides by the deviation of its elements, which it squares to compute it."""
    recurrent: bool = False
    """It processes a sequence step by step."""


_UNIT, _SIGNED_UNIT = (0.0, 1.0), (-1.0, 1.0)

OPS: dict[str, Op] = {
    # Elements stay as they are.
    "Compress": Op(moves_data=True),
    "Concat": Op(moves_data=True),
    "DepthToSpace": Op(moves_data=True, keeps_values=True),
    "Expand": Op(moves_data=True, keeps_values=True, may_be_identity=True),
    "Flatten": Op(moves_data=True, keeps_values=True, may_be_identity=True),
    "Gather": Op(moves_data=True),
    "GatherElements": Op(moves_data=True),
    "GatherND": Op(moves_data=True),
    "Identity": Op(moves_data=True, keeps_values=True, may_be_identity=True),
    "Pad": Op(moves_data=True),
    "Reshape": Op(moves_data=True, keeps_values=True, may_be_identity=True),
    "ReverseSequence": Op(moves_data=True, keeps_values=True),
    "ScatterElements": Op(moves_data=True),  # unless `reduction` is set
    "ScatterND": Op(moves_data=True),
    "Slice": Op(moves_data=True),
    "SpaceToDepth": Op(moves_data=True, keeps_values=True),
    "Split": Op(moves_data=True),
    "Squeeze": Op(moves_data=True, keeps_values=True),
    "Tile": Op(moves_data=True, keeps_values=True),
    "Transpose": Op(moves_data=True, keeps_values=True, may_be_identity=True),
    "Trilu": Op(moves_data=True),
    "Unsqueeze": Op(moves_data=True, keeps_values=True),
    "Where": Op(moves_data=True, operands=3),
    # One operand, element by element.
    "Abs": Op(operands=1),
    "Acos": Op(operands=1, range=(0.0, pi)),
    "Acosh": Op(operands=1),
    "Asin": Op(operands=1, range=(-pi / 2, pi / 2)),
    "Asinh": Op(operands=1),
    "Atan": Op(operands=1, range=(-pi / 2, pi / 2)),
    "Atanh": Op(operands=1),
    "BitwiseNot": Op(operands=1),
    "Cast": Op(operands=1, may_be_identity=True),
    "Ceil": Op(operands=1),
    "Celu": Op(operands=1),
    "Clip": Op(operands=1),
    "Cos": Op(operands=1, range=_SIGNED_UNIT),
    "Cosh": Op(operands=1),
    "Elu": Op(operands=1),
    "Erf": Op(operands=1, range=_SIGNED_UNIT),
    "Exp": Op(operands=1),
    "Floor": Op(operands=1),
    "Gelu": Op(operands=1),
    "HardSigmoid": Op(operands=1, range=_UNIT),
    "HardSwish": Op(operands=1),
    "IsInf": Op(operands=1),
    "IsNaN": Op(operands=1),
    "LeakyRelu": Op(operands=1),
    "Log": Op(operands=1),
    "Mish": Op(operands=1),
    "Neg": Op(operands=1),
    "Not": Op(operands=1),
    "Reciprocal": Op(operands=1),
    "Relu": Op(operands=1),
    "Round": Op(operands=1),
    "Selu": Op(operands=1),
    "Sigmoid": Op(operands=1, range=_UNIT),
    "Sign": Op(operands=1, range=_SIGNED_UNIT),
    "Sin": Op(operands=1, range=_SIGNED_UNIT),
    "Sinh": Op(operands=1),
    "Softplus": Op(operands=1),
    "Softsign": Op(operands=1, range=_SIGNED_UNIT),
    "Sqrt": Op(operands=1),
    "Tan": Op(operands=1),
    "Tanh": Op(operands=1, range=_SIGNED_UNIT),
    # Two operands, element by element.
    "Add": Op(operands=2, commutative=True),
    "And": Op(operands=2, commutative=True),
    "BitShift": Op(operands=2),
    "BitwiseAnd": Op(operands=2, commutative=True),
    "BitwiseOr": Op(operands=2, commutative=True),
    "BitwiseXor": Op(operands=2, commutative=True),
    "Div": Op(operands=2),
    "Equal": Op(operands=2, compares=True, commutative=True),
    "Greater": Op(operands=2, compares=True),
    "GreaterOrEqual": Op(operands=2, compares=True),
    "Less": Op(operands=2, compares=True),
    "LessOrEqual": Op(operands=2, compares=True),
    "Max": Op(operands=2, commutative=True),
    "Min": Op(operands=2, commutative=True),
    "Mod": Op(operands=2),
    "Mul": Op(operands=2, commutative=True),
    "Or": Op(operands=2, commutative=True),
    "PRelu": Op(operands=2),
    "Pow": Op(operands=2),
    "Sub": Op(operands=2),
    "Xor": Op(operands=2, commutative=True),
    # Products, norms and sequences.
    "Conv": Op(multiplies_weights=True),
    "ConvTranspose": Op(multiplies_weights=True),
    "Gemm": Op(multiplies_weights=True),
    "MatMul": Op(multiplies_weights=True),
    "GroupNormalization": Op(normalizes=True),
    "InstanceNormalization": Op(normalizes=True),
    "LayerNormalization": Op(normalizes=True),
    "RMSNormalization": Op(normalizes=True),
    "GRU": Op(recurrent=True),
    "LSTM": Op(recurrent=True),
    "RNN": Op(recurrent=True),
    "Softmax": Op(range=_UNIT),
    # Indices and sizes.
    "ArgMax": Op(counts=True),
    "ArgMin": Op(counts=True),
    "NonZero": Op(counts=True),
    "Shape": Op(counts=True),
    "Size": Op(counts=True),
    "TopK": Op(counts=True),
}


def _names(rows: Iterable[tuple[str, bool]]) -> frozenset[str]:
    return frozenset(name for name, holds in rows if holds)


# The names by trait: `kind in MOVES_DATA` is also defined for operators without a row.
KEEPS_VALUES = _names((name, op.keeps_values) for name, op in OPS.items())
MOVES_DATA = _names((name, op.moves_data) for name, op in OPS.items())
MAY_BE_IDENTITY = _names((name, op.may_be_identity) for name, op in OPS.items())
UNARY = _names((name, op.operands == 1) for name, op in OPS.items())
BINARY = _names((name, op.operands == 2) for name, op in OPS.items())
COMMUTATIVE = _names((name, op.commutative) for name, op in OPS.items())
COMPARES = _names((name, op.compares) for name, op in OPS.items())
COUNTS = _names((name, op.counts) for name, op in OPS.items())
MULTIPLIES_WEIGHTS = _names((name, op.multiplies_weights) for name, op in OPS.items())
NORMALIZES = _names((name, op.normalizes) for name, op in OPS.items())
RECURRENT = _names((name, op.recurrent) for name, op in OPS.items())
