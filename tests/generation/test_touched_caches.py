"""A cache that its owner edits, crops or pickles between two tokens goes on as eager's does."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.generation.families import tiny
from transformers import DynamicCache

import intarsia
from intarsia.generation import Generation

IDS = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(1))
TOKEN = torch.tensor([[5]])


@pytest.fixture(scope="module")
def gpt2() -> Iterator[Generation]:
    with intarsia.compile_generation(tiny("gpt2"), max_length=40, engines="openvino") as made:
        yield made


def overflowing(cache: Any) -> Any:
    cache.layers[0].values[0, 0, 1] = 1e30
    return cache


def overflowing_unseen(cache: Any) -> Any:
    cache.layers[0].values.numpy()[0, 0, 1] = 1e30  # torch does not count it
    return cache


def cropped(cache: Any) -> Any:
    cache.layers[0].values[0, 0, -1] = math.nan
    cache.crop(-4)
    return cache


def pickled(cache: Any) -> Any:
    cache.layers[0].values  # noqa: B018  # a view was asked for
    cache = pickle.loads(pickle.dumps(cache))
    cache.layers[0].values.zero_()
    return cache


@pytest.mark.filterwarnings("ignore:.*runs this call in place of an engine")
@pytest.mark.parametrize("edit", [overflowing, overflowing_unseen, cropped, pickled])
def test_edited_caches(gpt2: Generation, edit: Callable[[Any], Any]) -> None:
    model = gpt2.model

    def step(cache: Any, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        return found[0, -1]

    found = {}
    for compiled in (True, False):
        gpt2.enable(compiled)
        with torch.no_grad():
            cache: Any = DynamicCache(config=model.config)
            step(cache, IDS), step(cache, TOKEN)
            cache = edit(cache)
            found[compiled] = torch.stack([step(cache, TOKEN), step(cache, TOKEN)])
    gpt2.enable()
    assert torch.allclose(found[True], found[False], atol=1e-4, equal_nan=True)


def test_a_cache_filled_in_inference_mode_goes_on_outside(gpt2: Generation) -> None:
    model = gpt2.model
    cache: Any = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=IDS, past_key_values=cache, use_cache=True, logits_to_keep=1)
    with torch.no_grad():
        ours = model(input_ids=TOKEN, past_key_values=cache, use_cache=True).logits[:, -1]
        gpt2.enable(False)
        own = model(input_ids=torch.cat([IDS, TOKEN], 1)).logits[:, -1]
        gpt2.enable()
    assert torch.allclose(ours, own, atol=1e-4)


def test_of_a_cache_that_nobody_touches_the_sums_are_known(gpt2: Generation) -> None:
    from intarsia.engines.guards.known import known_squares

    with torch.no_grad():
        cache: Any = DynamicCache(config=gpt2.model.config)
        for ids in (IDS, TOKEN):
            gpt2.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    stack, _ = cache.layers[0].stack
    for layer in cache.layers:  # no part has more than the whole
        assert known_squares(layer.key_store) == pytest.approx(float(stack.square().sum()), rel=1e-4)
    assert cache.layers[0].keys is not None  # from here on others may write to it
    for layer in cache.layers:
        assert known_squares(layer.key_store) is None and known_squares(layer.value_store) is None
