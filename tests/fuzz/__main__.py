"""`python -m tests.fuzz`: random models compiled and compared with themselves run eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tests.fuzz.campaign import Campaign, reproduce
from tests.fuzz.check import Outcome, Verdict

app = typer.Typer(add_completion=False)


@app.command()
def fuzz(
    models: Annotated[int, typer.Option(help="how many models to try", min=1)] = 100,
    first: Annotated[int, typer.Option(help="the first seed", min=0)] = 0,
    jobs: Annotated[int, typer.Option(help="processes at a time", min=1)] = 1,
    state: Annotated[
        Path | None, typer.Option(help="a file of what was tried; a run that was stopped goes on from it")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="print the model of this seed, made small if wrong")
    ] = None,
) -> None:
    """Compile random models and compare them with eager PyTorch; exit with 1 if one is wrong."""
    console = Console(soft_wrap=True)
    if seed is not None:
        typer.echo(reproduce(seed))
        return
    wrong: list[int] = []
    tried = 0

    def tell(number: int, outcome: Outcome) -> None:
        nonlocal tried
        tried += 1
        if outcome.wrong:
            wrong.append(number)
            first_line = next(iter(outcome.said.splitlines()), "")
            console.print(
                f"seed {number}: {outcome.verdict.value}: {first_line}", markup=False, highlight=False
            )
        if console.is_terminal and tried % 20 == 0:
            console.print(f"{tried} tried", style="dim")

    counts = Campaign(models, first, jobs, state=state).run(tell)
    console.print(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict), highlight=False)
    if counts[Verdict.DIFFERENT] or counts[Verdict.FAILED]:
        console.print("`python -m tests.fuzz --seed N` prints one as a program, as small as it stays wrong")
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
