"""Compiled modules to files and back, whole or in parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, overload

from torch import nn

from intarsia.archive.container import Reader
from intarsia.archive.load import Place, complaining, load_whole
from intarsia.archive.parts import PARTS, load_parts, save_parts
from intarsia.archive.save import save_sealed
from intarsia.engines import Engine
from intarsia.errors import ArchiveError
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled


def save(
    compiled: nn.Module, path: str | os.PathLike[str], *, inductor: Literal["rebuilt", "aot"] = "rebuilt"
) -> None:
    """Write a compiled module to a file that `load` reads, in any process, without the model or its code.

    The file appears whole or not at all. It holds graphs, networks, weights, the plan, and what engines have
    compiled, which is used where their versions and the machine are the same, and elsewhere built again.
    Of a model compiled in parts it holds the parts; `load` is given the model to put them in.
    With `inductor="aot"`, segments on Inductor are compiled once more, to packages of AOTInductor: machine
    code that `load` runs if it is told to, needing no compiler.

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
    if not isinstance(compiled, PartlyCompiled):
        save_sealed(compiled, path, inductor == "aot")
        return
    if inductor == "aot":
        raise ArchiveError("a model compiled in parts is saved without packages of AOTInductor")
    save_parts(compiled, path)


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
    """Read a compiled module that `save` wrote; ArchiveError, in a sentence, for any other file.

    Engines are those the file names, with its options; `engines` gives others of the same names, with options
    of your own. A segment whose engine is not here runs in PyTorch, and `notes` say so. `map_location` puts
    everything on another device, or each device of a mapping on another.
    What engines have compiled is taken from the file if the same versions made it on such a machine; with
    `packed=False` they are built again, as they are anywhere else, and as those of parts always are.
    Nothing in the file is run as code, with one exception: where it holds packages of AOTInductor
    (`save(..., inductor="aot")`) and `trust_native_code=True` says that you trust who made it, as you would
    trust a program, their machine code is loaded. Otherwise Inductor compiles those segments anew.
    Types of arguments and results, and custom operators, must be known in this process: import what defines
    them first. The file is mapped into memory, so it must stay as it is while the module lives.
    A model that was compiled in parts needs its own code: make it, with the weights it had, and give it as
    `model`; a copy that shares its weights gets the parts.

    >>> import intarsia, pathlib, tempfile, torch
    >>> fast = intarsia.compile(nn.Tanh(), (torch.ones(2),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     intarsia.save(fast, pathlib.Path(folder, "tanh.intarsia"))
    ...     intarsia.load(pathlib.Path(folder, "tanh.intarsia")).plan.engines == fast.plan.engines
    True
    """
    with complaining(f"{os.fspath(path)} cannot be loaded"):
        reader = Reader(path)
        if reader.manifest.get("format") == PARTS:
            return load_parts(reader, model, engines, map_location)
        if model is not None:
            raise ArchiveError("it holds a model that was compiled as a whole; load it without model=")
        return load_whole(reader, engines, map_location, packed, native=trust_native_code)
