"""The state of this repository, for tables that say what they were measured at."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path


@functools.cache
def commit() -> str:
    """The commit, with a plus where files were changed since; empty outside of git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()
