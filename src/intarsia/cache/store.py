"""The cache directory: tables of JSON values and a folder of bounded size, shared by processes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_WAIT_S = 2.0  # for another process to finish writing; then the file is written without a lock
_warned_of: set[tuple[str, str]] = set()


class JsonStore:
    """Values by key. An unreadable value counts as missing; a value that cannot be written is dropped.

    A file that cannot be used gives one warning; no method raises.

    >>> import pathlib, tempfile
    >>> store = JsonStore(pathlib.Path(tempfile.mkdtemp()) / "known.json")
    >>> store.update({"a": 1.5})
    >>> store.update({"b": 2.5})
    >>> store.read()
    {'a': 1.5, 'b': 2.5}
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """All stored values; empty if there is no file, or it is damaged."""
        try:
            table = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            self._tell("read", error)
            return {}
        if not isinstance(table, dict):
            self._tell("read", f"it holds a {type(table).__name__}, not a table")
            return {}
        return table

    def update(self, fresh: Mapping[str, Any], *, keep: int | None = None) -> None:
        """Add or replace values. Values of other processes remain.

        The last `keep` keys remain. A value that is itself a table is merged with the one stored under its
        key.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                table = _merged(self.read(), fresh)
                if keep is not None:
                    table = dict(list(table.items())[-keep:])
                self._write(json.dumps(table).encode())
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._tell("write", error)

    def _write(self, data: bytes) -> None:
        write_atomically(self.path, lambda file, _: file.write(data), durable=False)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """In the `with` block, other processes do not write, if the system has locks. The wait is short."""
        try:
            import fcntl
        except ImportError:  # Windows: of two writers at once, one may lose a value
            yield
            return
        with open(self.path.with_name(f"{self.path.name}.lock"), "ab") as file:
            end = time.monotonic() + _WAIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > end:
                        break
                    time.sleep(0.01)
                except OSError:  # a file system without locks
                    break
                else:
                    break
            yield

    def _tell(self, verb: str, why: object) -> None:
        if (str(self.path), verb) in _warned_of:
            return
        _warned_of.add((str(self.path), verb))
        outcome = {
            "read": "what it held is measured again",
            "write": "measurements are not remembered; set INTARSIA_CACHE to a place that can be written to",
        }[verb]
        warnings.warn(f"cannot {verb} {self.path}: {why}: {outcome}", stacklevel=4)


def write_atomically(
    path: str | os.PathLike[str], write: Callable[[BinaryIO, str], Any], *, durable: bool = True
) -> None:
    """Write a file beside the path, then move it there, so that readers find a complete file.

    `write` is given the file and its temporary path. A `durable` file outlives a power cut, which takes
    milliseconds, and others may read it; what is only remembered is this user's own.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():  # moving a file there would replace a device (/dev/null)
        raise FileExistsError(errno.EEXIST, "it exists, and is no regular file", str(path))
    try:
        descriptor, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        error.filename = str(path)  # the user's, not the temporary one
        raise
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file, beside)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if durable:
            os.chmod(beside, 0o666 & ~_umask())  # as any new file; a temporary one is private
        os.replace(beside, target)
    except BaseException as error:
        Path(beside).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk names no file
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _merged(old: dict[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in fresh.items():
        before = merged.pop(key, None)  # new values come last
        both = isinstance(before, dict) and isinstance(value, Mapping)
        merged[key] = {**before, **value} if both else value
    return merged


def cache_directory() -> Path:
    """$INTARSIA_CACHE, or `intarsia` in the user's cache directory; it may not exist yet.

    A user without a home (a container's bare user number) has a directory beside other temporary files.

    >>> os.environ["INTARSIA_CACHE"] = "/tmp/measured"
    >>> str(cache_directory())
    '/tmp/measured'
    >>> del os.environ["INTARSIA_CACHE"]
    """
    own = os.environ.get("INTARSIA_CACHE")
    if own:
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / "intarsia"
    try:
        return Path.home() / ".cache" / "intarsia"
    except RuntimeError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"intarsia-{user}"


SIZE = "INTARSIA_CACHE_GB"  # the largest size, in gigabytes; 0 stores nothing
_DEFAULT_GB = 10.0
_DAY = 86400.0
_warned: set[str] = set()


def allowed_bytes() -> int:
    """The number of bytes that may be stored on disk."""
    try:
        return int(float(os.environ.get(SIZE, _DEFAULT_GB)) * 1e9)
    except ValueError:
        return int(_DEFAULT_GB * 1e9)


class Shelf:
    """A folder of files of bounded size, by key; the least recently used are deleted. No method raises.

    >>> import tempfile
    >>> shelf = Shelf(Path(tempfile.mkdtemp()), limit=1000)
    >>> shelf.put("one", lambda path: print(path.write_text("text")))
    4
    >>> path = shelf.find("one")
    >>> path.read_text(), shelf.find("other")
    ('text', None)
    """

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        self.folder = folder
        self.limit: int = allowed_bytes() if limit is None else limit

    def find(self, key: str) -> Path | None:
        """The file of a key, None if there is none. It counts as used now."""
        path = self.folder / key
        if self.limit <= 0 or not path.is_file():
            return None
        with contextlib.suppress(OSError):  # a folder that cannot be written to can still be read
            os.utime(path)
        return path

    def put(self, key: str, write: Callable[[Path], None]) -> None:
        """Store what `write` writes to a path, completely or not at all (see `write_atomically`)."""
        if self.limit <= 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / key)
            self._make_room()
        except OSError as error:
            if str(self.folder) not in _warned:
                _warned.add(str(self.folder))
                warnings.warn(f"cannot write to {self.folder}: {error}: builds are not cached", stacklevel=3)

    def has_room(self, size: int) -> bool:
        """Whether a file of this size takes at most half of the limit, and of the free disk space."""
        place = next((p for p in (self.folder, *self.folder.parents) if p.exists()), None)
        if place is None:
            return False
        try:
            return 2 * size < min(self.limit, shutil.disk_usage(place).free)
        except OSError:
            return False

    def throw_out(self, key: str) -> None:
        """Delete a file that is damaged."""
        with contextlib.suppress(OSError):
            (self.folder / key).unlink()

    def _make_room(self) -> None:
        entries = []
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):  # another process may have deleted it
                status = path.stat()
                if path.name.startswith("."):  # the temporary file of a process that ended early
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
