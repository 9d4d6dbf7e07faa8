"""The figures of `intarsia bench` as a chart: a row a model, a mark a peer, speed in multiples of eager."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_COLOURS = {
    "intarsia": "#c0392b",
    "intarsia, longer search": "#7b241c",
    "intarsia, fixed order": "#e8a79f",
    "torch.onnx + ONNX Runtime": "#2471a3",
    "OpenVINO's importer": "#1e8449",
    "torch.compile": "#b7950b",
    "torch.compile, freezing": "#7d6608",
}
_LEFT, _WIDTH, _ROW, _TOP = 150, 620, 22, 64


def chart(results: Sequence[Mapping[str, Any]]) -> str:
    """An SVG of the results that have a time for eager.

    >>> times = {"eager": {"median_ms": 2.0}, "intarsia": {"median_ms": 1.0}}
    >>> "2.00x" in chart([{"name": "bert", "peers": times}])
    True
    """
    rows = [(result["name"], _speeds(result)) for result in results if _speeds(result)]
    every = [1.0, *(speed for _, speeds in rows for speed in speeds.values())]
    low, high = math.log2(min(every) * 0.95), math.log2(max(every) * 1.05)
    height = _TOP + _ROW * len(rows) + 30

    def x(speed: float) -> float:
        return _LEFT + (math.log2(speed) - low) / max(high - low, 1e-9) * _WIDTH

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 70}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_LEFT + _WIDTH + 70}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18">speed in multiples of eager PyTorch (further right is faster)</text>',
    ]
    for place, (name, colour) in enumerate(_COLOURS.items()):
        column, line = place % 3, place // 3
        lines += [
            f'<circle cx="{_LEFT + 6 + column * 215}" cy="{32 + 16 * line}" r="5" fill="{colour}"/>',
            f'<text x="{_LEFT + 16 + column * 215}" y="{36 + 16 * line}">{escape(name)}</text>',
        ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = x(2.0**power)
        lines += [
            f'<line x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{height - 24}" stroke="#ddd"/>',
            f'<text x="{at:.1f}" y="{height - 8}" text-anchor="middle">{2.0**power:g}x</text>',
        ]
    for number, (name, speeds) in enumerate(rows):
        y = _TOP + _ROW * number + _ROW / 2
        lines.append(f'<text x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(str(name))}</text>')
        for peer, speed in reversed(speeds.items()):
            size = 6 if peer == "intarsia" else 4
            lines.append(
                f'<circle cx="{x(speed):.1f}" cy="{y:.1f}" r="{size}" fill="{_COLOURS[peer]}">'
                f"<title>{escape(peer)}: {speed:.2f}x</title></circle>"
            )
    return "\n".join([*lines, "</svg>", ""])


def _speeds(result: Mapping[str, Any]) -> dict[str, float]:
    times = {name: peer["median_ms"] for name, peer in result["peers"].items() if "median_ms" in peer}
    if "eager" not in times:
        return {}
    return {name: times["eager"] / times[name] for name in _COLOURS if name in times}
