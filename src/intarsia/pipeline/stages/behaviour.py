"""What a model does that no graph shows: it decides by chance, counts its calls, or averages over tokens."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from intarsia.capture.protect import kept_random_state
from intarsia.errors import CaptureError
from intarsia.lower.purity import bound_arguments
from intarsia.pipeline.gpipe.effects import trial

_DRAWS = {torch.rand, torch.rand_like, torch.Tensor.uniform_}
_ENDS = (0.0, 1.0 - 2.0**-24)  # the least and the largest number that torch.rand gives


def trace_without_chance(trace: Callable[[], fx.Graph]) -> fx.Graph:
    """What `trace` gives; refused if another throw of the dice would give another graph.

    LayerDrop compares a random number with a probability to skip a layer. Both ends are tried: where the
    probability is zero, both give the same graph.
    """
    graphs: list[fx.Graph] = []
    for end in _ENDS:
        with _Dice(end) as dice, torch.random.fork_rng(), no_other_dice():
            graphs.append(trace())
        if not dice.thrown:
            break
    if len({str(graph) for graph in graphs}) > 1:
        raise CaptureError("which modules run is decided by random numbers, which tracing would freeze")
    return graphs[0]


def export_without_chance(export: Callable[[], ExportedProgram]) -> ExportedProgram:
    """What `export` gives; with single random numbers known at both ends where it fails otherwise.

    Export cannot follow a comparison with a random number. Where both ends give the same program, in which
    nothing is computed from them, the number decides nothing (LayerDrop with a probability of zero). It is
    drawn all the same, so that later draws are those of the model.
    """
    try:
        with no_other_dice():
            return export()
    except CaptureError:
        raise
    except Exception as error:
        if "data-dependent" not in str(error):  # no comparison with a number is in the way
            raise
        programs: list[ExportedProgram] = []
        for end in _ENDS:
            try:
                with _KnownDice(end) as dice, torch.random.fork_rng(), no_other_dice():
                    programs.append(export())
            except CaptureError:
                raise
            except Exception:  # something else is in the way too
                raise error from None
            if not dice.thrown:
                return programs[0]
        if not _nothing_depends(*programs):
            raise error
        return programs[0]


class _Dice(TorchFunctionMode):
    """Every uniform random number is drawn, and becomes `value`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value, self.thrown = value, False

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        drawn = func(*args, **(kwargs or {}))
        return self._settled(drawn) if func in _DRAWS and isinstance(drawn, torch.Tensor) else drawn

    def _settled(self, drawn: torch.Tensor) -> torch.Tensor:
        self.thrown = True
        return drawn.fill_(self.value)


class _KnownDice(_Dice):
    """In place of a single random number `value` itself is given, which export then knows."""

    def _settled(self, drawn: torch.Tensor) -> torch.Tensor:
        if drawn.ndim:
            return drawn
        self.thrown = True
        return torch.tensor(self.value, dtype=drawn.dtype)


def _nothing_depends(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Whether two programs are the same, and compute nothing from the constants in which they differ."""
    if str(one.graph) != str(other.graph):
        return False
    differing = {
        name
        for name, constant in one.constants.items()
        if isinstance(constant, torch.Tensor) and not torch.equal(constant, other.constants[name])
    }
    specs = one.graph_signature.input_specs
    holders = [node for node in one.graph.nodes if node.op == "placeholder"]
    dice = [n for n, spec in zip(holders, specs, strict=True) if spec.target in differing]
    # A change in place that nothing else sees goes with the rest.
    private = set(dice)
    for node in one.graph.nodes:
        if node.all_input_nodes and private.issuperset(node.all_input_nodes):
            private.add(node)
    for node in reversed(one.graph.nodes):
        if node.op == "call_function" and not node.users and (node in private or not node.is_impure()):
            one.graph.erase_node(node)
    return not any(node.users for node in dice)


@contextmanager
def no_other_dice() -> Iterator[None]:
    """Refuse what draws numbers of Python or NumPy, or sets torch's generator; put their state back."""
    numpy = sys.modules.get("numpy")
    before, seed = random.getstate(), torch.initial_seed()
    array = None if numpy is None else numpy.random.get_state()
    set_state = torch.set_rng_state
    put_back: list[torch.Tensor] = []

    def noticed(new_state: torch.Tensor) -> None:
        put_back.append(new_state)
        set_state(new_state)

    with kept_random_state():
        torch.set_rng_state = noticed  # what `fork_rng` calls at its end
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
    if put_back:
        raise CaptureError("it restores torch's generator (fork_rng), which tracing would omit")
    if drew:
        raise CaptureError("it draws random numbers in Python, which tracing would freeze")


Result = TypeVar("Result")
_Numbers = dict[tuple[nn.Module, str], Any]
_OF_TORCH = frozenset(vars(nn.Module()))


def trace_without_counters(
    trace: Callable[[], Result], model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Result:
    """What `trace` gives; refused if it changed a number that another call of the model changes again.

    What is set once, when a model is first called, is as good as a constant.
    """
    with _put_back(model) as before, _at_its_end(model) as ends:
        result = trace()
        ends.append(_numbers(model))
    changed = {key for after in ends for key in after if after[key] != before.get(key)}
    if changed:
        with _put_back(model), trial(model), torch.no_grad():
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
    """The numbers and words that modules keep as attributes."""
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name not in _OF_TORCH
    }


@contextmanager
def _put_back(model: nn.Module) -> Iterator[_Numbers]:
    """Gives the numbers as they are, which they are again afterwards."""
    before = _numbers(model)
    try:
        yield before
    finally:
        for (module, name), value in before.items():
            vars(module)[name] = value


@contextmanager
def _at_its_end(model: nn.Module) -> Iterator[list[_Numbers]]:
    """Gives a list; a call adds the numbers at its end, since export puts them back before it returns."""
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
_MEAN = 1  # how aten writes reduction="mean"


class TokenMeans(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a mean of negative log likelihoods is computed while it is active.

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
        self.computed |= _is_token_mean(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def mean_inside(stage: nn.Module) -> str | None:
    """The node of a stage that computes a mean over tokens itself, if there is one."""
    program = getattr(stage, "program", None)
    if not isinstance(program, fx.GraphModule):
        return getattr(stage, "mean_node", None)  # of modules: what the example showed
    return next((n.name for n in program.graph.nodes if _is_token_mean(n.target, n.args, n.kwargs)), None)


def _is_token_mean(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if getattr(operator, "overloadpacket", None) not in _MEANS:
        return False
    return bool(bound_arguments(operator, args, kwargs).get("reduction", _MEAN) == _MEAN)
