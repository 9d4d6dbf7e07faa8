"""Random numbers by key: a place of a model draws from generators seeded by (seed, step, micro-batch, place).

A place is a node of an exported graph that draws, by its number ("draw 3"), or a layer that a pipeline calls,
by its name. So draws do not depend on the order of stages, nor on rank, cut or schedule, and a recomputation
draws the same numbers. The default generators are seeded and later restored, so `torch.utils.checkpoint`,
`fork_rng` and `manual_seed` work inside a layer as they do without a pipeline.
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

from intarsia.pipeline.gpipe.generators import CPU, changing_generator, generator_locks, seeded
from intarsia.pipeline.gpipe.stream import indexed

Devices = frozenset[torch.device]


@dataclass(frozen=True)
class RandomKey:
    """The key of the random numbers of one micro-batch.

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
        """The seed of a place. It is a digest, so that the seeds of neighbours are unrelated."""
        text = f"{self.seed} {self.step} {self.micro_batch} {place}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


_key: ContextVar[RandomKey | None] = ContextVar("random key", default=None)


def current_key() -> RandomKey | None:
    """The key in use. None: places draw from the default generators in their present state."""
    return _key.get()


@contextmanager
def using_key(key: RandomKey | None) -> Iterator[None]:
    """Make places draw by a key."""
    token = _key.set(key)
    try:
        yield
    finally:
        _key.reset(token)


