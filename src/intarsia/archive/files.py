"""Files of compiled modules: `save` and `load`, for a whole model or for its parts.

If a model is compiled in parts, the rest is Python code, which a file could only contain as a pickle or as
source text, and both are code. So the user creates the model, and all weights are compared by digest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn

from intarsia.archive.codec import Json
from intarsia.archive.container import Reader
from intarsia.archive.reader import LoadOptions, Place, complaining, open_bundle
from intarsia.archive.writer import MODEL, BundleWriter
from intarsia.engines import Engine
from intarsia.errors import ArchiveError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.forwards import PartlyCompiled, assembled
from intarsia.runtime.weights import tensor_digest

_PARTS, _PARTS_VERSION = "intarsia-parts", 2


def save(
    compiled: nn.Module, path: str | os.PathLike[str], *, inductor: Literal["rebuilt", "aot"] = "rebuilt"
) -> None:
    """Write a compiled module to a file. `load` reads it in any process, without the model or its code.

    The file holds graphs, networks, weights, the plan, and what engines have packed. The packed form is used
    if versions and machine match; otherwise engines are built again. For a model compiled in parts, the file
    holds the parts, and `load` needs the model. With `inductor="aot"`, segments on Inductor are also compiled
    to packages of AOTInductor. They are machine code, which `load` runs only with `trust_native_code=True`;
    they need no compiler. Writing is atomic: the file appears complete or not at all.

    >>> import intarsia, pathlib, tempfile, torch
    >>> fast = intarsia.compile(nn.ReLU(), (torch.ones(2),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     intarsia.save(fast, pathlib.Path(folder, "relu.intarsia"))
    ...     intarsia.load(pathlib.Path(folder, "relu.intarsia"))(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """
    if inductor not in ("rebuilt", "aot"):
        raise ArchiveError(
            f"inductor={inductor!r}: Inductor is 'rebuilt' when a file is loaded, or saved as 'aot'"
        )
    if isinstance(compiled, PartlyCompiled):
        if inductor == "aot":
            raise ArchiveError("a model compiled in parts is saved without packages of AOTInductor")
        _save_parts(compiled, path)
        return
    bundle = BundleWriter(native=inductor == "aot")
    bundle.add(MODEL, compiled)
    bundle.write(path)


@overload
def load(
    path: str | os.PathLike[str],
    engines: Sequence[Engine | str] | Engine | str | None = None,
    map_location: Place | None = None,
    *,
    packed: bool = True,
    trust_native_code: bool = False,
    model: None = None,
) -> Compiled: ...


@overload
def load(
    path: str | os.PathLike[str],
    engines: Sequence[Engine | str] | Engine | str | None = None,
    map_location: Place | None = None,
    *,
    packed: bool = True,
    trust_native_code: bool = False,
    model: nn.Module,
) -> PartlyCompiled: ...


def load(
    path: str | os.PathLike[str],
    engines: Sequence[Engine | str] | Engine | str | None = None,
    map_location: Place | None = None,
    *,
    packed: bool = True,
    trust_native_code: bool = False,
    model: nn.Module | None = None,
) -> Compiled | PartlyCompiled:
    """Read a compiled module that `save` wrote. Any other file is an ArchiveError.

    Nothing in the file is run as code, except packages of AOTInductor with `trust_native_code=True`. The file
    is mapped into memory, so do not change it while the module is in use.

    Args:
        path: the file.
        engines: engines with options of your own, in place of those that the file names. A segment whose
            engine is missing runs in PyTorch, and `notes` say so.
        map_location: a device for everything, or a mapping from each device to another.
        packed: use what engines have packed, if versions and machine match. False builds engines again.
        trust_native_code: run the packages of AOTInductor that `save(..., inductor="aot")` wrote. They can do
            everything that a program can do. Otherwise Inductor compiles these segments again.
        model: for a model that was compiled in parts, the model, with the weights that it had. A copy that
            shares its weights gets the parts.

    Custom operators, and types of arguments and results, must be known in this process. Import what defines
    them first.

    >>> import intarsia, pathlib, tempfile, torch
    >>> fast = intarsia.compile(nn.Tanh(), (torch.ones(2),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     intarsia.save(fast, pathlib.Path(folder, "tanh.intarsia"))
    ...     intarsia.load(pathlib.Path(folder, "tanh.intarsia")).plan.engines == fast.plan.engines
    True
    """
    with complaining(f"{os.fspath(path)} cannot be loaded"):
        reader = Reader(path)
        options = LoadOptions(engines, map_location, packed, native=trust_native_code)
        if reader.manifest.get("format") == _PARTS:
            return _load_parts(reader, model, options)
        if model is not None:
            raise ArchiveError("the model in the file was compiled as a whole; load it without model=")
        with open_bundle(reader, options=options) as bundle:
            return bundle.program(MODEL)


def _save_parts(partly: PartlyCompiled, path: str | os.PathLike[str]) -> None:
    """Write the compiled parts. The rest is the model's own Python code, which no file contains."""
    if not partly.parts:
        raise ArchiveError("no part of this model is compiled: it runs as it is, in its own Python code")
    bundle, about = _parts_bundle(partly)
    bundle.write(path, _PARTS, _PARTS_VERSION, about)


def copied_parts(partly: PartlyCompiled) -> tuple[Callable[..., PartlyCompiled], tuple[Any, ...]]:
    """What `pickle` and `copy.deepcopy` copy of a partly compiled model: an archive in memory, and it."""
    model = partly.uncompiled()
    if not partly.parts:
        return PartlyCompiled, (model, {}, partly.own_notes, partly.plan.reason)
    bundle, about = _parts_bundle(partly)
    return _parts_of_bytes, (bundle.to_bytes(_PARTS, _PARTS_VERSION, about), model)


def _parts_of_bytes(data: bytes, model: nn.Module) -> PartlyCompiled:
    with complaining("the archive in memory cannot be loaded"):
        return _load_parts(data, model, LoadOptions(packed=False))


def _parts_bundle(partly: PartlyCompiled) -> tuple[BundleWriter, dict[str, Any]]:
    """The compiled parts, and the description of the model."""
    bundle = BundleWriter()
    for where, program in partly.parts.items():
        check_shareable(where, program)
        bundle.add(where, program)
    about = {
        "model": _kind(partly.model),
        "reason": partly.plan.reason,
        "notes": list(partly.own_notes),
        "weights": weight_digests(partly.model),
        "types": {where: _kind(partly.model.get_submodule(where)) for where in partly.parts},
    }
    return bundle, about


def _load_parts(reader: Reader | bytes, model: nn.Module | None, options: LoadOptions) -> PartlyCompiled:
    """The parts of a file in a copy of `model`, which must have the same modules and weights."""
    with open_bundle(reader, _PARTS, _PARTS_VERSION, options) as bundle:
        manifest = bundle.manifest
        if model is None:
            raise ArchiveError(
                f"it holds parts of a {manifest['model']}, whose other modules run by their own Python code,"
                " which no file holds; make that model with the same weights, and give it:"
                " load(path, model=...)"
            )
        if _kind(model) != manifest["model"]:
            raise ArchiveError(f"it holds parts of a {manifest['model']}, not of a {_kind(model)}")
        modules = {where: module for where, module in model.named_modules() if where}
        for where, expected in manifest["types"].items():
            kind = _kind(modules[where]) if where in modules else "nothing"
            if kind != expected:
                raise ArchiveError(f"the model has {kind} at {where!r}; the file has a {expected} for it")
        check_weights("the model", model, manifest["weights"])
        parts = {str(where): bundle.program(where, modules[where]) for where in manifest["types"]}
        return assembled(model, parts, [str(note) for note in manifest["notes"]], str(manifest["reason"]))


def _kind(module: nn.Module) -> str:
    return type(module).__qualname__


def check_shareable(where: str, program: Compiled) -> None:
    """ArchiveError for a program that changes buffers, or returns weights, of the user's module."""
    program.weights.check(thorough=True)
    if program.lowered.buffers:
        changed = ", ".join(program.lowered.buffers)
        raise ArchiveError(f"{where} changes its buffers ({changed}), which a file cannot store")
    if any(view is not None and view.held for view in program.lowered.views):
        raise ArchiveError(f"{where} returns weights of its own, which a file cannot store")


def weight_digests(module: nn.Module) -> dict[str, Json]:
    """A digest of each parameter and buffer, including buffers that a state dict leaves out."""
    return {name: tensor_digest(tensor) for name, tensor in _weights(module).items()}


def check_weights(where: str, module: nn.Module, digests: Mapping[str, Any]) -> None:
    """ArchiveError for a module whose weights differ from those in the file."""
    weights = _weights(module)
    for name in {**digests, **weights}:
        if name not in digests or name not in weights:
            whose = "the file" if name in digests else "the model"
            raise ArchiveError(f"{where} has other weights than when it was saved: only {whose} has {name}")
        if tensor_digest(weights[name]) != digests[name]:
            raise ArchiveError(f"{where} has other weights than when it was saved: {name} differs")


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
