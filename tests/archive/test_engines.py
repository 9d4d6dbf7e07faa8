"""Engines that read graphs are given tensors without memory; free sizes, devices and versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.archive.forge import members
from torch import nn

import intarsia
from intarsia.archive.container import MANIFEST
from intarsia.archive.graphs import graph_from_json, graph_to_json
from intarsia.archive.tensors import TensorTable
from intarsia.engines import Inductor


def test_inductor_is_built_again_from_the_graph(tmp_path: Path) -> None:
    engine = Inductor()
    if (reason := engine.unavailable()) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).eval(), torch.randn(3, 16)
    fast = intarsia.compile(model, (x,), engines=engine, min_block_size=1)
    assert fast.plan.engines == ("inductor",)
    intarsia.save(fast, tmp_path / "m")
    loaded = intarsia.load(tmp_path / "m")
    assert loaded.plan.engines == ("inductor",)
    assert torch.equal(loaded(x), fast(x))


def test_values_of_nodes_are_described_and_have_no_memory() -> None:
    exported = torch.export.export(nn.Conv2d(1, 2, 3), (torch.randn(1, 1, 5, 5),)).module()
    plain = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    x = plain.graph.placeholder("x")
    x.meta["val"] = torch.empty_strided((2, 3), (1, 2), dtype=torch.float16)
    plain.graph.output((x,))
    written = graph_to_json(plain, TensorTable(), lambda _: None, values=True)
    again = graph_from_json(json.loads(json.dumps(written)), {}, lambda _: exported).module
    value = next(iter(again.graph.nodes)).meta["val"]
    assert (value.dtype, value.shape, value.stride()) == (torch.float16, (2, 3), (1, 2))
    assert value.device.type == "cpu"
    assert type(value).__name__ == "FakeTensor"


def test_the_manifest_tells_engines_versions_reasons_and_host(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).eval()
    engine = intarsia.OnnxRuntime(threads=1)
    fast = intarsia.compile(model, (torch.ones(2, 16),), engines=engine, min_block_size=1)
    intarsia.save(fast, tmp_path / "m")
    manifest = json.loads(members((tmp_path / "m").read_bytes())[MANIFEST])
    import onnxruntime

    told = manifest["programs"]["model"]["engines"]["onnxruntime"]
    assert f"onnxruntime {onnxruntime.__version__}" in told["version"]
    assert told["fields"]["threads"] == 1
    assert manifest["made by"]["torch"] == torch.__version__
    assert manifest["made by"]["processor"]
    assert str(Path(__file__).parent) not in json.dumps(manifest)  # no paths of this machine


def test_equal_modules_make_equal_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).eval()
    fast = intarsia.compile(model, (torch.ones(8, 64),), engines="onnxruntime", min_block_size=1)
    for name in ("a", "b"):
        intarsia.save(fast, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = intarsia.load(tmp_path / "a")
    intarsia.save(again, tmp_path / "c")
    intarsia.save(intarsia.load(tmp_path / "c"), tmp_path / "d")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "d").read_bytes()


def test_weights_are_held_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).eval()
    fast = intarsia.compile(model, (torch.ones(2, 256),), min_block_size=1)
    intarsia.save(fast, tmp_path / "m")
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert (tmp_path / "m").stat().st_size < weights * 1.1 + 20_000
