"""Calls without elements, and indices out of range that an engine computes, end no process.

Each test runs in a process of its own, because the defects that it looks for end it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.slow

_START = """
    import warnings

    import torch
    from torch import nn
    from torch.nn import functional as F

    import intarsia

    warnings.simplefilter("ignore")


    class Of(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)


    def compiled(model, example, sizes, **options):
        options |= {"dynamic_shapes": (sizes,), "min_block_size": 1}
        return intarsia.compile(model.eval(), (example,), **options)


    def same(fast, model, x):
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-5)


    anything = torch.export.Dim.DYNAMIC
"""


def run(code: str) -> None:
    script = textwrap.dedent(_START) + textwrap.dedent(code)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"exit code {ended.returncode}: {ended.stderr[-2000:]}"


@pytest.mark.openvino
def test_embedding_bag_with_sizes_that_vary() -> None:
    # Of no bags, the largest of no offsets was an index of -2**31: OpenVINO read there.
    run(
        """
        weight = torch.randn(10, 4)
        for sizes in ({0: anything}, {0: anything, 1: anything}):
            model = Of(lambda ids: F.embedding_bag(ids, weight, mode="mean")).eval()
            fast = compiled(model, torch.randint(0, 10, (3, 5)), sizes, engines=["openvino"])
            assert fast.plan.engines == ("openvino",), fast.plan
            for rows in (3, 0, 1, 7, 0):
                same(fast, model, torch.randint(0, 10, (rows, 5)))
        """
    )


@pytest.mark.openvino
def test_computed_indices_into_a_line_of_integers() -> None:
    run(
        """
        table = torch.arange(10)
        model = Of(lambda x: table[(x * 1e8).long()])
        fast = compiled(model, torch.zeros(3), {0: anything}, engines=["openvino"])
        assert fast.plan.engines == ("openvino",), fast.plan
        same(fast, model, torch.zeros(5))
        try:
            fast(torch.full((4,), -3.0))
        except IndexError as error:
            assert "out of" in str(error)
        else:
            raise AssertionError("torch refuses such indices")
        same(fast, model, torch.zeros(2))
        """
    )


@pytest.mark.openvino
def test_a_pool_of_no_images() -> None:
    # Its kernel leaves the last call's result: the whole model ran in PyTorch.
    run(
        """
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
        fast = compiled(model, torch.randn(3, 3, 8, 8), {0: anything}, engines=["openvino"])
        assert fast.plan.engines == ("openvino",), fast.plan
        assert any("leaves calls without elements to PyTorch: MaxPool" in note for note in fast.notes)
        for rows in (3, 0, 2, 0, 5):
            same(fast, model, torch.randn(rows, 3, 8, 8))
        """
    )


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_recurrent_layer_of_no_rows(kind: str) -> None:
    run(
        f"""
        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.{kind}(4, 3, batch_first=True)

            def forward(self, x):
                return self.layer(x)[0]

        model, example = Last(), torch.randn(3, 5, 4)
        fast = compiled(model, example, {{0: anything}}, engines=["onnxruntime"])
        assert fast.plan.engines == ("onnxruntime",), fast.plan
        assert any("leaves calls without elements to PyTorch: {kind}" in note for note in fast.notes)
        for rows in (3, 0, 1, 7):
            same(fast, model, torch.randn(rows, 5, 4))
        try:
            compiled(model, example, {{0: anything}}, engines=["onnxruntime"], require_full_compilation=True)
        except intarsia.errors.PartitionError as error:
            assert "takes no empty tensors" in str(error)
        else:
            raise AssertionError("PyTorch may not answer calls of no rows")
        """
    )
