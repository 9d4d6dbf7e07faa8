"""The build cache: a second compile of the same model, in any process, builds no engine.

Whole modules are kept, by the lowered graph: engines alone would leave out comparing, measuring and
converting. The model runs on the examples every time, and its answers are part of the key, so what was
verified is what is used. Converters, patterns, strategies and engines of a user turn it off, since their text
does not tell what they do.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from intarsia.archive.reader import open_bundle
from intarsia.archive.writer import MODEL, BundleWriter
from intarsia.build.faithful import Example
from intarsia.cache.machine import digest
from intarsia.cache.store import Shelf, cache_directory
from intarsia.choose.findings import Findings
from intarsia.choose.plan import MeasuredPlan, measured_plan
from intarsia.compiler.fingerprint import Unknowable, of_lowered, of_process, of_values
from intarsia.convert import registry
from intarsia.engines import Engine
from intarsia.errors import ArchiveError, IntarsiaError
from intarsia.lower import Lowered
from intarsia.plain_tensors import plain_state
from intarsia.rewrite import RewritePatternManager
from intarsia.runtime.compiled import Compiled, Source
from intarsia.runtime.inlay import Assembly

_FORMAT, _VERSION = "intarsia-build", 1
LEAST_S = 1.0  # a compile that took less is not stored: reading it back would take about as long
REUSED = "no engine was built: the build cache has an earlier compile of this model"


def cache_entry(
    lowered: Lowered, examples: Sequence[Example], engines: Sequence[Engine], settings: Sequence[Any]
) -> CacheEntry:
    """The entry of a compile.

    A stored build is reused only if all of these match: the lowered graph with its weights, the examples and
    what the model answers to them, engines, settings, versions and machine. Where one of them cannot be
    written as text, such as a strategy of the user's own, the compile has no entry.
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
    """The place of one compile on disk; without a key it is always empty."""

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
                warnings.simplefilter("error")  # what would be warned of is built again
                pieces = bundle.pieces(MODEL, lowered, plain_state(model.state_dict()))
                findings = bundle.manifest["findings"]
                if bundle.manifest["key"] != self.key:
                    raise ArchiveError("it is another compile's")
        except Exception:  # damaged, or thrown out by another process meanwhile: it is built again
            shelf.throw_out(self.key)
            return None
        assembly = Assembly(pieces.plan, pieces.pieces, pieces.programs, pieces.body_plans)
        source = Source(model, inspect.signature(model.forward))
        compiled = Compiled(lowered, assembly, source, [*pieces.notes, REUSED])
        if findings is not None:
            remembered = replace(Findings.from_dict(findings), remembered=True)
            compiled.plan = measured_plan(pieces.plan, remembered)
        return compiled

    def store(self, compiled: Compiled, compile_s: float) -> None:
        """Store a module that took long to make; one that cannot be saved, or is too large, is not stored."""
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
    """The text of a setting; an object that is known by its address alone has none."""
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
    """Whether converters or patterns are in use that this package does not ship."""
    if RewritePatternManager.instance().entries():
        return True
    return not all(one.shipped for target in registry.targets() for one in registry.converters(target))


def _converters() -> list[str]:
    """Those in use; some may be switched off."""
    return sorted(
        f"{target} {[c.name for c in registry.converters(target)]}" for target in registry.targets()
    )
