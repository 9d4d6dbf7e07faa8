"""PyTorch's OpInfo samples as small graphs with inputs and eager's answers."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import export
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from intarsia.convert.evaluators import EVALUATORS
from intarsia.convert.registry import registry
from intarsia.lower import lower

try:  # a private module of torch: the tests that need it say so instead of breaking
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo

    OPINFO_MISSING = ""
except ImportError as error:  # pragma: no cover
    op_db = []
    OPINFO_MISSING = f"this torch ({torch.__version__}) has no OpInfo database: {error}"

# Older exports take no sample of a few operators, and lack others.
BEFORE_TORCH_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int32", "int64", "bool")}
# Also taken by the command line and the full run, though not in the table.
MORE_DTYPES = {name: getattr(torch, name) for name in ("uint8", "int8", "int16", "float64")}
# The memory they return is not set, so only type and shape can be compared.
UNSET = frozenset(
    {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
)
LIMIT = 40  # samples an op and dtype; few ops have more
# What cannot be traced is told by the case that is missing, not by torch's log.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Case:
    """A graph, the tensors it is given, and what eager answers. `target` is the operator under test."""

    op: str
    dtype: str
    index: int
    level: str  # "composite": as exported; "core": after decomposition
    target: Any
    module: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    expected: tuple[torch.Tensor, ...]
    unset: bool = False
    lowered: fx.GraphModule | None = None  # what is converted, of an operator that lowering takes apart

    def __str__(self) -> str:
        return f"{self.op}[{self.dtype}] sample {self.index} ({self.target}, {self.level})"


def full_name(op: OpInfo) -> str:
    """`std`, or `std.unbiased` for a variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


@functools.cache
def op_infos() -> dict[str, OpInfo]:
    """The database by name, in its own order."""
    return {full_name(op): op for op in op_db}


def find_ops(pattern: str) -> list[str]:
    """Ops whose name, last part of the name or aten name is `pattern`."""
    return [
        name
        for name, op in op_infos().items()
        if pattern in (name, op.name, op.name.rsplit(".", 1)[-1], op.aten_name)
    ]


def dtypes_of(op: OpInfo, more: bool = False) -> list[str]:
    """Of the dtypes we test, those the op takes on the CPU."""
    asked = {**DTYPES, **MORE_DTYPES} if more else DTYPES
    return [name for name, dtype in asked.items() if dtype in op.dtypes]


@functools.cache
def tolerance(name: str, dtype: torch.dtype) -> tuple[float, float]:
    """(rtol, atol) of torch.testing, widened where OpInfo itself says the op needs it."""
    base = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5)}
    rtol, atol = base.get(dtype, (1e-7, 1e-7) if dtype.is_floating_point else (0.0, 0.0))
    for decorator in op_infos()[name].decorators:
        scoped = isinstance(decorator, DecorateInfo)
        if scoped and decorator.cls_name not in (None, "TestCommon", "TestDecomp", "TestInductorOpInfo"):
            continue
        for inner in decorator.decorators if scoped else (decorator,):
            override = getattr(inner, "d", {}).get(dtype)
            if isinstance(override, float):  # precisionOverride: absolute only
                atol = max(atol, override)
            elif override is not None:
                rtol, atol = max(rtol, override.rtol), max(atol, override.atol)
    return rtol, atol


