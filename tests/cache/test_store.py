"""A store never raises, wherever its directory is, whatever is inside, and however many write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia
from intarsia.cache.machine import machine_key, package_version, processor_name
from intarsia.cache.store import JsonStore, cache_directory, write_atomically
from intarsia.engines import OnnxRuntime
from intarsia.pipeline import balance_by_time
from intarsia.pipeline.balance import cache_path
from intarsia.rewrite.apply import Benefits, cache_file, engine_key


def test_keeps_and_merges(tmp_path: Path) -> None:
    store = JsonStore(tmp_path / "deep" / "known.json")
    assert store.read() == {}
    store.update({"engine": {"a": 1.0}, "x": 1})
    store.update({"engine": {"b": 2.0}, "x": [1]})
    assert JsonStore(store.path).read() == {"engine": {"a": 1.0, "b": 2.0}, "x": [1]}
    assert sorted(path.name for path in store.path.parent.iterdir()) == ["known.json", "known.json.lock"]


def test_the_oldest_go(tmp_path: Path) -> None:
    store = JsonStore(tmp_path / "known.json")
    for number in range(5):
        store.update({f"k{number}": number, "always": number}, keep=3)
    assert store.read() == {"k3": 3, "k4": 4, "always": 4}


def unusable(tmp_path: Path, kind: str) -> Path:
    if kind == "directory that cannot be made":
        return Path("/proc/no/known.json")
    if kind == "directory is a file":
        (tmp_path / "file").write_text("here")
        return tmp_path / "file" / "known.json"
    (tmp_path / "known.json").mkdir()
    return tmp_path / "known.json"


@pytest.mark.parametrize(
    "kind", ["directory that cannot be made", "directory is a file", "file is a directory"]
)
def test_a_path_that_cannot_be_used_is_told_once(tmp_path: Path, kind: str) -> None:
    store = JsonStore(unusable(tmp_path, kind))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            store.update({"a": 1})
            assert store.read() == {}
    said = [str(each.message) for each in told]
    assert any(f"cannot write {store.path}" in text and "not remembered" in text for text in said)
    assert len(said) == len(set(said)) <= 2
    assert not list(tmp_path.glob(".known*")), "no draft is left behind"


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """A file moved onto `/dev/null` would replace the device."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(FileExistsError, match="is no regular file") as refused:
            write_atomically(path, lambda file, _: file.write(b"1"))
        assert refused.value.filename == str(path)
    assert pipe.is_fifo()
    link.symlink_to(file)
    write_atomically(link, lambda file, _: file.write(b"1"))
    assert link.is_symlink() and file.read_bytes() == b"1"


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "file"
    with pytest.raises(FileNotFoundError) as missing:
        write_atomically(path, lambda file, _: file.write(b"1"))
    assert missing.value.filename == str(path)


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe\x00junk", b"", b'{"cut', b"[1, 2]", b"null", b'"text"', b"[" * 100_000]
)
def test_junk_is_replaced(tmp_path: Path, junk: bytes) -> None:
    store = JsonStore(tmp_path / "known.json")
    store.path.write_bytes(junk)
    with pytest.warns(UserWarning, match="cannot read"):
        assert store.read() == {}
    store.update({"a": 1})
    assert store.read() == {"a": 1}


def test_what_json_has_no_word_for_is_not_written(tmp_path: Path) -> None:
    store = JsonStore(tmp_path / "known.json")
    store.update({"a": 1})
    with pytest.warns(UserWarning, match="cannot write"):
        store.update({"b": object()})
    assert store.read() == {"a": 1}


WRITER = """
import sys
from pathlib import Path
from intarsia.cache.store import JsonStore
store = JsonStore(Path(sys.argv[1]))
for number in range(40):
    store.update({sys.argv[2]: {str(number): number}})
    assert isinstance(store.read().get(sys.argv[2]), dict)
"""


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "known.json"
    writers = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", WRITER, str(path), who]) for who in "ab"
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    assert json.loads(path.read_text()) == {who: {str(n): n for n in range(40)} for who in "ab"}


def test_threads_write_at_once(tmp_path: Path) -> None:
    store = JsonStore(tmp_path / "known.json")
    threads = [threading.Thread(target=store.update, args=({str(n): n},)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read() == {str(n): n for n in range(12)}


# One directory for all that is measured.


def test_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    assert cache_path() == tmp_path / "profiles.json"
    assert cache_file() == tmp_path / "rewrite.json"


def test_the_users_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INTARSIA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "intarsia"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "intarsia"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("INTARSIA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory().name.startswith("intarsia-")


# Whatever stands where measurements are kept, compiling and balancing go on.


MODEL = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.LayerNorm(4)).eval()


def prepare(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cache"
    monkeypatch.setenv("INTARSIA_CACHE", "/proc/no" if kind == "unwritable" else str(place))
    if kind == "a file":
        place.write_text("here")
    if kind in ("binary junk", "a list", "wrong types"):
        place.mkdir()
        key = engine_key(OnnxRuntime())
        junk = {
            "binary junk": b"\x00\xff" * 50,
            "a list": b"[1]",
            "wrong types": f'{{"{key}": ["no", "table"], "x": {{"y": "z"}}}}'.encode(),
        }[kind]
        for name in ("rewrite.json", "profiles.json"):
            (place / name).write_bytes(junk)


@pytest.mark.filterwarnings("ignore:cannot (read|write)")
@pytest.mark.parametrize("kind", ["unwritable", "a file", "binary junk", "a list", "wrong types"])
def test_compile_and_balance(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, kind, monkeypatch)
    x = torch.randn(2, 4)
    fast = intarsia.compile(MODEL, (x,), engines=["onnxruntime"])
    torch.testing.assert_close(fast(x), MODEL(x), rtol=1e-4, atol=1e-5)
    assert sum(balance_by_time(2, MODEL, x, timeout=0.01)) == 3


@pytest.mark.parametrize("value", ["0.5", True, None, [0.5], -1, float("nan")])
def test_a_ratio_that_is_none_is_unknown(tmp_path: Path, value: object) -> None:
    known = Benefits(tmp_path / "known.json")
    known.store.update({engine_key(OnnxRuntime()): {"silu": value}})
    assert known.get(OnnxRuntime(), "silu") is None


def test_the_key_names_what_a_measurement_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    key = engine_key(OnnxRuntime())
    for part in ("onnxruntime", onnxruntime.__version__, processor_name(), package_version("intarsia")):
        assert part in key
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert "77 of" in machine_key() and engine_key(OnnxRuntime()) != key
    assert package_version("no_such_module") == "?"
