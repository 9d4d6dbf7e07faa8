"""A model run for its answer alone: what a run changes, in it or in random generators, is put back."""

from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from intarsia.capture.example import Call, copied_call
from intarsia.checkpoint.linear import QuantizedLinear
from intarsia.errors import CaptureError
from intarsia.plain_tensors import plain_tensors

# Weights, submodules, and hooks, which a model may install when it is first run (transformers' models do).
_TABLES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, dict))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; each submodule's own mode comes back after."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
    except Exception:  # such as an exported module, whose mode is part of its graph
        for module in modes:
            module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


# Large integers that a run did not write to, and their version then: weights in few bits, mostly. Until they
# are written to, a further run of the model is not preceded by a copy of them. A copy took as much memory as
# the model at each run, and all the time while plans were measured.
_READ_ONLY: MutableMapping[torch.Tensor, int] = WeakTensorKeyDictionary()
_LARGE = 1 << 18  # bytes
_SHORT = frozenset({torch.int8, torch.uint8, torch.int32})


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """The model in evaluation, without gradients; its attributes, its buffers and the random state come back.

    Attributes that are replaced come back, and tensors that are written to; a list or another object that a
    model appends to in `forward` is not restored, just as capture does not see it.

    What it yields gives what a tensor of the model holds, for use after its end: a copy if that has changed.
    CaptureError if integers of many bytes change that an earlier run has left alone.
    """
    # The tables of TorchScript's modules are no dictionaries.
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [_attributes(module) for module in modules]
    state = _state(modules)
    for buffer in (b for m in modules if isinstance(m, QuantizedLinear) for b in m._buffers.values()):
        if buffer is not None and _is_large_integers(buffer):
            _READ_ONLY.setdefault(buffer, buffer._version)  # no run of these layers writes to them
    written = [(t, t.detach().clone(), _count(t)) for t in state if not _is_read_only(t)]
    copies = {id(tensor): (before, count) for tensor, before, count in written}
    read_only = {id(tensor): tensor for tensor in state if id(tensor) not in copies}

    def held(tensor: torch.Tensor) -> torch.Tensor:
        before, count = copies.get(id(tensor), (None, None))
        same = id(tensor) in read_only or (before is not None and not _is_written(tensor, before, count))
        return tensor.detach() if same else tensor.detach().clone()

    devices = [*range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    try:
        with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield held
    finally:
        for module, (plain, tables) in zip(modules, attributes, strict=True):
            _restore(module.__dict__, plain)
            for name, table in tables.items():
                _restore(module.__dict__[name], table)
        with torch.no_grad():
            for tensor, before, count in written:
                if _is_written(tensor, before, count):
                    tensor.copy_(before)
                elif _is_large_integers(tensor):
                    _READ_ONLY[tensor] = tensor._version
    if not all(map(_is_read_only, read_only.values())):
        raise CaptureError(
            "the model writes to a large buffer of integers that it did not write to in an earlier run"
        )


def initialized(model: Any, call: Call) -> list[str]:
    """Run a model with lazy modules on the example, as its first call would: they get weights of its shapes.

    Returns notes.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        return []
    lazy = [path for path, module in model.named_modules() if any(map(is_lazy, _weights(module)))]
    if not lazy:
        return []
    args, kwargs = copied_call(call)
    try:
        with evaluating(model), torch.no_grad():
            model(*args, **kwargs)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} fails on the example itself: {type(error).__name__}: {error}"
        ) from error
    return [f"{', '.join(lazy) or 'the model'} had no weights yet: a run on the example initialized them"]


def _weights(module: nn.Module) -> list[Any]:
    return [*module._parameters.values(), *module._buffers.values()]


def _attributes(module: nn.Module) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    tables = {name: dict(module.__dict__[name]) for name in _TABLES if name in module.__dict__}
    return dict(module.__dict__), tables


def _restore(live: dict[str, Any], before: dict[str, Any]) -> None:
    if live.keys() == before.keys() and all(live[name] is value for name, value in before.items()):
        return
    live.clear()
    live.update(before)


def _state(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Buffers, and tensors kept as plain attributes: what a model may write to in evaluation."""
    held = [value for m in modules for value in (*m._buffers.values(), *m.__dict__.values())]
    by_identity = {id(t): t for t in held if isinstance(t, torch.Tensor) and not t.is_meta}
    return [part for tensor in by_identity.values() for part in plain_tensors(tensor)]


def _is_large_integers(tensor: torch.Tensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_inference()  # the others have no version
    return is_plain and tensor.dtype in _SHORT and tensor.nbytes >= _LARGE


def _is_read_only(tensor: torch.Tensor) -> bool:
    return _is_large_integers(tensor) and _READ_ONLY.get(tensor) == tensor._version


def _is_written(tensor: torch.Tensor, before: torch.Tensor, count: int | None) -> bool:
    return _count(tensor) != count or (count is None and not _identical(tensor, before))


def _count(tensor: torch.Tensor) -> int | None:
    """How often a tensor that cannot be compared element by element (a sparse one) was written to."""
    return None if tensor.layout is torch.strided else tensor._version


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a == b
    return bool(torch.all(same | (a != a) & (b != b) if a.is_floating_point() else same))


P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def kept_random_state() -> Iterator[None]:
    """A context that restores the random generators of torch, numpy and Python at its end."""
    numpy = sys.modules.get("numpy")  # torch works without it, and unimported it has drawn nothing
    python_state = random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [*range(torch.cuda.device_count())] if started else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def keeps_random_state(function: Callable[P, T]) -> Callable[P, T]:
    """The function, under `kept_random_state`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with kept_random_state():
            return function(*args, **kwargs)

    return wrapper


def shared_copy(model: nn.Module) -> nn.Module:
    """The tree of modules copied, in evaluation mode; weights and TorchScript's modules are shared."""
    copies: dict[int, nn.Module] = {}

    def copied(module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in copies:
            twin = copies[id(module)] = module.__class__.__new__(module.__class__)
            twin.__dict__.update(module.__dict__)
            for table in _TABLES:
                if table in module.__dict__:
                    twin.__dict__[table] = module.__dict__[table].copy()
            twin.__dict__["_modules"] = {
                name: child if child is None else copied(child) for name, child in module._modules.items()
            }
            twin.training = False
            if inspect.ismethod(own := module.__dict__.get("forward")) and own.__self__ is module:
                twin.__dict__["forward"] = own.__func__.__get__(twin)
        return copies[id(module)]

    with evaluating(model):  # a module may do more in eval() than set a flag
        return copied(model)
