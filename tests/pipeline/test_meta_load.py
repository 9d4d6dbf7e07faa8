"""Models built and cut on the meta device: their costs, and weights from safetensors, stage by stage."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path

import pytest
import torch
from pipeline_zoo import make
from safetensors.torch import save_file, save_model
from torch import nn

from intarsia.errors import CaptureError, InputError, PartitionError
from intarsia.pipeline.split import split
from intarsia.pipeline.stages.profile import DeviceSpeed
from intarsia.pipeline.stages.weights import INDEX


class Table(nn.Module):
    """A table that is computed and not saved, a counter that is saved, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.mix = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.arange(4.0), persistent=False)

    def forward(self, ids):
        return self.head(self.norm(torch.tanh(self.mix(self.words(ids) * self.scale))))


def on_meta(maker):
    with torch.device("meta"):
        return maker()


@pytest.fixture
def table(tmp_path):
    torch.manual_seed(0)
    model = Table().eval()
    model.norm.running_mean.uniform_()
    save_model(model, str(tmp_path / "model.safetensors"))
    return model, tmp_path


def shards(folder: Path, tensors, count: int = 2) -> Path:
    """Write a folder of shards with an index, as Hugging Face does."""
    folder.mkdir()
    weight_map = {}
    for i in range(count):
        part = dict(list(tensors.items())[i::count])
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        save_file({k: v.contiguous() for k, v in part.items()}, str(folder / name), {"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


IDS = torch.randint(0, 8, (6,), generator=torch.Generator().manual_seed(0))


def meta_stages(**options):
    return split(on_meta(Table).eval(), (IDS,), stages=2, by="memory", **options)


def test_loads_what_was_cut_on_meta(table):
    model, folder = table
    stages = meta_stages()
    with pytest.raises(InputError, match=r"scale is a buffer that the model computes and does not save"):
        stages.load(folder)
    stages.load(folder / "model.safetensors", buffers={"scale": torch.arange(4.0)})
    torch.testing.assert_close(stages(IDS), model(IDS))
    assert list(stages.state_dict()) == list(model.state_dict())
    tied = [p for stage in stages for n, p in stage.named_parameters() if n == "words.weight"]
    assert all(p is tied[0] for p in tied)


def test_only_the_stages_that_are_asked_for_get_memory(table):
    _, folder = table
    stages = meta_stages().load(folder, only=[1], buffers={"scale": torch.arange(4.0)})
    assert all(p.is_meta for p in stages[0].parameters()) and not any(
        p.is_meta for p in stages[1].parameters()
    )
    with pytest.raises(InputError, match=r"of stage 0 is on the meta device"):
        stages(IDS)
    with pytest.raises(InputError, match=r"of stage 0 is on the meta device"):
        stages.gpipe(chunks=2)
    with pytest.raises(InputError, match=r"only=\[4\] names a stage that does not exist"):
        stages.load(folder, only=[4])


def test_a_buffer_that_was_computed_before_the_split_keeps_its_values(table):
    model, folder = table
    empty = on_meta(Table).eval()
    empty.scale = torch.arange(4.0)
    stages = split(empty, (IDS,), stages=2, by="memory").load(folder)
    torch.testing.assert_close(stages(IDS), model(IDS))
    assert empty.scale.device.type == "cpu"


def test_stages_with_memory_are_filled_in_place(table):
    model, folder = table
    other = Table().eval()
    stages = split(other, (IDS,), stages=2, by="memory").load(folder)
    assert torch.equal(other.mix.weight, model.mix.weight)
    assert any(p is other.mix.weight for p in stages.parameters())


def test_names_and_shapes_that_do_not_fit_are_told(table, tmp_path):
    model, _ = table
    good = {k: v.clone() for k, v in model.state_dict().items() if k != "head.weight"}

    def load(change, **options):
        tensors = dict(good)
        change(tensors)
        save_file(tensors, str(tmp_path / "other.safetensors"))
        return meta_stages().load(
            tmp_path / "other.safetensors", buffers={"scale": torch.arange(4.0)}, **options
        )

    with pytest.raises(InputError, match=r"lacks mix.bias$"):
        load(lambda t: t.pop("mix.bias"))
    with pytest.raises(InputError, match=r"also has more$"):
        load(lambda t: t.update(more=torch.ones(1)))
    load(lambda t: t.update(more=torch.ones(1)), strict=False)
    with pytest.raises(
        InputError, match="buffers names 'scaled', which is not a buffer of the model; did you mean 'scale'"
    ):
        meta_stages().load(tmp_path / "other.safetensors", buffers={"scaled": torch.arange(4.0)})
    with pytest.raises(
        InputError, match=r"does not fit: mix.weight is float32\[4, 4\], stored as float32\[4, 5\]"
    ):
        load(lambda t: t.update({"mix.weight": torch.ones(4, 5)}))
    with pytest.raises(InputError, match=r"mix.weight is float32\[4, 4\], stored as int8\[4, 4\]"):
        load(lambda t: t.update({"mix.weight": torch.ones(4, 4, dtype=torch.int8)}))
    with pytest.raises(InputError, match=r"words.weight and head.weight are tied in the model"):
        load(lambda t: t.update({"head.weight": torch.ones(8, 4)}))
    with pytest.raises(InputError, match=r"did you mean 'net.mix.bias'\? Map the names with rename="):
        load(lambda t: t.update({"net.mix.bias": t.pop("mix.bias")}))
    with pytest.raises(InputError, match=r"buffers has scale of shape \[3\]; it is float32\[4\]"):
        meta_stages().load(tmp_path, buffers={"scale": torch.arange(3.0)})

    def prefixed(tensors):
        renamed = {f"net.{k}": v for k, v in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    stages = load(prefixed, rename=lambda name: f"net.{name}")
    torch.testing.assert_close(stages(IDS), model(IDS))
    stages = load(lambda t: t.update({"mix.weight": t["mix.weight"].double()}))  # as load_state_dict does
    assert stages.state_dict()["mix.weight"].dtype is torch.float32


def test_damaged_files_are_refused(table, tmp_path):
    model, _ = table
    folder = shards(tmp_path / "parts", {k: v for k, v in model.state_dict().items() if k != "head.weight"})
    values = {"scale": torch.arange(4.0)}
    torch.testing.assert_close(meta_stages().load(folder, buffers=values)(IDS), model(IDS))
    index = json.loads((folder / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    whole = (folder / first).read_bytes()
    for damaged, words in (
        (whole[:5], "header too small"),
        (whole[:-8], "incomplete: .* not fully covered"),
        (struct.pack("<Q", 2**40) + whole[8:], "header too large"),
        (struct.pack("<Q", 4) + b"oops" + whole, "not a safetensors file"),
    ):
        (folder / first).write_bytes(damaged)
        with pytest.raises(InputError, match=words):
            meta_stages().load(folder, buffers=values)
    (folder / first).unlink()
    with pytest.raises(InputError, match="which is not in the folder"):
        meta_stages().load(folder, buffers=values)
    (folder / first).write_bytes(whole)
    (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], "new": first}}))
    with pytest.raises(InputError, match=f"{first} lacks new, which {INDEX} has"):
        meta_stages().load(folder, buffers=values)
    (folder / INDEX).write_text("[]")
    with pytest.raises(InputError, match="has no weight_map"):
        meta_stages().load(folder, buffers=values)
    with pytest.raises(InputError, match="is neither a safetensors file nor a folder with"):
        meta_stages().load(tmp_path / "nothing", buffers=values)


@pytest.mark.parametrize("costs", ["measured", "analytic", DeviceSpeed(flops=1e15)])
def test_costs_on_meta(costs):
    model = on_meta(lambda: nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 2048), nn.Linear(2048, 256)))
    stages = split(model, (torch.randn(64, 256),), stages=2, costs=costs)
    seconds = [cost.seconds for cost in stages.report.costs]
    assert all(s > 0 for s in seconds)
    if costs == "measured":
        assert "(each node measured on cpu with random values)" in str(stages.report)
        return
    assert "(computed for " in str(stages.report)
    work = [sum(p.numel() for p in stage.parameters() if p.ndim == 2) for stage in stages]
    if costs == "analytic":  # three products of 2 * 64 operations a weight, and some bytes
        for seconds_of, weights in zip(seconds, work, strict=True):
            assert seconds_of > 3 * 2 * 64 * weights / 1e12 * 0.8


