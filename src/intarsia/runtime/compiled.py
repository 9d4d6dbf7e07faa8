"""A compiled module: the programs of a model's pieces, which is called as the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.modules import module as torch_module

from intarsia.capture.example import under_autocast
from intarsia.capture.protect import evaluating
from intarsia.engines import Program
from intarsia.errors import InputError, RefitError, count_text
from intarsia.graph.nodes import uses_gpu
from intarsia.graph.plan import Plan
from intarsia.lower import Lowered
from intarsia.refitting import make_refittable
from intarsia.runtime.call_interface import CallInterface, Check, FixedInput, checks_of
from intarsia.runtime.fallback import WithFallback
from intarsia.runtime.inlay import Assembly, Inlay
from intarsia.runtime.ownership import constants_of
from intarsia.runtime.results import ResultPlan
from intarsia.runtime.weights import FrozenModule, FrozenWeights, asks_gradients, warn_of_gradients
from intarsia.tracing import is_traced

Run = Callable[[Sequence[Any]], list[Any]]  # from the graph's inputs to everything it returns, flat

Weights = Mapping[str, Any] | nn.Module
Refit = Callable[["Compiled", Weights], "Compiled"]  # returns the module with other weights

# Hooks on all modules (`register_module_forward_hook`). torch 2.13 has no public way to read them.
GLOBAL_HOOKS = tuple(
    getattr(torch_module, name, {}) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
)

# The interpreters of torch.func (vmap, grad, jvp) that are active. torch 2.13 has no public way to read them.
_TRANSFORMED: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)

NOT_TRANSFORMED = (
    "it runs on engines, which torch.func (vmap, grad, jvp, jacrev) cannot transform; transform the original"
    " model, or compile a module that calls the transformation"
)
NOT_TRACED = "it runs on engines, which torch cannot trace; export or trace the original model"

NOT_HERE = (
    "a compiled module has no {!r}: its weights are frozen, and it has none of the model's modules; use the"
    " model itself, also for torch.func.functional_call, or pass new weights to refit"
)


@dataclass(frozen=True)
class Source:
    """The model that a module was compiled from.

    `state` are its weights by name; without it, those of `model`. `eager` is set if the model itself answers
    calls and not its graph: "chosen" because that is faster, or "required" because the graph answers
    differently. If it is only faster, inputs are checked, weights are watched, and the module can be saved
    and refitted.
    """

    model: nn.Module | None = None
    signature: inspect.Signature | None = None
    state: Mapping[str, torch.Tensor] | None = None
    eager: Literal["chosen", "required"] | None = None


class _Fit:
    """Everything that depends on the weights. A refit replaces it as a whole.

    The attributes on the last line of `__slots__` are for the fast path of a call: `run` or, for a single
    program, `whole` computes the graph. `direct` is a program's shortcut that checks its inputs itself.
    """

    __slots__ = (
        *("lowered", "plan", "body_plans", "inlay", "interface", "results", "weights", "state", "notes"),
        *("eager", "stands", "run", "whole", "direct", "fixed", "is_single", "checks_weights"),
    )

    def __init__(
        self,
        lowered: Lowered,
        assembly: Assembly,
        source: Source,
        notes: Sequence[str],
        checks: Sequence[Check] | None,
    ) -> None:
        model = source.model
        self.lowered, self.body_plans = lowered, dict(assembly.body_plans)
        self.plan = replace(assembly.plan, bodies=self.body_plans) if self.body_plans else assembly.plan
        self.inlay: Inlay = Inlay(lowered.module.graph, assembly)
        checks = checks_of(lowered) if checks is None else tuple(checks)  # those of a file, or the graph's
        self.interface = CallInterface(lowered, checks, source.signature)
        self.results = ResultPlan(lowered, assembly)
        self.eager = None if source.eager is None else model
        self.stands = self.eager is None or source.eager == "chosen"
        constants = {} if lowered.program is None else lowered.program.constants
        self.weights = FrozenWeights(
            model if self.stands else None,
            constants_of(lowered.module),
            lowered.buffers,
            constants,
            runs_model=self.eager is not None,
        )
        state = source.state
        if state is None:
            state = {} if model is None else {k: v.detach() for k, v in model.state_dict().items()}
        self.state = dict(state)
        self.notes = tuple(notes)
        self.run: Run = self.inlay.results
        self.whole = self.inlay.whole
        is_plain = self.eager is None and not self.results.writes
        self.fixed = self.interface.fixed if is_plain else None
        self.is_single = self.results.is_single
        self.direct = _direct(self.whole, self.fixed) if self.is_single else None
        self.checks_weights = True


class Compiled(FrozenModule):
    """A model whose pieces run on engines. Call it like the model.

    It computes what the model computes in evaluation, with the weights that the model had when it was
    compiled. It has no gradients. `plan` says what runs where, and `notes` has further information.

    >>> import intarsia
    >>> fast = intarsia.compile(nn.ReLU(), (torch.ones(2),), engines="pytorch")
    >>> fast(torch.tensor([-1.0, 2.0])), fast.plan.engines
    (tensor([0., 2.]), ('pytorch',))
    """

    def __init__(
        self,
        lowered: Lowered,
        assembly: Assembly,
        source: Source | None = None,
        notes: Sequence[str] = (),
        checks: Sequence[Check] | None = None,
    ) -> None:
        super().__init__()
        self.training = False
        self._fit = _Fit(lowered, assembly, source or Source(), notes, checks)
        self.inlay = self._fit.inlay
        self._kind = "cuda" if uses_gpu(lowered.module.graph) else "cpu"
        self._refit: Refit | None = None
        self.differences: tuple[str, ...] = ()  # when it can answer differently from the model
        self.captured: Callable[[], fx.GraphModule] | None = None  # the program of a loaded file

    # The parts of the module.

    @property
    def plan(self) -> Plan:
        """What runs where."""
        return self._fit.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._fit.plan = plan

    @property
    def body_plans(self) -> dict[str, Plan]:
        """What runs where inside control flow, by the name of the branch or body."""
        return self._fit.body_plans

    @property
    def lowered(self) -> Lowered:
        """The lowered graph, and how a call maps to it."""
        return self._fit.lowered

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks of a call, in the order of the flattened call."""
        return self._fit.interface.checks

    @property
    def call_signature(self) -> inspect.Signature | None:
        """The signature of the model's `forward`, if it is known."""
        return self._fit.interface.signature

    @property
    def stands_for_model(self) -> bool:
        """Whether the graph answers as the model does; otherwise the model itself answers every call."""
        return self._fit.stands

    @property
    def runs_graph(self) -> bool:
        """Whether the graph answers calls, and not the model itself."""
        return self._fit.eager is None

    @property
    def weights(self) -> FrozenWeights:
        """The weights that were compiled, with a check whether the model still has them."""
        return self._fit.weights

    @property
    def notes(self) -> tuple[str, ...]:
        """Further information for the user, including engines that failed at a call."""
        programs = [step.program for step in self._fit.inlay.steps]
        failed = [(p.engine, p.failure) for p in programs if isinstance(p, WithFallback) and p.failure]
        return (*self._fit.notes, *(f"{engine} failed at a call: {why}" for engine, why in failed))

    @property
    def compile_notes(self) -> tuple[str, ...]:
        """The notes of the compile alone, which an archive stores."""
        return self._fit.notes

    def note(self, *notes: str) -> None:
        """Add notes for the user."""
        self._fit.notes = (*self._fit.notes, *notes)

    def weights_digest(self) -> str:
        """SHA-256 of the current values of the weights that were compiled.

        A call detects changes in place, which torch counts, and compares samples of the weights. It may miss
        a write of few elements through `p.data` or numpy. To detect such a write, compare digests.
        """
        return self._fit.weights.digest()

    # Refit.

    def refit(self, weights: Weights) -> None:
        """Use other weights of the same names, shapes and dtypes from now on.

        Constants are folded again and engines are built again, by the same plan. If you pass a model, the
        whole is compared with it, and its weights are watched. The weights of a state dict are copied. If the
        weights do not fit, this raises RefitError, and the module is unchanged.

        >>> import intarsia
        >>> model = nn.Linear(2, 1, bias=False)
        >>> fast = intarsia.compile(model, (torch.ones(1, 2),))
        >>> fast.refit({"weight": torch.tensor([[2.0, 3.0]])})
        >>> fast(torch.ones(1, 2))
        tensor([[5.]])
        """
        if self._refit is None and self.captured is not None:
            make_refittable(self, self.captured())  # imports the compiler
        if self._refit is None or not self._fit.stands:
            raise RefitError(
                "this module runs as it is and has no captured"
                " program; compile the model with its new weights"
            )
        refitted = self._refit(self, weights)
        self._fit = refitted._fit
        self.inlay = refitted._fit.inlay

    def refit_by(self, refit: Refit, program: ExportedProgram | None = None) -> None:
        """Set the function that `refit` calls, and the captured program if one is passed."""
        self._refit = refit
        if program is not None:
            self._fit.lowered = replace(self._fit.lowered, program=program)

    def refit_from(self, old: Compiled, state: Mapping[str, torch.Tensor]) -> None:
        """Copy from a compiled module what does not depend on weights."""
        fit = self._fit
        fit.interface = replace(fit.interface, signature=old.call_signature)
        fit.state = dict(state)
        fit.notes = tuple(dict.fromkeys((*old._fit.notes, *fit.notes)))

    # Calls.

    @property
    def run(self) -> Run:
        """The function that computes the graph: the inlay's, or the one set by `run_by`."""
        return self._fit.run

    def run_by(self, run: Run, *, checks_weights: bool = False) -> None:
        """Compute the graph by `run` instead of the inlay.

        With `checks_weights`, `run` itself checks the weights, at a better time in the call.
        """
        fit = self._fit
        fit.run, fit.whole, fit.direct, fit.checks_weights = run, None, None, not checks_weights

    def results(self, inputs: Sequence[Any]) -> list[Any]:
        """Everything the graph returns for its inputs, flat. Nothing is checked or written back."""
        fit = self._fit
        return fit.run(inputs) if fit.whole is None else list(fit.whole(*inputs))

    def check(self, flat: list[Any]) -> None:
        """Raise InputError, naming the input, if a flattened call does not pass the checks."""
        self._fit.interface.check(flat)

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The call as a list, in the order of `checks`; InputError if its structure differs."""
        return self._fit.interface.flatten(args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The most common call, tensors of fixed shapes without hooks, is checked and run here. For a model
        # that takes 100 us, every further function call is noticeable.
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise InputError(NOT_TRACED)
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            # Importing Dynamo takes time, which a process that only loads files saves.
            from intarsia.runtime.untraced import untraced

            return untraced(self, args, kwargs)
        fit = self._fit
        if fit.eager is None:
            if torch.is_autocast_enabled(self._kind):
                raise InputError(under_autocast(self._kind))
            if _TRANSFORMED() is not None:
                raise InputError(NOT_TRANSFORMED)
        if fit.checks_weights:
            fit.weights.check()
        if kwargs or self._forward_hooks or self._forward_pre_hooks or any(GLOBAL_HOOKS) or is_traced():
            return super().__call__(*args, **kwargs)
        if asks_gradients(args):
            return super().__call__(*args)
        direct = fit.direct
        if direct is not None:
            try:
                return direct(*args)
            except Exception:  # `forward` runs other calls, or raises a better error
                answer = super().__call__(*args)
                if fit.whole is not None and getattr(fit.whole, "failure", None) is not None:
                    fit.direct = None  # the engine failed, and PyTorch runs the segment from now on
                return answer
        fixed = fit.fixed
        if fixed is None or len(args) != len(fixed):
            return super().__call__(*args)
        for value, (dtype, shape, device) in zip(args, fixed):  # noqa: B905
            if (
                value.__class__ is not torch.Tensor
                or value.dtype is not dtype
                or value.is_nested
                or value.shape != shape
                or value.device != device
            ):
                return super().__call__(*args)
        whole = fit.whole
        answer = fit.run(args) if whole is None else whole(*args)
        return answer[0] if fit.is_single else fit.results.finish(args, answer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run any call: nested, with names or sizes that vary. A wrong one raises InputError."""
        if torch.compiler.is_exporting():
            raise InputError(NOT_TRACED)
        warn_of_gradients(args, kwargs)
        fit = self._fit
        if fit.eager is not None and not fit.stands:
            return _run_eagerly(fit.eager, args, kwargs)
        flat = fit.interface.flatten(args, kwargs)
        fit.interface.check(flat)
        if fit.eager is not None:
            return _run_eagerly(fit.eager, args, kwargs)
        fit.results.check_written(flat)
        inputs = fit.interface.feed(flat)
        whole = None if is_traced() else fit.whole  # `run` records the name of each segment
        return fit.results.finish(flat, fit.run(inputs) if whole is None else whole(*inputs))

    def extra_repr(self) -> str:
        return f"{count_text(len(self.plan), 'segment')} on {', '.join(self.plan.engines)}"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and self._holds(name):
            raise AttributeError(NOT_HERE.format(name))
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # torch.func.functional_call sets weights by name. Engines would not see them.
        if isinstance(value, torch.Tensor) and self._holds(name):
            raise InputError(NOT_HERE.format(name))
        super().__setattr__(name, value)

    def _holds(self, name: str) -> bool:
        """Whether the model has a weight of this name, or a module of this name with a weight."""
        return any(key.partition(".")[0] == name for key in self._fit.state)

    def _weights(self) -> Iterable[torch.Tensor]:
        return self._fit.state.values()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination.update({prefix + name: tensor for name, tensor in self._fit.state.items()})

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        error_messages = rest[-1]
        for name, tensor in self._fit.state.items():
            loaded = state_dict.get(prefix + name)
            if loaded is not None and not torch.equal(loaded.to(tensor), tensor):
                error_messages.append(
                    f"{prefix}{name} belongs to a compiled module, whose weights are frozen; load it into the"
                    " model and compile it again"
                )


def _run_eagerly(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with evaluating(model), torch.no_grad():
        return model(*args, **kwargs)


def _direct(program: Program | None, fixed: list[FixedInput] | None) -> Callable[..., torch.Tensor] | None:
    """The shortcut of a program that computes the whole model and checks its inputs itself, if it has one."""
    make = getattr(program, "direct", None)
    if make is None or not fixed:
        return None
    return make([tuple(shape) for _, shape, _ in fixed])  # type: ignore[no-any-return]
