"""For every known operator, the rule that says where the batch is in its result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from intarsia.graph.nodes import SIZE_FUNCTIONS
from intarsia.graph.rows import products, views
from intarsia.graph.rows.call import Call, Mixes, Numbers, Placement, Reduced, Rows, Size, Unknown

Rule = Callable[[Call], Any]


def placement(call: Call) -> Any:
    """Where the batch is in the result of an operator; Mixes if it may combine rows."""
    target = call.node.target
    if target is operator.getitem:
        return _item(call)
    if target in _ARITHMETIC:
        return _number(call)
    if not isinstance(target, torch._ops.OpOverload):
        raise Unknown(f"{getattr(target, '__name__', target)} is not known to keep rows apart")
    if call.name == "aten::sym_size":
        place = call.of("self")
        if not isinstance(place, Rows | Numbers) or call.arg("dim") % call.arg("self").dim() != place.axis:
            return None
        return Size(place.length * place.outer if isinstance(place, Rows) else 1)
    if call.name in _CHECKS:
        return None
    if torch.Tag.nondeterministic_seeded in call.tags and _plain(call.name) not in _RULES and not call.trains:
        raise Mixes(f"{call.name} makes random numbers")
    return _tensor(call)


def _plain(name: str) -> str:
    """The name of an operator without the underscore of an in-place one."""
    return name if name in _RULES or name.endswith("__") else name.removesuffix("_")


def _tensor(call: Call) -> Any:
    reads_rows = any(where is not None for _, where in call.operands())
    if not reads_rows and not call.sizes():
        return None
    name = _plain(call.name)
    rule = _RULES.get(name) or (_RANDOM.get(name) if call.trains else None)
    if torch.Tag.pointwise in call.tags and rule is not _same:
        rule = products.pointwise  # `max.other`, for example, does not reduce as `max` does
    if call.sizes() and ((name not in _SIZED and rule is not views.creation) or call.inexact()):
        raise Mixes(f"{call.name} computes with the size of the batch")
    if rule is not None and call.numbers() and name not in _NUMBERED:
        raise Mixes(f"{call.name} computes with the numbers of rows")
    if rule is None:
        raise Unknown(f"{call.name} is not known to keep rows apart")
    return rule(call)


def _item(call: Call) -> Any:
    places, number = call.of("0"), call.arg("1")
    return places[number] if isinstance(places, list | tuple) else places


def _number(call: Call) -> Placement:
    """Arithmetic of numbers: a multiple of the batch size, multiplied by an integer, stays one."""
    if not call.sizes():
        return None
    if call.node.target is operator.mul:
        parts = [(call.of(place), call.arg(place)) for place in ("0", "1")]
        sized = [where.times for where, _ in parts if isinstance(where, Size)]
        plain = [value for where, value in parts if where is None]
        if len(sized) == 1 and sized[0] is not None and isinstance(plain[0], int) and plain[0] > 0:
            return Size(sized[0] * plain[0])
    return Size(None)


def _dims(call: Call) -> list[int]:
    rank, dims = call.arg("self").dim(), call.arg("dims" if call.name in _PLURAL else "dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)]


def _keeps(names: str, what: str, busy: Callable[[Call, torch.Tensor], Iterable[int]]) -> Rule:
    """The rule of operators that keep the axes of their operand, the first of `names`, or the first at all.

    They are `busy` along some of these axes; the batch's must not be one of them. Rows may also be in the
    other arguments that are named.
    """

    def rule(call: Call) -> Any:
        operand, *others = names.split() or [call.first()]
        call.only(operand, *others)
        axis = call.rows(operand).axis
        if axis in busy(call, call.arg(operand)):
            raise Mixes(f"{call.name} {what}")
        return call.everywhere(axis)

    return rule


def _last(count: int, rank: int) -> range:
    return range(max(rank - count, 0), rank)


def _pool(spatial: int) -> Rule:
    return _keeps("", "runs over the batch", lambda call, x: _last(spatial, x.dim()))


def _of_samples(name: str) -> Rule:
    """The rule of operators that treat each entry of the first axis alone; other arguments are constant."""
    return _keeps(name, "runs over the batch", _not_first)


def _not_first(call: Call, x: torch.Tensor) -> range:
    return range(int(x.dim() >= (4 if call.name in _SPATIAL else 2)), x.dim())


def _reduce(call: Call) -> Any:
    """A reduction of axes; the batch's must not be one of them."""
    call.only("self")
    axis, dims = call.rows("self").axis, _dims(call)
    if axis in dims:
        raise Reduced(f"{call.name} reduces the batch")
    return call.everywhere(axis if call.arg("keepdim", False) else axis - sum(dim < axis for dim in dims))


def _batch_norm(call: Call) -> Any:
    call.only("input")
    own = call.arg("training") or call.arg("running_mean") is None
    if call.rows("input").axis != 0 or (own and not call.trains):
        raise Mixes(f"{call.name} normalizes by the mean of the batch")
    if isinstance(call.result, tuple):  # the other results are empty outside of training
        return (call.at(0, call.result[0]), *(None for _ in call.result[1:]))
    return _of_samples("input")(call)


def _grid(call: Call) -> Placement:
    call.only("input", "grid")
    if any(call.rows(name).axis != 0 for name in ("input", "grid")):
        raise Mixes(f"{call.name} runs over the batch")
    return call.at(0)


def _repeat_interleave(call: Call) -> Placement:
    call.only("self")
    if not isinstance(call.arg("repeats"), int) or call.arg("dim") is None:
        raise Mixes(f"{call.name} repeats elements unequally")
    return call.at(call.rows("self").axis)


