"""Memory that is given back: pages of files that weights were read from, unless they were written to."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import fx

from intarsia.memory import release_mapped
from intarsia.quantized import LINEAR
from intarsia.runtime.weights import releasing_memory

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not os.access("/proc/self/pagemap", os.R_OK),
    reason="the pages of a process are read from /proc/self/pagemap",
)


def pages_in_memory(tensor: torch.Tensor) -> int:
    first, end = (
        address // mmap.PAGESIZE for address in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
    )
    with open("/proc/self/pagemap", "rb", buffering=0) as pages:
        entries = os.pread(pages.fileno(), (end - first) * 8, first * 8)
    return sum(entry >> 7 for entry in entries[7::8])  # the highest bit of each: the page is present


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    drawn = {"read": torch.randn(512, 512), "written": torch.randn(512, 512)}
    save_file(drawn, tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in drawn.items())
    return {**loaded, "drawn": drawn["read"], "drawn to be written": drawn["written"]}


def test_weights_of_a_file_take_no_memory_until_they_are_read_again(weights: dict[str, torch.Tensor]) -> None:
    assert pages_in_memory(weights["read"]) > 250
    release_mapped(weights.values())
    assert pages_in_memory(weights["read"]) < 4  # those at its ends, which other tensors share
    assert torch.equal(weights["read"], weights["drawn"])
    assert pages_in_memory(weights["read"]) > 250


@pytest.mark.parametrize("row", [0, 100, 511])
def test_what_was_written_to_such_weights_stays(weights: dict[str, torch.Tensor], row: int) -> None:
    for tensor in (weights["written"], weights["drawn to be written"]):
        tensor[row] = 7.0
    release_mapped([weights["written"]])
    assert torch.equal(weights["written"], weights["drawn to be written"])


def test_memory_of_the_process_itself_stays(weights: dict[str, torch.Tensor]) -> None:
    before = weights["drawn"].clone()
    release_mapped([weights["drawn"], weights["drawn"][3:5], torch.empty(0), torch.empty(2, device="meta")])
    assert torch.equal(weights["drawn"], before)


def test_weights_that_an_engine_reads_while_it_builds_are_released_again(
    weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("intarsia.runtime.weights._LARGE", 1)
    graph = fx.Graph()
    x, packed = graph.placeholder("x"), graph.get_attr("read")
    graph.output(graph.call_function(LINEAR, (x, packed, packed, None, None, 4)))
    with releasing_memory(fx.GraphModule({"read": weights["read"]}, graph)):
        weights["read"].sum()
        wait_until(lambda: pages_in_memory(weights["read"]) < 4)
    weights["read"].sum()
    time.sleep(0.5)
    assert pages_in_memory(weights["read"]) > 250  # the block has ended


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
