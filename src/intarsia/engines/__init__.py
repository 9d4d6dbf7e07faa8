"""The engines that run a piece: those of this package, and those that other packages add."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
from collections.abc import Iterable, Sequence

from intarsia.engines.base import Engine as Engine
from intarsia.engines.base import GraphEngine as GraphEngine
from intarsia.engines.base import GrowingFile as GrowingFile
from intarsia.engines.base import GuardedProgram as GuardedProgram
from intarsia.engines.base import NetworkEngine as NetworkEngine
from intarsia.engines.base import Packed as Packed
from intarsia.engines.base import Program as Program
from intarsia.engines.base import RuntimeFile as RuntimeFile
from intarsia.engines.base import WeightFile as WeightFile
from intarsia.engines.base import Workload as Workload
from intarsia.engines.inductor.engine import Inductor as Inductor
from intarsia.engines.mnn.engine import MNN as MNN
from intarsia.engines.mnn.engine import MNNFp16 as MNNFp16
from intarsia.engines.onnxruntime.engine import OnnxRuntime as OnnxRuntime
from intarsia.engines.onnxruntime.short import OnnxRuntimeInt4Weights as OnnxRuntimeInt4Weights
from intarsia.engines.onnxruntime.short import OnnxRuntimeInt8 as OnnxRuntimeInt8
from intarsia.engines.onnxruntime.short import OnnxRuntimeInt8Weights as OnnxRuntimeInt8Weights
from intarsia.engines.openvino.engine import OpenVINO as OpenVINO
from intarsia.engines.openvino.short import OpenVINOBf16 as OpenVINOBf16
from intarsia.engines.openvino.short import OpenVINOFp16 as OpenVINOFp16
from intarsia.engines.openvino.short import OpenVINOInt4Weights as OpenVINOInt4Weights
from intarsia.engines.openvino.short import OpenVINOInt8 as OpenVINOInt8
from intarsia.engines.openvino.short import OpenVINOInt8Weights as OpenVINOInt8Weights
from intarsia.engines.pytorch import CuDNN as CuDNN
from intarsia.engines.pytorch import PyTorch as PyTorch
from intarsia.errors import EngineError, error_text

ENTRY_POINTS = "intarsia.engines"
# In the order they are asked. Engines of other packages come after the first two.
_FIRST: tuple[type[Engine], ...] = (OpenVINO, OnnxRuntime)
_LAST: tuple[type[Engine], ...] = (
    OpenVINOInt8,
    OpenVINOBf16,
    OpenVINOFp16,
    OnnxRuntimeInt8,
    OnnxRuntimeInt8Weights,
    OpenVINOInt8Weights,
    OnnxRuntimeInt4Weights,
    OpenVINOInt4Weights,
    MNNFp16,
    MNN,
    Inductor,
    CuDNN,
    PyTorch,
)


def known_engines() -> dict[str, type[Engine]]:
    """Engines by name, in the order they are asked; other packages add theirs by an entry point."""
    return _load_engines()[0]


def short_engines() -> dict[str, type[Engine]]:
    """The known engines of shorter arithmetic than the model's own: used by name, or within a tolerance."""
    return {name: kind for name, kind in known_engines().items() if kind.arithmetic != "fp32"}


def _load_engines() -> tuple[dict[str, type[Engine]], dict[str, str]]:
    """The known engines, and engines of other packages that could not be loaded, each with the reason."""
    engines = {kind.name: kind for kind in _FIRST}
    shipped = {kind.name for kind in (*_FIRST, *_LAST)}
    broken: dict[str, str] = {}
    for entry in _entry_points(tuple(sys.path)):
        try:
            kind = entry.load()
            if kind.name not in shipped:
                engines.setdefault(kind.name, kind)
        except Exception as error:  # another package's mistake must not cost the engines that work
            broken[entry.name] = f"{entry.value} could not be loaded: {error_text(error)}"
    return engines | {kind.name: kind for kind in _LAST}, broken


