"""The figures of `intarsia bench` in the documents: a table, the chart, and a mix that won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from intarsia.cli.bench_chart import chart
from intarsia.cli.bench_peers import FIXED, OURS, OWN, PEERS, SEARCHED
from intarsia.errors import IntarsiaError

_PICTURE = "pictures/bench.svg"


def fill_documents(folder: Path, results: Sequence[Mapping[str, Any]], summary: str) -> None:
    """Put the figures between the marks in measurements.md and choosing.md, and the chart beside them."""
    (folder / _PICTURE).parent.mkdir(parents=True, exist_ok=True)
    (folder / _PICTURE).write_text(chart(results))
    figures = f"![speed against eager PyTorch]({_PICTURE})\n\n{markdown(results)}\n\n{summary}."
    _fill(folder / "measurements.md", "bench", figures)
    _fill(folder / "choosing.md", "mix", mix_that_won(results))


def _fill(path: Path, name: str, content: str) -> None:
    path.write_text(filled(path.read_text(), name, content, str(path)))


def filled(text: str, name: str, content: str, path: str = "the document") -> str:
    """The text with what stands between the marks of that name replaced.

    >>> filled("a\\n<!-- x: begin -->\\nold\\n<!-- x: end -->\\nb", "x", "new").splitlines()
    ['a', '<!-- x: begin -->', 'new', '<!-- x: end -->', 'b']
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise IntarsiaError(f"{path} needs the marks {begin} and {end}, once and in that order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for every model: times in ms, compile times in seconds."""
    every = (*PEERS, *OWN)
    used = [name for name in every if any(name in result["peers"] for result in results)]
    rows = [["model", *used, "error", "compile s: fixed, cold, again"], ["---"] * (len(used) + 3)]
    for result in results:
        error = result["peers"].get(OURS, {}).get("error")
        seconds = ["-" if s is None else f"{s:.1f}" for s in compile_seconds(result)]
        cells = [cell(result["peers"].get(name)) for name in used]
        rows.append([result["name"], *cells, "-" if error is None else f"{error:.0e}", ", ".join(seconds)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def compile_seconds(result: Mapping[str, Any]) -> list[float | None]:
    """Of the fixed order, of the default on a machine that knows no costs, and once they are known."""
    peers = result["peers"]
    own = [peers.get(name, {}).get("compile_s") for name in (FIXED, OURS)]
    return [*own, result.get("compile_again_s")]


def mix_that_won(results: Sequence[Mapping[str, Any]]) -> str:
    """The plan of the mix that gained most over the best plan by one engine, as it was printed."""
    found: list[tuple[float, str, str]] = []
    for result in results:
        for key in ("plan", "plan_searched"):
            plan = result.get(key, {})
            measured = plan.get("measured") or {}
            trials = {trial["name"]: trial for trial in measured.get("trials", ())}
            won = trials.get(measured.get("chosen"))
            if won is None or not won["blocks"]:
                continue
            alone = [_median(trial) for trial in trials.values() if not trial["blocks"] and trial["final"]]
            if alone:
                found.append((min(alone) / _median(won), str(result["name"]), str(plan["text"])))
    if not found:
        a = "a" if any(SEARCHED in result["peers"] for result in results) else "no"
        return f"No mix won on the machine that made the figures ({a} longer search was run)."
    gain, name, text = max(found)
    return f"`{name}`: {gain:.2f} times as fast as the best plan by one engine.\n\n```\n{text}\n```"


def _median(trial: Mapping[str, Any]) -> float:
    ordered = sorted(trial["seconds"])
    return float(ordered[len(ordered) // 2])


def cell(peer: Mapping[str, Any] | None) -> str:
    """A time, or why there is none."""
    if peer is None:
        return ""
    return "fails" if "failed" in peer else f"{peer['median_ms']:.1f}" if "median_ms" in peer else "-"
