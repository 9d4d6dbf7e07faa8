"""Compiled modules as files: saved once, loaded in any process, with no code and no pickle inside.

    container   named members with digests: a JSON manifest, safetensors, ONNX, blobs of engines
    codec       values as JSON; graphs, call, tensors, networks, engines: what modules are made of
    writer      a bundle: programs by name over one table of tensors, to members
    reader      members to programs, in place
    files       `save` and `load`; export: files for the runtimes of engines

`tuning`, `generation` and the build cache write and read bundles, too. The safetensors library writes and
maps whole files only, so `tensors` lays out its member, and maps it, by itself: weights stay where they lie.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable

from intarsia.archive.files import copied_parts
from intarsia.archive.files import load as load
from intarsia.archive.files import save as save
from intarsia.archive.reader import load_bytes
from intarsia.archive.writer import save_bytes
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled


def _reduce(compiled: Compiled) -> tuple[Callable[[bytes], Compiled], tuple[bytes]]:
    return load_bytes, (save_bytes(compiled),)


# `pickle`, `torch.save` and `copy.deepcopy` go through an archive in memory: engines are built again.
copyreg.pickle(Compiled, _reduce)
copyreg.pickle(PartlyCompiled, copied_parts)
