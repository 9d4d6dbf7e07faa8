"""The operators that are decomposed before conversion, and the rule of each.

An operator is decomposed only if necessary, so composite operators (`linear`, `layer_norm`, attention) reach
the network as one layer. torch's table is kept between compiles: reading it took 0.13 s, two thirds of
compiling a tiny model (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSet
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

from intarsia.errors import LoweringError

Decomposition = Callable[..., Any]
aten = torch.ops.aten
# These check their results and raise. A decomposed check is an effect, and export adds tokens to the graph
# that order effects. Not decomposed, they run in PyTorch and raise as in eager.
_CHECKING = (
    aten.inverse.default,
    aten.linalg_cholesky.default,
    aten.linalg_inv.default,
    aten.linalg_ldl_factor.default,
    aten.linalg_lu_factor.default,
    aten.linalg_solve.default,
    aten.linalg_tensorinv.default,
    aten.linalg_tensorsolve.default,
)
_registered: dict[torch._ops.OpOverload, Decomposition] = {}
_defaults_of: dict[frozenset[str], dict[Any, Decomposition]] = {}  # torch's last table, by operator names
_kept_whole: ContextVar[Callable[[Any], bool] | None] = ContextVar("_kept_whole", default=None)


@contextmanager
def keeping_whole(keep: Callable[[Any], bool]) -> Iterator[None]:
    """In the `with` block, operators for which `keep` holds are not decomposed."""
    token = _kept_whole.set(keep)
    try:
        yield
    finally:
        _kept_whole.reset(token)


class OperatorSet(MutableSet[torch._ops.OpOverload]):
    """A set of operators. Each is an overload, and in at most one of the two sets.

    A packet (`torch.ops.aten.gelu`) stands for all its overloads.
    """

    def __init__(self, name: str, check: Callable[[torch._ops.OpOverload], None] | None = None) -> None:
        self.name = name
        self.rival: OperatorSet | None = None
        self._check = check
        self._operators: dict[torch._ops.OpOverload, None] = {}  # keeps the order of insertion

    def add(self, value: Any) -> None:
        """Add an operator. LoweringError if it is not an operator, or is in the other set."""
        overloads = overloads_of(value)
        for overload in overloads:
            if self.rival is not None and overload in self.rival:
                raise LoweringError(
                    f"{overload} is in {self.rival.name}; take it out there before adding it to {self.name}"
                )
            if self._check is not None:
                self._check(overload)
        self._operators.update(dict.fromkeys(overloads))

    def update(self, values: Iterable[Any]) -> None:
        """Add several."""
        for value in values:
            self.add(value)

    def discard(self, value: Any) -> None:
        for overload in overloads_of(value):
            self._operators.pop(overload, None)

    def __contains__(self, value: object) -> bool:
        return value in self._operators

    def __iter__(self) -> Iterator[torch._ops.OpOverload]:
        return iter(self._operators)

    def __len__(self) -> int:
        return len(self._operators)

    def __repr__(self) -> str:
        return f"{self.name}{{{', '.join(str(op) for op in self)}}}"


def _check_known(overload: torch._ops.OpOverload) -> None:
    if overload not in _registered and _of_torch(overload) is None:
        raise LoweringError(
            f"torch has no decomposition of {overload}; write one with register_decomposition"
        )


torch_enabled_decompositions: OperatorSet = OperatorSet("torch_enabled_decompositions", _check_known)
torch_enabled_decompositions.__doc__ = "Operators that are decomposed even though they have a converter."
torch_disabled_decompositions: OperatorSet = OperatorSet("torch_disabled_decompositions")
torch_disabled_decompositions.__doc__ = "Operators that torch does not decompose."
torch_enabled_decompositions.rival = torch_disabled_decompositions
torch_disabled_decompositions.rival = torch_enabled_decompositions


def register_decomposition(
    *operators: Any, replace: bool = False
) -> Callable[[Decomposition], Decomposition]:
    """Register a function of torch operators as the decomposition of an operator.

    It takes precedence over torch's decomposition and over a converter of the operator. If the function
    returns NotImplemented, the call is not decomposed.

    >>> import torch
    >>> from intarsia.lower.decompositions import register_decomposition, unregister_decomposition
    >>> @register_decomposition(torch.ops.aten.logaddexp2.default)
    ... def logaddexp2(self, other):
    ...     return torch.log2(torch.exp2(self) + torch.exp2(other))
    >>> unregister_decomposition(torch.ops.aten.logaddexp2.default)
    """
    if not operators:
        raise LoweringError("register_decomposition needs the operator that is decomposed")
    overloads = [overload for operator in operators for overload in overloads_of(operator)]

    def decorate(function: Decomposition) -> Decomposition:
        for overload in overloads:
            if overload in _registered and not replace:
                raise LoweringError(
                    f"{overload} is decomposed by {_registered[overload].__name__} already;"
                    " pass replace=True to put this one in its place"
                )
        for overload in overloads:
            _registered[overload] = function
        return function

    return decorate


def unregister_decomposition(operator: Any) -> None:
    """Remove the registered decomposition of an operator."""
    registered = [overload for overload in overloads_of(operator) if overload in _registered]
    if not registered:
        raise LoweringError(f"no decomposition of {operator} is registered, so it cannot be removed")
    for overload in registered:
        del _registered[overload]


def decomposition_table(
    has_converter: Callable[[Any], bool] = lambda target: False,
) -> dict[Any, Decomposition]:
    """The rules in use: torch's defaults, without operators that have a converter, and the users' own."""
    keep = _kept_whole.get()
    table = _torch_defaults()
    for operator in (*_CHECKING, *torch_disabled_decompositions):
        table.pop(operator, None)
    for operator in torch_enabled_decompositions:
        rule = _of_torch(operator)
        if rule is not None:
            table[operator] = rule
    whole = {operator for operator in table if has_converter(operator)} - {*torch_enabled_decompositions}
    rules = {operator: rule for operator, rule in table.items() if operator not in whole} | _registered
    return rules if keep is None else {op: rule for op, rule in rules.items() if not keep(op)}


def composites_of(graph: fx.Graph, has_converter: Callable[[Any], bool]) -> dict[Any, Decomposition]:
    """Rules for the composite operators of a graph that have no converter.

    torch's table lacks those that make views, since it decomposes them whenever it traces.
    """
    keep = _kept_whole.get()
    whole = {*_CHECKING, *torch_disabled_decompositions}
    targets = {node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    rules = {
        target: composite_rule(target)
        for target in targets - whole
        if not target._schema.is_mutable and not has_converter(target) and not (keep and keep(target))
    }
    return {target: rule for target, rule in rules.items() if rule is not None}


def _torch_defaults() -> dict[Any, Decomposition]:
    """A copy of torch's default decompositions, including operators outside torch.

    torch looks through all operators of all namespaces when the table is read, which takes 0.1 s. The table
    is read again only if the dispatcher has other composite operators.
    """
    names = composite_names()
    if names is None:
        return {**torch.export.default_decompositions()}
    if names not in _defaults_of:
        defaults: dict[Any, Decomposition] = {**torch.export.default_decompositions()}
        _defaults_of.clear()
        _defaults_of[names] = defaults
    return dict(_defaults_of[names])


def composite_names() -> frozenset[str] | None:
    """Every operator that the dispatcher can decompose; None if this torch has no such list."""
    ask = getattr(torch._C, "_dispatch_get_registrations_for_dispatch_key", None)
    return None if ask is None else frozenset(ask("CompositeImplicitAutograd"))


def registered_decompositions() -> dict[Any, Decomposition]:
    """The rules that users registered."""
    keep = _kept_whole.get()
    return {op: rule for op, rule in _registered.items() if keep is None or not keep(op)}


def overloads_of(operator: Any) -> list[torch._ops.OpOverload]:
    """The overloads of an operator; for a packet, all that compute from tensors."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        names: list[str] = operator.overloads()  # type: ignore[no-untyped-call]
        overloads = [getattr(operator, name) for name in names]
        return [o for o in overloads if not o._schema.is_mutable and _takes_tensors(o)]
    raise LoweringError(f"{operator!r} is not an operator such as torch.ops.aten.gelu.default")


def _takes_tensors(overload: torch._ops.OpOverload) -> bool:
    # TorchScript's overloads on numbers and strings are never in a graph.
    return any("Tensor" in str(argument.type) for argument in overload._schema.arguments)


def _of_torch(operator: torch._ops.OpOverload) -> Decomposition | None:
    """torch's own decomposition of an operator, from its registry or from its composite kernel."""
    from torch._decomp import get_decompositions

    rule = get_decompositions([operator]).get(operator)
    return composite_rule(operator) if rule is None else rule


def composite_rule(operator: torch._ops.OpOverload) -> Decomposition | None:
    """The kernel that computes an operator by calls of others; None if it has none."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    name: str = operator.name()  # type: ignore[no-untyped-call]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, composite):
        return None

    def composite_kernel(*args: Any, **kwargs: Any) -> Any:
        # `operator.decompose` would look up the table while a program is decomposed, and find this function.
        return operator._op_dk(composite, *args, **kwargs)

    return composite_kernel
