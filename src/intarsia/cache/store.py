"""A table of JSON values in one file: shared by processes, and never a reason to fail."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_WAIT_S = 2.0  # for another process to finish writing; after that we write without waiting
_told: set[tuple[str, str]] = set()


class JsonStore:
    """Values by key. What cannot be read counts as unknown; what cannot be written is forgotten.

    A file that cannot be used is told once in a warning; no method raises.

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
        """All that is kept; empty where there is no file, or none that holds a table."""
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
        """Add or replace values; what other processes wrote stays. The last `keep` keys are kept.

        A value that is itself a table is merged with the one kept under its key.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                table = _merged(self.read(), fresh)
                if keep is not None:
                    table = dict(list(table.items())[-keep:])
                self._replace(json.dumps(table))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._tell("write", error)

    def _replace(self, text: str) -> None:
        """Put a new file in the place of the old one at once, so that no reader sees half of it."""
        handle, draft = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other writers out, where the system can; a lock nobody gives up is not waited for long."""
        try:
            import fcntl
        except ImportError:  # Windows: two writers at once may lose a value, never the file
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
        if (str(self.path), verb) in _told:
            return
        _told.add((str(self.path), verb))
        outcome = {
            "read": "what it held is measured anew",
            "write": "measurements are not remembered; set INTARSIA_CACHE to a place that can be written to",
        }[verb]
        warnings.warn(f"cannot {verb} {self.path}: {why}: {outcome}", stacklevel=4)


def _merged(old: dict[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in fresh.items():
        before = merged.pop(key, None)  # what is new stands last
        both = isinstance(before, dict) and isinstance(value, Mapping)
        merged[key] = {**before, **value} if both else value
    return merged
