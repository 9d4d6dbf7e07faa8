"""Recurrent networks over whole sequences: LSTM, GRU, plain; layers and directions become layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from intarsia.convert.aten.kernels import is_empty, static, wide
from intarsia.convert.aten.sizes import sizes
from intarsia.convert.context import Context
from intarsia.convert.registry import converter
from intarsia.errors import ConversionError
from intarsia.network import Tensor
from intarsia.network import functional as F

aten = torch.ops.aten
# How ONNX orders the gates, in torch's numbers: torch has i f g o and r z n, ONNX i o f c and z r h.
_KINDS = {
    "lstm": ("LSTM", None),
    "gru": ("GRU", None),
    "rnn_tanh": ("RNN", "Tanh"),
    "rnn_relu": ("RNN", "Relu"),
}
_GATES = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}


def _reordered(parameter: Tensor, gates: Sequence[int]) -> Tensor:
    """The rows of a weight or bias, gate by gate, in ONNX's order, under a leading 1."""
    x = wide(parameter, halves=True)
    rows = static(x, 0) // len(gates)
    if x.constant is not None:
        blocks = x.constant.reshape(len(gates), rows, *x.constant.shape[1:])
        return F.constant(np.ascontiguousarray(blocks[list(gates)].reshape(1, *x.constant.shape)))
    if list(gates) == [0]:
        return F.unsqueeze(x, [0])
    pieces = F.split(x, [rows] * len(gates), axis=0)
    return F.unsqueeze(F.concat([pieces[i] for i in gates], 0), [0])


def _joined(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    known = [part.constant for part in parts if part.constant is not None]
    if len(known) == len(parts):  # engines pack weights that are constants, and join others at every call
        return F.constant(np.concatenate(known, axis))
    return F.concat(list(parts), axis)


def _merged(output: Tensor, directions: int, hidden: int) -> Tensor:
    """(time, directions, batch, hidden) as (time, batch, directions * hidden)."""
    if directions == 1:
        return F.squeeze(output, [1])
    turned = F.transpose(output, (0, 2, 1, 3))
    return F.reshape(turned, [*sizes(turned)[:2], directions * hidden])


@converter(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def recurrent(
    ctx: Context,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """The outputs of the last layer, then the final states of all layers."""
    kind, activation = _KINDS[ctx.operator]
    attributes: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}
    if activation is not None:
        attributes["activations"] = [activation] * (2 if bidirectional else 1)
    states = [hx] if isinstance(hx, Tensor) else hx
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    if train and dropout:
        raise ConversionError(f"dropout={dropout} in training is not handled")
    if len(params) != num_layers * directions * each:
        raise ConversionError(f"{len(params)} weights for {num_layers} layers (projected?) are not handled")
    if is_empty(input, *states, *params):
        raise ConversionError("a sequence without elements is not handled")
    gates = _GATES[kind]
    hidden = static(params[1], 1)
    x = wide(input, halves=True)
    x = F.transpose(x, (1, 0, 2)) if batch_first else x
    final: list[list[Tensor]] = [[] for _ in states]
    for layer in range(num_layers):
        first = layer * directions
        groups = [params[(first + d) * each : (first + d + 1) * each] for d in range(directions)]
        weight, recurrence = (_joined([_reordered(group[i], gates) for group in groups]) for i in (0, 1))
        bias = None
        if has_biases:
            bias = _joined([_joined([_reordered(g[2], gates), _reordered(g[3], gates)], 1) for g in groups])
        start = [wide(F.slice(state, first, first + directions, axis=0), halves=True) for state in states]
        results = F.ops(
            kind,
            x,
            weight,
            recurrence,
            bias,
            None,
            *start,
            outputs=1 + len(states),
            hidden_size=hidden,
            direction="bidirectional" if bidirectional else None,
            **attributes,
        )
        for collected, state in zip(final, results[1:], strict=True):
            collected.append(state)
        x = _merged(results[0], directions, hidden)
    output = F.transpose(x, (1, 0, 2)) if batch_first else x
    return tuple(F.cast(t, ctx.dtype) for t in (output, *(_joined(collected) for collected in final)))
