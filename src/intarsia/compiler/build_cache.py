"""The build cache: a second compile of the same model, in any process, builds no engine.

The cache stores whole modules and not only engines' programs, so that a second compile neither compares,
measures nor converts. The model still runs on the examples: its answers are part of the key, so a stored
module is used only for a model that answers as the one it was compared with. The key is a digest of text: the
graph with its edges, arguments and weights, the process and the settings. The cache is off if the user has
converters, patterns, strategies or engines of their own, since no text says what those compute.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intarsia.archive.reader import open_bundle
from intarsia.archive.writer import MODEL, BundleWriter
from intarsia.build.judge import Example
from intarsia.cache.machine import digest, machine_key, package_version, processor_features
from intarsia.cache.store import Shelf, cache_directory
from intarsia.capture.annotate import wanted_engine
from intarsia.choose.findings import Findings, MeasuredPlan, measured_plan
from intarsia.choose.memory import argument_text
from intarsia.convert import registry
from intarsia.engines import Engine
from intarsia.errors import ArchiveError, IntarsiaError
from intarsia.graph.nodes import module_path, source_line
from intarsia.lower import Lowered
from intarsia.plain_tensors import plain_state
from intarsia.rewrite import RewritePatternManager
from intarsia.runtime.compiled import Compiled, Source
from intarsia.runtime.weights import tensor_digest

_FORMAT, _VERSION = "intarsia-build", 1
LEAST_S = 1.0  # a compile that took less is not stored: reading it back would take about as long
REUSED = "no engine was built: the build cache has an earlier compile of this model"


def cache_entry(
    lowered: Lowered, examples: Sequence[Example], engines: Sequence[Engine], settings: Sequence[Any]
) -> CacheEntry:
    """The cache entry of a compile.

    A stored build is reused only if all of these match: the lowered graph with its weights, the examples and
    what the model answers to them, engines, settings, versions and machine. Where one of them cannot be
    written as text, such as a strategy of the user's own, the entry has no key.
    """
    if Shelf(_folder()).limit <= 0 or _has_foreign_parts():
        return CacheEntry(None)
    answers = [(e.inputs, e.truth and (e.truth.leaves, e.truth.inputs, e.truth.buffers)) for e in examples]
    try:
        lines = [
            *of_process(),
            *_converters(),
            *of_lowered(lowered),
            *of_values(answers),
            *map(_engine_text, engines),
            *map(_text, settings),
        ]
    except (Unknowable, RuntimeError):  # the latter of a tensor without plain memory
        return CacheEntry(None)
    return CacheEntry(digest(*lines))


@dataclass(frozen=True)
class CacheEntry:
    """The place of one compile in the cache. Without a key it is always empty."""

    key: str | None

    def module(self, model: nn.Module | None, lowered: Lowered) -> Compiled | None:
        """The module that an earlier compile stored, over this model's weights; None if there is none."""
        if self.key is None or model is None:
            return None
        shelf = Shelf(_folder())
        path = shelf.find(self.key)
        if path is None:
            return None
        try:
            with warnings.catch_warnings(), open_bundle(path, _FORMAT, _VERSION) as bundle:
                warnings.simplefilter("error")  # a module that warns while it is read is built again
                assembly, notes = bundle.assembly(MODEL, lowered, plain_state(model.state_dict()))
                findings = bundle.manifest["findings"]
                if bundle.manifest["key"] != self.key:
                    raise ArchiveError("it is another compile's")
        except Exception:  # damaged, or removed by another process meanwhile: it is built again
            shelf.throw_out(self.key)
            return None
        source = Source(model, inspect.signature(model.forward))
        compiled = Compiled(lowered, assembly, source, [*notes, REUSED])
        if findings is not None:
            remembered = replace(Findings.from_dict(findings), remembered=True)
            compiled.plan = measured_plan(assembly.plan, remembered)
        return compiled

    def store(self, compiled: Compiled, compile_s: float) -> None:
        """Store a module, unless it compiled quickly, cannot be saved, or is too large."""
        shelf = Shelf(_folder())
        if self.key is None or compile_s < LEAST_S or not shelf.has_room(_bytes(compiled)):
            return
        plan, bundle = compiled.plan, BundleWriter()
        findings = plan.findings.as_dict() if isinstance(plan, MeasuredPlan) else None
        about = {"key": self.key, "findings": findings}
        try:
            bundle.add(MODEL, compiled)
            shelf.put(self.key, lambda path: bundle.write(path, _FORMAT, _VERSION, about))
        except IntarsiaError:
            return


def _folder() -> Path:
    return cache_directory() / "built"


def _bytes(compiled: Compiled) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in compiled.state_dict().values())


