"""Tests of patterns on random networks: a pattern must not change the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.errors import NetworkError, RewriteError
from intarsia.network import Network, Tensor, dtypes, net_guard
from intarsia.network import functional as F
from intarsia.network.infer import attribute_defaults
from intarsia.rewrite.manager import RewritePatternManager
from intarsia.rewrite.pattern import PatternRewriter, Rule
from intarsia.rewrite.term import AnyValue, Either, Maybe, Number, OpTerm, Output, Root, Term, Var

# Random networks made from a rule's own terms.


_DTYPES = (
    ir.DataType.FLOAT,
    ir.DataType.FLOAT,
    ir.DataType.DOUBLE,
    ir.DataType.INT64,
    ir.DataType.INT32,
)


def random_network(roots: Sequence[Root], rng: np.random.Generator, rank: int) -> Network:
    """A random network that contains the terms. Most variables have `rank` dimensions."""
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
        return attribute_defaults("", op_type).get(name)


# Proof by running: a pattern's network before and after, on random shapes, dtypes, symbols and values.


Sample = Callable[[np.random.Generator], Network]
Build = Callable[[Network], Callable[..., tuple[torch.Tensor, ...]]]

# What inputs hold, in turns: small numbers; numbers far from 1; some of NaN, infinities, zeros of both signs.
KINDS = ("plain", "large", "special")
_SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-38, 1.0)
_TOLERANCE = {ir.DataType.FLOAT16: 1e-2, ir.DataType.BFLOAT16: 4e-2, ir.DataType.DOUBLE: 1e-7}


@dataclass(frozen=True)
class Checked:
    """The result of a check: networks tried, networks changed, why others were not, the largest error."""

    tried: int
    fired: int
    refused: dict[str, int]
    worst: float


def check_pattern(
    pattern: PatternRewriter,
    sample: Sample | None = None,
    *,
    trials: int = 40,
    build: Build | None = None,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
) -> Checked:
    """Run `trials` random networks before and after a pattern; RewriteError at the first difference.

    The networks have floats and, if the operators take them, integers. Sizes are numbers or symbols. `kinds`
    are the kinds of input values, in turns. If the pattern refuses a network, another one is tried, up to 40
    times as many as `trials`. It is an error if the pattern refuses all of them. `sample(rng)` makes a
    network that the pattern may match; by default, it is made from the terms of a rule. `build` turns a
    network into a program (an engine's `build`); the default is ONNX's reference evaluator.

    >>> from intarsia.network import functional as F
    >>> from intarsia.rewrite import check_pattern, rule
    >>> @rule(lambda op, x: op.Relu(op.Relu(x)))
    ... def relu_once(net, x):
    ...     return F.relu(x)
    >>> check_pattern(relu_once, trials=5).fired
    5
    """
    if sample is None and not isinstance(pattern, Rule):
        raise RewriteError(
            f"pattern {pattern.name!r} is not a rule: give sample=, a function that makes networks for it"
        )
    rng = np.random.default_rng(seed)
    run = build or reference
    refused: Counter[str] = Counter()
    fired, worst = 0, 0.0
    tried = 0
    while fired < trials and tried < 40 * trials:
        kind = kinds[tried % len(kinds)]
        tried += 1
        net, inputs, expected = _trial(pattern, sample, run, rng, kind)
        before = str(net)
        manager = RewritePatternManager()
        manager.add(pattern.name, pattern)
        if not manager.rewrite(net):
            refused.update(_reasons(manager, net, pattern))
            continue
        fired += 1
        net.verify()
        with np.errstate(all="ignore"):
            got = run(net)(*inputs)
        for number, (a, b) in enumerate(zip(expected, got, strict=True)):
            error = difference(a, b)
            worst = max(worst, error)
            if error > _TOLERANCE.get(dtypes.to_onnx(a.dtype), 1e-4):
                raise RewriteError(
                    f"pattern {pattern.name!r} changes output {number} by {error:.3g} of its size, "
                    f"for {kind} values"
                    f"\nbefore:\n{before}\nafter:\n{net}"
                )
    if not fired:
        reasons = "; ".join(f"{reason} ({count} times)" for reason, count in refused.most_common(3))
        raise RewriteError(f"pattern {pattern.name!r} never fired in {tried} networks: {reasons}")
    return Checked(tried, fired, dict(refused), worst)


def _trial(
    pattern: PatternRewriter, sample: Sample | None, run: Build, rng: np.random.Generator, kind: str
) -> tuple[Network, list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """A network, inputs and its outputs; generated networks that no evaluator supports are skipped."""
    failure: Exception | None = None
    rank = int(rng.integers(1, 5))
    for attempt in range(300):
        if attempt % 60 == 59:  # operators may not take so many dimensions: shapes that never fit
            rank = int(rng.integers(1, 5))
        try:
            if sample is not None:
                net = sample(rng)
            else:
                assert isinstance(pattern, Rule)
                net = random_network(pattern.roots, rng, rank)
            inputs = random_inputs(net, rng, kind, indices=sample is not None)
            with np.errstate(all="ignore"):
                return net, inputs, run(net)(*inputs)
        except Exception as error:
            if sample is not None:
                raise
            failure = error
    raise RewriteError(f"no network of pattern {pattern.name!r} could be generated: {failure}") from failure


def _reasons(manager: RewritePatternManager, net: Network, pattern: PatternRewriter) -> list[str]:
    roots = [x for x in net.get_layers() if pattern.root_layer is None or x.kind in pattern.root_layer]
    return [manager.explain(layer)[0].reason for layer in roots[-1:]]


def random_inputs(
    net: Network, rng: np.random.Generator, kind: str = "plain", *, indices: bool = True
) -> list[torch.Tensor]:
    """Random values for a network's inputs. `indices` makes integers small."""
    sizes: dict[Any, int] = {}
    tensors = []
    for tensor in net.get_inputs():
        shape = [
            d if isinstance(d, int) else sizes.setdefault(d, int(rng.integers(1, 5))) for d in tensor.shape
        ]
        if tensor.dtype == ir.DataType.BOOL:
            array: Any = rng.random(shape) < 0.5
        elif tensor.dtype not in dtypes.INTEGERS:
            array = _floats(rng, shape, kind)
        else:
            array = rng.integers(0, 4, shape) if indices else _integers(rng, shape, kind, tensor.dtype)
        tensors.append(torch.from_numpy(np.asarray(array)).to(dtypes.to_torch(tensor.dtype)))
    return tensors


def _integers(rng: np.random.Generator, shape: Sequence[int], kind: str, dtype: ir.DataType) -> Any:
    """Small ones of both signs, as far as the dtype has them; or up to 2**24, where 32-bit floats end.

    Not up to the dtype's ends: ONNX itself defines products of integers (Gemm) by way of 64-bit floats.
    """
    ends = np.iinfo(dtypes.to_numpy(dtype))
    most = 9 if kind == "plain" else min(ends.max, 2**24)
    return rng.integers(max(-most, ends.min), most, shape, endpoint=True)


def _floats(rng: np.random.Generator, shape: Sequence[int], kind: str) -> Any:
    array = rng.standard_normal(shape)
    if kind == "large":
        return array * rng.choice([1e-3, 1e2, 1e4])
    array = np.asarray(array * rng.choice([0.3, 1.0, 4.0]))
    if kind == "plain":
        return array
    return np.where(rng.random(shape) < 0.2, rng.choice(_SPECIAL, shape), array)


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; infinite for another shape, dtype or NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.numel():
        return 0.0
    x, y = a.double(), b.double()
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return 0.0
    if not bool((x.isfinite() == y.isfinite()).all()):
        return float("inf")
    largest = float(x[x.isfinite()].abs().max()) if bool(x.isfinite().any()) else 0.0
    gap = (x - y)[~same].abs()
    return float(gap.max()) / max(largest, 1e-3) if bool(gap.isfinite().all()) else float("inf")


def reference(net: Network) -> Callable[..., tuple[torch.Tensor, ...]]:
    """A program that runs a network by ONNX's reference definition of its operators. It is slow."""
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(net.to_onnx())
    names = [tensor.name for tensor in net.get_inputs()]
    wanted = [dtypes.to_torch(tensor.dtype) for tensor in net.get_outputs()]

    def program(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = evaluator.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})
        return tuple(torch.from_numpy(np.array(x)).to(d) for x, d in zip(results, wanted, strict=True))

    return program
