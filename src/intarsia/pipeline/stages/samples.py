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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from intarsia.capture.export_context import kept_messages
from intarsia.capture.protect import evaluating
from intarsia.compare import disagreement
from intarsia.errors import DifferenceWarning, error_text
from intarsia.graph.rows import Doubt, doubt_about
from intarsia.pipeline.gpipe.effects import trial
from intarsia.pipeline.gpipe.keyed_random import DrawMode
from intarsia.pipeline.stages.signature import Axes, BatchDims
from intarsia.pipeline.stages.trace import Trace, trace

# Two batch lengths, of fake tensors only: long enough for a window over the batch to be seen.
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
    axes = [signature.axes.get(entry.name) for entry in signature.inputs]
    if signature.batch is None or not any(axis is not None for axis in axes):
        return captured
    # A graph with a fixed batch does not run at two sizes; only the model can be asked.
    doubt = _doubt(captured) if isinstance(signature.batch, str) else Doubt("", proved=False)
    if doubt is None:
        return captured
    try:
        mixes = difference_in_halves(model, args, kwargs or {}, axes, summaries=doubt.proved)
        warning = f"{doubt.reason}; a forward pass of the example shows no difference" if doubt.proved else ""
        if mixes and doubt.reason:
            mixes = doubt.reason if doubt.proved else f"{mixes}; {doubt.reason}"
    except Incomparable as error:
        mixes = doubt.reason if doubt.proved else ""
        # With a fixed batch, the plain model does not take a larger batch either.
        warning = f"{doubt.reason}, and {error}" if doubt.reason else ""
    if warning and not mixes:
        warnings.warn(f"samples may be mixed: {warning}", DifferenceWarning, stacklevel=3)
    return replace(captured, signature=replace(signature, mixes=mixes))


def difference_in_halves(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    axes: Axes,
    *,
    summaries: bool = False,
) -> str:
    """How the model's output for two batches together differs from that for each; empty if it does not.

    The model runs in evaluation mode, and also in training mode if it has no batch norm, which normalizes by
    the statistics of the batch. Dropout keeps everything. With `summaries`, an output without a batch axis,
    such as a loss, must be the mean or the sum of those of the two batches.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    if any(isinstance(t, Tensor) and t.is_meta for t in [*leaves, *model.parameters()]):
        raise Incomparable("the meta device cannot run it")

    def outputs(values: Sequence[Any]) -> list[Any]:
        again, options = pytree.tree_unflatten(list(values), spec)
        return pytree.tree_leaves(model(*again, **options))

    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    modes = [False, True] if model.training and not has_batch_norm else [False]
    for mode in modes:
        without_chance = _WithoutChance()  # type: ignore[no-untyped-call]
        with trial(model), nullcontext() if mode else evaluating(model), torch.no_grad(), without_chance:
            whole, halves = _attempt(leaves, axes, lambda lanes: [outputs(lane) for lane in lanes])
        for number, (one, first, second) in enumerate(zip(whole, *halves, strict=True)):
            agrees = _agree(one, (first, second))
            if agrees is False or (agrees is None and summaries and not _is_summary(one, (first, second))):
                return f"output {number} of two batches together differs from that of each batch"
    return ""


class _WithoutChance(DrawMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers, which would differ between a batch and its halves, by ones and zeros."""

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result: dropout masks keep everything, and integers are valid indices."""
        if func is torch.ops.aten.native_dropout.default:  # on CUDA, where it returns values and mask
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return pytree.tree_map_only(
            Tensor,
            lambda t: t.fill_(1 if t.is_floating_point() or t.dtype is torch.bool else 0),
            func(*args, **kwargs),
        )


def _doubt(captured: Trace) -> Doubt | None:
    """The doubt about the independence of samples that the graph leaves, or None."""
    signature = captured.signature
    low, high = signature.ranges.get(str(signature.batch), (0, 0))
    first = max(low, 2)
    lengths = _LENGTHS if low <= _LENGTHS[0] and _LENGTHS[1] <= high else (first, first + 1)
    aliases = [alias for alias, length in signature.same.items() if length == signature.batch]
    # torch logs operators that fail with other lengths; the doubt reports them.
    with kept_messages(), FakeTensorMode() as mode:
        calls = []
        for n in lengths:
            sizes = {**signature.example, str(signature.batch): n, **dict.fromkeys(aliases, n)}
            calls.append((n, captured.fakes(mode, sizes)))
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


def _is_summary(whole: Any, halves: tuple[Any, Any]) -> bool:
    """Whether a value without a batch axis is the mean or the sum of its values for each batch."""
    if not all(isinstance(v, Tensor) and v.is_floating_point() for v in (whole, *halves)):
        return True
    tolerance = torch.finfo(whole.dtype).eps ** 0.5
    sums = halves[0] + halves[1]
    return any(disagreement([one], [whole], tolerance=tolerance) is None for one in (sums, sums / 2))
