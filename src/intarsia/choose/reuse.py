"""A compile that was kept: what is made of a model is looked for on disk, and put there."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from intarsia.build.faithful import Example
from intarsia.build.kept import Keeper
from intarsia.choose.findings import Findings
from intarsia.choose.plan import MeasuredPlan, measured_plan
from intarsia.choose.wishes import Wishes
from intarsia.engines import Engine
from intarsia.lower import Lowered
from intarsia.runtime.compiled import Compiled, Source
from intarsia.runtime.inlay import Assembly

WORTH_KEEPING_S = 1.0  # a compile that took less is not kept on disk
TOLD = "no engine was built: an earlier compile of the same model was kept on disk"


class Earlier:
    """An earlier compile of the same graph, weights, examples, answers and wishes, if one was kept."""

    def __init__(
        self,
        model: nn.Module,
        lowered: Lowered,
        examples: Sequence[Example],
        usable: Sequence[Engine],
        wishes: Wishes,
        notes: Sequence[str],
    ) -> None:
        self._model, self._lowered, self._began = model, lowered, wishes.began
        self._keeper = Keeper(None)
        in_part = wishes.graphs is not None or not isinstance(model, nn.Module)
        if in_part or wishes.tolerance is not None or wishes.more:
            return  # parts of a model, and what is measured for precision, are made anew
        answers = [
            (e.inputs, e.truth and (e.truth.leaves, e.truth.inputs, e.truth.buffers)) for e in examples
        ]
        asked = (
            *(wishes.strategy, wishes.measured, wishes.options, wishes.rewrite, wishes.verify),
            *(wishes.cuda_graphs, wishes.only_if_worth_it, list(notes), inspect.signature(model.forward)),
        )
        self._keeper = Keeper.of(lowered, answers, usable, asked)

    def module(self) -> Compiled | None:
        """The module it made, over this model's weights; None if there is none."""
        found = self._keeper.find(self._lowered, self._model.state_dict)
        if found is None:
            return None
        made, signature = found.pieces, inspect.signature(self._model.forward)
        assembly = Assembly(made.plan, made.pieces, made.programs, made.body_plans)
        source = Source(self._model, signature)
        compiled = Compiled(self._lowered, assembly, source, [*made.notes, TOLD])
        if (findings := found.extra.get("findings")) is not None:
            compiled.plan = measured_plan(made.plan, replace(Findings.from_dict(findings), remembered=True))
        return compiled

    def module_or(self, make: Callable[[], Compiled]) -> Compiled:
        """The module it made, or one made now, and kept."""
        found = self.module()
        if found is None:
            found = make()
            self.keep(found, (), verified=False)
        return found

    def keep(self, compiled: Compiled, examples: Sequence[Example], *, verified: bool) -> None:
        """Keep a module that took long to make; one of a model that draws lots was not compared with it."""
        if time.perf_counter() - self._began < WORTH_KEEPING_S:
            return
        if verified and not all(example.truth is not None for example in examples):
            return
        plan = compiled.plan
        findings = plan.findings.as_dict() if isinstance(plan, MeasuredPlan) else None
        self._keeper.keep(compiled, {"findings": findings})
