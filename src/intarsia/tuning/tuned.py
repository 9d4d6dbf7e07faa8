"""What tuning did: which modules run compiled, why others do not, and what the whole call takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from intarsia.runtime.placed import PlacedForward
from intarsia.timing import Timing


@dataclass(eq=False)
class Tuned:
    """Modules of a program somebody else wrote, running compiled in their places.

    `placed` has them by path, `left` says of others why they stay as they are, `before` and `after` are times
    of the whole call. `restore()` puts everything back, and so does the end of a `with` block.
    """

    placed: Mapping[str, PlacedForward]
    left: Mapping[str, str]
    shares: Mapping[str, float] = field(default_factory=dict)  # of the call's time, by path, before
    before: Timing | None = None
    after: Timing | None = None
    notes: Sequence[str] = ()

    @property
    def speedup(self) -> float:
        """How many times faster the whole call is; 1 where it was not measured."""
        return self.before.median / self.after.median if self.before and self.after else 1.0

    def restore(self) -> None:
        """Give every module its own forward back; compiled programs are let go."""
        for placed in self.placed.values():
            placed.take_out()
        self.placed = {}

    def enable(self, on: bool = True) -> None:
        """Let the modules run compiled, or as they are, for now."""
        for placed in self.placed.values():
            placed.enable(on)

    def __enter__(self) -> Tuned:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def __str__(self) -> str:
        head = f"{len(self.placed)} modules run compiled"
        if self.before and self.after:
            head += (
                f"; the whole call took {self.before.median * 1e3:.4g} ms and takes"
                f" {self.after.median * 1e3:.4g} ms ({self.speedup:.2f}x)"
            )
        lines = [head]
        for path, placed in self.placed.items():
            engines = dict.fromkeys(e for program in placed.programs for e in program.plan.engines)
            share = f", {self.shares[path]:.0%} of the time" if path in self.shares else ""
            lines.append(f"  {path}: {len(placed.programs)} programs on {', '.join(engines)}{share}")
        lines += [f"  {path} stays as it is: {reason}" for path, reason in self.left.items()]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