def cases(
    name: str,
    dtype: str,
    core: int = LIMIT,
    limit: int = LIMIT,
    seen: set[str] | None = None,
    pick: int | None = None,
    apart: bool = False,
) -> Iterator[Case]:
    """The cases of every covered sample: its own operator has a converter.

    The graph is traced as export does, composite operators kept. The operator under test is the
    one OpInfo names, or the only one in the graph. Where another node of the graph has no converter,
    the operator stands alone in its graph. For the first `core` samples, operators that appear only after
    torch's own decomposition are cases of their own; those that differ in values alone from one in `seen`
    are left out. `pick` takes one sample by number, wrapping around. With `apart`, operators that lowering
    takes apart are cases too.
    """
    op = op_infos()[name]
    seen = set() if seen is None else seen
    found = samples(op, getattr(torch, dtype), limit)
    for index, sample in enumerate(found):
        if pick is not None and index != pick % len(found):
            continue
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        if any(t.layout != torch.strided or t.is_quantized for t in inputs):
            continue
        call = Call(op, leaves, spec)
        composite = trace(call, inputs, decompose=False)
        tested: set[Any] = set()
        if composite is not None:
            tested = own_targets(op, composite)
            for target in tested:
                yield from _cases(name, dtype, index, "composite", target, composite, inputs)
            if apart and not tested:
                yield from _taken_apart(name, dtype, index, call, composite, inputs)
        if index >= core:
            continue
        lowered = trace(call, inputs, decompose=True)
        if lowered is None:
            continue
        for target in dict.fromkeys(node.target for node in _calls(lowered)):
            if target not in registry or target in tested:
                continue
            signature = _signature(next(n for n in _calls(lowered) if n.target is target))
            if signature not in seen:
                seen.add(signature)
                yield from _cases(name, dtype, index, "core", target, lowered, inputs)


def samples(op: OpInfo, dtype: torch.dtype, limit: int) -> list[Any]:
    """The op's samples, the same at each call; spread evenly if there are more than `limit`."""
    random.seed(0)
    np.random.seed(0)
    # OpInfo seeds before every sample, and `torch.manual_seed` also writes down the stack for devices that
    # are not there: half the time of a run over all operators. And it looks for a test of unittest on the
    # stack, reading the source of every frame: two thirds of the time to draw samples.
    seeded = mock.patch.object(torch, "manual_seed", torch.default_generator.manual_seed)
    with seeded, mock.patch.object(inspect, "stack", list):
        torch.manual_seed(0)
        found = list(op.sample_inputs("cpu", dtype, requires_grad=False))
    if len(found) <= limit:
        return found
    return [found[i * len(found) // limit] for i in range(limit)]


class Call:
    """The op as a function of its tensors alone."""

    def __init__(self, op: OpInfo, leaves: list[Any], spec: Any) -> None:
        self.op, self.leaves, self.spec = op, leaves, spec

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        input_, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.op(input_, *args, **kwargs)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def trace(call: Call, inputs: tuple[torch.Tensor, ...], decompose: bool) -> fx.GraphModule | None:
    """The call as a graph over fake tensors, sizes that depend on data left open; None if it has none."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(t) for t in inputs]
    table = _core_table() if decompose else None
    function: Any = torch.func.functionalize(call, remove="mutations_and_views") if decompose else call
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            module = make_fx(function, table, _allow_non_fake_inputs=True, pre_dispatch=not decompose)(*fakes)
    except Exception:  # control flow on data, sparse results, ...: export cannot make a graph of it either
        return None
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


@functools.cache
def _core_table() -> dict[Any, Any]:
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that make layers."""
    return [n for n in module.graph.nodes if n.op == "call_function" and n.target not in EVALUATORS]


def _signature(node: fx.Node) -> str:
    """Target, types of tensors, and all other arguments."""

    def show(source: fx.Node) -> str:
        value = source.meta.get("val")
        return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)

    return f"{node.target}{fx.map_arg((node.args, node.kwargs), show)}"


def own_targets(op: OpInfo, module: fx.GraphModule) -> set[Any]:
    """The operators of the graph that are the op under test and have a converter."""
    calls = _calls(module)
    names = {op.aten_name, op.name.rsplit(".", 1)[-1], *(alias.name for alias in op.aliases)}
    found = {n.target for n in calls if _packet_name(n.target) in names}
    if not found and len({n.target for n in calls}) == 1:
        found = {calls[0].target}
    return {target for target in found if target in registry}


def _packet_name(target: Any) -> str:
    packet = getattr(target, "overloadpacket", None)
    return getattr(packet, "__name__", "") if packet is not None else ""


def _cases(
    name: str, dtype: str, index: int, level: str, target: Any, module: fx.GraphModule, inputs: Any
) -> Iterator[Case]:
    unset = op_infos()[name].name in UNSET or _packet_name(target) in UNSET
    whole = level == "composite" and all(n.target in registry for n in _calls(module))
    recorder = _Recorder(module)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Where the graph writes in place, eager gets inputs of its own.
        expected = recorder.run(*(t.clone() for t in inputs) if recorder.writes else inputs)
    if whole:
        yield Case(name, dtype, index, level, target, module, inputs, _detached(expected), unset)
        return
    node = next(n for n in _calls(module) if n.target is target)
    alone = isolate(node, recorder.given[node], recorder.made[node])
    if alone is not None:
        yield Case(name, dtype, index, level, target, *alone, unset)


def _taken_apart(
    name: str, dtype: str, index: int, call: Call, module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]
) -> Iterator[Case]:
    if _writes(module):
        return
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = export(_Exported(call), inputs, strict=False)
            expected = fx.Interpreter(module).run(*inputs)
    except Exception:  # control flow on data, ...: nobody can compile it
        return
    lowered = lower(program, registry.__contains__).module
    if all(node.target in registry for node in _calls(lowered)):
        unset = op_infos()[name].name in UNSET
        yield Case(name, dtype, index, "composite", name, module, inputs, _detached(expected), unset, lowered)


