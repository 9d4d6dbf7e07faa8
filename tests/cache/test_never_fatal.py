"""Whatever stands where measurements are kept, compiling and balancing go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import intarsia
from intarsia.cache.machine import machine_key, package_version, processor_name
from intarsia.engines import OnnxRuntime
from intarsia.pipeline import balance_by_time
from intarsia.rewrite.apply import Benefits, engine_key

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
