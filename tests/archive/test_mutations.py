"""Archives with bytes flipped, members swapped and manifests edited: each is refused or answers the same."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.archive.forge import members, sealed, unsealed
from torch import nn

import intarsia
from intarsia.archive.container import MANIFEST
from intarsia.archive.reader import load_bytes
from intarsia.archive.writer import save_bytes
from intarsia.errors import ArchiveError

X = torch.linspace(-1, 1, 48).reshape(3, 16)


def mutated(data: bytes, found: dict[str, bytes], random_state: random.Random) -> bytes:
    """One mutation, none of which mends the digests."""
    kind = random_state.randrange(6)
    at = random_state.randrange(len(data))
    if kind <= 1:
        count = random_state.choice([1, 1, 2, 8])
        return data[:at] + random_state.randbytes(count) + data[at + count :]
    if kind == 2:
        return data[:at] + bytes([data[at] ^ (1 << random_state.randrange(8))]) + data[at + 1 :]
    if kind == 3:  # cut out or doubled
        end = min(len(data), at + random_state.randrange(1, 200))
        return data[:at] + data[end:] if random_state.random() < 0.5 else data[:end] + data[at:]
    names = sorted(found)
    if kind == 4:
        one, other = random_state.sample(names, 2)
        return unsealed({**found, one: found[other], other: found[one]})
    manifest = json.loads(found[MANIFEST])
    edited(manifest, random_state)
    return unsealed({**found, MANIFEST: json.dumps(manifest).encode()})


def edited(value: Any, random_state: random.Random) -> None:
    """Change one thing somewhere inside."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        place = random_state.choice(places)
        inner = value[place]
        if not isinstance(inner, dict | list) or not inner or random_state.random() < 0.1:
            value[place] = random_state.choice([None, -1, 2**70, "x", [], {}, 0.5, True])
            return
        value = inner


def run(count: int, seed: int) -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    fast = intarsia.compile(model, (X,), engines="onnxruntime", min_block_size=1)
    data, expected, random_state = save_bytes(fast), fast(X), random.Random(seed)
    found, refused, equal = members(data), 0, 0
    for _ in range(count):
        try:
            loaded = load_bytes(mutated(data, found, random_state))
        except ArchiveError as error:
            refused += "\n" not in str(error)
            continue
        assert torch.equal(loaded(X), expected)
        equal += 1
    return refused, equal


def test_three_hundred_mutations() -> None:
    refused, equal = run(300, seed=1)
    assert refused + equal == 300
    assert refused > 150 and equal > 5  # both happen: a zip has bytes that mean nothing, such as dates


def test_forged_manifests_raise_nothing_but_archive_errors() -> None:
    """With digests mended, a changed file may be another model; it may not be another error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    data = save_bytes(intarsia.compile(model, (X,), engines="onnxruntime", min_block_size=1))
    random_state, refused = random.Random(3), 0
    for _ in range(200):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load_bytes(
                    sealed(data, lambda manifest, _: edited(manifest["programs"]["model"], random_state))
                )
            except ArchiveError:
                refused += 1
    assert refused > 50


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_files_whose_engines_read_them_too(engine: str, tmp_path: Path) -> None:
    """Mutated, a file is refused or answers the same; forged, it raises nothing but ArchiveError."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).eval()
    fast = intarsia.compile(model, (X,), engines=engine, min_block_size=1)
    intarsia.save(fast, tmp_path / "m")
    data, expected, random_state = (tmp_path / "m").read_bytes(), fast(X), random.Random(5)
    found, refused = members(data), 0
    for number in range(60):
        path = tmp_path / str(number)
        path.write_bytes(mutated(data, found, random_state))
        try:
            loaded = intarsia.load(path)
        except ArchiveError:
            refused += 1
        else:
            assert torch.equal(loaded(X), expected)
    assert refused > 30
    for number in range(15):
        path = tmp_path / f"forged{number}"
        path.write_bytes(
            sealed(data, lambda manifest, _: edited(manifest["programs"]["model"], random_state))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                intarsia.load(path)
            except ArchiveError:
                refused += 1
    assert refused > 33


@pytest.mark.full
def test_two_thousand_mutations() -> None:
    assert sum(run(2000, seed=2)) == 2000
