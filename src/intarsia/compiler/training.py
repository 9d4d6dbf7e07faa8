"""A model in training mode: a compiled module computes what it does in evaluation, and warns."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.capture.example import Call, copied_call
from intarsia.capture.output_objects import open_objects
from intarsia.capture.protect import shared_copy
from intarsia.compare import disagreement

# Modules that ask for the mode themselves, to name them; whether the answers differ is tried.
_ASKING = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase)


def training_difference(model: Any, call: Call) -> str | None:
    """How a model in training mode answers the example otherwise than in evaluation; None if it does not."""
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return None
    if not any(module.training for module in model.modules()):
        return None
    try:
        evaluated = _answer(model, call, training=False)
    except Exception:  # the model fails on the example, which its compile has said
        return None
    try:
        mismatch = disagreement(_answer(model, call, training=True), evaluated)
        difference = None if mismatch is None else mismatch.replace("PyTorch", "evaluation")
    except Exception as error:
        difference = f"it fails: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if difference is None:
        return None
    kinds = Counter(type(m).__name__ for m in model.modules() if m.training and isinstance(m, _ASKING))
    names = f" ({', '.join(f'{name} x{count}' for name, count in kinds.items())})" if kinds else ""
    return (
        f"the model is in training mode{names}; the compiled module computes what it does in evaluation. In"
        f" training, {difference}. Call model.eval() before you compile it"
    )


def _answer(model: nn.Module, call: Call, *, training: bool) -> list[Any]:
    args, kwargs = copied_call(call)
    copy = shared_copy(model)  # what was compiled of the model notices writes to its buffers
    for twin, module in zip(copy.modules(), model.modules(), strict=True):
        twin.training = module.training and training
        twin._buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        leaves = pytree.tree_leaves(open_objects(copy(*args, **kwargs)))
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
