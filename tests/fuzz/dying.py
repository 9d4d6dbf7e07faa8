"""A process of the fuzzer that dies at its first model; it imports nothing, so that it dies soon."""

from __future__ import annotations

import os
from typing import Any


def serve(pipe: Any) -> None:
    pipe.recv()
    os._exit(7)
