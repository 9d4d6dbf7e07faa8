"""Files by key in one folder, bounded in size: those used longest ago go first."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path

SIZE = "INTARSIA_CACHE_GB"  # how much is kept, in gigabytes; 0 keeps nothing
_DEFAULT_GB = 10.0
_DAY = 86400.0
_told: set[str] = set()


def allowed_bytes() -> int:
    """How much may be kept on disk."""
    try:
        return int(float(os.environ.get(SIZE, _DEFAULT_GB)) * 1e9)
    except ValueError:
        return int(_DEFAULT_GB * 1e9)


class Shelf:
    """Whoever writes a file puts it there whole; whoever finds a damaged one throws it out. Nothing raises.

    >>> import tempfile
    >>> shelf = Shelf(Path(tempfile.mkdtemp()), limit=1000)
    >>> shelf.put("one", lambda path: print(path.write_text("kept")))
    4
    >>> path = shelf.find("one")
    >>> path.read_text(), shelf.find("other")
    ('kept', None)
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit: int = allowed_bytes() if limit is None else limit

    def find(self, key: str) -> Path | None:
        """The file of a key, which counts as used now."""
        path = self.folder / key
        if self.limit <= 0 or not path.is_file():
            return None
        with contextlib.suppress(OSError):  # a folder that cannot be written to can still be read
            os.utime(path)
        return path

    def put(self, key: str, write: Callable[[Path], None]) -> None:
        """Let a file be written; one that is not written whole is as good as none."""
        if self.limit <= 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.folder / f".{key}.{os.getpid()}"
            try:
                write(draft)
                os.replace(draft, self.folder / key)
            finally:
                draft.unlink(missing_ok=True)
            self._make_room()
        except OSError as error:
            if str(self.folder) not in _told:
                _told.add(str(self.folder))
                warnings.warn(
                    f"cannot write to {self.folder}: {error}: what is built is not kept", stacklevel=3
                )

    def has_room(self, size: int) -> bool:
        """Whether a file of this size leaves half of what may be kept, and of what the disk has."""
        place = next((p for p in (self.folder, *self.folder.parents) if p.exists()), None)
        if place is None:
            return False
        try:
            return 2 * size < min(self.limit, shutil.disk_usage(place).free)
        except OSError:
            return False

    def throw_out(self, key: str) -> None:
        """Forget a file that turned out to be damaged."""
        with contextlib.suppress(OSError):
            (self.folder / key).unlink()

    def _make_room(self) -> None:
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may have thrown it out
                status = path.stat()
                if path.name.startswith("."):  # the draft of a writer that did not live to finish it
                    if time.time() - status.st_mtime > _DAY:
                        path.unlink()
                else:
                    entries.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries, key=lambda item: item[0]):
            if total <= self.limit:
                return
            self.throw_out(path.name)
            total -= size