def draws_of(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The number of draws of an operator call; 0, for example, for attention without dropout.

    `lower.purity.draws` asks only whether it does, by any generator; GPipe imports nothing of the compiler.

    >>> x = torch.ones(2)
    >>> [draws_of(torch.ops.aten.dropout.default, (x, p, True), {}) for p in (0.0, 0.5)]
    [0, 1]
    """
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return 0
    names = [argument.name for argument in op._schema.arguments]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    if values.get("generator") is not None:  # the model draws from a generator of its own
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
    """The device on which an operator draws: its `device` argument, or the device of its first tensor."""
    device = kwargs.get("device")
    if device is None:
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        device = next((x.device for x in tensors), torch.get_default_device())
    return indexed(torch.device(device))


class DrawMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `draw` in place of every operator that draws."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's wrapper that disables dynamo imports it, which takes seconds in the first run."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        count = draws_of(func, args, kwargs or {})
        return self.draw(count, func, args, kwargs or {}) if count else func(*args, **(kwargs or {}))

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result."""
        raise NotImplementedError


class SeenDraws(DrawMode):
    """Counts draws and collects their devices. Draws by a key inside do not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0
        self.devices: set[Any] = set[torch.device]()
        self._locks = generator_locks()

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result."""
        if generator_locks() is self._locks:
            self.count += count
            self.devices.add(_device_of(func, args, kwargs))
        return func(*args, **kwargs)


class _NumberedDraws(DrawMode):
    """Every draw is a place; places are numbered from `number`."""

    def __init__(self, key: RandomKey, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.number = key, number

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result."""
        place, self.number = f"draw {self.number}", self.number + count
        self.key.drawn.add(place)
        with seeded(self.key.at(place), [_device_of(func, args, kwargs)]):
            return func(*args, **kwargs)


def keyed_draw(op: Any, number: int, count: int, *args: Any, **kwargs: Any) -> Any:
    """The result of a node that draws `count` times; `number` is the number of the first draw."""
    proxy = next((x for x in (*args, *kwargs.values()) if isinstance(x, fx.Proxy)), None)
    if proxy is not None:  # a saved graph is traced again when it is loaded
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
    """A context in which every draw is a place, numbered from `number`, if there is a key."""
    key = current_key()
    return nullcontext() if key is None else _NumberedDraws(key, number)


# For each layer, its mode (training or not, by module) in the last observed call, and the devices it drew on.
_layers: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[bool, ...], Devices]] = weakref.WeakKeyDictionary()


def call_layer(layer: nn.Module, place: str, *args: Any, **kwargs: Any) -> Any:
    """Call a layer that is a place: its draws start from its key.

    The first call in each mode observes whether the layer draws. Layers that do not draw need no generators,
    so stages on the CPU run at the same time. A layer with `keys_draws = True` has places of its own. Inside
    other layers there is no key: a pipeline there draws its key from the generator seeded for the layer.
    """
    key = current_key()
    if key is None or getattr(layer, "keys_draws", False):
        return layer(*args, **kwargs)
    mode = tuple(module.training for module in layer.modules())
    observed_mode, devices = _layers.get(layer, (None, frozenset()))
    with using_key(None):
        if observed_mode == mode:
            if not devices:
                return layer(*args, **kwargs)
            key.drawn.add(place)
            with seeded(key.at(place), devices):
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
    devices = {CPU, *(indexed(x.device) for x in tensors if isinstance(x, Tensor))}
    return {device for device in devices if device.type in ("cpu", "cuda")}


def forget_layers(modules: Collection[nn.Module]) -> None:
    """Observe these layers again at their next call."""
    for module in modules:
        _layers.pop(module, None)


@contextmanager
def key_of_run() -> Iterator[RandomKey]:
    """The key of a run of a pipeline: the key in use, or one drawn from the caller's default generator.

    If nothing draws by the key, the generator is restored. So `manual_seed` makes runs repeatable, and a
    recomputation under `torch.utils.checkpoint` draws the same numbers.
    """
    current = current_key()
    if current is not None:
        yield current
        return
    generator = torch.default_generator
    with changing_generator():
        before = generator.get_state()
        key = RandomKey(int(torch.randint(0, 2**62, (), device="cpu")))
        after = generator.get_state()
    yield key
    if not key.drawn:
        with changing_generator():
            if torch.equal(generator.get_state(), after):
                generator.set_state(before)


@contextmanager
def keyed_random(
    seed: int, step: int = 0, micro_batch: int = 0, layers: Mapping[str, nn.Module] | None = None
) -> Iterator[None]:
    """Draw by key, so that a plain loop and a pipeline draw the same numbers.

    For a plain model, run the forward and the backward pass of one micro-batch inside, and nothing else that
    draws. `layers` names the modules whose draws start from a key of their own: `pipe.layers(model)` for
    `GPipe` and for stages cut along modules. Models cut by the graph need none, since every draw has a key.
    The default generators are restored at the end. Only one thread may be inside.

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

    The seed of the CPU generator is the number of the place. `torch.utils.checkpoint` and `fork_rng` restore
    it, so a recomputation has the same places. If the seed is not a number of a place, a layer draws by its
    own key, or the model has seeded the generator: then draws stay as they are.
    """

    def __init__(self, key: RandomKey) -> None:
        super().__init__(key, 0)
        self.base = key.at("plain") & ~0xFFFFF
        self.places: list[str] = []
        self.calls: dict[str, int] = {}
        self.open: list[ExitStack] = []

    def _next(self, new_place: Callable[[], str]) -> str | None:
        number = torch.initial_seed() - self.base
        if not 0 <= number <= len(self.places):
            return None
        if number == len(self.places):
            self.places.append(new_place())
        torch.default_generator.manual_seed(self.base + number + 1)
        return self.places[number]

    def draw(self, count: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result."""

        def new_place() -> str:
            self.number += count
            return f"draw {self.number - count}"

        place = self._next(new_place)
        if place is None:
            return func(*args, **kwargs)
        with seeded(self.key.at(place), [_device_of(func, args, kwargs)]):
            return func(*args, **kwargs)

    def enter(self, name: str) -> Callable[..., None]:
        """A forward pre-hook that seeds the generators for the layer `name`."""

        def new_place() -> str:
            number = self.calls[name] = self.calls.get(name, -1) + 1
            return layer_place(name, number)

        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            place, stack = self._next(new_place), ExitStack()
            if place is not None:
                stack.enter_context(seeded(self.key.at(place), _devices(layer, args)))
            self.open.append(stack)

        return hook

    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A forward hook that restores the generators."""
        self.open.pop().close()


def layer_place(name: str, number: int) -> str:
    """The place of a layer in its call `number` (from 0) of one forward pass."""
    return f"{name}#{number}" if number else name
