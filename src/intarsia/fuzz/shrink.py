"""A smaller case that is still wrong: statements, weights, outputs and options taken away one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from intarsia.fuzz.draw import Case


def shrink(case: Case, still_wrong: Callable[[Case], bool], *, tries: int = 200) -> Case:
    """The smallest case found within `tries` trials."""
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if tries <= 0:
                return case
            tries -= 1
            if still_wrong(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for program in case.program.smaller():
        yield replace(case, program=program)
    options = case.options
    for plainer in (
        replace(options, dynamic=False),
        replace(options, rewrite=False),
        replace(options, partition="dependency"),
        replace(options, min_block_size=1),
    ):
        if plainer != options:
            yield replace(case, options=plainer)
    if len(options.engines) > 1:
        for engine in options.engines:
            yield replace(case, options=replace(options, engines=(engine,)))


def script(case: Case, said: str) -> str:
    """The case as a program a person can run."""
    o = case.options
    dynamic = ""
    if o.dynamic:
        dims = ", ".join("{0: n}" if x.dynamic else "None" for x in case.program.inputs)
        dynamic = f"    dynamic_shapes=({dims},),\n"
    lines = [f"# {line}" for line in said.splitlines()] + [case.program.source(), "import intarsia", ""]
    lines += ["model = Model().eval()"] + (["n = torch.export.Dim('n', min=1, max=64)"] if dynamic else [])
    lines += [
        "fast = intarsia.compile(",
        "    Model().eval(),",
        "    inputs(),",
        f"{dynamic}    engines={list(o.engines)!r},",
        f"    partition={o.partition!r},",
        f"    min_block_size={o.min_block_size!r},",
        f"    rewrite={o.rewrite!r},",
        ")",
        "with torch.no_grad():",
        "    for seed in range(4):",
        "        print(model(*inputs(seed=seed)), fast(*inputs(seed=seed)))",
        "",
    ]
    return "\n".join(lines)
