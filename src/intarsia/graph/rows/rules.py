"""For every known operator, the rule that says whether it combines rows.

Most operators combine entries along some axes of one argument: a softmax along `dim`, a linear layer along
the last. Rows stay apart if the batch is another axis. Where the batch is in the result needs no rule: that
axis is longer in a run with a larger batch. An operator without a rule ends the proof.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch

from intarsia.graph.nodes import SIZE_FUNCTIONS
from intarsia.graph.rows.along import (
    Along,
    all_unless,
    last,
    named,
    normalized,
    numbered,
    of_batch_norm,
    of_convolution,
    padded,
    same,
    spatial,
    squeezed,
    within,
)
from intarsia.graph.rows.call import (
    Call,
    Mixes,
    Numbers,
    Placement,
    Reduced,
    Rows,
    Size,
    Unknown,
    flat,
    grown_axes,
)

Rule = Callable[[Call], Any]
_TO_THE_END = 2**31  # a slice to this end or beyond has all rows
# Operators along as many of the last axes as the digit in their names says.
_SPATIAL = re.compile(
    r"aten::_?((adaptive_)?(avg|max)_pool|upsample_(nearest(_exact)?|(bi|tri)?linear|bicubic))\dd"
    r"(_aa|_with_indices)?"
)
_NO_REDUCTION = 0  # aten's number for reduction="none"


def placement(call: Call) -> Any:
    """Where the batch is in the result of an operator; Mixes if it may combine rows."""
    target = call.node.target
    if target is operator.getitem:
        places, number = call.of("0"), call.arg("1")
        return places[number] if isinstance(places, list | tuple) else places
    if target in _ARITHMETIC:
        return _number(call)
    if not isinstance(target, torch._ops.OpOverload):
        raise Unknown(f"{getattr(target, '__name__', target)} is not known to keep rows apart")
    if call.name == "aten::sym_size":
        return Size(True) if len({*call.results}) > 1 else None
    if call.name in _CHECKS:
        return None
    name = call.name if call.name in _RULES or call.name.endswith("__") else call.name.removesuffix("_")
    if torch.Tag.nondeterministic_seeded in call.tags and name not in _RULES and not call.trains:
        raise Mixes(f"{call.name} makes random numbers")
    places = [place for place in call.places() if place is not None]
    if not places:
        return None
    rule = _RULES.get(name) or (_RANDOM.get(name) if call.trains else None)
    if _SPATIAL.fullmatch(name):
        rule = Along(spatial)
    if torch.Tag.pointwise in call.tags and rule is not same:
        rule = Call.kept  # `max.other`, for example, does not reduce as `max` does
    if (Size(True) in places and name not in _SIZED) or Size(False) in places:
        raise Mixes(f"{call.name} computes with the size of the batch")
    if rule is None:
        raise Unknown(f"{call.name} is not known to keep rows apart")
    if name not in _NUMBERED and any(isinstance(place, Numbers) for place in places):
        raise Mixes(f"{call.name} computes with the numbers of rows")
    return rule(call)


def _number(call: Call) -> Placement:
    """Arithmetic of numbers: a multiple of the batch size, multiplied by an integer, stays one."""
    if not any(isinstance(place, Size) for place in call.places()):
        return None
    multiples = [name for name in ("0", "1") if call.of(name) == Size(True)]
    factors = [call.arg(name) for name in ("0", "1") if call.of(name) is None]
    scales = call.node.target is operator.mul and len(multiples) == len(factors) == 1
    return Size(scales and isinstance(factors[0], int) and factors[0] > 0)


# Views, joins and creation.


def _reshape(call: Call) -> Any:
    """Elements keep their order in memory, so as many come before the batch as did before."""
    place, value = call.of("self"), call.arg("self")
    if place is None:
        raise Mixes(f"{call.name} shapes a constant by the size of the batch")
    axis, new = call.axis("self"), next(iter(grown_axes(call.results)), 0)
    before = math.prod(value.shape[:axis]) * getattr(place, "outer", 1)
    passed = math.prod(call.results[0].shape[:new])
    if not before or not passed or before % passed:
        raise Unknown(f"{call.name} splits the axis of the batch")
    moved = call.folded(before // passed)
    return numbered(call, moved) if isinstance(place, Numbers) else moved


def _expand(call: Call) -> Any:
    """A constant repeated for every row, or rows repeated along other axes."""
    return call.kept() if call.of("self") is None else same(call)


def _repeat(call: Call) -> Any:
    value, repeats = call.arg("self"), call.arg("repeats")
    for axis in grown_axes(call.results):
        own = axis - len(repeats) + value.dim()
        if own >= 0 and value.shape[own] != 1 and repeats[axis] != 1:
            raise Mixes(f"{call.name} repeats the batch, or an axis of a constant as often as there are rows")
    return call.kept()


def _creation(call: Call) -> Any:
    """A tensor with one value everywhere, and the batch as one axis of its shape."""
    if isinstance(call.of("fill_value"), Size):
        raise Mixes(f"{call.name} fills a tensor with the size of the batch")
    sized = any(isinstance(place, Size) for place in flat([call.of("size")]))
    return call.folded(1) if sized else None  # None: `new_ones` of a shape of its own


def _arange(call: Call) -> Placement:
    counts = [name for name in call.names if call.of(name) is not None]
    steps = call.arg("start") in (None, 0) and call.arg("step") in (None, 1)
    if counts != ["end"] or not steps or call.folded(1) != Rows(0):
        raise Mixes(f"{call.name} counts by the size of the batch")
    return Numbers(0)


def _cut(call: Call) -> Any:
    """Parts along another axis than the batch's, or all of the batch's."""
    axis, value, end = call.axis("self"), call.arg("self"), call.arg("end")
    if axis != call.arg("dim") % value.dim():
        if any(isinstance(place, Size) for place in call.places()):
            raise Mixes(f"{call.name} cuts another axis by the size of the batch")
        return same(call)
    to_end = end is None or end >= _TO_THE_END or (end == value.shape[axis] and call.of("end") is not None)
    from_begin = call.arg("start") in (None, 0) and call.of("start") is None
    is_whole = call.name in _SLICES and from_begin and to_end and call.arg("step") == 1
    if not is_whole:
        raise Mixes(f"{call.name} selects some rows only")
    return same(call)


def _cat(call: Call) -> Any:
    places, stacked = call.of("tensors"), call.name == "aten::stack"
    axes = {where.axis if isinstance(where, Rows) else None for where in places}
    dim = call.arg("dim") % (call.arg("tensors")[0].dim() + stacked)
    if len(axes) != 1 or None in axes:
        raise Mixes(f"{call.name} joins rows with what is not a row")
    if not stacked and dim in axes:
        raise Mixes(f"{call.name} concatenates batches")
    return call.kept()


# Look-ups by index.


def _index(call: Call) -> Any:
    """`x[i, :, j]`: an index along the batch must be the numbers of the rows: each selects from itself."""
    place, indices = call.of("self"), call.arg("indices")
    if any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in indices):
        raise Unknown(f"{call.name} selects by a mask")
    placed = dict(enumerate(call.of("indices")))
    if isinstance(place, Rows):
        own = placed.pop(place.axis, None)
        if not isinstance(own, Numbers):
            constant = place.axis >= len(indices) or indices[place.axis] is None
            if not constant or any(where is not None for where in placed.values()):
                raise Mixes(f"{call.name} selects from all rows")
        elif place != Rows(place.axis):
            raise Mixes(f"{call.name} selects by indices of other rows")
    if any(isinstance(where, Numbers) for where in placed.values()):
        raise Mixes(f"{call.name} selects by the numbers of rows")
    return call.kept()


# Products, attention, recurrent layers and losses.


def _matmul(call: Call) -> Any:
    """`a @ b`, with an addend before them in `addmm` and `baddbmm`."""
    left, right = [name for name in call.names if isinstance(call.arg(name), torch.Tensor)][-2:]
    summed = {left: call.arg(left).dim() - 1, right: max(0, call.arg(right).dim() - 2)}
    for name, axis in summed.items():
        where = call.of(name)
        if isinstance(where, Rows) and where.axis == axis:
            raise Mixes(f"{call.name} sums over the batch")
    return call.kept()


def _attention(call: Call) -> Any:
    if call.arg("dropout_p") and not call.trains:
        raise Mixes(f"{call.name} drops out at random")
    for name in ("query", "key", "value"):
        where = call.of(name)
        if not isinstance(where, Rows):
            raise Unknown(f"{call.name} attends from rows to what is not a row")
        if where.axis >= call.arg(name).dim() - 2:
            raise Mixes(f"{call.name} attends from row to row")
    return call.kept()


def _einsum(call: Call) -> Any:
    equation = call.arg("equation").replace(" ", "")
    if "." in equation or "->" not in equation:
        raise Unknown(f"{call.name} of {equation} is not supported")
    terms, result = equation.split("->")
    places = zip(terms.split(","), call.of("tensors"), strict=True)
    letters = {
        (term[where.axis], term.count(term[where.axis])) for term, where in places if where is not None
    }
    if len(letters) != 1 or any(count > 1 or result.count(letter) != 1 for letter, count in letters):
        raise Mixes(f"{call.name} of {equation} sums over the batch or combines different rows")
    return call.kept()


def _recurrent(call: Call) -> Any:
    """LSTM, GRU and plain cells: the batch is axis 1 of the states, and axis 1 or 0 of the input."""
    axis, batch = call.axis("input", "hx"), 0 if call.arg("batch_first") else 1
    if (call.arg("train") and not call.trains) or axis != batch or call.arg("input").dim() != 3:
        raise Mixes(f"{call.name} runs over the batch")
    if any(not isinstance(state, Rows) or state.axis != 1 for state in flat([call.of("hx")])):
        raise Mixes(f"{call.name} begins with a state that is not of the same rows")
    return call.kept()


def _loss(call: Call) -> Any:
    """A loss: one number for all rows, unless the reduction is none."""
    if call.arg("reduction") != _NO_REDUCTION:
        raise Reduced(f"{call.name} reduces the batch")
    if call.name not in _ELEMENTWISE:
        raise Unknown(f"{call.name} is not known to keep rows apart")
    return call.kept()


def _type_as(call: Call) -> Any:
    return call.of("self")


def _table(rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"aten::{name}": rule for names, rule in rules.items() for name in names.split()}


_ARITHMETIC = {*SIZE_FUNCTIONS.values(), torch.sym_max, torch.sym_min, torch.sym_int, torch.sym_not}
_CHECKS = {"aten::_assert_scalar", "aten::sym_constrain_range", "aten::sym_constrain_range_for_size"}
_SLICES = ("aten::slice", "aten::slice_copy")
_SHAPED = "view reshape _unsafe_view flatten unflatten"
_SAME = "_to_copy clone contiguous to alias detach lift_fresh"
_MADE = "full zeros ones empty new_full new_zeros new_ones new_empty"
_ELEMENTWISE = {f"aten::{name}" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")}
_RULES: dict[str, Rule] = _table(
    {
        f"{_SAME} transpose t numpy_T permute unsqueeze": same,
        _SHAPED: _reshape,
        "squeeze": Along(squeezed, "removes the batch if it has one row"),
        "expand": _expand,
        "repeat": _repeat,
        _MADE: _creation,
        "full_like zeros_like ones_like empty_like": same,
        "arange": _arange,
        "slice narrow split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk": _cut,
        "select unbind": Along(named, "selects one row"),
        "cat concat stack": _cat,
        "embedding": Along(argument="indices"),
        "gather": Along(named, "selects from other rows than those of its indices", others=("index",)),
        "index_select": Along(named, "selects rows"),
        "index _unsafe_index": _index,
        "linear": Along(last(1), "sums over the batch"),
        "matmul mm bmm mv addmm baddbmm": _matmul,
        "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d": Along(
            of_convolution
        ),
        "scaled_dot_product_attention": _attention,
        "einsum": _einsum,
        "lstm gru rnn_tanh rnn_relu": _recurrent,
        "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp"
        " sort argsort topk glu flip roll": Along(named),
        "sum mean amax amin max min argmax argmin prod var std logsumexp all any norm nansum nanmean"
        " var_mean std_mean linalg_vector_norm count_nonzero median nanmedian": Along(
            named, "reduces the batch", Reduced
        ),
        "layer_norm rms_norm": Along(normalized, "normalizes over the batch"),
        "batch_norm _native_batch_norm_legit_no_training": Along(
            of_batch_norm, "normalizes by the mean of the batch"
        ),
        "group_norm instance_norm prelu": Along(within),
        "grid_sampler grid_sampler_2d grid_sampler_3d": Along(within, others=("grid",)),
        "triu tril": Along(last(2)),  # by positions along the last two axes
        "pixel_shuffle pixel_unshuffle channel_shuffle": Along(last(3)),
        "constant_pad_nd pad": Along(padded, "pads the batch"),
        "repeat_interleave": Along(
            all_unless(lambda call: isinstance(call.arg("repeats"), int) and call.arg("dim") is not None),
            "repeats elements unequally",
        ),
        "one_hot": Along(
            all_unless(lambda call: call.arg("num_classes") >= 0), "counts the classes of all rows"
        ),
        "diff": Along(named, others=("prepend", "append")),
        "type_as": _type_as,
        "masked_fill where expand_as __and__ __or__ __xor__": Call.kept,
        "hardswish floor_divide log_sigmoid relu6 copy fill zero": Call.kept,
        "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div"
        " binary_cross_entropy binary_cross_entropy_with_logits": _loss,
    }
)
_RANDOM = _table(  # each row draws its own numbers
    {
        "dropout feature_dropout alpha_dropout feature_alpha_dropout native_dropout bernoulli rrelu uniform"
        " normal rand_like randn_like randint_like": Call.kept,
        "rand randn randint": _creation,
    }
)
_VIEWED = f"{_SHAPED} expand slice"
_SIZED = {f"aten::{name}" for name in f"{_VIEWED} {_MADE} repeat arange rand randn randint".split()}
_NUMBERED = {f"aten::{name}" for name in f"{_VIEWED} {_SAME} transpose t permute unsqueeze squeeze".split()}
_NUMBERED |= {"aten::index", "aten::_unsafe_index"}
