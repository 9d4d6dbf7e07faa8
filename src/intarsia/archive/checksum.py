"""A checksum of large members, which costs little more than reading them.

SHA-256 of the weights of a BERT-base takes longer than its engine needs to load them. Here every mebibyte is
a table of numbers whose rows and columns are added up, and SHA-256 is taken of the sums: damage, zeroed pages
and exchanged pieces change them. (Forgery is nothing a digest inside the file could tell.)
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

_ROWS, _COLUMNS = 128, 1024  # of eight bytes each
_BLOCK = _ROWS * _COLUMNS * 8


class Checksum:
    """Bytes in, in pieces of any size; one digest out.

    >>> one, other = Checksum(), Checksum()
    >>> one.update(b"ab"); one.update(b"c"); other.update(b"abc")
    >>> one.hexdigest() == other.hexdigest() != Checksum().hexdigest()
    True
    """

    def __init__(self) -> None:
        self._sums = hashlib.sha256()
        self._rest = bytearray()

    def update(self, data: Any) -> None:
        """Take more bytes."""
        view = memoryview(data).cast("B")
        if self._rest:
            wanted = _BLOCK - len(self._rest)
            self._rest += view[:wanted]
            view = view[wanted:]
            if len(self._rest) < _BLOCK:
                return
            self._add(memoryview(self._rest))
            self._rest = bytearray()
        whole = len(view) // _BLOCK * _BLOCK
        for start in range(0, whole, _BLOCK):
            self._add(view[start : start + _BLOCK])
        self._rest += view[whole:]

    def _add(self, block: memoryview) -> None:
        table = np.frombuffer(block, "<u8").reshape(_ROWS, _COLUMNS)
        self._sums.update(table.sum(0).tobytes())
        self._sums.update(table.sum(1).tobytes())

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""
        sums = self._sums.copy()
        sums.update(self._rest)
        return sums.hexdigest()
