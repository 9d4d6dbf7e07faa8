"""What becomes of one model: compiled by default, and compared with itself run eagerly on two inputs."""

from __future__ import annotations

import copy
import dataclasses
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tests.models.case import Call, Case

import intarsia
from intarsia.compare import relative_error
from intarsia.runtime.forwards import PartlyCompiled

EQUAL, PARTS, AS_IT_IS = "equal", "in parts", "as it is"
EAGER_REFUSES, RAISED, DIFFERS = "refused by PyTorch itself", "RAISED", "DIFFERS"
CRASHED, TIMED_OUT = "CRASHED", "TIMED OUT"
GOOD = (EQUAL, PARTS, AS_IT_IS)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One line of the table."""

    name: str
    source: str
    outcome: str
    on_engines: float | None = None
    error: float | None = None
    note: str = ""
    seconds: float = 0.0
    commit: str = ""  # the state of this repository that it was run in


def outcome_of(case: Case) -> Outcome:
    """Compile a model with default options; whether it answers as it does in PyTorch."""
    start = time.perf_counter()

    def told(what: str, note: str = "", share: float | None = None, error: float | None = None) -> Outcome:
        return Outcome(
            case.name, case.source, what, share, error, note, round(time.perf_counter() - start, 1)
        )

    made = case.call()
    calls = [(made.args, made.kwargs), other_call(made)]
    try:
        truths = [_answer(made.model, *call) for call in calls]
    except Exception as error:
        return told(EAGER_REFUSES, _one_line(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fast = intarsia.compile(copy.deepcopy(made.model), *copy.deepcopy(calls[0]))
            answers = [_answer(fast, *call) for call in calls]
        except Exception as error:
            return told(RAISED, _one_line(error))
    share, note = _share(fast), _without_folders(" ".join(fast.notes) or _first_reason(fast))
    worst = 0.0
    for answer, truth in zip(answers, truths, strict=True):
        wrong = _difference(answer, truth)
        if isinstance(wrong, str):
            return told(DIFFERS, f"{wrong} {note}", share)
        worst = max(worst, wrong)
    if share == 0:
        return told(AS_IT_IS, note, share, worst)
    return told(PARTS if isinstance(fast, PartlyCompiled) else EQUAL, note, share, worst)


def other_call(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Other values of the same shapes, and of the same range, so that they stay permitted."""
    generator = torch.Generator().manual_seed(1)

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                return value.flatten()[torch.randperm(value.numel(), generator=generator)].view_as(value)
            return value.roll(1, 1) if value.dim() > 1 and value.dtype is not torch.bool else value
        if type(value) in (list, tuple):
            return type(value)(other(item) for item in value)
        return {key: other(item) for key, item in value.items()} if type(value) is dict else value

    return other(call.args), other(call.kwargs)


def _answer(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's answer, its state and the arguments left as they were; random numbers start alike."""
    torch.manual_seed(3)
    args, kwargs = copy.deepcopy((args, kwargs))
    with torch.no_grad():
        return copy.deepcopy(model(*args, **kwargs))


def _difference(answer: Any, truth: Any) -> float | str:
    """The largest relative error over all tensors of an answer, or what is wrong with it."""
    if type(answer) is not type(truth):
        return f"it answers with a {type(answer).__name__} where PyTorch makes a {type(truth).__name__}."
    ours, theirs = list(_leaves(answer)), list(_leaves(truth))
    if len(ours) != len(theirs):
        return f"it answers with {len(ours)} values where PyTorch makes {len(theirs)}."
    worst = 0.0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(b, torch.Tensor):
            if a != b:
                return f"value {index} is {a!r} where PyTorch makes {b!r}."
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"value {index} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}."
        error = relative_error(a, b) if b.is_floating_point() or b.is_complex() else float((a != b).any())
        allowed = 1e-4 if not b.is_floating_point() else max(1e-4, 16 * torch.finfo(b.dtype).eps)
        if error > allowed:
            return f"value {index} is off by {error:.2g} of its largest."
        worst = max(worst, error)
    return worst


def _leaves(value: Any, depth: int = 6) -> Iterator[Any]:
    """Tensors and numbers in an answer of any kind, in order."""
    if isinstance(value, torch.Tensor | int | float | str):
        yield value
    elif depth and isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        yield from _leaves(vars(value), depth - 1)


def _share(fast: Any) -> float:
    """The share of nodes on engines, over what was captured; 0 where nothing was."""
    plans = list(fast.plan.parts.values()) if isinstance(fast, PartlyCompiled) else [fast.plan]
    nodes = [sum(len(segment.nodes) for segment in plan.segments) for plan in plans]
    on = sum(plan.on_engines * count for plan, count in zip(plans, nodes, strict=True))
    return on / sum(nodes) if sum(nodes) else 0.0


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return _without_folders(f"{type(error).__name__}: {lines[0]}")


def _first_reason(fast: Any) -> str:
    """Why the first kind of node is not on an engine, as the plan tells it."""
    lines = str(fast.plan).splitlines()
    reasons = [line.strip() for before, line in pairwise(lines) if before.startswith("not on ")]
    return reasons[0] if reasons else ""


def _without_folders(text: str) -> str:
    return re.sub(r"(?:/[^/\s:]+)+/([^/\s:]+\.py)", r"\1", " ".join(text.split()))


# docs/models.md: the table of models outside the zoo.


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
