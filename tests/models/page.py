"""docs/models.md: the table of models outside the zoo."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.models.outcome import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = """# Models outside the zoo

Written by `python -m tests.models.outside --docs` (needs the extra `models`). Each model is small, has random
weights, is compiled with `intarsia.compile(model, args, kwargs)` and no option, and is compared with itself
run eagerly on the example and on another input of the same shapes. The error is the largest difference of
any output as a share of that output's largest value; 1e-4 is the most that counts as equal (16 roundings in
shorter types). *In parts*: torch.export cannot take the model, so its submodules are compiled. *As it is*:
all of it runs in PyTorch. The share of nodes on engines is of what was captured.

"""


def write_page(outcomes: Sequence[Outcome], listed: int) -> None:
    """The page, from the outcomes in their order."""
    PAGE.write_text(page(outcomes, listed))


def page(outcomes: Sequence[Outcome], listed: int) -> str:
    """The page's text: counts, and a line a model."""
    counts = Counter(made.outcome for made in outcomes)
    summary = ", ".join(f"{count} {what}" for what, count in counts.most_common())
    missing = (
        f" {listed - len(outcomes)} more are listed and not tried yet." if listed > len(outcomes) else ""
    )
    states = Counter(made.commit or "an earlier one" for made in outcomes)
    told = ", ".join(f"{count} of {state}" for state, count in states.items())
    lines = [f"{len(outcomes)} models: {summary}.{missing} Rows by the commit they were run at: {told}.", ""]
    lines += [
        "| model | source | outcome | on engines | error | note |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return _HEAD + "\n".join([*lines, *map(_line, outcomes)]) + "\n"


def _line(made: Outcome) -> str:
    share = "" if made.on_engines is None else f"{made.on_engines:.0%}"
    error = "" if made.error is None else f"{made.error:.0e}" if made.error else "0"
    note = made.note.replace("|", "\\|")
    note = note if len(note) <= 200 else note[:197] + "..."
    return f"| {made.name} | {made.source} | {made.outcome} | {share} | {error} | {note} |"
