"""Compiled modules as files: saved once, loaded in any process, with no code and no pickle inside."""

from __future__ import annotations

import copyreg
from collections.abc import Callable

from intarsia.archive.file import load as load
from intarsia.archive.file import save as save
from intarsia.archive.load import load_bytes
from intarsia.archive.save import save_bytes
from intarsia.runtime.compiled import Compiled


def _reduce(compiled: Compiled) -> tuple[Callable[[bytes], Compiled], tuple[bytes]]:
    return load_bytes, (save_bytes(compiled),)


# `pickle`, `torch.save` and `copy.deepcopy` go through an archive in memory: engines are built anew.
copyreg.pickle(Compiled, _reduce)
