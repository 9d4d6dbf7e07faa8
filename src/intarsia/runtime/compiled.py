"""Segments and their programs, inlaid as one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from intarsia.capture.autocast import under_autocast
from intarsia.capture.protect import evaluating
from intarsia.capture.size_guards import check_guards, read_guards
from intarsia.engines import Program
from intarsia.errors import InputError, RefitError
from intarsia.graph.devices import uses_gpu
from intarsia.graph.piece import Piece
from intarsia.graph.plan import Plan
from intarsia.lower import Lowered, Role
from intarsia.refitting import make_refittable
from intarsia.runtime.call_structure import flat_arguments, split_spec, with_defaults
from intarsia.runtime.fallback import WithFallback
from intarsia.runtime.frozen_module import FrozenModule
from intarsia.runtime.inlay import Inlay
from intarsia.runtime.input_checks import Check, FixedInput, check_inputs, checks_of, fixed_inputs
from intarsia.runtime.ownership import Ownership, constants_of
from intarsia.runtime.result_layouts import ResultLayouts
from intarsia.runtime.weights import FrozenWeights

Run = Callable[[Sequence[Any]], list[Any]]  # the graph's inputs in, what it returns out, flat

Refitted = Callable[["Compiled", "Mapping[str, Any] | nn.Module"], "Compiled"]

# Hooks on every module there is (`register_module_forward_hook`); torch has no public way to ask for them.
GLOBAL_HOOKS = tuple(
    getattr(torch_module, name, {}) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
)


NOT_TRACED = "it runs on engines, which torch cannot trace; export or trace the model it was made from"


class Compiled(FrozenModule):
    """A model whose pieces run on engines; call it like the model it was made from.

    It computes what the model computes in evaluation, with the weights it had when it was compiled, and gives
    no gradients. `plan` tells what runs where, `notes` what else a user should know.

    >>> import intarsia
    >>> fast = intarsia.compile(nn.ReLU(), (torch.ones(2),), engines="pytorch")
    >>> fast(torch.tensor([-1.0, 2.0])), fast.plan.engines
    (tensor([0., 2.]), ('pytorch',))
    """

    plan: Plan

    def __init__(
        self,
        lowered: Lowered,
        plan: Plan,
        pieces: Sequence[Piece],
        programs: Sequence[Program],
        notes: Sequence[str] = (),
        forward_signature: inspect.Signature | None = None,
        body_plans: Mapping[str, Plan] | None = None,
        model: nn.Module | None = None,
        as_it_is: bool = False,
        by_choice: bool = False,
        checks: Sequence[Check] | None = None,
        state: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.training = False
        self._refitted: Refitted | None = None
        self.captured: Callable[[], fx.GraphModule] | None = None  # of a loaded module, what it was made of
        self.plan = plan
        self._notes = tuple(notes)
        self._lowered = lowered
        # In a tuple, lest it become a submodule: the model itself, where it runs as it is.
        self._as_it_is: tuple[nn.Module, ...] = (model,) if as_it_is and model is not None else ()
        # A model that runs as it is because that is faster has a graph that answers as it does; whatever
        # holds for compiled modules (frozen weights, checked inputs, archives) then holds for it too.
        self._stands = by_choice or not self._as_it_is
        held = constants_of(lowered.module)
        self._frozen = FrozenWeights(model if self._stands else None, held, lowered.buffers)
        self._check_weights = True
        if state is None:
            state = {} if model is None else {k: v.detach() for k, v in model.state_dict().items()}
        self._state = dict(state)
        self._call_signature = forward_signature
        self.inlay = Inlay(lowered.module.graph, pieces, programs)
        # Looked up at every call; a submodule's attribute would cost as much as a small operator.
        self._run: Run = self.inlay.results
        self._whole = self.inlay.whole
        self.body_plans = dict(body_plans or {})
        self._checks = checks_of(lowered) if checks is None else tuple(checks)
        self._ranges = lowered.range_constraints
        self._kind = "cuda" if uses_gpu(lowered.module.graph) else "cpu"
        places = {item.name: item.index for item in lowered.inputs if item.index is not None}
        self._guards = read_guards(lowered.guards, places)
        self._user_slots = tuple(
            (slot, i.index) for slot, i in enumerate(lowered.inputs) if i.index is not None
        )
        self._buffer_slots = tuple((slot, i.buffer) for slot, i in enumerate(lowered.inputs) if i.buffer)
        mutates = any(output.role is not Role.USER for output in lowered.outputs)
        self._flat_args = flat_arguments(lowered.in_spec)
        users = iter(lowered.views)
        views = [next(users, None) if o.role is Role.USER else None for o in lowered.outputs]
        self._views = tuple((place, view) for place, view in enumerate(views) if view is not None)
        engines_make = _fresh(lowered, pieces, programs)
        self._layouts = ResultLayouts(lowered, views, engines_make)
        fresh = [
            output.role is not Role.USER
            or output.is_input
            or output.twin is not None
            or is_fresh
            or views[place] is not None
            for place, (output, is_fresh) in enumerate(zip(lowered.outputs, engines_make, strict=True))
        ]
        self._ownership = Ownership(held, list(lowered.buffers.values()), fresh)
        by_name = {item.name: item.index for item in lowered.inputs}
        self._written = tuple(
            (output.target or "", by_name[output.target or ""] or 0)
            for output in lowered.outputs
            if output.role is Role.INPUT
        )
        self._plain_inputs = [item.index for item in lowered.inputs] == list(range(len(self._checks)))
        plain = self._flat_args >= 0 and self._plain_inputs and not (self._guards or mutates or as_it_is)
        self._quick = fixed_inputs(self._checks) if plain else None
        as_made = not (mutates or self._views or self._layouts) and all(fresh)
        self._one_result = lowered.out_spec.is_leaf() and as_made
        self._direct = _direct(self._whole, self._quick) if self._one_result else None

    def refit(self, weights: Mapping[str, Any] | nn.Module) -> None:
        """Compute with other weights of the same names, shapes and dtypes from now on.

        Nothing is captured or partitioned anew: constants are folded again from the new weights, and engines
        built again. With a model, the whole is verified against it, and the model's weights are watched from
        now on; those of a state dict are copied. RefitError where they do not fit; the module is then as it
        was.

        >>> import intarsia
        >>> model = nn.Linear(2, 1, bias=False)
        >>> fast = intarsia.compile(model, (torch.ones(1, 2),))
        >>> fast.refit({"weight": torch.tensor([[2.0, 3.0]])})
        >>> fast(torch.ones(1, 2))
        tensor([[5.]])
        """
        if self._refitted is None and self.captured is not None:
            make_refittable(self, self.captured())
        if self._refitted is None or not self._stands:
            raise RefitError(
                "this module has not kept the program it was made of, since it runs as it is; compile the"
                " model with its new weights"
            )
        made = self._refitted(self, weights).__dict__
        of_modules = nn.Module().__dict__  # hooks and the like stay
        self.__dict__.update({name: made[name] for name in made if name not in of_modules})
        self._modules = made["_modules"]

    def weights_digest(self) -> str:
        """SHA-256 of the model's weights that were compiled, as they are now.

        A call notices what torch counts: changes in place. Writes through `p.data` or numpy are not counted;
        where they may happen, keep the digest and compare it.
        """
        return self._frozen.digest()

    @property
    def lowered(self) -> Lowered:
        """The graph that was cut, and how a call maps onto it."""
        return self._lowered

    @property
    def checks(self) -> tuple[Check, ...]:
        """What each input of a call must be, in the order of the flattened call."""
        return tuple(self._checks)

    @property
    def call_signature(self) -> inspect.Signature | None:
        """The arguments of the model's `forward`, where they are known."""
        return self._call_signature

    def check(self, flat: list[Any]) -> None:
        """Raise InputError, naming the input, unless a flattened call fits what was compiled."""
        check_inputs(self._checks, flat, self._ranges)
        if self._guards:
            check_guards(self._guards, flat)

    def refit_from(self, old: Compiled, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what new weights do not change."""
        self._call_signature, self._state = old._call_signature, dict(state)
        self._notes = tuple(dict.fromkeys((*old._notes, *self._notes)))

    def refit_by(self, refitted: Refitted, program: ExportedProgram | None = None) -> None:
        """Let `refit` make the module with new weights by this function, from the program if one is given."""
        self._refitted = refitted
        if program is not None:
            self._lowered = replace(self._lowered, program=program)

    @property
    def weights(self) -> FrozenWeights:
        """The weights that were compiled, and whether the model still holds them."""
        return self._frozen

    def run_by(self, run: Run, *, checks_weights: bool = False) -> None:
        """Answer every call by `run`, which takes the graph's inputs, instead of the inlay's own.

        One that `checks_weights` does so itself, where it costs the call least.
        """
        self._run, self._whole, self._direct = run, None, None
        self._check_weights = not checks_weights

    def results(self, inputs: Sequence[Any]) -> list[Any]:
        """Everything the graph returns for its inputs, flat; nothing is checked, and nothing written back."""
        return self._run(inputs) if self._whole is None else list(self._whole(*inputs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The common call, plain tensors of fixed shape and no hooks, is checked and run right here: a model
        # of a hundred microseconds feels every further step.
        # A trace would take this call's result for a constant.
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise InputError(NOT_TRACED)
        if torch.is_autocast_enabled(self._kind) and not self._as_it_is:
            raise InputError(under_autocast(self._kind))
        if self._check_weights:
            self._frozen.check()
        if kwargs or self._forward_hooks or self._forward_pre_hooks or any(GLOBAL_HOOKS):
            return super().__call__(*args, **kwargs)
        direct = self._direct
        if direct is not None:
            try:
                return direct(*args)
            except Exception:  # any other call: the long way runs it, or says what is wrong with it
                answer = super().__call__(*args)
                if self._whole is not None and getattr(self._whole, "failure", None) is not None:
                    self._direct = None  # the engine failed: the long way has gone over to PyTorch
                return answer
        quick = self._quick
        if quick is None or len(args) != len(quick):
            return super().__call__(*args)
        for value, (dtype, shape, device) in zip(args, quick):  # noqa: B905
            if (
                value.__class__ is not torch.Tensor
                or value.dtype is not dtype
                or value.shape != shape
                or value.device != device
            ):
                return super().__call__(*args)
        whole = self._whole
        answer = self._run(args) if whole is None else whole(*args)
        return answer[0] if self._one_result else self._finish(list(args), answer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Any call: nested, named or sized at run time, or wrong, which is then said."""
        if torch.compiler.is_exporting():
            raise InputError(NOT_TRACED)
        if not self._stands:
            return _run_as_it_is(self._as_it_is[0], args, kwargs)
        flat = list(args) if self._flat_args == len(args) and not kwargs else self.flatten(args, kwargs)
        self.check(flat)
        if self._as_it_is:
            return _run_as_it_is(self._as_it_is[0], args, kwargs)
        if self._written:
            self._ownership.check_written(
                [(name, flat[index]) for name, index in self._written],
                [(item.name, flat[item.index]) for item in self._lowered.inputs if item.index is not None],
            )
        inputs = flat if self._plain_inputs else self._feed(flat)
        results = self._run(inputs) if self._whole is None else self._whole(*inputs)
        return results[0] if self._one_result else self._finish(flat, results)

    def _feed(self, flat: list[Any]) -> list[Any]:
        """The graph's inputs: the caller's, and the buffers the model changes."""
        buffers = self._lowered.buffers
        return [buffers[i.buffer] if i.buffer else flat[i.index or 0] for i in self._lowered.inputs]

    def _finish(self, flat: list[Any], results: Sequence[Any]) -> Any:
        """Write back what the model changes, then give the caller its results."""
        settled = list(self._ownership.own(results, flat))
        if self._layouts:
            self._layouts.lay_out(settled, flat)
        returned: dict[int, Any] = {}
        indices = dict(self._written)
        with torch.no_grad():
            for place, (output, result) in enumerate(zip(self._lowered.outputs, settled, strict=True)):
                if output.role is Role.BUFFER:
                    self._lowered.buffers[output.target or ""].copy_(result)
                elif output.role is Role.INPUT:
                    flat[indices[output.target or ""]].copy_(result)
                else:
                    returned[place] = result if output.twin is None else returned[output.twin]
        if self._views:
            self._replay(flat, returned)
        return pytree.tree_unflatten(list(returned.values()), self._lowered.out_spec)

    def _replay(self, flat: list[Any], returned: dict[int, Any]) -> None:
        """Make views again what the model returns as views, of what the caller has."""
        places = list(returned)
        for place, view in self._views:
            returned[place] = view(flat, [returned[p] for p in places])
        for place, output in enumerate(self._lowered.outputs):
            if output.role is Role.USER and output.twin is not None:
                returned[place] = returned[output.twin]

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """A call as a list, in the order of `checks`; InputError where it has another structure."""
        spec = self._lowered.in_spec
        positional, named = split_spec(spec)
        if (len(args), set(kwargs)) != (positional, set(named)):
            args, kwargs = self._rebind(args, kwargs, positional, named)
        flat, found = pytree.tree_flatten((args, {name: kwargs[name] for name in named}))
        if found != spec:
            raise InputError(f"the call has the structure {found}; compiled for {spec}")
        return flat

    def _rebind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], positional: int, named: list[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with arguments passed by position or name as when compiled."""
        expected = f"{positional} positional arguments" + (f" and {', '.join(named)}" if named else "")
        if self._call_signature is not None:
            try:
                given = dict(self._call_signature.bind(*args, **kwargs).arguments)
            except TypeError as error:
                raise InputError(f"the call does not fit the model: {error}") from error
            given = with_defaults(self._call_signature, given, positional, named)
            order = [name for name in self._call_signature.parameters if name in given]
            if len(order) == positional + len(named) and all(name in given for name in named):
                rest = [name for name in order if name not in named]
                return tuple(given[name] for name in rest), {name: given[name] for name in named}
        has = f"{len(args)} positional arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
        raise InputError(f"the call has {has}; compiled for {expected}")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know besides the plan, engines that failed at a call included."""
        programs = [step.program for step in self.inlay.steps]
        failed = [(p.engine, p.failure) for p in programs if isinstance(p, WithFallback) and p.failure]
        return (*self._notes, *(f"{engine} failed at a call: {why}" for engine, why in failed))

    def note(self, *told: str) -> None:
        """Add to what a user should know."""
        self._notes = (*self._notes, *told)

    def extra_repr(self) -> str:
        return f"{len(self.plan)} segments on {', '.join(self.plan.engines)}"


def _run_as_it_is(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with evaluating(model), torch.no_grad():
        return model(*args, **kwargs)


def _fresh(lowered: Lowered, pieces: Sequence[Piece], programs: Sequence[Program]) -> list[bool]:
    """For each output of the graph, whether an engine makes it that hands out memory of its own."""
    made = {
        node
        for piece, program in zip(pieces, programs, strict=True)
        if isinstance(program, WithFallback) and program.fresh
        for node in piece.outputs
    }
    returned: Any = next(iter(reversed(lowered.module.graph.nodes))).args[0]
    # A value that is returned twice is fresh but once.
    return [
        not isinstance(item, fx.Node) or (item in made and item not in returned[:place])
        for place, item in enumerate(returned)
    ]


def _direct(program: Program | None, quick: list[FixedInput] | None) -> Callable[..., torch.Tensor] | None:
    """The whole model as one call that checks its inputs itself, where its program has one."""
    make = getattr(program, "direct", None)
    if make is None or not quick:
        return None
    return make([tuple(shape) for _, shape, _ in quick])  # type: ignore[no-any-return]
