"""New weights in a module that was loaded: the file holds the program, which is lowered once more."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.archive.forge import sealed
from tests.runtime.test_refit import Folds, changed
from torch import nn

import intarsia
from intarsia.archive.reader import load_bytes
from intarsia.archive.writer import save_bytes
from intarsia.cli import zoo
from intarsia.compare import relative_error
from intarsia.errors import RefitError


@pytest.mark.parametrize("engines", ["openvino", "onnxruntime", "pytorch"])
def test_what_was_folded_is_folded_again(engines: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Folds().eval(), torch.randn(2, 3, 8, 8)
    intarsia.save(intarsia.compile(model, (x,), engines=engines, min_block_size=1), tmp_path / "a")
    fast = intarsia.load(tmp_path / "a")
    plan, other = str(fast.plan), changed(model)
    fast.refit(other)
    torch.testing.assert_close(fast(x), other(x), rtol=1e-4, atol=1e-5)
    assert (fast(x) - model(x)).abs().max() > 1e-2
    assert str(fast.plan) == plan
    intarsia.save(fast, tmp_path / "b")  # what was refitted is saved, loaded and refitted again
    again = intarsia.load(tmp_path / "b")
    torch.testing.assert_close(again(x), other(x), rtol=1e-4, atol=1e-5)
    intarsia.save(again, tmp_path / "c")
    for loaded in (again, fast, intarsia.load(tmp_path / "c")):
        loaded.refit(model.state_dict())
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
        assert loaded.state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
def test_a_new_process_refits_without_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Folds().eval(), torch.randn(2, 3, 8, 8)
    other = changed(model)
    intarsia.save(intarsia.compile(model, (x,), engines="onnxruntime", min_block_size=1), tmp_path / "a")
    torch.save((other.state_dict(), x), tmp_path / "weights")
    script = f"""
import sys, torch, intarsia
fast = intarsia.load({str(tmp_path / "a")!r})
assert not {{"intarsia.convert", "intarsia.compiler"}} & set(sys.modules)
state, x = torch.load({str(tmp_path / "weights")!r})
fast.refit(state)
torch.save(fast(x), {str(tmp_path / "answer")!r})
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    torch.testing.assert_close(torch.load(tmp_path / "answer"), other(x), rtol=1e-4, atol=1e-5)


class Counts(nn.Module):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("step", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += self.step
        return x * self.count


def test_buffers_begin_where_the_new_ones_are() -> None:
    fast = copy.deepcopy(intarsia.compile(Counts().eval(), (torch.ones(2),)))
    fast.refit({"count": torch.tensor([10.0])})
    assert [float(fast(torch.ones(2))[0]) for _ in range(2)] == [11, 12]
    other = Counts().eval()
    other.step = torch.full((1,), 2.0)
    fast.refit(other)
    assert [float(fast(torch.ones(2))[0]) for _ in range(2)] == [2, 4]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, times: int = 2) -> dict[str, torch.Tensor]:
        made = torch.cond(x.sum() > 0, lambda y: self.linear(y).relu(), lambda y: y.sin(), (x,))
        return {"made": made * times, "sum": made.sum()}


def test_control_flow_and_nested_results() -> None:
    model, x = Branches().eval(), torch.ones(3, 16)
    other = changed(model)
    fast = copy.deepcopy(intarsia.compile(model, (x,), {"times": 3}, min_block_size=1))
    fast.refit(other)
    for value in (x, -x):
        expected, found = other(value, times=3), fast(value, times=3)
        torch.testing.assert_close(found, expected)


def test_real_architectures() -> None:
    """BERT's position embeddings are folded; its inputs are integers and come by name."""
    specimen = zoo.specimen("bert")
    fast = copy.deepcopy(intarsia.compile(specimen.model, specimen.args, specimen.kwargs))
    other = changed(specimen.model)
    fast.refit(other.state_dict())
    with torch.no_grad():
        expected = other(*specimen.args, **specimen.kwargs)
    assert relative_error(fast(*specimen.args, **specimen.kwargs), expected) <= 1e-4


class Masked(nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.mask)


def test_weights_of_which_something_else_was_proven() -> None:
    model, q = Masked().eval(), torch.randn(1, 2, 4, 8)
    fast = copy.deepcopy(intarsia.compile(model, (q,)))
    with pytest.raises(RefitError, match="another graph"):
        fast.refit({"mask": torch.ones(4, 4, dtype=torch.bool).tril()})
    torch.testing.assert_close(fast(q), model(q))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    fast = copy.deepcopy(intarsia.compile(model, (x,)))
    before = fast(x)
    with pytest.raises(RefitError, match="weight has the shape"):
        fast.refit({**model.state_dict(), "weight": torch.ones(4, 4)})
    assert torch.equal(fast(x), before)


def test_sizes_that_vary_are_refused_and_files_without_a_program() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    batch = torch.export.Dim("batch", min=2, max=9)
    fast = intarsia.compile(model, (x,), dynamic_shapes={"input": {0: batch}})
    with pytest.raises(RefitError, match="sizes of input vary"):
        copy.deepcopy(fast).refit(model.state_dict())

    def forget(manifest: dict[str, Any], contents: dict[str, bytes]) -> None:
        manifest["programs"]["model"]["captured"] = {"reason": "it had none"}
        del contents["captured/0.json"]

    without = load_bytes(sealed(save_bytes(intarsia.compile(model, (x,))), forget))
    with pytest.raises(RefitError, match="holds no program to refit: it had none"):
        without.refit(model.state_dict())
