"""Random numbers by key: a place of a model draws from generators seeded by (seed, step, micro-batch, place).

A place is a drawing node of an exported graph, by its number ("draw 3"), or a layer that a pipeline calls,
by its name. Its draws depend on nothing else: not on the order in which stages run, nor on rank, cut or
schedule; what is computed again draws the same again. The default generators themselves are seeded, so that
`torch.utils.checkpoint`, `fork_rng` and `manual_seed` inside a layer do what they do without a pipeline;
afterwards they are put back.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from intarsia.pipeline.gpipe.generators import CPU, holding, moving_generator, seeded

Devices = frozenset[torch.device]


@dataclass(frozen=True)
class RandomKey:
    """What the random numbers of one micro-batch depend on.

    >>> RandomKey(seed=0, step=1).of(2).at("h.0") == RandomKey(0, 1, 2).at("h.0")
    True
    """

    seed: int
    step: int = 0
    micro_batch: int = 0
    # Shared by the micro-batches of a run: not empty once something has drawn.
    drawn: set[str] = field(default_factory=set, compare=False)

    def of(self, micro_batch: int) -> RandomKey:
        """The key of a micro-batch of the same run."""
        return replace(self, micro_batch=micro_batch)

    def at(self, place: str) -> int:
        """The seed of a place. A digest, since the seeds of neighbours must have nothing in common."""
        text = f"{self.seed} {self.step} {self.micro_batch} {place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


_key: ContextVar[RandomKey | None] = ContextVar("random key", default=None)


def current_key() -> RandomKey | None:
    """The key that places draw by now. None: they draw from the default generators as they stand."""
    return _key.get()


@contextmanager
def using_key(key: RandomKey | None) -> Iterator[None]:
    """Let places draw by a key."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


# What draws, by the operators that run.


def draws_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How often an operator draws: attention without dropout, say, may draw and does not.

    `lower.purity.draws` asks only whether it does, by any generator; GPipe imports nothing of the compiler.

    >>> x = torch.ones(2)
    >>> [draws_of(torch.ops.aten.dropout.default, (x, p, True), {}) for p in (0.0, 0.5)]
    [0, 1]
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return 0
    names = [argument.name for argument in op._schema.arguments]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    if values.get("generator") is not None:  # the model's own
        return 0
    drops = "dropout" in op._schema.name
    chances = [values[n] for n in ("dropout_p", "dropout", "p") if n in values and (n != "p" or drops)]
    if values.get("train", True) is False or values.get("training", True) is False:
        return 0
    if 0 in chances or (drops and 1 in chances):
        return 0
    if "num_layers" in values:  # a recurrent network drops between its layers
        return int(values["num_layers"]) - 1 if chances else 0
    return 0 if "dropout_p" in names and not chances else 1


def _device_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
    """The device an operator draws on: the one it names, or that of its first tensor."""
    named = kwargs.get("device")
    if named is None:
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        named = next((x.device for x in tensors), torch.get_default_device())
    return _indexed(torch.device(named))


def _indexed(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class _DrawMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `draw` in place of every operator that draws."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without torch's wrapper that keeps dynamo out: it imports dynamo, seconds in the first run."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        count = draws_of(func, args, kwargs or {})
        return self.draw(count, func, args, kwargs or {}) if count else func(*args, **(kwargs or {}))

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives."""
        raise NotImplementedError


class SeenDraws(_DrawMode):
    """Notes how often something draws, and on which devices; what is keyed inside does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0
        self.devices: set[Any] = set[torch.device]()
        self._hold = holding()

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives."""
        if holding() is self._hold:
            self.count += count
            self.devices.add(_device_of(func, args, kwargs))
        return func(*args, **kwargs)


class _NumberedDraws(_DrawMode):
    """Every draw is a place by itself, and they are numbered from `number`."""

    def __init__(self, key: RandomKey, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.number = key, number

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives."""
        place, self.number = f"draw {self.number}", self.number + count
        self.key.drawn.add(place)
        with seeded(self.key.at(place), [_device_of(func, args, kwargs)]):
            return func(*args, **kwargs)


# Places.


def keyed_draw(op: Any, number: int, count: int, *args: Any, **kwargs: Any) -> Any:
    """A node of a graph that draws: `count` draws of the model, the first of which has a number."""
    proxy = next((x for x in (*args, *kwargs.values()) if isinstance(x, fx.Proxy)), None)
    if proxy is not None:  # a graph that was saved is traced again when it is loaded
        return proxy.tracer.create_proxy("call_function", keyed_draw, (op, number, count, *args), kwargs)
    key = current_key()
    if key is None:
        return op(*args, **kwargs)
    if count > 1:
        with _NumberedDraws(key, number):
            return op(*args, **kwargs)
    place = f"draw {number}"
    key.drawn.add(place)
    with seeded(key.at(place), [_device_of(op, args, kwargs)]):
        return op(*args, **kwargs)


def numbered_draws(number: int) -> Any:
    """A context in which draws are places by themselves, numbered from `number`, if there is a key."""
    key = current_key()
    return nullcontext() if key is None else _NumberedDraws(key, number)


# The devices on which layers drew in the mode (training or not, by module) they were last seen in.
_layers: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[bool, ...], Devices]] = weakref.WeakKeyDictionary()


