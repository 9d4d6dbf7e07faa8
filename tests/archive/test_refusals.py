"""Damaged, forged, hostile and newer files: each is refused in one sentence, and nothing is written."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import resource
import stat
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.archive.forge import members, repacked, sealed, unsealed
from torch import nn

import intarsia
from intarsia.archive.container import MANIFEST, SEAL
from intarsia.archive.reader import load_bytes
from intarsia.archive.writer import save_bytes
from intarsia.errors import ArchiveError

X = torch.linspace(-1, 1, 32).reshape(2, 16)


@pytest.fixture(scope="module")
def archive() -> bytes:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).eval()
    return save_bytes(intarsia.compile(model, (X,), engines="onnxruntime", min_block_size=1))


def refused(data: bytes, words: str) -> None:
    with pytest.raises(ArchiveError, match=words) as caught:
        load_bytes(data)
    assert "\n" not in str(caught.value)


def first_node(manifest: dict[str, Any], op: str) -> dict[str, Any]:
    module = manifest["programs"]["model"]["inlay"]["pieces"][0]["module"]
    found: dict[str, Any] = next(node for node in module["nodes"] if node["op"] == op)
    return found


def test_no_archive_at_all(tmp_path: Path) -> None:
    for name, data in {"empty": b"", "text": b"hello", "zeros": bytes(4096)}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ArchiveError, match=f"{name} cannot be loaded"):
            intarsia.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        intarsia.load(tmp_path / "missing")


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "model.pt")
    with pytest.raises(ArchiveError):
        intarsia.load(tmp_path / "model.pt")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(archive: bytes, share: float) -> None:
    refused(archive[: int(len(archive) * share)], "not a whole archive|digest")


def test_every_member_has_a_digest_that_counts(archive: bytes) -> None:
    for name, member in members(archive).items():
        at = archive.index(member) + len(member) // 2
        refused(archive[:at] + bytes([archive[at] ^ 1]) + archive[at + 1 :], "digest|JSON|twice")
        assert member in archive, name


def test_a_newer_format(archive: bytes) -> None:
    refused(sealed(archive, lambda m, _: m.update(version=99)), "version 99 of the format")


def test_an_older_format(archive: bytes) -> None:
    refused(
        sealed(archive, lambda m, _: m.update(version=2)), "version 2 .* compile the model again and save"
    )


def test_compressed_members(archive: bytes) -> None:
    refused(repacked(members(archive), compression=zipfile.ZIP_DEFLATED), "compressed")


def test_a_zip_bomb_is_not_unpacked() -> None:
    bomb = repacked({MANIFEST: bytes(200_000_000)}, compression=zipfile.ZIP_DEFLATED)
    refused(bomb, "compressed")


@pytest.mark.parametrize("name", ["../outside", "/etc/outside", "networks/../../outside", "unknown"])
def test_members_that_nobody_asked_for(archive: bytes, name: str, tmp_path: Path) -> None:
    def add(manifest: dict[str, Any], contents: dict[str, bytes]) -> None:
        contents[name] = b"x"

    data = sealed(archive, add)
    if name != "unknown":
        refused(data, "not a plain file")
    found = members(archive)
    refused(repacked({**found, name: b"x"}), "not a plain file|not aligned|is not in its manifest")


def test_a_symbolic_link(archive: bytes) -> None:
    at = archive.rindex(b"PK\x01\x02")
    attributes = struct.pack("<I", (stat.S_IFLNK | 0o777) << 16)
    refused(archive[: at + 38] + attributes + archive[at + 42 :], "not a plain file")


def test_two_members_of_one_name(archive: bytes) -> None:
    file = io.BytesIO(archive)
    with zipfile.ZipFile(file, "a") as double, pytest.warns(UserWarning, match="Duplicate"):
        double.writestr(MANIFEST, b"{}")
    refused(file.getvalue(), "two members")


def test_json_of_absurd_depth(archive: bytes) -> None:
    depth = 200_000
    deep = b"[" * depth + b"]" * depth
    found = members(archive)
    for text in (deep, b'{"members": ' + deep + b"}"):
        found[MANIFEST], found[SEAL] = text, hashlib.sha256(text).hexdigest().encode()
        refused(unsealed(found), "nested too deeply|not a whole archive")


def test_a_huge_header_of_weights(archive: bytes) -> None:
    def edit(manifest: dict[str, Any], contents: dict[str, bytes]) -> None:
        contents["weights.safetensors"] = struct.pack("<Q", 2**62) + contents["weights.safetensors"][8:]

    refused(sealed(archive, edit), "claims")


def test_weights_outside_their_file(archive: bytes) -> None:
    def edit(manifest: dict[str, Any], contents: dict[str, bytes]) -> None:
        data = contents["weights.safetensors"]
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        header["0.weight"]["data_offsets"] = [2**40, 2**40 + 1024]
        text = json.dumps(header).encode()
        contents["weights.safetensors"] = struct.pack("<Q", len(text)) + text + data[8 + length :]

    refused(sealed(archive, edit), "does not lie")


@pytest.mark.parametrize(
    ("op", "key", "value"),
    [
        ("placeholder", "target", "x=__import__('os').system('true')"),
        ("placeholder", "name", "x): __import__('os').system('true'"),
        ("placeholder", "name", "import"),
        ("get_attr", "target", 'weight", __import__("os").abort(), "'),
        ("call_function", "kwargs", {"a=1); __import__('os').abort(": 1}),
        ("call_function", "target", "aten::from_file.default"),
        ("call_function", "target", "os::system.default"),
        ("call_function", "target", "builtins.eval"),
        ("call_function", "target", "load_library::__call__.default"),
        ("call_function", "target", "higher_order::triton_kernel_wrapper_mutation"),
        ("call_function", "op", "call_method"),
        ("call_function", "args", [{"object": "posix.system"}]),
        ("call_function", "args", [{"node": "nobody"}]),
    ],
)
def test_a_forged_graph_runs_no_code(archive: bytes, op: str, key: str, value: Any) -> None:
    refused(sealed(archive, lambda m, _: first_node(m, op).update({key: value})), "cannot be loaded")


def test_a_structure_cannot_import_anything(archive: bytes) -> None:
    enum = json.dumps({"__enum__": True, "fqn": "antigravity:X", "name": "A"})
    for spec in (
        {
            "type": "collections.defaultdict",
            "context": "{}",
            "children_spec": [],
        },
        {"type": "builtins.dict", "context": enum, "children_spec": []},
    ):

        def edit(manifest: dict[str, Any], contents: dict[str, bytes], spec: Any = spec) -> None:
            manifest["programs"]["model"]["call"]["out_spec"] = [1, spec]

        refused(sealed(archive, edit), "has no form in an archive")


def test_a_network_cannot_read_files(archive: bytes) -> None:
    import onnx

    def edit(manifest: dict[str, Any], contents: dict[str, bytes]) -> None:
        model = onnx.ModelProto.FromString(contents["networks/0.onnx"])
        model.graph.initializer.add(
            name="stolen", data_type=1, dims=[16], data_location=onnx.TensorProto.EXTERNAL
        ).external_data.add(key="location", value="/etc/passwd")
        contents["networks/0.onnx"] = model.SerializeToString()

    refused(sealed(archive, edit), "outside the archive")


def test_options_that_could_name_files_are_not_taken_from_a_file() -> None:
    engine = intarsia.OnnxRuntime(options={"session.use_env_allocators": "0"})
    fast = intarsia.compile(nn.Linear(64, 64).eval(), (torch.ones(8, 64),), engines=engine, min_block_size=1)
    assert fast.plan.engines == ("onnxruntime",)
    data = save_bytes(fast)
    refused(data, "may not set")


def test_an_operator_that_is_not_registered_is_named(archive: bytes) -> None:
    def edit(manifest: dict[str, Any], contents: dict[str, bytes]) -> None:
        first_node(manifest, "call_function")["target"] = "mine::fancy.default"

    refused(sealed(archive, edit), "mine::fancy.default, which is not registered")


def test_junk_in_every_part_is_refused(archive: bytes) -> None:
    for key in ("programs", "tensors"):
        for junk in (None, 3, "text", [], {}, [[]], {"a": None}):
            refused(sealed(archive, lambda m, _, k=key, j=junk: m.update({k: j})), "cannot be loaded")
    assert torch.equal(load_bytes(sealed(archive, lambda m, _: None))(X), load_bytes(archive)(X))


def test_an_engine_that_is_missing_here_is_told(archive: bytes) -> None:
    def rename(manifest: dict[str, Any], contents: dict[str, bytes]) -> None:
        manifest["programs"]["model"]["engines"]["elsewhere"] = manifest["programs"]["model"]["engines"].pop(
            "onnxruntime"
        )
        manifest["programs"]["model"]["inlay"]["pieces"][0]["engine"] = "elsewhere"

    with pytest.warns(UserWarning, match="elsewhere: there is no such engine on this machine"):
        loaded = load_bytes(sealed(archive, rename))
    assert loaded.plan.engines == ("pytorch",)
    assert torch.allclose(loaded(X), load_bytes(archive)(X), atol=1e-6)
    assert any("its segments run in PyTorch" in note for note in loaded.notes)


def test_writing_is_atomic_and_leaves_nothing_behind(archive: bytes, tmp_path: Path) -> None:
    target = tmp_path / "model.intarsia"
    target.write_bytes(b"old")
    fast = load_bytes(archive)

    class Broken(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Broken

    real = os.replace
    try:
        os.replace = fail  # type: ignore[assignment]
        with pytest.raises(Broken):
            intarsia.save(fast, target)
    finally:
        os.replace = real
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.intarsia"]
    intarsia.save(fast, target)
    assert os.listdir(tmp_path) == ["model.intarsia"]
    assert torch.equal(intarsia.load(target)(X), fast(X))


def test_a_full_disk_is_an_error_with_the_name_of_the_file(
    archive: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unraisable: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    fast, limits = load_bytes(archive), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*model\.intarsia"):
            intarsia.save(fast, tmp_path / "model.intarsia")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gc.collect()
    assert os.listdir(tmp_path) == [] and not unraisable


def test_members_are_aligned_and_readable_by_their_own_libraries(archive: bytes, tmp_path: Path) -> None:
    import onnx
    from safetensors.torch import load as load_safetensors

    found = members(archive)
    for name, member in found.items():
        assert archive.index(member) % 64 == 0, name
    weights = load_safetensors(found["weights.safetensors"])
    assert torch.equal(weights["0.weight"], load_bytes(archive).state_dict()["0.weight"])
    onnx.ModelProto.FromString(found["networks/0.onnx"])


@pytest.mark.parametrize("what", ["module", "parts", "as it is", "foreign engine"])
def test_what_cannot_be_saved_is_refused(what: str, tmp_path: Path, make: Callable[[str], Any]) -> None:
    with pytest.raises(ArchiveError):
        intarsia.save(make(what), tmp_path / "x")
    assert not os.listdir(tmp_path)


@pytest.fixture
def make() -> Callable[[str], Any]:
    class Foreign(intarsia.OnnxRuntime):
        name = "foreign"

    def made(what: str) -> Any:
        if what == "module":
            return nn.ReLU()
        if what == "parts":
            return intarsia.PartlyCompiled(nn.ReLU(), {}, [], "no reason")
        if what == "foreign engine":
            model = nn.Linear(64, 64).eval()
            return intarsia.compile(model, (torch.ones(8, 64),), engines=Foreign(), min_block_size=1)
        fast = intarsia.compile(nn.ReLU(), (torch.ones(2),))
        fast._fit.stands = False
        return fast

    return made
