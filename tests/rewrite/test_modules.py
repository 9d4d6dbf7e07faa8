"""Module rewriting: by class, path and glob; nothing of the given model is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from intarsia.errors import RewriteError
from intarsia.rewrite import rewrite_modules


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Sequential(nn.Linear(3, 3), nn.GELU()))
        self.head = nn.Linear(3, 2)
        self.again = self.body[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.body(x)))


def test_by_class_everywhere() -> None:
    model = Net().eval()
    made, swapped = rewrite_modules(model, {nn.GELU: lambda old: nn.ReLU()})
    assert [s.path for s in swapped] == ["body.1", "body.2.1"]
    assert {(s.old, s.new) for s in swapped} == {("GELU", "ReLU")}
    assert not any(isinstance(m, nn.GELU) for m in made.modules())
    assert sum(isinstance(m, nn.GELU) for m in model.modules()) == 2
    assert made.again is made.body[2] and made.head is model.head
    assert not made.body[1].training
    assert {p.data_ptr() for p in made.parameters()} == {p.data_ptr() for p in model.parameters()}
    x = torch.ones(1, 3)
    again = model.body[2]
    relu = torch.relu
    expected = model.head(relu(again[0](relu(again[0](relu(model.body[0](x)))))))
    torch.testing.assert_close(made(x), expected)


def test_by_path_and_glob() -> None:
    model = Net()

    def low_rank(old: nn.Module) -> nn.Module:
        assert isinstance(old, nn.Linear)
        return nn.Sequential(nn.Linear(old.in_features, 1), nn.Linear(1, old.out_features))

    made, swapped = rewrite_modules(model, {"head": low_rank, "body.*.0": low_rank})
    assert [s.path for s in swapped] == ["body.2.0", "head"]
    assert made(torch.ones(1, 3)).shape == (1, 2)


def test_what_is_put_in_is_not_looked_into() -> None:
    model = nn.Sequential(nn.ReLU())
    made, swapped = rewrite_modules(model, {nn.ReLU: lambda old: nn.Sequential(nn.ReLU(), old)})
    assert len(swapped) == 1 and len(made[0]) == 2


def test_rules_that_name_nothing_are_an_error() -> None:
    with pytest.raises(RewriteError, match=r"no submodule is named by \['tail', 'Conv2d'\]"):
        rewrite_modules(Net(), {"tail": lambda old: old, nn.Conv2d: lambda old: old})
    with pytest.raises(RewriteError, match="which is not a module"):
        rewrite_modules(Net(), {"head": lambda old: None})  # type: ignore[dict-item, return-value]
    with pytest.raises(RewriteError, match="no rule to swap modules"):
        rewrite_modules(Net(), {})