def call_layer(layer: nn.Module, place: str, *args: Any, **kwargs: Any) -> Any:
    """Call a layer that is a place: its draws start from its key.

    Whether it draws is seen in its first call in each mode, so that others cost nothing, and stages on the
    CPU run at the same time. A layer with `keys_draws = True` has places of its own; in others there is no
    key, and a pipeline in one of them draws its key from the generator that was seeded for the layer.
    """
    key = current_key()
    if key is None or getattr(layer, "keys_draws", False):
        return layer(*args, **kwargs)
    mode = tuple(module.training for module in layer.modules())
    known = _layers.get(layer)
    with using_key(None):
        if known is not None and known[0] == mode:
            if not known[1]:
                return layer(*args, **kwargs)
            key.drawn.add(place)
            with seeded(key.at(place), known[1]):
                return layer(*args, **kwargs)
        with seeded(key.at(place), _devices(layer, args)), SeenDraws() as seen:
            output = layer(*args, **kwargs)
    _layers[layer] = mode, frozenset(seen.devices)
    if seen.devices:
        key.drawn.add(place)
    return output


def _devices(layer: nn.Module, args: tuple[Any, ...]) -> set[torch.device]:
    """The devices on which a layer may draw."""
    tensors = (*layer.parameters(), *layer.buffers(), *tree_leaves(args))
    devices = {CPU, *(_indexed(x.device) for x in tensors if isinstance(x, Tensor))}
    return {device for device in devices if device.type in ("cpu", "cuda")}


def forget_layers(modules: Collection[nn.Module]) -> None:
    """Look again whether these layers draw, when they are called next."""
    for module in modules:
        _layers.pop(module, None)


@contextmanager
def key_of_run() -> Iterator[RandomKey]:
    """The key of a run of a pipeline: the one in use, or one drawn from the caller's default generator.

    The generator then stands one number further on, or where it stood if nothing drew. So `manual_seed` makes
    runs repeatable, and a run that is computed again under `torch.utils.checkpoint` is the same.
    """
    current = current_key()
    if current is not None:
        yield current
        return
    generator = torch.default_generator
    with moving_generator():
        before = generator.get_state()
        key = RandomKey(int(torch.randint(0, 2**62, (), device="cpu")))
        after = generator.get_state()
    yield key
    if not key.drawn:
        with moving_generator():
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)


# The plain loop.


@contextmanager
def keyed_random(
    seed: int, step: int = 0, micro_batch: int = 0, layers: Mapping[str, nn.Module] | None = None
) -> Iterator[None]:
    """Draw by key: in a plain loop what a pipeline draws, and in a pipeline what a plain loop draws.

    For a plain model run the forward and the backward pass of one micro-batch inside, and nothing else that
    draws. `layers` names the modules whose draws start from their own key, as `GPipe` and stages cut along
    the module tree have it (`pipe.layers(model)`); in models cut by the graph every draw has a key, and
    there are none. The default generators are afterwards what they were before. One thread may be inside at
    a time.

    >>> dropout = nn.Dropout(0.5)
    >>> with keyed_random(seed=0, step=3):
    ...     first = dropout(torch.ones(8))
    >>> with keyed_random(seed=0, step=3):
    ...     torch.equal(first, dropout(torch.ones(8)))
    True
    """
    key = RandomKey(seed, step, micro_batch)
    plain = _PlainDraws(key)
    state = torch.get_rng_state()
    with ExitStack() as stack:
        stack.callback(torch.set_rng_state, state)
        for name, layer in (layers or {}).items():
            stack.callback(layer.register_forward_pre_hook(plain.enter(name)).remove)
            stack.callback(layer.register_forward_hook(plain.leave, always_call=True).remove)
        stack.enter_context(using_key(key))
        stack.enter_context(plain)
        torch.default_generator.manual_seed(plain.base)
        yield


class _PlainDraws(_NumberedDraws):  # type: ignore[no-untyped-call]
    """The places of a plain model, one after the other.

    The CPU generator's seed says at which place the model is. `torch.utils.checkpoint` and `fork_rng` put it
    back, and what runs again finds its places. Where it says something else, a layer draws from its own key,
    or the model has seeded the generator: then draws are what they are.
    """

    def __init__(self, key: RandomKey) -> None:
        super().__init__(key, 0)
        self.base = key.at("plain") & ~0xFFFFF
        self.places: list[str] = []
        self.calls: dict[str, int] = {}
        self.open: list[ExitStack] = []

    def _next(self, new: Callable[[], str]) -> str | None:
        number = torch.initial_seed() - self.base
        if not 0 <= number <= len(self.places):
            return None
        if number == len(self.places):
            self.places.append(new())
        torch.default_generator.manual_seed(self.base + number + 1)
        return self.places[number]

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives."""

        def new() -> str:
            self.number += count
            return f"draw {self.number - count}"

        place = self._next(new)
        if place is None:
            return func(*args, **kwargs)
        with seeded(self.key.at(place), [_device_of(func, args, kwargs)]):
            return func(*args, **kwargs)

    def enter(self, name: str) -> Callable[..., None]:
        """What to do before a layer runs."""

        def new() -> str:
            number = self.calls[name] = self.calls.get(name, -1) + 1
            return layer_place(name, number)

        def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
            place, stack = self._next(new), ExitStack()
            if place is not None:
                stack.enter_context(seeded(self.key.at(place), _devices(layer, args)))
            self.open.append(stack)

        return before

    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """What to do when it has run."""
        self.open.pop().close()


def layer_place(name: str, number: int) -> str:
    """The place of a layer that is called for the nth time in one forward pass."""
    return f"{name}#{number}" if number else name