class _Exported(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return self.call(*tensors)


def _writes(module: fx.GraphModule) -> bool:
    schemas = [getattr(n.target, "_schema", None) for n in _calls(module)]
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _detached(values: Any) -> tuple[torch.Tensor, ...]:
    return tuple(leaf.detach() for leaf in pytree.tree_leaves(values))


class _Recorder(fx.Interpreter):
    """Runs a graph on real tensors and keeps what every node is given and makes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given: dict[fx.Node, dict[fx.Node, Any]] = {}
        self.made: dict[fx.Node, Any] = {}
        self.writes = _writes(module)

    def run_node(self, n: fx.Node) -> Any:
        self.given[n] = {source: self._kept(self.env[source]) for source in n.all_input_nodes}
        result = super().run_node(n)
        self.made[n] = self._kept(result)
        return result

    def _kept(self, value: Any) -> Any:
        # Another node may write in place to what this one is given or makes.
        return pytree.tree_map_only(torch.Tensor, torch.clone, value) if self.writes else value


def isolate(
    node: fx.Node, given: dict[fx.Node, Any], answer: Any
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] | None:
    """One node as a graph of its own; sizes become numbers. None if it makes no tensor."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    placed: dict[fx.Node, Any] = {}

    def place(source: fx.Node) -> Any:
        value = given[source]
        if not isinstance(value, torch.Tensor):
            return value
        if source not in placed:
            placed[source] = graph.placeholder(source.name)
            fake = source.meta.get("val")
            # Some decompositions make another dtype on fake tensors than on real ones.
            agrees = isinstance(fake, torch.Tensor) and fake.dtype == value.dtype
            placed[source].meta["val"] = fake if agrees else value
            inputs.append(value)
        return placed[source]

    args, kwargs = fx.map_arg((node.args, node.kwargs), place)
    made = graph.call_function(node.target, args, kwargs)
    made.meta.update(node.meta)
    answers = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not all(isinstance(a, torch.Tensor) for a in answers):
        return None
    if isinstance(answer, list | tuple):
        # What nobody reads need not be made.
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        places = [i for i in range(len(answers)) if i in read or not read]
        answers = [answers[i] for i in places]
        outputs = [graph.call_function(operator.getitem, (made, i)) for i in places]
        for output, item in zip(outputs, answers, strict=True):
            output.meta["val"] = item
    else:
        outputs = [made]
    graph.output(outputs)
    return fx.GraphModule({}, graph), tuple(inputs), tuple(a.detach() for a in answers)
