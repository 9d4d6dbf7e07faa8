"""An OpenVINO model with weights of few bits, by nncf, which is silent here and reports to nobody."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType
from typing import Any, TextIO

_GROUP = 32  # weights of a row that share a scale, in 4 bits
_NO_REPORTS = "NNCF_CI"  # set while nncf is imported, it sends no figures about its use


def compressed(model: Any, bits: int) -> Any:
    """The model, changed in place: constants of products and embeddings in 8 or 4 bits, and their scales."""
    with _silence() as nncf:
        modes = nncf.CompressWeightsMode
        if bits == 8:
            return nncf.compress_weights(model, mode=modes.INT8_ASYM)
        return nncf.compress_weights(model, mode=modes.INT4_ASYM, group_size=_GROUP)


def _nncf() -> ModuleType:
    if "nncf" in sys.modules or _NO_REPORTS in os.environ:
        import nncf

        return nncf  # type: ignore[no-any-return]
    os.environ[_NO_REPORTS] = "1"
    try:
        import nncf

        return nncf  # type: ignore[no-any-return]
    finally:
        del os.environ[_NO_REPORTS]


@contextmanager
def _silence() -> Iterator[ModuleType]:
    """nncf logs and draws its progress to standard output, from threads of its own; others go on writing."""
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    with redirect_stdout(_Filtered(sys.stdout, others)):
        nncf = _nncf()  # first, since it sets the level of its logger
        log = logging.getLogger("nncf")
        before = log.level
        log.setLevel(logging.ERROR)
        try:
            yield nncf
        finally:
            log.setLevel(before)


class _Filtered(io.TextIOBase):
    """Standard output for some threads, and for no others."""

    def __init__(self, out: TextIO, heard: set[int | None]) -> None:
        self._out, self._heard = out, heard

    def write(self, text: str) -> int:
        return self._out.write(text) if threading.get_ident() in self._heard else len(text)

    def flush(self) -> None:
        self._out.flush()
