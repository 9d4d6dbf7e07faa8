"""Where measurements made on this machine are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
