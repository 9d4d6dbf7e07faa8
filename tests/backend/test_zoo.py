"""The zoo through `torch.compile(backend="intarsia", dynamic=True)`: four sizes after one compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from intarsia.backend import intarsia_backend, reports
from intarsia.cli import zoo
from intarsia.compare import relative_error

pytestmark = pytest.mark.slow

LENGTHS = (16, 7, 24, 11)
BATCHES = (3, 5, 7, 6)  # none is a size that models have: Dynamo takes equal sizes for one, and compiles anew
QUICK = ("bert",)  # the others take longer, and are all of them in the full run
SOUND = 256  # samples for each of a length; of more than 6409 wav2vec2 is another graph to Dynamo


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    reports(clear=True)
    yield
    torch._dynamo.reset()
    reports(clear=True)


def resized(value: Any, turn: int) -> Any:
    """A tensor of the call in another length; an image, whose sides are the model's own, as another batch."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim == 2:  # tokens, masks, samples of sound
        length = LENGTHS[turn] * (SOUND if value.is_floating_point() else 1)
        return value[:, torch.arange(length) % value.shape[1]].contiguous()
    batch = torch.cat([value] * BATCHES[turn])
    for axis in range(1, batch.ndim):
        torch._dynamo.mark_static(batch, axis)
    return batch


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in zoo.names()]
)
@torch.no_grad()
def test_four_sizes_after_one_compile(name: str) -> None:
    thing = zoo.specimen(name)
    options = {"engines": ["onnxruntime"]}
    fast = torch.compile(thing.model, backend=intarsia_backend, dynamic=True, options=options)
    compiled = []
    for turn in range(len(LENGTHS)):
        args, kwargs = pytree.tree_map(lambda x, turn=turn: resized(x, turn), (thing.args, thing.kwargs))
        assert relative_error(fast(*args, **kwargs), thing.model(*args, **kwargs)) < 1e-4
        compiled.append(sum(report.programs for report in reports()))
    made = reports()
    print(f"{name}: {sum(r.on_engines for r in made)} of {sum(r.nodes for r in made)} nodes on engines")
    assert set(compiled) == {compiled[0]}, f"compiled {compiled} times"
    assert all(report.reason is None for report in made)
    assert sum(report.on_engines for report in made) >= 0.9 * sum(report.nodes for report in made)
