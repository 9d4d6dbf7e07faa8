"""Export of a model that will be cut: in its present mode, with a dynamic batch, and buffers written early.

Export puts a `copy_` for `self.n = ...` at the end of the graph, which would forbid every cut. So it is moved
up to the node that computes the value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.utils import _pytree as pytree

from intarsia.capture.export_context import kept_messages, short_stack_traces
from intarsia.capture.output_objects import opening
from intarsia.errors import CaptureError, error_text
from intarsia.graph.nodes import memory_of
from intarsia.pipeline.stages.behaviour import export_without_chance, trace_without_counters
from intarsia.pipeline.stages.signature import Axes

_FILE = torch.utils.checkpoint.__file__


@contextmanager
def checkpointed_modules(model: nn.Module) -> Iterator[list[str]]:
    """A list to which calls add the names of the outermost modules inside `torch.utils.checkpoint`.

    Operations in a checkpoint that are in no module are not recorded. Reentrant checkpoints are disabled:
    they run without gradients, and export would trace that.
    """
    names: list[str] = []

    def before(name: str) -> None:
        if not any(name == outer or name.startswith(f"{outer}.") for outer in names) and _inside(
            sys._getframe(1)
        ):
            names.append(name)

    reentrant = torch.utils.checkpoint.CheckpointFunction
    with ExitStack() as stack:
        torch.utils.checkpoint.CheckpointFunction = _Transparent  # type: ignore[misc,assignment]
        stack.callback(setattr, torch.utils.checkpoint, "CheckpointFunction", reentrant)
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_pre_hook(lambda *_, name=name: before(name))
                stack.callback(hook.remove)
        yield names


class _Transparent:
    """Replaces the function that reentrant `torch.utils.checkpoint` calls; a test checks that it does."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """The function's result."""
        return function(*args)


def _inside(frame: FrameType | None) -> bool:
    """Whether `torch.utils.checkpoint` is among the callers."""
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            return True
        frame = frame.f_back
    return False


# Guards for device and dtype of the example; the signature checks these instead.
_GUARDS = {torch.ops.aten._assert_tensor_metadata.default}

# The module of operators that `vmap` leaves in a graph (torch 2.11 to 2.13).
_VMAP = "torch._functorch.predispatch"


def export_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Axes, dynamic_shapes: Any
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The exported model, with a dynamic batch or `dynamic_shapes`; and the modules that it checkpoints."""
    shapes = _open_batch(model, args, kwargs, axes) if dynamic_shapes is None else dynamic_shapes
    # If the model fixes the batch length, it is exported with that length.
    for dynamic in [shapes, None] if shapes and dynamic_shapes is None else [shapes]:
        try:
            with (
                kept_messages(),
                short_stack_traces(),
                opening(model, (args, kwargs)),
                checkpointed_modules(model) as names,
            ):
                run = partial(export, model, args, kwargs, dynamic_shapes=dynamic)
                program = trace_without_counters(partial(export_without_chance, run), model, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:
            reason = error
            continue
        if any(getattr(node.target, "__module__", "") == _VMAP for node in program.graph.nodes):
            raise CaptureError("it calls torch.vmap, whose operators cannot run one by one or in parts")
        _drop_guards(program.graph_module)
        _write_buffers_early(program.graph)
        return program, tuple(dict.fromkeys(names))
    raise CaptureError(error_text(reason)) from reason


def _open_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Axes) -> Any:
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]
    is_open = False
    for tensor, axis in zip(pytree.tree_leaves((args, kwargs)), axes, strict=False):
        if axis is not None and tensor.shape[axis] > 1:  # export always fixes a length of one
            shapes[tensor] = {axis: Dim.AUTO}
            is_open = True
    return shapes.dynamic_shapes(model, args, kwargs) if is_open else None  # type: ignore[no-untyped-call]


def _drop_guards(module: fx.GraphModule) -> None:
    """Erase guards in the graph and in the graphs inside it (such as a part without autocast)."""
    for inner in module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in list(inner.graph.nodes):
                if node.target in _GUARDS:
                    inner.graph.erase_node(node)
            inner.recompile()


def _write_buffers_early(graph: fx.Graph) -> None:
    """Move writes of buffers as early as possible.

    Export writes an assigned buffer by a `copy_` at the end of the graph. Every cut would separate it from
    the nodes that read the buffer.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.users:
            continue
        buffer, value = node.args[:2]
        if memory_of(value) == {buffer} and value.meta["val"].shape == buffer.meta["val"].shape:
            graph.erase_node(node)  # `self.n += 1` has written it already
        elif buffer.op == "placeholder":
            others = [user for user in buffer.users if user is not node]
            max([value, *others], key=place.__getitem__).append(node)