def _text(value: Any) -> str:
    """The text of a setting; Unknowable if the text would contain an address."""
    if callable(value) and not isinstance(value, type):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '<')}"
        if not name.startswith("intarsia.") or "<" in name:
            raise Unknowable(name)
        return name
    text = repr(value)
    if " at 0x" in text or "<function" in text or "object at" in text:
        raise Unknowable(text)
    return text


def _engine_text(engine: Engine) -> str:
    """An engine with its options and its version."""
    kind = type(engine)
    return f"{kind.__module__}.{kind.__qualname__} {engine.version()} {_text(engine.key())}"


def _has_foreign_parts() -> bool:
    """Whether converters or patterns that this package does not ship are registered."""
    if RewritePatternManager.instance().entries():
        return True
    return not all(one.shipped for target in registry.targets() for one in registry.converters(target))


def _converters() -> list[str]:
    """The converters in use; some may be switched off."""
    return sorted(
        f"{target} {[c.name for c in registry.converters(target)]}" for target in registry.targets()
    )


_PACKAGES = ("torch", "onnx", "onnx_ir", "numpy")  # engines state their own versions


def of_lowered(lowered: Lowered) -> Iterator[str]:
    """A graph as text, with everything that its results depend on.

    `choose.memory.contents` leaves out names and values, so that equal layers have one measured time.
    """
    yield from _graph(lowered.module)
    yield repr((lowered.inputs, lowered.outputs, lowered.in_spec, lowered.out_spec))
    yield repr((lowered.input_names, lowered.guards, lowered.notes))
    yield repr(sorted((str(symbol), str(known)) for symbol, known in lowered.range_constraints.items()))
    yield from _tensors(lowered.buffers.items())
    strides = lowered.module.meta.get("strides", {})
    yield repr(sorted((str(name), tuple(value)) for name, value in strides.items()))


def _graph(module: fx.GraphModule) -> Iterator[str]:
    held: list[tuple[str, torch.Tensor]] = []
    for node in module.graph.nodes:
        value = str(_described(node.meta.get("val")))
        where = (module_path(node), source_line(node), wanted_engine(node))
        yield repr((node.op, node.name, str(node.target), _argument(node.args), _argument(node.kwargs)))
        yield repr((value, where))
        if node.op == "get_attr":
            attribute = attrgetter(str(node.target))(module)
            if isinstance(attribute, torch.Tensor):
                held.append((str(node.target), attribute))
            elif isinstance(attribute, fx.GraphModule):
                yield from _graph(attribute)
            else:
                raise Unknowable(f"{node.target} is a {type(attribute).__name__}")
    yield from _tensors(held)


class Unknowable(Exception):
    """A value has no text that identifies it."""


def _argument(value: Any) -> str:
    return argument_text(value, lambda node: f"%{node.name}", _leaf)


def _leaf(value: Any) -> str:
    plain = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    if value is None or value is Ellipsis or isinstance(value, plain):
        return f"{type(value).__name__} {value!r}"
    raise Unknowable(f"an argument is a {type(value).__name__}")


def _described(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.dtype, str(value.device), *map(str, value.shape), "strides", *map(str, value.stride())
    return type(value).__name__, str(value)


def of_values(tree: Any) -> Iterator[str]:
    """The values of a tree and their structure as text; tensors by a digest of their contents."""
    leaves, structure = pytree.tree_flatten(tree)
    yield repr(structure)
    tensors = [(str(place), leaf) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    yield from _tensors(tensors)
    yield from (_argument(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))


def _tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    items = list(named)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # hashlib releases the GIL
        yield from pool.map(lambda item: f"{item[0]}: {_tensor(item[1])}", items)


def _tensor(tensor: torch.Tensor) -> str:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise Unknowable(f"a tensor of layout {tensor.layout} on {tensor.device}")
    return f"{tensor.stride()} {tensor_digest(tensor)}"


def of_process() -> Iterator[str]:
    """This machine, its versions, and the settings that change what torch computes, as text."""
    yield f"{machine_key()}, {processor_features()}, {_sources()}"
    yield ", ".join(f"{name} {package_version(name)}" for name in _PACKAGES)
    settings = sorted(item for item in os.environ.items() if item[0].startswith(("INTARSIA_", "ORT_", "OV_")))
    yield repr([item for item in settings if not item[0].startswith("INTARSIA_CACHE")])
    yield repr(
        (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            torch.get_default_dtype(),
            torch.backends.mha.get_fastpath_enabled(),
        )
    )


@functools.cache
def _sources() -> str:
    """A digest of this package's own files, since an installed version may be edited in place."""
    root = Path(__file__).parents[1]
    files = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns) for p in root.rglob("*.py")]
    return digest(repr(sorted(files)))
