"""Nodes know the line they come from, though export does not read the whole stack for each of them."""

from __future__ import annotations

import threading

import torch
import torch.fx.proxy
from torch import fx, nn

from intarsia.capture.export import capture
from intarsia.capture.export_context import short_stack_traces
from intarsia.graph.nodes import source_line


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shifted(x).tanh()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)) * 2


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def lines(graph: fx.Graph) -> dict[str, str]:
    return {node.name: source_line(node, full=True) for node in graph.nodes}


def test_lines_are_those_that_torch_finds() -> None:
    x = torch.ones(2, 4)
    with torch.no_grad():
        whole = torch.export.export(Outer().eval(), (x,), strict=False).graph
    short = capture(Outer(), (x,)).graph
    assert lines(short) == lines(whole)
    assert all(lines(short)[name].rsplit(":")[0] == __file__ for name in ("add", "tanh", "mul"))


def test_torch_still_reads_stacks_by_the_name_that_is_replaced() -> None:
    """Where this fails, `short_stack_traces` replaces nothing: export is slower, and nothing else."""
    own = torch.fx.proxy.CapturedTraceback
    with short_stack_traces():
        assert torch.fx.proxy.CapturedTraceback is not own
        traces = [node.stack_trace for node in torch.export.export(Inner(), (torch.ones(2),)).graph.nodes]
    assert torch.fx.proxy.CapturedTraceback is own
    assert any(traces)
    assert all("\n" not in trace.replace("\n  File", "File") for trace in traces if trace)  # no source lines


def test_threads_that_export_at_once_leave_torch_as_it_was() -> None:
    own = torch.fx.proxy.CapturedTraceback
    inside, leave = threading.Barrier(2), threading.Event()

    def second() -> None:
        with short_stack_traces():
            inside.wait()
            leave.wait()

    other = threading.Thread(target=second)
    with short_stack_traces():
        other.start()
        inside.wait()
    assert torch.fx.proxy.CapturedTraceback is not own  # the other still exports
    leave.set()
    other.join()
    assert torch.fx.proxy.CapturedTraceback is own
