"""Plans as text: what runs where, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from intarsia.graph.nodes import module_path, op_name, source_line
from intarsia.graph.segment import PYTORCH, Segment

if TYPE_CHECKING:
    from rich.table import Table

Segments = Sequence[Segment]
Bodies = Mapping[str, Sequence[Segment]]  # the segments of each body of control flow, by the body's name

_OPS_SHOWN = 6


def plan_text(segments: Segments, strategy: str, bodies: Bodies) -> str:
    """The plan in lines: a heading, a line a segment and a body, and the reasons of every fallback."""
    width = max((len(segment.engine) for segment in segments), default=0)
    lines = [heading(segments, strategy, bodies)]
    for number, segment in enumerate(segments):
        alone = "  (stands alone)" if segment.do_not_merge else ""
        count = f"{len(segment)} node{'s' * (len(segment) != 1)}"
        lines.append(
            f"  {number:>3}  {segment.engine:<{width}}  {count:<10} {ops_text(segment.nodes)}{alone}"
        )
    lines += [f"  {row}" for row in _body_rows(bodies)]
    for engine, rows in fallbacks(segments).items():
        lines.append(f"not on {engine}:")
        lines.extend(f"  {row}" for row in rows)
    return "\n".join(lines)


def plan_table(segments: Segments, strategy: str, bodies: Bodies) -> Table:
    """The plan as a rich table."""
    from rich.table import Table

    table = Table(title=heading(segments, strategy, bodies), title_justify="left")
    for column in ("segment", "engine", "nodes", "ops", "not on an engine because"):
        table.add_column(column)
    for number, segment in enumerate(segments):
        reasons = Counter(
            f"{engine}: {reason}" for why in segment.reasons.values() for engine, reason in why.items()
        )
        text = "\n".join(reason for reason, _ in reasons.most_common(_OPS_SHOWN))
        table.add_row(str(number), segment.engine, str(len(segment)), ops_text(segment.nodes), text)
    return table


def ops_text(nodes: tuple[fx.Node, ...]) -> str:
    """The ops of some nodes with their counts, most frequent first."""
    counts = Counter(op_name(node) for node in nodes)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{name} x{count}" if count > 1 else name for name, count in ranked[:_OPS_SHOWN]]
    more = len(ranked) - len(shown)
    return ", ".join(shown) + (f", {more} more kinds" if more > 1 else f", {more} more kind" if more else "")


def fallbacks(segments: Segments) -> dict[str, list[str]]:
    """For every engine, one line for each op and reason it refused: how often, and one example."""
    seen: dict[str, dict[tuple[str, str], list[fx.Node]]] = {}
    for segment in segments:
        for node, reasons in segment.reasons.items():
            for engine, reason in reasons.items():
                seen.setdefault(engine, {}).setdefault((op_name(node), reason), []).append(node)
    lines: dict[str, list[str]] = {}
    for engine in sorted(seen):
        ranked = sorted(seen[engine].items(), key=lambda item: (-len(item[1]), item[0]))
        lines[engine] = [_fallback(name, reason, nodes) for (name, reason), nodes in ranked]
    return lines


def _fallback(name: str, reason: str, nodes: list[fx.Node]) -> str:
    times = f" x{len(nodes)}" if len(nodes) > 1 else ""
    place = [text for text in (module_path(nodes[0]), source_line(nodes[0])) if text]
    example = f" [{', '.join((nodes[0].name, *place))}]"
    return f"{name}{times}: {reason}{example}"


def _body_rows(bodies: Bodies) -> list[str]:
    """A line for each body of control flow: how many of its nodes run on which engine."""
    rows = []
    for name, segments in bodies.items():
        counts: Counter[str] = Counter()
        for segment in segments:
            counts[segment.engine] += len(segment)
        placed = ", ".join(
            f"{count} node{'s' * (count != 1)} on {engine}" for engine, count in counts.items()
        )
        rows.append(f"in {name}: {placed or 'nothing to run'}")
    return rows


def node_counts(segments: Segments, bodies: Bodies) -> tuple[int, int]:
    """How many nodes run on engines, and how many there are, those of control flow's bodies among them."""
    everywhere = [*segments, *(segment for body in bodies.values() for segment in body)]
    placed = sum(len(segment) for segment in everywhere if segment.engine != PYTORCH)
    return placed, sum(map(len, everywhere))


def heading(segments: Segments, strategy: str, bodies: Bodies) -> str:
    """How many segments there are, and how much of the graph runs on engines."""
    placed, total = node_counts(segments, bodies)
    how = f" by {strategy}" if strategy else ""
    count = f"{len(segments)} segment{'s' * (len(segments) != 1)}"
    share = f"{placed} of {total} nodes ({placed / total:.0%}) on engines" if total else "nothing to run"
    return f"Plan{how}: {count}, {share}"
