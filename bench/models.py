"""More than twenty whole models against eager, torch.compile, torch.onnx + ONNX Runtime, OpenVINO's importer.

    python -m bench.models [names...] [--out bench-results] [--limit 900] [--tolerance 0.02] [--docs docs]
    python -m bench.models [names...] --out bench-throughput-8 --throughput --batch 8
    python -m bench.models [names...] --out bench-padded-8 --padded 8 [--varying]

Each model runs in a process of its own, with a limit on time. Results are kept as JSON in `--out`, and a run
that was stopped continues with the models that have none. At the end: a table, results.json and chart.svg;
with `--docs` also the figures in the documents.
"""

from __future__ import annotations

import io
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from bench import specimens
from bench.peers import FIXED, OURS, OWN, PEERS, SEARCHED, Wish, command
from rich.console import Console
from rich.table import Table

from intarsia.errors import IntarsiaError

_PICTURE = "pictures/bench.svg"  # in the documents' folder
_COLOURS = {
    "intarsia": "#c0392b",
    "intarsia, longer search": "#7b241c",
    "intarsia, fixed order": "#e8a79f",
    "torch.onnx + ONNX Runtime": "#2471a3",
    "OpenVINO's importer": "#1e8449",
    "torch.onnx + MNN": "#76448a",
    "torch.compile": "#b7950b",
    "torch.compile, freezing": "#7d6608",
}


def bench(
    models: Annotated[
        list[str] | None, typer.Argument(help="models by name; all where none is named")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="where results are kept; a model that is there is not run")
    ] = Path("bench-results"),
    limit: Annotated[float, typer.Option(help="seconds a model may take", min=1)] = 900.0,
    budget: Annotated[float, typer.Option(help="seconds of a longer search; 0 for none", min=0)] = 60.0,
    tolerance: Annotated[float, typer.Option(help="error of one more plan; 0 for none", min=0, max=1)] = 0.0,
    rounds: Annotated[int, typer.Option(help="rounds of a race", min=3)] = 40,
    inductor: Annotated[bool, typer.Option(help="run torch.compile too, which takes minutes")] = True,
    full: Annotated[bool, typer.Option(help="the size a model is known by")] = True,
    batch: Annotated[int, typer.Option(help="times the example is repeated in a batch", min=1)] = 1,
    padded: Annotated[int, typer.Option(help="rows of tokens with a mask of padding; 0 for none", min=0)] = 0,
    varying: Annotated[bool, typer.Option(help="batch and length of padded rows vary")] = False,
    throughput: Annotated[bool, typer.Option(help="several threads call at once")] = False,
    docs: Annotated[
        Path | None, typer.Option(help="folder whose choosing.md and measurements.md are filled in")
    ] = None,
) -> None:
    """Measure models against their peers, as JSON and a chart; a run that was stopped goes on."""
    console = Console(width=150, soft_wrap=True)
    named = models or specimens.names()
    for name in named:
        if name not in specimens.names():
            raise IntarsiaError(f"there is no model {name!r}; known are {', '.join(specimens.names())}")
    if varying and not padded:
        raise IntarsiaError("--varying needs --padded ROWS")
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in named:
        path = out / f"{name}.json"
        if not _is_done(path):
            wish = Wish(name, full, rounds, budget, inductor=inductor, tolerance=tolerance, batch=batch)
            wish = replace(wish, objective="throughput") if throughput else wish
            wish = replace(wish, padded=padded, varying=varying)
            reason = _run(wish, path, limit)
            console.print(f"{name}: {reason or 'measured'}", markup=False, highlight=False)
        results.append(_read(path, name))
    (out / "results.json").write_text(json.dumps(results, indent=1))
    (out / "chart.svg").write_text(chart(results))
    if docs is not None:
        fill_documents(docs, results, summary(results))
    console.print(table(results))
    console.print(summary(results), highlight=False)


