"""`torch.compile(backend="intarsia")`: the just-in-time door."""

from __future__ import annotations

from importlib.metadata import distributions

import pytest
import torch
from torch import nn

from intarsia.backend import intarsia_backend


class Branches(nn.Module):
    """Data decides the way, so that export fails and Dynamo makes two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if y.sum() > 0:
            return torch.relu(self.down(y))
        return torch.tanh(self.down(y))


def test_a_model_that_cannot_be_exported_still_compiles() -> None:
    model = Branches().eval()
    torch._dynamo.reset()
    fast = torch.compile(model, backend=intarsia_backend, dynamic=False)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(3, 8)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not list(distributions(name="intarsia")), reason="intarsia is not installed")
def test_the_name_is_known_to_torch() -> None:
    assert "intarsia" in torch.compiler.list_backends()


def test_gradients_are_left_to_pytorch() -> None:
    model = nn.Linear(4, 4)
    torch._dynamo.reset()
    fast = torch.compile(model, backend=intarsia_backend)
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match="it needs gradients"):
        fast(x).sum().backward()
    assert model.weight.grad is not None
