"""Where measurements made on this machine are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$INTARSIA_CACHE, or `intarsia` in the user's cache directory; it may not exist yet.

    >>> os.environ["INTARSIA_CACHE"] = "/tmp/measured"
    >>> str(cache_directory())
    '/tmp/measured'
    >>> del os.environ["INTARSIA_CACHE"]
    """
    own = os.environ.get("INTARSIA_CACHE")
    if own:
        return Path(own)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "intarsia"
