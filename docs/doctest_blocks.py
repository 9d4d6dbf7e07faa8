"""For the site: doctests in docstrings become blocks of code. Markdown would take `>>>` for a quotation."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Docstring, Extension

_EXAMPLE = re.compile(
    r"(?:^[ ]*Examples?:\n)?((?:^[ ]*>>>.*\n?)(?:^[ ]*\S.*\n?)*(?:\n(?=[ ]*>>>)(?:^[ ]*\S.*\n?)+)*)", re.M
)


class DoctestBlocks(Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = _EXAMPLE.sub(_block, obj.docstring.value)


def _block(match: re.Match[str]) -> str:
    return f"\n```pycon\n{textwrap.dedent(match[1]).rstrip()}\n```\n"
