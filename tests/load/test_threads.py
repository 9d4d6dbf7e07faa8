"""Many threads at once: on one compiled module, and compiling."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import intarsia


def together(work: Callable[[int], None], count: int) -> None:
    """Run `work` in so many threads; the first error is raised here."""
    errors: list[BaseException] = []
    gate = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            gate.wait()
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4), nn.Softmax(-1)).eval()


@pytest.mark.parametrize("engines", [["onnxruntime"], ["openvino"], ["pytorch"], ["onnxruntime", "openvino"]])
def test_32_threads_on_one_module(engines: list[str]) -> None:
    model = mlp()
    fast = intarsia.compile(model, (torch.randn(3, 16),), engines=engines, min_block_size=1)
    inputs = [torch.randn(3, 16) for _ in range(32)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]

    def work(index: int) -> None:
        for _ in range(20):
            torch.testing.assert_close(fast(inputs[index]), expected[index], rtol=1e-5, atol=1e-6)

    together(work, 32)


def test_compiling_in_many_threads() -> None:
    models = [mlp() for _ in range(6)]
    x = torch.randn(3, 16)

    def work(index: int) -> None:
        fast = intarsia.compile(models[index], (x,), min_block_size=1)
        torch.testing.assert_close(fast(x), models[index](x).detach(), rtol=1e-5, atol=1e-6)

    together(work, len(models))


def test_calls_while_others_compile() -> None:
    model, x = mlp(), torch.randn(3, 16)
    fast = intarsia.compile(model, (x,), min_block_size=1)
    expected = model(x).detach()

    def work(index: int) -> None:
        if index:
            for _ in range(50):
                torch.testing.assert_close(fast(x), expected, rtol=1e-5, atol=1e-6)
        else:
            intarsia.compile(mlp(), (x,), min_block_size=1)

    together(work, 4)
