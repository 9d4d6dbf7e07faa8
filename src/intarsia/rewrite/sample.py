"""Random networks made from a rule's own terms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from intarsia.errors import NetworkError
from intarsia.network import Network, Tensor, dtypes, net_guard
from intarsia.network import functional as F
from intarsia.network.schema import schema_of
from intarsia.rewrite.term import AnyValue, Either, Maybe, Number, OpTerm, Output, Root, Term, Var

_DTYPES = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.INT64,
    ir.DataType.INT32,
)


def random_network(roots: Sequence[Root], rng: np.random.Generator, rank: int) -> Network:
    """A network in which the terms stand, most variables of `rank` dimensions, or an error."""
    net = Network("sample")
    with net_guard(net):
        maker = _Maker(rng, rank)
        for index, root in enumerate(roots):
            maker.make(root).mark_output(f"out{index}")
    net.verify()
    return net


class _Maker:
    def __init__(self, rng: np.random.Generator, rank: int) -> None:
        self.rng = rng
        self.dtype = _DTYPES[rng.integers(len(_DTYPES))]
        self.base = tuple(int(d) for d in rng.choice([1, 2, 2, 3, 4], size=rank))
        # In some networks one size is not a number: inputs that have it call it by one symbol.
        self.symbol = int(rng.choice(self.base)) if rank and rng.random() < 0.3 else None
        self.variables: dict[str, Tensor] = {}
        self.calls: dict[OpTerm, tuple[Tensor, ...]] = {}

    def make(self, term: Term) -> Tensor:
        if isinstance(term, Var):
            if term.name not in self.variables:
                self.variables[term.name] = self.variable(term)
            return self.variables[term.name]
        if isinstance(term, Number):
            return F.constant(term.value, self.dtype)
        if isinstance(term, Either):
            return self.make(term.terms[self.rng.integers(len(term.terms))])
        if isinstance(term, Maybe):
            return self.make(term.term)
        if isinstance(term, Output):
            return self.call(term.call, 1 + term.index)[term.index]
        assert isinstance(term, OpTerm)
        return self.call(term, 1)[0]

    def variable(self, var: Var) -> Tensor:
        shape = self.shape()
        if not var.constant:
            return Tensor(var.name, self.dtype, tuple("n" if d == self.symbol else d for d in shape))
        whole = self.dtype in dtypes.INTEGERS
        values = self.rng.integers(-9, 9, shape) if whole else self.rng.standard_normal(shape)
        return F.constant(np.asarray(values), self.dtype, name=var.name)

    def shape(self) -> tuple[int, ...]:
        """A shape seen before, its end, one that broadcasts to it, its last two turned, or any other."""
        seen = [self.base, *[tensor.shape for tensor in self.variables.values()]]
        picked = seen[self.rng.integers(len(seen))]
        shape = tuple(int(self.symbol if d == "n" else d) for d in picked)  # type: ignore[arg-type]
        way = self.rng.random()
        if way < 0.4 or not shape:
            return shape
        if way < 0.7:
            return shape[self.rng.integers(len(shape)) :]
        if way < 0.85 and len(shape) > 1:
            return (*shape[:-2], shape[-1], shape[-2])
        if way < 0.95:
            return tuple(1 if self.rng.random() < 0.4 else d for d in shape)
        return tuple(int(d) for d in self.rng.choice([1, 2, 3], size=int(self.rng.integers(0, 4))))

    def call(self, call: OpTerm, outputs: int) -> tuple[Tensor, ...]:
        if call in self.calls:
            return self.calls[call]
        inputs: list[Tensor | None] = []
        for term in call.inputs:
            left_out = term is None or (isinstance(term, Maybe) and self.rng.random() < 0.5)
            inputs.append(None if left_out else self.make(term))  # type: ignore[arg-type]
        if any(t is None for t in inputs[1:]):  # inputs after a missing one are missing too, mostly
            cut = next(i for i, t in enumerate(inputs) if t is None)
            inputs = inputs if self.rng.random() < 0.3 else inputs[:cut]
        domain, _, op_type = call.kind.rpartition("::")
        attributes = self.attributes(call, op_type, inputs[0])
        self.calls[call] = F.ops(op_type, *inputs, outputs=outputs, domain=domain, **attributes)
        return self.calls[call]

    def attributes(self, call: OpTerm, op_type: str, first: Tensor | None) -> dict[str, Any]:
        tensors: dict[str, Any] = {}
        for name, wanted in call.attributes.items():
            if not isinstance(wanted, AnyValue) and not callable(wanted):
                tensors[name] = wanted
                continue
            for _ in range(40):
                value = self.attribute(name, op_type, first)
                if isinstance(wanted, AnyValue) or wanted(value):
                    tensors[name] = value
                    break
            else:
                raise NetworkError(f"no value of {name} satisfies the pattern")
        return tensors

    def attribute(self, name: str, op_type: str, first: Tensor | None) -> Any:
        rank = 0 if first is None else first.ndim
        if name == "perm":
            return [int(i) for i in self.rng.permutation(rank)]
        if name == "axis":
            return int(self.rng.integers(-rank, max(rank, 1)))
        if name in ("keepdims", "transA", "transB", "is_causal"):
            return int(self.rng.integers(2))
        if name in ("alpha", "beta", "scale"):
            return float(self.rng.choice([0.5, 1.0, 2.0]))
        if name == "epsilon":
            return float(self.rng.choice([1e-5, 1e-3]))
        schema = schema_of("", op_type)
        return None if schema is None else schema.defaults.get(name)
