"""Whether the samples of a batch are independent: by the graph, or by a forward pass.

The batch axis is followed through the graph (`graph.rows`). If that is no proof, a forward pass of two
batches together is compared with a pass of each. The first batch is the example; the second has other values,
since a mix of equal samples changes nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from intarsia.capture.export_context import kept_messages
from intarsia.capture.protect import evaluating
from intarsia.compare import disagreement
from intarsia.errors import DifferenceWarning, error_text
from intarsia.graph.nodes import whereabouts
from intarsia.graph.rows import Doubt, doubt_about
from intarsia.pipeline.gpipe.effects import trial
from intarsia.pipeline.stages.signature import Axes, BatchDims
from intarsia.pipeline.stages.trace import Trace, trace

# Two batch lengths that hardly any other size equals. They are only used for fake tensors.
_LENGTHS = (61, 67)


class Incomparable(Exception):
    """The model does not run on twice the example's batch."""


def mixed_samples(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dims: BatchDims | None = None,
) -> str:
    """Why the samples of a batch depend on each other, with node and source line; empty if they do not.

    >>> class Centred(nn.Module):
    ...     def forward(self, x):
    ...         return x - x.mean(0)
    >>> "makes one value of all samples" in mixed_samples(Centred(), (torch.randn(4, 2),))
    True
    >>> mixed_samples(nn.Softmax(-1), (torch.randn(4, 2),))
    ''
    """
    captured = trace(model, args, kwargs, batch_dims=batch_dims)
    return judged(model, captured, args, kwargs).signature.mixes


