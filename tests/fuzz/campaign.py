"""Many random models, each tried in a process that may die without taking the others along; resumable."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fuzz.check import Outcome, Verdict, check
from tests.fuzz.draw import Case, draw_case


@dataclass(frozen=True)
class Campaign:
    """Seeds `first` to `first + models`, `jobs` at a time; what is in the file `state` is not tried again."""

    models: int
    first: int = 0
    jobs: int = 1
    limit_s: float = 120.0
    state: Path | None = None

    def run(self, tell: Callable[[int, Outcome], None] = lambda seed, outcome: None) -> Counter[Verdict]:
        """Try every seed and count the verdicts; `tell` hears of each as it comes."""
        counts: Counter[Verdict] = Counter()
        known = dict(self._known())
        seeds = [seed for seed in range(self.first, self.first + self.models) if seed not in known]
        for seed in range(self.first, self.first + self.models):
            if seed in known:
                counts[known[seed].verdict] += 1
        for seed, outcome in _outcomes(seeds, self.jobs, self.limit_s):
            counts[outcome.verdict] += 1
            self._remember(seed, outcome)
            tell(seed, outcome)
        return counts

    def _known(self) -> Iterator[tuple[int, Outcome]]:
        if self.state is None or not self.state.exists():
            return
        for line in self.state.read_text().splitlines():
            try:
                row = json.loads(line)
                yield row["seed"], Outcome(Verdict(row["verdict"]), row["said"])
            except (ValueError, KeyError, TypeError):
                continue  # a line cut short when a run was stopped: that seed is tried again

    def _remember(self, seed: int, outcome: Outcome) -> None:
        if self.state is None:
            return
        row = {"seed": seed, "verdict": outcome.verdict.value, "said": outcome.said}
        with self.state.open("a") as file:
            file.write("\n" + json.dumps(row))  # the line before may have been cut short


def reproduce(seed: int) -> str:
    """The case of a seed, made smaller while it stays wrong, as a runnable program.

    >>> "class Model(nn.Module)" in reproduce(0)
    True
    """
    case = draw_case(seed)
    outcome = check(case)
    if not outcome.wrong:
        return script(case, f"seed {seed}: {outcome.verdict.value}")
    smallest = shrink(case, lambda other: check(other).verdict is outcome.verdict)
    return script(smallest, f"seed {seed}: {outcome.verdict.value}: {check(smallest).said}")


class _Worker:
    """A process that tries the seeds it is sent."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.seed: int | None = None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while (seed := pipe.recv()) is not None:
        try:
            outcome = check(draw_case(seed))
        except Exception as error:  # the fuzzer's own mistake is reported like a model's
            outcome = Outcome(Verdict.FAILED, f"the trial itself failed: {type(error).__name__}: {error}")
        pipe.send((outcome.verdict.value, outcome.said))


def _outcomes(seeds: list[int], jobs: int, limit_s: float) -> Iterator[tuple[int, Outcome]]:
    waiting = list(reversed(seeds))
    workers = [_Worker() for _ in range(min(jobs, len(waiting)))]
    try:
        for worker in workers:
            _next(worker, waiting)
        while busy := [worker for worker in workers if worker.seed is not None]:
            ready: list[Any] = wait([worker.pipe for worker in busy], timeout=limit_s)
            # One that hangs is noticed when nothing else moves.
            for worker in [w for w in busy if w.pipe in ready] or busy:
                seed = worker.seed
                assert seed is not None
                if worker.pipe not in ready:
                    outcome = Outcome(Verdict.FAILED, f"no answer within {limit_s:g} s")
                else:
                    outcome = _answer(worker)
                if not worker.process.is_alive() or worker.pipe not in ready:
                    worker.stop()
                    workers[workers.index(worker)] = worker = _Worker()
                _next(worker, waiting)
                yield seed, outcome
    finally:
        for worker in workers:
            worker.stop()


def _answer(worker: _Worker) -> Outcome:
    try:
        verdict, said = worker.pipe.recv()
    except (EOFError, ConnectionError):
        worker.process.join()
        return Outcome(Verdict.FAILED, f"the process died with exit code {worker.process.exitcode}")
    return Outcome(Verdict(verdict), said)


def _next(worker: _Worker, waiting: list[int]) -> None:
    worker.seed = waiting.pop() if waiting else None
    if worker.seed is not None:
        worker.pipe.send(worker.seed)


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
        replace(options, training=False),
        replace(options, step=False),
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
        dynamic = f"    dynamic_shapes=pack({dims}),\n"
    lines = [f"# {line}" for line in said.splitlines()] + [case.program.source(), "import intarsia", ""]
    mode = "train()" if o.training else "eval()"
    lines += ["model = Model().eval()", f"twin = Model().{mode}"] + (
        ["n = torch.export.Dim('n', min=1, max=64)"] if dynamic else []
    )
    lines += [
        "fast = intarsia.compile(",
        "    twin,",
        "    pack(*inputs()),",
        f"{dynamic}    engines={list(o.engines)!r},",
        f"    partition={o.partition!r},",
        f"    min_block_size={o.min_block_size!r},",
        f"    rewrite={o.rewrite!r},",
        ")",
        "with torch.no_grad():",
        "    for seed in range(4):",
        "        print(model(*pack(*inputs(seed=seed))), fast(*pack(*inputs(seed=seed))))",
        "",
    ]
    if o.step:
        lines += [
            "for module in (model, twin):",
            "    for parameter in module.parameters():",
            "        parameter.grad = torch.ones_like(parameter)",
            "    torch.optim.AdamW(module.parameters(), lr=0.1, fused=True).step()",
            "print(model(*pack(*inputs())), fast(*pack(*inputs())))  # has to be refused",
            "",
        ]
    return "\n".join(lines)
