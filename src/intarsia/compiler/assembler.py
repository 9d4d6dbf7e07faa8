"""Compiled modules of a lowered graph: its pieces are built, and the programs are put together."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from intarsia.build.builder import Builder, BuildSettings
from intarsia.build.judge import LoweredModel
from intarsia.build.trial import Cases, rewriter
from intarsia.engines import Engine
from intarsia.graph.nodes import uses_gpu
from intarsia.lower.size_examples import between
from intarsia.options import CompileOptions
from intarsia.partition import Strategy
from intarsia.partition.support import refused_table
from intarsia.runtime.compiled import Compiled, Source
from intarsia.runtime.cuda_graphs import use_cuda_graphs
from intarsia.runtime.inlay import Assembly

_SIZES_RECORDED = 24  # CUDA graphs of sizes between the ends of a range


@dataclass(frozen=True, eq=False)
class Assembler:
    """Puts the modules of one model together, whatever plan they run by."""

    model: nn.Module | None  # None for new weights without a model
    signature: inspect.Signature | None
    options: CompileOptions
    strategy: Strategy

    def builder(self, graph: LoweredModel, engines: Sequence[Engine], notes: Sequence[str] = ()) -> Builder:
        """A builder of the graph's pieces. It compares every program with the examples."""
        module, options = graph.lowered.module, self.options
        device = "cuda" if uses_gpu(module.graph) else "cpu"
        settings = BuildSettings(
            options.limits,
            self.strategy,
            None if options.rewrite is False else rewriter(options.rewrite, engines, device),
            options.build_limit_s,
            options.accuracy.tolerance,
        )
        examples = [example.inputs for example in graph.examples] if options.accuracy.verify else ()
        cases = Cases(module, [example.case for example in graph.examples])
        return Builder(module, engines, settings, examples, cases, list(notes))

    def inlay(self, graph: LoweredModel, assembly: Assembly, builder: Builder) -> Compiled:
        """A compiled module of these programs. On a GPU, it is one CUDA graph if it can be recorded."""
        compiled = self._compiled(graph, assembly, builder.notes)
        setting, module = self.options.cuda_graphs, graph.lowered.module
        if uses_gpu(module.graph) and graph.examples and setting is not False:
            # A GPU loads a kernel at its first use, and cuBLAS has other kernels for other sizes. Without
            # these examples, the first call of a size takes up to 20 ms (GPT-2, H200).
            inputs = [example.inputs for example in graph.examples]
            use_cuda_graphs(
                compiled,
                module.graph,
                capturable=all(e.capturable for e in builder.engines if e.name in assembly.plan.engines),
                results="static" if setting == "static" else "fresh",
                examples=[*inputs, *between(graph.lowered, inputs[0], _SIZES_RECORDED)],
            )
        return compiled

    def eager(
        self,
        graph: LoweredModel,
        engines: Sequence[Engine],
        reason: str,
        eager: Literal["chosen", "required"],
    ) -> Compiled:
        """A compiled module that runs the whole model in PyTorch; its plan gives `reason`."""
        builder = self.builder(replace(graph, examples=[]), engines)
        table = refused_table(graph.lowered.module, [engine.name for engine in engines], reason)
        assembly = replace(builder.run(table), body_plans={})  # the model runs, and not the bodies
        return self._compiled(graph, assembly, builder.notes, eager)

    def _compiled(
        self,
        graph: LoweredModel,
        assembly: Assembly,
        notes: Sequence[str],
        eager: Literal["chosen", "required"] | None = None,
    ) -> Compiled:
        source = Source(self.model, self.signature, eager=eager)
        return Compiled(graph.lowered, assembly, source, [*graph.notes, *graph.lowered.notes, *notes])