def judged(model: nn.Module, captured: Trace, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Trace:
    """The capture with `signature.mixes`: why a batch cannot be divided, or nothing."""
    signature = captured.signature
    if signature.batch is None or not any(axis is not None for axis in signature.axes.values()):
        return captured
    fixed = not isinstance(signature.batch, str)
    doubt = _doubt(captured)
    if doubt is None and not fixed:
        return captured
    proved = doubt is not None and doubt.proved and not fixed
    try:
        if fixed or any(state.tensor.is_meta for state in captured.states.values()):
            axes = [signature.axes.get(entry.name) for entry in signature.inputs]
            difference = difference_in_halves(model, args, kwargs or {}, axes)
        else:
            difference = _lockstep(captured, signature.flatten(args, kwargs))
    except Incomparable as error:
        if fixed:
            return captured  # the plain model does not take a larger batch either
        if doubt is not None and not doubt.proved:
            message = f"samples may be mixed: {doubt.reason}, and {error}"
            warnings.warn(message, DifferenceWarning, stacklevel=3)
        difference = doubt.reason if doubt is not None and doubt.proved else ""
    else:
        if not difference and proved:
            assert doubt is not None
            warnings.warn(
                f"samples may be mixed: {doubt.reason}; a forward pass of the example shows no difference",
                DifferenceWarning,
                stacklevel=3,
            )
        if difference and doubt is not None and (doubt.proved or fixed):
            difference = doubt.reason
    return replace(captured, signature=replace(signature, mixes=difference))


def difference_in_halves(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], axes: Axes) -> str:
    """How the model's output for two batches together differs from that for each; empty if it does not.

    The model runs in evaluation mode, and also in training mode if it has no batch norm, which normalizes by
    the statistics of the batch. A mode in which the model draws random numbers is not compared.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
        raise Incomparable("the meta device cannot run it")

    def outputs(values: Sequence[Any]) -> list[Any]:
        again, options = pytree.tree_unflatten(list(values), spec)
        return pytree.tree_leaves(model(*again, **options))

    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    modes = [False, True] if model.training and not has_batch_norm else [False]
    for mode in modes:
        with trial(model), nullcontext() if mode else evaluating(model), torch.no_grad():
            state = torch.get_rng_state()
            whole, halves = _attempt(leaves, axes, lambda lanes: [outputs(lane) for lane in lanes])
            if not torch.equal(state, torch.get_rng_state()):
                continue
        for number, (one, first, second) in enumerate(zip(whole, *halves, strict=True)):
            if _agree(one, (first, second)) is False:
                return f"output {number} of two batches together differs from that of each batch"
    return ""


def _doubt(captured: Trace) -> Doubt | None:
    """The doubt about the independence of samples that the graph leaves, or None."""
    signature = captured.signature
    low, high = signature.ranges.get(str(signature.batch), (0, 0))
    first = max(low, 2)
    lengths = [n for n in _LENGTHS if low <= n <= high] or [n for n in (first, first + 1) if n <= high]
    aliases = [alias for alias, length in signature.same.items() if length == signature.batch]
    calls = []
    # torch logs operators that fail with other lengths; the doubt reports them.
    with kept_messages(), FakeTensorMode() as mode:
        for n in lengths:
            sizes = {**signature.example, str(signature.batch): n, **dict.fromkeys(aliases, n)}
            calls.append((n, captured.fakes(mode, sizes)))
        if not calls:
            batch: Any = signature.example.get(str(signature.batch), signature.batch)
            calls = [(batch, captured.fakes(mode, signature.example))]
        axes = {node: signature.axes.get(node.name) for node in captured.inputs}
        return doubt_about(captured.module, captured.graph, calls, axes)


def _attempt(
    leaves: Sequence[Any], axes: Axes, run: Callable[[list[list[Any]]], list[Any]]
) -> tuple[Any, list[Any]]:
    """The results of `run` for two batches together, and for each."""
    error: Exception | None = None
    for bold in (True, False):
        second = [
            leaf if axis is None or not isinstance(leaf, Tensor) else _other_values(leaf, axis, bold)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        whole = [
            a if axis is None or not isinstance(a, Tensor) else torch.cat([a, b], axis)
            for a, b, axis in zip(leaves, second, axes, strict=True)
        ]
        try:
            one, *halves = run([whole, list(leaves), second])
            return one, halves
        except Exception as failure:  # a model may raise anything for values or lengths that it does not take
            error = failure
    assert error is not None
    raise Incomparable(f"the model does not run on twice the batch ({error_text(error)})")


def _other_values(tensor: Tensor, axis: int, bold: bool) -> Tensor:
    """Other samples of the same kind: floats with noise, and integers drawn from the example's values.

    If all integers are equal, `bold` draws 0 and 1, which are valid indices of any table with two rows.
    """
    draw = torch.Generator().manual_seed(0)
    tensor = tensor.detach()
    if tensor.is_floating_point():
        noise = torch.randn(tensor.shape, generator=draw).to(tensor.device, tensor.dtype)
        return tensor.roll(1, axis) + noise * (float(tensor.float().std(correction=0)) or 1.0)
    if tensor.dtype is torch.bool or tensor.is_complex() or not tensor.numel():
        return tensor.roll(1, axis)
    values = tensor.flatten()
    if bold and tensor.device.type == "cpu" and bool((values == values[0]).all()):
        values = torch.tensor([0, 1], dtype=tensor.dtype)
    places = torch.randint(0, len(values), tensor.shape, generator=draw)
    return values[places.to(tensor.device)]


def _agree(whole: Any, halves: tuple[Any, Any]) -> bool | None:
    """Whether a value of two batches is the join of the values of each; None if it has no batch axis."""
    values = (whole, *halves)
    if not all(isinstance(v, Tensor) and v.ndim == whole.ndim for v in values):
        return None
    grown = [i for i, n in enumerate(whole.shape) if n != halves[0].shape[i]]
    if len(grown) > 1:
        return False
    if not grown or whole.shape[grown[0]] != sum(h.shape[grown[0]] for h in halves):
        return None
    axis = grown[0]
    tolerance = torch.finfo(whole.dtype).eps ** 0.5 if whole.is_floating_point() else 0.0
    # The batch may be folded inside another axis, any number of times that divides both lengths.
    common = math.gcd(*(h.shape[axis] for h in halves))
    for outer in (n for n in range(1, common + 1) if common % n == 0):
        parts = [h.unflatten(axis, (outer, -1)) for h in halves]
        joined = torch.cat(parts, axis + 1).flatten(axis, axis + 1)
        if disagreement([joined], [whole], tolerance=tolerance) is None:
            return True
    return False


def _lockstep(captured: Trace, tensors: Sequence[Tensor]) -> str:
    """The first node that differs, if an output of the graph differs for two batches together."""
    axes = captured.signature.tensor_axes
    devices = sorted({t.device.index or 0 for t in tensors if t.is_cuda})

    def run(lanes: list[list[Any]]) -> list[Any]:
        interpreter = _Lockstep(captured)
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            interpreter.run(*_arguments(captured, lanes))
        return [interpreter.agreement, None, None]

    agreement, _ = _attempt(tensors, axes, run)
    waiting, seen, wrong = list(captured.graph.output_node().all_input_nodes), set(), False
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        wrong = wrong or agreement.get(node) is False
        # A value without a batch axis, such as a loss, agrees if its inputs do.
        waiting += node.all_input_nodes if agreement.get(node) is None else []
    if not wrong:
        return ""
    first = next(node for node in captured.graph.nodes if agreement.get(node) is False)
    return f"{first.name} differs between a batch and its halves ({whereabouts(first)})"


def _arguments(captured: Trace, lanes: list[list[Any]]) -> list[Any]:
    """The arguments of the graph, each with a value for every lane."""
    inputs = dict(zip(captured.inputs, map(_Lanes, zip(*lanes, strict=True)), strict=True))
    written = captured.line.written

    def states(node: fx.Node, tensor: Tensor) -> _Lanes:
        return _Lanes(tensor.detach().clone() if node in written else tensor.detach() for _ in lanes)

    return captured.arguments(inputs.get, states)


class _Lanes(list[Any]):
    """The values of one node: for two batches together, and for each of them."""


class _Lockstep(fx.Interpreter):
    """Runs the graph for several batches node by node, without dropout."""

    def __init__(self, captured: Trace) -> None:
        super().__init__(captured.module, graph=captured.graph)
        self.agreement: dict[fx.Node, bool | None] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        count = next((len(v) for v in pytree.tree_leaves((args, kwargs), _is_lanes) if _is_lanes(v)), 3)
        lanes = [
            pytree.tree_map(lambda v, i=i: v[i] if _is_lanes(v) else v, (args, kwargs), is_leaf=_is_lanes)
            for i in range(count)
        ]
        values = _Lanes(_without_chance(n.target, lanes))
        self.agreement[n] = _agree(values[0], (values[1], values[2]))
        return values


def _is_lanes(value: Any) -> bool:
    return isinstance(value, _Lanes)


def _without_chance(target: Any, lanes: Sequence[tuple[Any, Any]]) -> list[Any]:
    """An operator's result in each lane; random numbers and statistics of batches are equal in all lanes."""
    if target in _DROPOUTS:
        return [args[0] for args, _ in lanes]
    if target is torch.ops.aten.batch_norm.default and lanes[0][0][5]:
        x = lanes[0][0][0]
        variance, mean = torch.var_mean(x, [d for d in range(x.ndim) if d != 1], correction=0)
        return [target(*a[:3], mean, variance, False, *a[6:]) for a, _ in lanes]
    if target is torch.ops.aten.scaled_dot_product_attention.default:
        return [target(*a[:4], 0.0, *a[5:], **k) for a, k in lanes]
    values = [target(*args, **kwargs) for args, kwargs in lanes]
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        return [
            pytree.tree_map_only(Tensor, lambda t: t.fill_(1 if t.is_floating_point() else 0), v)
            for v in values
        ]
    return values


_ATEN = torch.ops.aten
_DROPOUTS = {
    *(_ATEN.dropout.default, _ATEN.feature_dropout.default, _ATEN.alpha_dropout.default),
    *(_ATEN.feature_alpha_dropout.default, _ATEN.dropout_.default, _ATEN.feature_dropout_.default),
}
