"""The names of Dynamo that are not public, as `dynamo_graph` reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from intarsia.backend.dynamo_graph import DynamoInput, Kind, inputs_of, settled


class Reads(nn.Module):
    """A parameter, a buffer, a plain tensor, a float, a size and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(4))
        self.plain = torch.ones(4)

    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return self.norm(x) * n + self.table * x.shape[0] + self.plain


def test_each_input_is_told_from_the_others() -> None:
    seen: list[tuple[list[DynamoInput], int]] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        items = [node for node in module.graph.nodes if node.target == "item"]
        seen.append((inputs_of(module, inputs), sum(map(settled, items))))
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Reads().eval(), backend=backend, dynamic=True)(torch.randn(3, 4), 7)
    ((found, fixed),) = seen
    weights = {item.source.split("'")[-2] for item in found if item.kind is Kind.WEIGHT}
    assert {"weight", "bias", "running_mean", "running_var", "table"} <= weights
    assert any("plain" in item.source for item in found if item.kind is Kind.WEIGHT)
    (size,) = [item for item in found if item.kind is Kind.SIZE]
    assert found[size.tensor].source == "L['x']" and size.axis == 0
    (number,) = [item for item in found if item.kind is Kind.NUMBER]
    assert number.source == "L['n']"
    assert found[size.tensor].dims.keys() == {0} and found[size.tensor].dims[0].min == 2
    floats = [item for item in found if item.source.endswith((".eps", ".momentum"))]
    assert len(floats) == fixed == 2 and all(item.kind is Kind.SETTING for item in floats)
