"""Export of a model that will be cut: in its present mode, with a dynamic batch, and buffers written early.

Export puts a `copy_` for `self.n = ...` at the end of the graph, which would forbid every cut. So it is moved
up to the node that computes the value. Behaviour that a graph does not show is refused: random decisions,
counted calls.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from intarsia.capture.example import distinct_inputs
from intarsia.capture.export_context import kept_messages, keywords_named, short_stack_traces
from intarsia.capture.output_objects import opening
from intarsia.capture.protect import kept_random_state
from intarsia.errors import CaptureError, error_text
from intarsia.graph.nodes import memory_of
from intarsia.lower.purity import bound_arguments
from intarsia.pipeline.gpipe.effects import trial
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
    args, kwargs = distinct_inputs(model, args, kwargs)
    shapes = _open_batch(model, args, kwargs, axes) if dynamic_shapes is None else dynamic_shapes
    # If the model fixes the batch length, it is exported with that length.
    for dynamic in [shapes, None] if shapes and dynamic_shapes is None else [shapes]:
        try:
            with (
                kept_messages(),
                short_stack_traces(),
                opening(model, (args, kwargs)),
                keywords_named(model, (args, kwargs), dynamic) as by_name,
                checkpointed_modules(model) as names,
            ):
                run = partial(export, model, args, kwargs, dynamic_shapes=by_name)
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


_DRAWS = {torch.rand, torch.rand_like, torch.Tensor.uniform_}
_ENDS = (0.0, 1.0 - 2.0**-24)  # the least and the largest number that torch.rand returns


def trace_without_chance(trace: Callable[[], fx.Graph]) -> fx.Graph:
    """The graph of `trace`. Raises CaptureError if another random number would lead to another graph.

    LayerDrop compares a random number with a probability to skip a layer. The graph is traced with both ends
    of the range. If the probability is zero, both graphs are equal.
    """
    graphs: list[fx.Graph] = []
    for end in _ENDS:
        with _FixedDraws(end) as draws, torch.random.fork_rng(), no_untraced_draws():
            graphs.append(trace())
        if not draws.drew:
            break
    if len({str(graph) for graph in graphs}) > 1:
        raise CaptureError("random numbers decide which modules run, which tracing would freeze")
    return graphs[0]


def export_without_chance(export: Callable[[], ExportedProgram]) -> ExportedProgram:
    """The program of `export`. If export fails, single random numbers are replaced by constants.

    Export cannot trace a comparison with a random number. If both ends of its range lead to the same program,
    and the program computes nothing from it, the number has no effect (LayerDrop with a probability of zero).
    The number is still drawn, so that later draws are equal to those of the model.
    """
    try:
        with no_untraced_draws():
            return export()
    except CaptureError:
        raise
    except Exception as error:
        if "data-dependent" not in str(error):  # the cause is no comparison with a number
            raise
        programs: list[ExportedProgram] = []
        for end in _ENDS:
            try:
                with _ConstantDraws(end) as draws, torch.random.fork_rng(), no_untraced_draws():
                    programs.append(export())
            except CaptureError:
                raise
            except Exception:  # there is another cause too
                raise error from None
            if not draws.drew:
                return programs[0]
        if not _are_independent(*programs):
            raise error
        return programs[0]


class _FixedDraws(TorchFunctionMode):
    """Draws every uniform random number, and replaces it by `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.drew = value, False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        drawn = func(*args, **(kwargs or {}))
        return self._replaced(drawn) if func in _DRAWS and isinstance(drawn, torch.Tensor) else drawn

    def _replaced(self, drawn: torch.Tensor) -> torch.Tensor:
        self.drew = True
        return drawn.fill_(self.value)


class _ConstantDraws(_FixedDraws):
    """Replaces every single random number by a constant, which export can compare."""

    def _replaced(self, drawn: torch.Tensor) -> torch.Tensor:
        if drawn.ndim:
            return drawn
        self.drew = True
        return torch.tensor(self.value, dtype=drawn.dtype)


def _are_independent(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Whether two programs are equal, and compute nothing from the constants in which they differ."""
    if str(one.graph) != str(other.graph):
        return False
    differing = {
        name
        for name, constant in one.constants.items()
        if isinstance(constant, torch.Tensor) and not torch.equal(constant, other.constants[name])
    }
    specs = one.graph_signature.input_specs
    placeholders = one.graph.find_nodes(op="placeholder")
    draws = [n for n, spec in zip(placeholders, specs, strict=True) if spec.target in differing]
    # In-place changes of nodes that only depend on the draws are erased too.
    private = set(draws)
    for node in one.graph.nodes:
        if node.all_input_nodes and private.issuperset(node.all_input_nodes):
            private.add(node)
    for node in reversed(one.graph.nodes):
        if node.op == "call_function" and not node.users and (node in private or not node.is_impure()):
            one.graph.erase_node(node)
    return not any(node.users for node in draws)


@contextmanager
def no_untraced_draws() -> Iterator[None]:
    """Raise CaptureError for draws with Python or NumPy, or a set generator of torch; restore all states."""
    numpy = sys.modules.get("numpy")
    before, seed = random.getstate(), torch.initial_seed()
    array = None if numpy is None else numpy.random.get_state()
    set_state = torch.set_rng_state
    new_states: list[torch.Tensor] = []

    def recording(new_state: torch.Tensor) -> None:
        new_states.append(new_state)
        set_state(new_state)

    with kept_random_state():
        torch.set_rng_state = recording  # `fork_rng` calls it at its end
        try:
            yield
            drew = random.getstate() != before
            if numpy is not None and array is not None:
                drew |= not all(map(numpy.array_equal, array, numpy.random.get_state()))
            reseeded = torch.initial_seed() != seed
        finally:
            torch.set_rng_state = set_state
    if reseeded:
        raise CaptureError("it calls torch.manual_seed, which tracing would omit")
    if new_states:
        raise CaptureError("it restores torch's generator (fork_rng), which tracing would omit")
    if drew:
        raise CaptureError("it draws random numbers in Python, which tracing would freeze")


Result = TypeVar("Result")
_Numbers = dict[tuple[nn.Module, str], Any]
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))


def trace_without_counters(
    trace: Callable[[], Result], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Result:
    """The result of `trace`. Raises CaptureError if the model changes a number at every call.

    A number that only the first call sets is as good as a constant.
    """
    with _restored(model) as before, _numbers_after_calls(model) as ends:
        result = trace()
        ends.append(_numbers(model))
    changed = {key for after in ends for key in after if after[key] != before.get(key)}
    if changed:
        with _restored(model), trial(model), torch.no_grad():
            model(*args, **kwargs)
            once = _numbers(model)
            model(*args, **kwargs)
            twice = _numbers(model)
        for module, name in changed:
            if once.get((module, name)) != twice.get((module, name)):
                raise CaptureError(
                    f"{type(module).__name__} changes its {name} at every call, which tracing would freeze"
                )
    return result


def _numbers(model: nn.Module) -> _Numbers:
    """The numbers and strings among the attributes of modules."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name not in _TORCH_ATTRIBUTES
    }


@contextmanager
def _restored(model: nn.Module) -> Iterator[_Numbers]:
    """The present numbers, which are restored at the end."""
    before = _numbers(model)
    try:
        yield before
    finally:
        for (module, name), value in before.items():
            vars(module)[name] = value


@contextmanager
def _numbers_after_calls(model: nn.Module) -> Iterator[list[_Numbers]]:
    """A list to which each call adds its numbers at its end: export restores them before it returns."""
    ends: list[_Numbers] = []
    hook = model.register_forward_hook(lambda *_: ends.append(_numbers(model)))
    try:
        yield ends
    finally:
        hook.remove()


_ATEN = torch.ops.aten
_MEANS = {
    *(_ATEN.cross_entropy_loss, _ATEN.nll_loss, _ATEN.nll_loss_nd, _ATEN.nll_loss2d),
    *(_ATEN.nll_loss_forward, _ATEN.nll_loss2d_forward),
}
_MEAN = 1  # reduction="mean" in aten


class TokenMeans(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether a mean of negative log likelihoods is computed while it is active.

    >>> with TokenMeans() as seen:
    ...     _ = torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))
    >>> seen.computed
    True
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: bool = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.computed |= is_token_mean(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def is_token_mean(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a node computes a mean of negative log likelihoods."""
    if getattr(operator, "overloadpacket", None) not in _MEANS:
        return False
    return bool(bound_arguments(operator, args, kwargs).get("reduction", _MEAN) == _MEAN)
