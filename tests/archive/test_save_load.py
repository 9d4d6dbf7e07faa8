"""A compiled module is saved and loaded by files, copies, pickle and `torch.save`, and it is freed."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.archive.models import MODELS
from torch import nn

import intarsia
from intarsia.errors import ArchiveError, InputError


def compiled(name: str) -> tuple[Any, tuple[Any, ...]]:
    torch.manual_seed(0)
    specimen = MODELS[name]()
    wishes = {"min_block_size": 1, **specimen.options}
    return intarsia.compile(specimen.model, specimen.args, **wishes), specimen.args


@pytest.mark.parametrize("name", ["convolutions", "branches", "sizes"])
def test_copies_answer_alike(name: str) -> None:
    fast, args = compiled(name)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    expected = fast(*args)
    for other in (
        copy.deepcopy(fast),
        pickle.loads(pickle.dumps(fast)),
        torch.load(file, weights_only=False),
        copy.deepcopy(nn.Sequential(fast))[0],
    ):
        assert torch.equal(other(*args), expected)
        assert str(other.plan) == str(fast.plan)
        assert other.state_dict().keys() == fast.state_dict().keys()


def test_a_copy_has_buffers_of_its_own() -> None:
    fast, args = compiled("counter")
    other = copy.deepcopy(fast)
    fast(*args)
    fast(*args)
    assert fast.state_dict()["count"][0] == other.state_dict()["count"][0] + 2
    other(*args)
    assert other.state_dict()["count"][0] + 1 == fast.state_dict()["count"][0]
    assert not torch.equal(other.state_dict()["count"], other.state_dict()["total"])


def test_a_loaded_module_refuses_what_the_saved_one_refused() -> None:
    fast, _ = compiled("sizes")
    other = copy.deepcopy(fast)
    for bad in (
        (torch.randn(50, 24), torch.randn(100, 24)),
        (torch.randn(3, 24), torch.randn(7, 24)),
        (torch.randn(3, 24).double(), torch.randn(6, 24)),
    ):
        with pytest.raises(intarsia.errors.InputError) as first:
            fast(*bad)
        with pytest.raises(intarsia.errors.InputError) as second:
            other(*bad)
        assert str(first.value) == str(second.value)


def test_guards_are_kept() -> None:
    class Pools(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.max_pool2d(x, 2) * 2 + 1

    fast = intarsia.compile(Pools(), (torch.randn(1, 2, 8, 8),), engines="onnxruntime", min_block_size=1)
    other = copy.deepcopy(fast)
    bad = torch.randn(1, 2, 8, 8)
    bad[0, 0, 0, 0] = torch.nan
    with pytest.warns(UserWarning, match="PyTorch runs this call"):
        answer = other(bad)
    assert torch.equal(answer.isnan(), Pools()(bad).isnan())
    assert answer.isnan().any()


def test_engines_go_with_their_module() -> None:
    fast, args = compiled("attention")
    program = fast.inlay.steps[0].program
    watched = [weakref.ref(program.program), weakref.ref(program)]
    fast(*args)
    del fast, program
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_what_cannot_be_saved_cannot_be_pickled_either() -> None:
    fast, _ = compiled("loop")
    fast._fit.stands = False
    with pytest.raises(ArchiveError, match="runs as it is"):
        pickle.dumps(fast)


@pytest.mark.openvino
def test_engines_of_the_users_own_choice(tmp_path: Any) -> None:
    fast, args = compiled("attention")
    intarsia.save(fast, tmp_path / "m")
    mine = intarsia.load(tmp_path / "m", engines=intarsia.PyTorch())
    assert mine.plan.engines == ("pytorch",)
    assert torch.allclose(mine(*args), fast(*args), atol=1e-5)
    assert any("not among the engines that were passed" in note for note in mine.notes)
    one = intarsia.load(tmp_path / "m", engines=[intarsia.OpenVINO(threads=1), "onnxruntime"])
    assert one.plan.engines == fast.plan.engines
    assert torch.allclose(one(*args), fast(*args), atol=1e-5)


def test_types_are_found_by_their_registered_names() -> None:
    specimen_module = pytest.importorskip("tests.archive.pairs")
    model = specimen_module.MakesPair()
    fast = intarsia.compile(model, (torch.ones(3),), engines="pytorch")
    made = copy.deepcopy(fast)(torch.ones(3))
    assert type(made) is specimen_module.Pair
    assert torch.equal(made.twice, torch.full((3,), 2.0))


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "pytorch"])
def test_export_and_tracing_are_refused_clearly(engine: str) -> None:
    x = torch.randn(2, 16)
    fast = intarsia.compile(nn.Linear(16, 4).eval(), (x,), engines=engine, min_block_size=1)
    with pytest.raises(Exception, match="engines, which torch cannot trace"):
        torch.export.export(fast, (x,))
    with pytest.raises(InputError, match="engines, which torch cannot trace"):
        torch.jit.trace(fast, (x,))  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match="load the file in every process"):
        fast.share_memory()


def _answer(fast: Any, x: torch.Tensor, pipe: Any) -> None:
    pipe.send(fast(x).tolist())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_forked_process_answers_alike(engine: str) -> None:
    x = torch.randn(2, 16)
    fast = intarsia.compile(nn.Linear(16, 4).eval(), (x,), engines=engine, min_block_size=1)
    _check_process("fork", fast, x)


@pytest.mark.full
def test_a_spawned_process_answers_alike() -> None:
    x = torch.randn(2, 16)
    fast = intarsia.compile(nn.Linear(16, 4).eval(), (x,), engines="onnxruntime", min_block_size=1)
    _check_process("spawn", fast, x)


def _check_process(start: str, fast: Any, x: torch.Tensor) -> None:
    context = multiprocessing.get_context(start)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(fast, x, theirs))  # type: ignore[attr-defined]
    process.start()
    assert ours.poll(100)
    assert torch.allclose(torch.tensor(ours.recv()), fast(x), atol=1e-6)
    process.join(20)
    assert process.exitcode == 0


def test_everything_is_put_on_the_device_asked_for(tmp_path: Path) -> None:
    x = torch.randn(2, 16)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    intarsia.save(intarsia.compile(model, (x,), engines="pytorch"), tmp_path / "m")
    for place in ("meta", {"cpu": "meta"}):
        elsewhere = intarsia.load(tmp_path / "m", map_location=place)  # a device that every machine has
        assert {tensor.device.type for tensor in elsewhere.state_dict().values()} == {"meta"}
        with pytest.raises(InputError, match="is on cpu; compiled for meta"):
            elsewhere(x)
        assert elsewhere(x.to("meta")).device.type == "meta"
    assert torch.equal(intarsia.load(tmp_path / "m", map_location={"cuda:0": "cpu"})(x), model(x))
    if not torch.cuda.is_available():
        with pytest.raises(ArchiveError, match="map_location names 'cuda:0', but there is no CUDA device"):
            intarsia.load(tmp_path / "m", map_location="cuda:0")