def test_computed_costs_need_no_meta():
    model, args, kwargs = make("llama")
    report = split(model, args, kwargs, stages=2, costs="analytic").report
    again = split(model, args, kwargs, stages=2, costs="analytic").report
    assert report.costs == again.costs and report.balance > 0.7


def test_wishes_that_cannot_be_met():
    model = on_meta(Table).eval()
    with pytest.raises(PartitionError, match="costs='guessed' is neither"):
        split(model, (IDS,), stages=2, costs="guessed")
    model.mix.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(CaptureError, match=r"words.weight is on the meta device and mix.weight is not"):
        split(model, (IDS,), stages=2)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else x


def test_what_cannot_be_exported_cannot_be_cut_on_meta():
    with pytest.raises(CaptureError, match="which the meta device cannot"):
        split(on_meta(Branch), (torch.randn(4, 4),), stages=2)


def test_rotary_tables_are_computed_again():
    model, args, kwargs = make("llama")
    model.eval()
    empty = on_meta(lambda: type(model)(copy.deepcopy(model.config))).eval()
    stages = split(empty, args, kwargs, stages=2, by="memory")
    assert set(stages.buffer_values) == {
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    }
    assert torch.equal(stages.buffer_values["model.rotary_emb.inv_freq"], model.model.rotary_emb.inv_freq)
