"""Findings as text: every plan that was measured, every block on every engine, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from intarsia.choose.findings import BlockCost, Findings, Trial

_BUSY = 1.5  # a median so many times the quickest round says more of the machine than of the plan


def findings_text(found: Findings) -> str:
    """The findings in lines, the quickest plan first, times in milliseconds."""
    lines = [*_trials(found)] if found.trials else ["nothing was measured"]
    if found.blocks:
        lines += _blocks(found)
    if found.entering:
        prices = ", ".join(f"{engine} {seconds * 1e3:.3f}" for engine, seconds in found.entering.items())
        lines.append(f"price of a crossing into an engine, ms: {prices}")
    if found.tolerance is not None and found.trials:
        whole = found.trial(found.chosen).error
        lines.append(f"error end to end {whole:.2g} of the largest value; tolerance={found.tolerance:g}")
        lines.append("  measured on the examples, in each row of a batch; other inputs may be off by more")
        lines += [f"  error of the segment from {node}: {error:.2g}" for node, error in found.errors.items()]
    lines += [f"left out: {reason}" for reason in found.left_out]
    return "\n".join(lines)


def _trials(found: Findings) -> Iterator[str]:
    what = "ms a call" if found.objective == "latency" else "ms a call's share, several callers"
    how = "remembered" if found.remembered else f"in {found.spent_s:.1f} s"
    yield f"measured end to end ({what}; median and spread of interleaved rounds; {how}):"
    rows = [(trial.name, trial) for trial in sorted(found.trials, key=_rank)]
    width = max((len(name) for name, _ in rows), default=0)
    best = found.trial(found.chosen).median
    for name, trial in rows:
        mark = "*" if name == found.chosen else " "
        count = f"{trial.segments} segment{'s' * (trial.segments != 1)}"
        ratio = f"{trial.median / best:.2f}x" if name != found.chosen else "chosen"
        dropped = "" if trial.final else ", not in the last race"
        if trial.quickest and trial.median > _BUSY * trial.quickest:
            dropped += f"; the machine was busy: its quickest round took {trial.quickest * 1e3:.3f}"
        yield f" {mark} {name:<{width}}  {_ms(trial)}  {ratio:>6}  {count}{dropped}"


def _rank(trial: Trial) -> tuple[bool, float]:
    return (not trial.final, trial.median)


def _ms(trial: Trial) -> str:
    spread = "        " if len(trial.seconds) < 2 else f" ±{trial.spread * 1e3:6.3f}"
    return f"{trial.median * 1e3:9.3f}{spread}"


def _blocks(found: Findings) -> Iterator[str]:
    engines = list(dict.fromkeys(engine for block in found.blocks for engine in block.seconds))
    runs = found.trial(found.chosen).blocks if found.trials else ()
    yield "blocks, ms (equal blocks are measured once):"
    yield f"  {'block':<9}{'nodes':>5}  " + "  ".join(f"{engine:>11}" for engine in engines) + "  begins at"
    for first, last, block in _runs(found.blocks, runs):
        name = f"{first}" if first == last else f"{first}-{last}"
        cells = []
        for engine in engines:
            mark = "*" if runs and runs[first] == engine else " "
            seconds = block.seconds.get(engine)
            cells.append(f"{'-' if seconds is None else format(seconds * 1e3, '.3f'):>10}{mark}")
        yield f"  {name:<9}{block.nodes:>5}  {'  '.join(cells)}  {block.at}"


def _runs(blocks: Sequence[BlockCost], runs: Sequence[str]) -> Iterator[tuple[int, int, BlockCost]]:
    """Neighbouring blocks that are equal and run on the same engine, as one line."""
    first = 0
    for number in range(1, len(blocks) + 1):
        same = number < len(blocks) and blocks[number].contents == blocks[first].contents
        if same and (not runs or runs[number] == runs[first]):
            continue
        yield first, number - 1, blocks[first]
        first = number
