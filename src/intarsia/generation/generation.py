"""The result of `compile_generation`: a model that generates with compiled programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from intarsia.generation.forward import GeneratingForward
from intarsia.runtime.compiled import Compiled
from intarsia.runtime.partly import PartlyCompiled


@dataclass(eq=False)
class Generation:
    """A model whose `generate` runs compiled programs; `restore()`, or the end of a `with` block, undoes it.

    `model` is your model with another `forward`. Its `generate(...)` is unchanged. `error` is the largest
    error of the logits in the comparison after the compile, as a share of the largest logit.
    """

    model: nn.Module
    forward: GeneratingForward
    error: float = 0.0
    tolerance: float | None = None
    notes: tuple[str, ...] = ()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `generate`."""
        return self.model.generate(*args, **kwargs)  # type: ignore[operator]

    def enable(self, on: bool = True) -> None:
        """Use the compiled programs, or with `on=False` the model's own forward."""
        self.forward.enable(on)

    def restore(self) -> None:
        """Restore the model's own forward and release the compiled programs."""
        self.forward.take_out()
        self.forward.by_rows, self.forward.encoder, self.forward.programs = {}, None, []

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: Any) -> None:
        self.restore()

    def __str__(self) -> str:
        forward = self.forward
        lines = [f"{forward.path} generates compiled, up to {forward.max_length} tokens"]
        named: list[tuple[str, Compiled | PartlyCompiled | None]] = []
        masked = "padded prompt"
        if forward.encoder is not None:
            named = [("encoder", forward.encoder.plain), ("encoder, padded", forward.encoder.masked)]
            masked = "prompt"
        for rows, programs in forward.by_rows.items():
            named += [
                (f"batch {rows}, prompt", programs.prompt),
                (f"batch {rows}, {masked}", programs.masked_prompt),
                (f"batch {rows}, token", programs.token),
                (f"batch {rows}, tokens after a cache", programs.continued),
            ]
        lines += [f"  {name}: on {', '.join(it.plan.engines)}" for name, it in named if it is not None]
        if self.tolerance is not None:
            error = f"error of logits {self.error:.2g} of the largest; tolerance={self.tolerance:g}"
            lines.append(
                f"  {error}; measured on the prompts of the compile; the error of other prompts may be larger"
            )
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