def _run(wish: Wish, path: Path, limit: float) -> str | None:
    """Measure one model; what went wrong, if something did, which is kept with what was measured."""
    try:
        done = subprocess.run(command(wish, path), timeout=limit, capture_output=True, text=True, check=False)
        lines = done.stderr.strip().splitlines()
        reason = None if done.returncode == 0 else (lines[-1] if lines else f"ended with {done.returncode}")
    except subprocess.TimeoutExpired:
        reason = f"stopped after {limit:g} s"
    if reason is not None:
        kept = _read(path, wish.name)
        path.write_text(json.dumps({**kept, "stopped": reason}, indent=1))
    return reason


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) and "peers" in found else {"name": name, "peers": {}}


def _is_done(path: Path) -> bool:
    kept = _read(path, "")
    return bool(kept.get("complete") or kept.get("stopped"))


def ratio(result: Mapping[str, Any]) -> float | None:
    """The best peer's time over ours: above 1, we are faster.

    >>> ratio({"peers": {"eager": {"median_ms": 3.0}, "intarsia": {"median_ms": 2.0}}})
    1.5
    """
    times = {name: peer["median_ms"] for name, peer in result["peers"].items() if "median_ms" in peer}
    peers = [times[name] for name in PEERS if name in times]
    return min(peers) / times[OURS] if OURS in times and peers else None


def table(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row for every model, times in milliseconds."""
    made = Table(
        title="median ms a call; error is ours against eager; compile: fixed order, cold, with known costs"
    )
    for column in ("model", *PEERS, *OWN, "best peer / ours", "error", "compile s"):
        made.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        peers = result["peers"]
        cells = [cell(peers.get(name)) for name in (*PEERS, *OWN)]
        own, best = peers.get(OURS, {}), ratio(result)
        error = own.get("error")
        made.add_row(
            str(result["name"]),
            *cells,
            "-" if best is None else f"{best:.2f}",
            "-" if error is None else f"{error:.0e}",
            ", ".join("-" if seconds is None else f"{seconds:.1f}" for seconds in compile_seconds(result)),
        )
    return made


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """The geometric mean and the worst case against the best peer of each model."""
    found = {result["name"]: best for result in results if (best := ratio(result)) is not None}
    if not found:
        return "nothing was measured"
    mean = math.exp(sum(map(math.log, found.values())) / len(found))
    worst = min(found, key=found.__getitem__)
    return (
        f"{len(found)} models: best peer / ours {mean:.3f} in the geometric mean,"
        f" {found[worst]:.2f} at worst ({worst})"
    )


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


def chart(results: Sequence[Mapping[str, Any]]) -> str:
    """An SVG of the results that have a time for eager: a row a model, a point a peer.

    >>> times = {"eager": {"median_ms": 2.0}, "intarsia": {"median_ms": 1.0}}
    >>> "bert" in chart([{"name": "bert", "peers": times}])
    True
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    rows = [(str(result["name"]), speeds) for result in results if (speeds := _speeds(result))]
    # Text stays text, and the same results make the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "intarsia"}):
        figure = Figure(figsize=(9, 1.6 + 0.27 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for peer, colour in _COLOURS.items():
            points = [(speeds[peer], place) for place, (_, speeds) in enumerate(rows) if peer in speeds]
            if points:
                size, above = (70, 3) if peer == OURS else (28, 2)
                axes.scatter(*zip(*points, strict=True), s=size, color=colour, label=peer, zorder=above)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda speed, _: f"{speed:g}x"))
        axes.set_yticks(range(len(rows)), [name.replace("$", r"\$") for name, _ in rows])
        axes.invert_yaxis()
        axes.axvline(1.0, color="#777777", linewidth=1)
        axes.grid(color="#dddddd", linewidth=0.6, zorder=0)
        axes.set_axisbelow(True)
        axes.set_xlabel("times as fast as eager PyTorch (further right is faster)")
        if rows:
            figure.legend(loc="outside upper center", ncols=3, frameon=False)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


def _speeds(result: Mapping[str, Any]) -> dict[str, float]:
    times = {name: peer["median_ms"] for name, peer in result["peers"].items() if "median_ms" in peer}
    if "eager" not in times:
        return {}
    return {name: times["eager"] / times[name] for name in _COLOURS if name in times}


if __name__ == "__main__":
    typer.run(bench)
