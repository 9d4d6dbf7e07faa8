"""What speaks against a CUDA graph shows in the graph, and a wish that cannot be met is refused."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import intarsia
from intarsia.errors import InputError
from intarsia.runtime.cuda_graphs import not_capturable

aten = torch.ops.aten


def graph_of(*devices: str, op: object = aten.relu.default) -> fx.Graph:
    """A chain of one operator, each result on the device of that name."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = _described(devices[0])
    for device in devices[1:]:
        node = graph.call_function(op, (node,))  # type: ignore[arg-type]
        node.meta["val"] = _described(device)
    graph.output((node,))
    return graph


def _described(device: str) -> object:
    from torch._subclasses import FakeTensorMode

    if device == "number":
        return 3
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(2, device=device)


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (("cuda:0", "cuda:0"), None),
        (("cpu", "cuda:0"), "x is on cpu"),
        (("cuda:0", "cpu", "cuda:0"), "relu_default is on cpu"),
        pytest.param(
            ("cuda:0", "cuda:1"),
            "it runs on cuda:0 and cuda:1",
            marks=pytest.mark.skipif(torch.cuda.device_count() == 1, reason="there is one GPU, no second"),
        ),
        (("cuda:0", "number"), "relu_default reads a value back from the GPU"),
        (("number",), "no part of it runs on a GPU"),
    ],
)
def test_what_speaks_against_a_graph(devices: tuple[str, ...], reason: str | None) -> None:
    assert not_capturable(graph_of(*devices), engines_capturable=True) == reason


class Picks(nn.Module):
    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x[places]


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        (torch.tensor([2, 0]), "x is on cpu"),
        (torch.tensor([True, False, True]), "the sizes of index"),
    ],
    ids=["integers", "booleans"],
)
def test_sizes_that_depend_on_values_speak_against_a_graph(places: torch.Tensor, reason: str) -> None:
    graph = torch.export.export(Picks(), (torch.ones(3), places)).graph
    said = not_capturable(graph, engines_capturable=True)
    assert said is not None and said.startswith(reason)


def test_an_engine_with_a_stream_of_its_own_speaks_against_a_graph() -> None:
    said = not_capturable(graph_of("cuda:0", "cuda:0"), engines_capturable=False)
    assert said == "an engine of the plan launches its kernels on a stream of its own"


@pytest.mark.parametrize("asked", [True, "static"])
def test_a_cuda_graph_of_a_model_on_the_cpu_is_refused(asked: object) -> None:
    with pytest.raises(InputError, match="needs a model on a CUDA device; this one is on cpu"):
        intarsia.compile(nn.Linear(2, 2), (torch.ones(1, 2),), cuda_graphs=asked)  # type: ignore[arg-type]