@functools.lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The engines of packages on this path; reading all their metadata again took 7 % of a small compile."""
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))


def default_engines(device: str = "cpu", notes: list[str] | None = None) -> list[Engine]:
    """The engines asked when none is named, for a model on this kind of device, in that order."""
    engines: list[Engine] = []
    for name, kind in known_engines().items():
        try:
            if kind.is_default(device):
                engines.append(kind())
        except Exception as error:
            if notes is not None:
                notes.append(f"{name}: it could not be created: {error_text(error)}")
    return engines


def resolve_engines(
    asked: Sequence[Engine | str] | Engine | str | None, device: str = "cpu"
) -> tuple[list[Engine], list[str]]:
    """The engines to use, PyTorch last, and a sentence for each that this machine lacks.

    An engine asked for by the user and unavailable is an error; for a default engine it is a note.
    """
    known, broken = _load_engines()
    notes: list[str] = []
    if asked is None:
        notes += [f"{name}: {reason}" for name, reason in broken.items()]
        engines = default_engines(device, notes)
    else:
        if isinstance(asked, type) or not isinstance(asked, Engine | str | Iterable):
            raise EngineError(f"engines={asked!r}; pass engines or their names, e.g. ['openvino']")
        listed = [asked] if isinstance(asked, Engine | str) else list(asked)
        if any(isinstance(item, str) and item not in known and item not in broken for item in listed):
            _entry_points.cache_clear()  # it may have been installed meanwhile
            known, broken = _load_engines()
        engines = [_make(item, known, broken) for item in listed]
    usable: list[Engine] = []
    for engine in engines:
        reason = _unavailable(engine)
        if reason is None:
            usable.append(engine)
        elif asked is None:
            notes.append(f"{engine.name}: {reason}")
        else:
            raise EngineError(f"engine {engine.name!r} cannot be used: {reason}")
    names = [engine.name for engine in usable]
    for name in names:
        if names.count(name) > 1:
            raise EngineError(f"engine {name!r} is named twice")
    pytorch = next((engine for engine in usable if engine.name == "pytorch"), PyTorch())
    return [*(engine for engine in usable if engine is not pytorch), pytorch], notes


def with_unasked_engines(usable: Sequence[Engine], device: str, model: object = None) -> list[Engine]:
    """All available engines, including those that a fixed order omits, PyTorch last: timing decides.

    With a model, only the engines that may be faster for it.
    """
    names = [engine.name for engine in usable]
    others: list[Engine] = []
    for name, kind in known_engines().items():
        if name in names or kind.arithmetic != "fp32":
            continue
        with contextlib.suppress(Exception):  # an engine that cannot be made without options is not tried
            engine = kind()
            is_wanted = model is None or engine.may_pay(model)
            if is_wanted and engine.runs_on(device) and _unavailable(engine) is None:
                others.append(engine)
    return [*usable[:-1], *others, *usable[-1:]]


def with_short_engines(
    usable: Sequence[Engine], arithmetic: Sequence[str]
) -> tuple[list[Engine], dict[str, str]]:
    """The engines, with those in shorter arithmetic before PyTorch; and why others are missing."""
    wrong = [engine for engine in usable if not (engine.is_exact or engine.arithmetic in arithmetic)]
    usable = [engine for engine in usable if engine not in wrong]
    names = [engine.name for engine in usable]
    siblings = [
        kind()
        for name, kind in short_engines().items()
        if kind.arithmetic in arithmetic and kind.based_on in names and name not in names
    ]
    missing = {engine.name: reason for engine in siblings if (reason := _unavailable(engine)) is not None}
    engines = [*usable[:-1], *(e for e in siblings if e.name not in missing), *usable[-1:]]
    precision = ", ".join(arithmetic)
    missing |= {e.name: f"it computes in {e.arithmetic}, and precision is {precision}" for e in wrong}
    if not missing and all(engine.is_exact for engine in engines):
        missing[precision] = "none of the named engines computes in it"
    return engines, missing


def _unavailable(engine: Engine) -> str | None:
    try:
        return engine.unavailable()
    except Exception as error:
        return f"the check whether it is available failed: {error_text(error)}"


def _make(item: Engine | str, known: dict[str, type[Engine]], broken: dict[str, str]) -> Engine:
    if isinstance(item, Engine):
        return item
    if item in broken:
        raise EngineError(f"engine {item!r} cannot be used: {broken[item]}")
    if item not in known:
        raise EngineError(f"there is no engine {item!r}; known are {', '.join(known)}")
    return known[item]()
