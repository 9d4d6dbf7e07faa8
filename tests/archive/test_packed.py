"""What engines have compiled, in the file: used by the version and machine that made it, else rebuilt."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from tests.archive.forge import members, sealed
from tests.layouts import Compressed
from torch import nn

import intarsia
from intarsia.archive.container import MANIFEST
from intarsia.engines import OnnxRuntime, OpenVINO
from intarsia.errors import ArchiveError

ENGINES = {"openvino": OpenVINO, "onnxruntime": OnnxRuntime}
X = torch.linspace(-1, 1, 64).reshape(2, 32)


@pytest.fixture(params=ENGINES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).eval()
    fast = intarsia.compile(model, (X,), engines=request.param, min_block_size=1)
    intarsia.save(fast, tmp_path / "m")
    return request.param, tmp_path / "m", fast(X)


def _no_build(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let engines that read a network say so."""
    built: list[str] = []
    for name, kind in ENGINES.items():
        old = kind.build

        def build(self: object, net: object, old: object = old, name: str = name) -> object:
            built.append(name)
            return old(self, net)  # type: ignore[operator]

        monkeypatch.setattr(kind, "build", build)
    return built


def test_no_engine_is_built_where_it_was_made(
    saved: tuple[str, Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, path, expected = saved
    built = _no_build(monkeypatch)
    loaded = intarsia.load(path)
    assert not built
    assert loaded.plan.engines == (name,)
    assert torch.equal(loaded(X), expected)
    assert torch.equal(intarsia.load(path, packed=False)(X), expected)
    assert built == [name]


@pytest.mark.parametrize("what", ["version", "machine", "options"])
def test_another_version_machine_or_option_builds_it_again(
    saved: tuple[str, Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    name, path, expected = saved
    built, given = _no_build(monkeypatch), None
    if what == "version":
        monkeypatch.setattr("intarsia.engines.base.package_version", lambda name: "0.0")
    elif what == "machine":
        monkeypatch.setattr("intarsia.archive.engines.processor_features", lambda: "none")
    else:
        given = ENGINES[name](threads=3)
    loaded = intarsia.load(path, engines=given)
    assert built == [name]
    assert torch.allclose(loaded(X), expected, atol=1e-6)


def test_a_blob_that_its_engine_refuses_is_rebuilt_and_told(
    saved: tuple[str, Path, torch.Tensor], tmp_path: Path
) -> None:
    _, path, expected = saved

    def swap(manifest: dict[str, object], found: dict[str, bytes]) -> None:
        found["packed/0.blob"] = b"no model" * 40

    (tmp_path / "forged").write_bytes(sealed(path.read_bytes(), swap))
    loaded = intarsia.load(tmp_path / "forged")
    assert torch.equal(loaded(X), expected)
    assert any("built again" in note for note in loaded.notes)


def test_a_loaded_module_is_saved_and_guarded_like_the_first(
    saved: tuple[str, Path, torch.Tensor], tmp_path: Path
) -> None:
    _, path, expected = saved
    loaded = intarsia.load(path)
    intarsia.save(loaded, tmp_path / "again")
    again = intarsia.load(tmp_path / "again")
    assert torch.equal(again(X), expected)
    odd = torch.full_like(X, float("nan"))
    assert torch.equal(again(odd), loaded(odd)) or bool(again(odd).isnan().all())


def test_damaged_weights_are_refused_though_they_are_checked_last(
    saved: tuple[str, Path, torch.Tensor],
) -> None:
    _, path, _ = saved
    data = bytearray(path.read_bytes())
    weights = members(bytes(data))["weights.safetensors"]
    at = bytes(data).index(weights) + len(weights) - 5
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArchiveError, match=r"weights\.safetensors does not match its digest"):
        intarsia.load(path)


def test_weights_of_a_file_are_held_once_and_every_member_has_digests(
    saved: tuple[str, Path, torch.Tensor],
) -> None:
    _, path, _ = saved
    found = members(path.read_bytes())
    told = json.loads(found[MANIFEST])["members"]
    assert {"sha256", "sums", "size"} == set(told["weights.safetensors"])
    assert len(found["packed/0.blob"]) < 20_000  # of 11 kB of weights, which are not in it


def test_loading_imports_no_more_than_it_needs(saved: tuple[str, Path, torch.Tensor]) -> None:
    """A second of sympy and ONNX is more than loading takes: fixed sizes and packed engines need neither."""
    _, path, _ = saved
    code = f"""
import sys, torch
before = set(sys.modules)
import intarsia
intarsia.load({str(path)!r})(torch.zeros(2, 32))
unwanted = {{"onnx", "onnx_ir", "onnxscript", "sympy", "mpmath", "transformers", "typer", "rich", "fastapi"}}
rooms = "convert rewrite partition build choose compiler report pipeline network cli fuzz"
unwanted |= {{f"intarsia.{{room}}" for room in rooms.split()}}
print(sorted(unwanted & (set(sys.modules) - before)))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "[]", ran.stdout + ran.stderr


class _Joined(nn.Module):
    """Three weights, and the same joined, as a rewritten attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(96 + 32 * number, 192) for number in range(3))
        self.register_buffer("joined", torch.cat(list(self.parts)).detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (nn.functional.linear(x, part) for part in self.parts)
        return q.sum(-1) * k.sum(-1) * v.sum(-1) + nn.functional.linear(x, self.joined).sum(-1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_stands_once_in_the_file_though_it_is_joined_with_others(
    engine: str, tmp_path: Path
) -> None:
    model, x = _Joined().eval(), torch.rand(1, 4, 192)
    # Whether projections are joined once more is measured, and hangs on the machine: here it is the model's.
    fast = intarsia.compile(model, (x,), engines=engine, min_block_size=1, rewrite=False)
    intarsia.save(fast, tmp_path / "m")
    assert len(members((tmp_path / "m").read_bytes())["weights.safetensors"]) < 1.1 * model.joined.nbytes
    for packed in (True, False):
        loaded = intarsia.load(tmp_path / "m", packed=packed)
        assert torch.allclose(loaded(x), fast(x))
        assert all(torch.equal(w, model.state_dict()[name]) for name, w in loaded.state_dict().items())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_weight_in_few_bits_stands_once_in_the_file(engine: str, tmp_path: Path) -> None:
    """The model holds its integers in another shape and dtype than what the engine is given."""
    model, x = Compressed(512, 1024, 128, 4).eval(), torch.randn(2, 512)
    fast = intarsia.compile(model, (x,), engines=engine, min_block_size=1)
    assert "1 in 4 bits" in str(fast.plan)
    intarsia.save(fast, tmp_path / "m")
    assert (tmp_path / "m").stat().st_size < 1.2 * sum(buffer.nbytes for buffer in model.buffers())
    for packed in (True, False):
        loaded = intarsia.load(tmp_path / "m", packed=packed)
        assert torch.equal(loaded(x), fast(x))
        assert all(torch.equal(w, model.state_dict()[name]) for name, w in loaded.state_dict().items())
    other = Compressed(512, 1024, 128, 4).eval()
    loaded.refit(other)
    torch.testing.assert_close(loaded(x), other(x))


def test_bytes_that_are_not_those_of_another_tensor_are_refused(tmp_path: Path) -> None:
    model, x = Compressed(512, 1024, 128, 4).eval(), torch.randn(2, 512)
    intarsia.save(intarsia.compile(model, (x,), engines="onnxruntime", min_block_size=1), tmp_path / "m")
    data = (tmp_path / "m").read_bytes()
    for place, value in ((2, [2, 2]), (2, [-1, -262144]), (1, "F32"), (0, "weight_scale")):

        def edit(
            manifest: dict[str, object], found: dict[str, bytes], place: int = place, value: object = value
        ) -> None:
            told: dict[str, dict[str, list[object]]] = manifest["tensors"]  # type: ignore[assignment]
            next(entry for entry in told.values() if "alike" in entry)["alike"][place] = value

        (tmp_path / "forged").write_bytes(sealed(data, edit))
        with pytest.raises(ArchiveError, match="does not consist of the bytes of"):
            intarsia.load(tmp_path / "forged")


@pytest.mark.openvino
def test_a_part_that_lies_outside_its_whole_is_refused(tmp_path: Path) -> None:
    model, x = _Joined().eval(), torch.rand(1, 4, 192)
    intarsia.save(intarsia.compile(model, (x,), engines="openvino", min_block_size=1), tmp_path / "m")
    data = (tmp_path / "m").read_bytes()
    for begin, stop in ((0, 10**6), (-1, 4), (5, 2)):

        def edit(manifest: dict[str, object], found: dict[str, bytes], ends: object = (begin, stop)) -> None:
            told: dict[str, dict[str, list[object]]] = manifest["tensors"]  # type: ignore[assignment]
            entry = next(entry for entry in told.values() if "rows" in entry)
            entry["rows"][1:] = ends  # type: ignore[call-overload]

        (tmp_path / "forged").write_bytes(sealed(data, edit))
        with pytest.raises(ArchiveError, match="is not part of"):
            intarsia.load(tmp_path / "forged")


def test_a_packed_model_that_names_files_is_not_given_to_onnxruntime(tmp_path: Path) -> None:
    """ONNX Runtime would read the file beside the archive that a forged model names."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU()).eval()
    fast = intarsia.compile(model, (X,), engines="onnxruntime", min_block_size=1)
    intarsia.save(fast, tmp_path / "m")

    def edit(manifest: dict[str, object], found: dict[str, bytes]) -> None:
        entry = onnx.StringStringEntryProto(key="location", value="secret")
        stolen = onnx.TensorProto(name="stolen", dims=[300], data_type=1, data_location=1)
        stolen.external_data.append(entry)
        extra = onnx.ModelProto()
        extra.graph.initializer.append(stolen)
        found["packed/0.blob"] += extra.SerializeToString()

    (tmp_path / "secret").write_bytes(bytes(1200))
    (tmp_path / "forged").write_bytes(sealed((tmp_path / "m").read_bytes(), edit))
    loaded = intarsia.load(tmp_path / "forged")
    assert any("refers to other files" in note for note in loaded.notes)
    assert torch.equal(loaded(X), fast(X))


def test_a_file_that_is_replaced_while_it_is_loaded_is_refused(
    saved: tuple[str, Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines find weights by the name of the file: those of another one would answer wrongly."""
    name, path, _ = saved
    old = ENGINES[name].unpack

    def unpack(self: object, *args: object) -> object:
        (path.parent / "new").write_bytes(path.read_bytes())
        (path.parent / "new").replace(path)
        return old(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ENGINES[name], "unpack", unpack)
    with pytest.raises(ArchiveError, match="it was replaced or removed during loading"):
        intarsia.load(path)


def test_a_file_behind_a_link_with_an_odd_name_is_loaded(saved: tuple[str, Path, torch.Tensor]) -> None:
    _, path, expected = saved
    (path.parent / "elsewhere").mkdir()
    odd = path.rename(path.parent / "elsewhere" / "ä b%.intarsia")
    (path.parent / "link").symlink_to(odd)
    for where in (odd, path.parent / "link"):
        loaded = intarsia.load(where)
        assert not loaded.notes
        assert torch.equal(loaded(X), expected)


class Looks(nn.Module):
    """A table asked at a remainder."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.sum() % 4)


@pytest.mark.openvino
def test_divided_integers_are_not_packed_since_reading_them_ends_the_process(tmp_path: Path) -> None:
    model, x, path = Looks().eval(), torch.tensor([3, -5, 9]), tmp_path / "looks.intarsia"
    fast = intarsia.compile(model, (x,), engines=["openvino"], min_block_size=1)
    assert fast.plan.engines == ("openvino",)
    intarsia.save(fast, path)
    assert torch.equal(intarsia.load(path)(x), model(x))


def test_the_file_is_closed_with_its_module(saved: tuple[str, Path, torch.Tensor]) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        intarsia.load(saved[1])
        gc.collect()
    assert not [str(w.message) for w in told if issubclass(w.category, ResourceWarning)]


class Ends(nn.Module):
    """The ends of slices are the largest integers of 64 bits, as export writes them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.relu(x)[:, 2:], torch.sin(x)[:, -3:], (x * 2)[:, :-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_slices_to_the_end_of_sizes_that_vary(engine: str, tmp_path: Path) -> None:
    """OpenVINO read the end of one as -1, and the last column was lost."""
    shapes = {"x": {1: torch.export.Dim("width", min=1, max=64)}}
    fast = intarsia.compile(Ends(), (X,), engines=engine, dynamic_shapes=shapes, min_block_size=1)
    assert fast.plan.engines == (engine,)
    intarsia.save(fast, tmp_path / "m")
    loaded = intarsia.load(tmp_path / "m")
    for width in (1, 2, 3, 4, 64):
        x = torch.randn(2, width)
        for ours, theirs, expected in zip(fast(x), loaded(x), Ends()(x), strict=True):
            torch.testing.assert_close(ours, expected)
            torch.testing.assert_close(theirs, expected)