def _same(call: Call) -> Placement:
    """An operator that keeps all axes. Unlike with `pointwise`, indices of rows stay indices."""
    call.only("self")
    place = call.of("self")
    return place if isinstance(place, Numbers) else call.at(call.rows("self").axis)


def _loss(call: Call) -> Placement:
    """A loss: one number for all rows, unless the reduction is none."""
    if call.arg("reduction") != _NO_REDUCTION:
        raise Reduced(f"{call.name} reduces the batch")
    if call.name not in _ELEMENTWISE:
        raise Unknown(f"{call.name} is not known to keep rows apart")
    return products.pointwise(call)


def _type_as(call: Call) -> Any:
    return call.of("self")


def _one_hot(call: Call) -> Placement:
    if call.arg("num_classes") < 0:
        raise Mixes(f"{call.name} counts the classes of all rows")
    return call.at(call.rows("self").axis)


def _table(rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"aten::{name}": rule for names, rule in rules.items() for name in names.split()}


_ARITHMETIC = {*SIZE_FUNCTIONS.values(), torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_not}
_CHECKS = {"aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"}
_PLURAL = {"aten::flip", "aten::roll"}
_SPATIAL = {"aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::channel_shuffle"}
_SHAPED = "view reshape _unsafe_view flatten unflatten"
_SAME = "_to_copy clone contiguous to alias detach lift_fresh"
_MADE = "full zeros ones empty new_full new_zeros new_ones new_empty"
_ELEMENTWISE = {f"aten::{name}" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")}
_NO_REDUCTION = 0  # aten's number for reduction="none"
_RULES: dict[str, Rule] = _table(
    {
        _SHAPED: views.reshape,
        "transpose t numpy_T": views.transpose,
        "permute": views.permute,
        "unsqueeze": views.unsqueeze,
        "squeeze": views.squeeze,
        "expand": views.expand,
        "repeat": views.repeat,
        _MADE: views.creation,
        "full_like zeros_like ones_like empty_like": views.like,
        "arange": views.arange,
        "slice narrow split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk": views.cut,
        "select unbind": views.select,
        "cat concat stack": views.cat,
        "embedding": _keeps("indices", "", lambda call, indices: ()),
        "gather": views.gather,
        "index_select": _keeps("self", "selects rows", lambda call, x: [call.arg("dim") % x.dim()]),
        "index _unsafe_index": views.index,
        "linear": _keeps("input", "sums over the batch", lambda call, x: _last(1, x.dim())),
        "matmul mm bmm mv addmm baddbmm": products.matmul,
        "conv1d conv2d conv3d convolution": products.convolution,
        "conv_transpose1d conv_transpose2d conv_transpose3d": products.convolution,
        "scaled_dot_product_attention": products.attention,
        "einsum": products.einsum,
        "lstm gru rnn_tanh rnn_relu": products.recurrent,
        "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp"
        " sort argsort topk glu flip roll": _keeps(
            "self", "runs along the batch", lambda call, x: _dims(call)
        ),
        "sum mean amax amin max min argmax argmin prod var std logsumexp all any norm nansum nanmean"
        " var_mean std_mean linalg_vector_norm count_nonzero median nanmedian": _reduce,
        "layer_norm rms_norm": _keeps(
            "input",
            "normalizes over the batch",
            lambda call, x: _last(len(call.arg("normalized_shape")), x.dim()),
        ),
        "batch_norm _native_batch_norm_legit_no_training": _batch_norm,
        "group_norm instance_norm": _of_samples("input"),
        "pixel_shuffle pixel_unshuffle channel_shuffle prelu": _of_samples("self"),
        "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d upsample_nearest1d upsample_linear1d"
        " _upsample_nearest_exact1d max_pool1d_with_indices": _pool(1),
        "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d"
        " upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
        " max_pool2d_with_indices _adaptive_avg_pool2d": _pool(2),
        "triu tril": _pool(2),  # by positions along the last two axes
        "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest3d"
        " upsample_trilinear3d _upsample_nearest_exact3d": _pool(3),
        "constant_pad_nd pad": _keeps(
            "self", "pads the batch", lambda call, x: _last(len(call.arg("pad")) // 2, x.dim())
        ),
        "grid_sampler grid_sampler_2d grid_sampler_3d": _grid,
        "repeat_interleave": _repeat_interleave,
        "one_hot": _one_hot,
        "diff": _keeps(
            "self prepend append", "runs along the batch", lambda call, x: [call.arg("dim") % x.dim()]
        ),
        "type_as": _type_as,
        _SAME: _same,
        "masked_fill where expand_as __and__ __or__ __xor__": products.pointwise,
        "hardswish floor_divide log_sigmoid relu6 copy fill zero": products.pointwise,
        "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div"
        " binary_cross_entropy binary_cross_entropy_with_logits": _loss,
    }
)
_RANDOM = _table(  # each row draws its own numbers
    {
        "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout bernoulli rrelu uniform"
        " normal rand_like randn_like randint_like": products.pointwise,
        "rand randn randint": views.creation,
    }
)
_VIEWED = f"{_SHAPED} expand slice"
_SIZED = {f"aten::{name}" for name in f"{_VIEWED} {_MADE} repeat arange".split()}
_NUMBERED = {f"aten::{name}" for name in f"{_VIEWED} {_SAME} transpose t permute unsqueeze squeeze".split()}
_NUMBERED |= {"aten::index", "aten::_unsafe_index"}
