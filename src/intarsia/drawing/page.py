"""The report as one HTML page that needs nothing else: no server, no network, no other file."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from intarsia.drawing.drawing import Drawing


def page(drawing: Drawing, title: str = "Intarsia report") -> str:
    """The page. Names, source lines and reasons are data in it, never markup.

    >>> from intarsia.drawing import Drawing, DrawnNode, DrawnSegment
    >>> drawing = Drawing("<b>", (DrawnNode("</script>", "op"),), (DrawnSegment("pytorch", 1, "op"),))
    >>> "<b>" in page(drawing), "</script>\\"" in page(drawing)
    (False, False)
    """
    return _text("page.html").format(
        title=html.escape(title),
        style=_text("page.css"),
        layout=_text("vendor/dagre-3.1.3.min.js"),
        content=_data(_content(drawing)),
        script=_text("page.js"),
    )


def framed(document: str, height: int = 720) -> str:
    """The page for a notebook: in a frame of its own, so that neither's style or script meets the other's."""
    source = html.escape(document, quote=True)
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{source}"'
        f' style="width:100%;height:{height}px;border:0"></iframe>'
    )


def _content(drawing: Drawing) -> dict[str, Any]:
    plain = asdict(drawing) | {"colours": drawing.colours}
    return plain | {"bodies": {name: _content(body) for name, body in drawing.bodies.items()}}


def _data(content: dict[str, Any]) -> str:
    # A script element ends at `</script` wherever that stands, so no `<` may be in the text.
    text = json.dumps(content, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _text(name: str) -> str:
    return files("intarsia.drawing").joinpath(name).read_text(encoding="utf-8")
