"""Compiled modules as files: saved once, loaded in any process, with no code and no pickle inside.

    container   named members with digests: a JSON manifest, safetensors, ONNX, blobs of engines
    codec       values as JSON; graphs, calls, tensors, networks and engines have files of their own
    writer      programs by name, which share one table of tensors, become members
    reader      members become programs
    files       `save` and `load`; export: files for the runtimes of engines

`tuning`, `generation` and the build cache write and read bundles, too. The safetensors library writes and
maps only whole files, so `tensors` writes and maps its member itself, and weights are used where the file is
mapped.
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
from intarsia.runtime.forwards import PartlyCompiled


def _reduce(compiled: Compiled) -> tuple[Callable[[bytes], Compiled], tuple[bytes]]:
    return load_bytes, (save_bytes(compiled),)


# `pickle`, `torch.save` and `copy.deepcopy` use an archive in memory, from which engines are built again.
copyreg.pickle(Compiled, _reduce)
copyreg.pickle(PartlyCompiled, copied_parts)
