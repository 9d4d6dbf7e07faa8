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

pytestmark = pytest.mark.openvino

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
    from intarsia.engines.guards.inputs import known_squares

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


def filled(model: Any, *steps: torch.Tensor) -> Any:
    """A cache after some steps."""
    cache: Any = DynamicCache(config=model.config)
    for ids in steps:
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    return cache


def both_ways(gpt2: Generation, run: Callable[[Any], list[Any]]) -> None:
    """What is run on the compiled model and on the model as it is gives the same."""
    found = {}
    for compiled in (True, False):
        gpt2.enable(compiled)
        found[compiled] = run(gpt2.model)
    gpt2.enable()
    for ours, truth in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_keys_that_somebody_holds_stay_as_they_were(gpt2: Generation) -> None:
    """Eager makes new memory for every token, so what was asked for before never changes."""

    def run(model: Any) -> list[Any]:
        cache = filled(model, IDS, TOKEN)
        held = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        kept = [tensor.clone() for tensor in held]
        cache.crop(-4)
        logits = model(input_ids=TOKEN, past_key_values=cache, use_cache=True).logits[:, -1]
        assert all(torch.equal(a, b) for a, b in zip(held, kept, strict=True))
        return [logits]

    both_ways(gpt2, run)


@torch.no_grad()
def test_cropping_copies_nothing_that_nobody_holds(gpt2: Generation) -> None:
    cache = filled(gpt2.model, IDS, TOKEN)
    before = cache.layers[0].key_store.data_ptr()
    cache.crop(-4)
    gpt2.model(input_ids=TOKEN, past_key_values=cache, use_cache=True)
    assert cache.layers[0].key_store.data_ptr() == before


def test_gradients_go_through_a_cache_that_programs_filled(gpt2: Generation) -> None:
    def run(model: Any) -> list[Any]:
        with torch.no_grad():
            cache = filled(model, IDS, TOKEN)
        logits = [model(input_ids=TOKEN, past_key_values=cache, use_cache=True).logits for _ in range(2)]
        torch.cat(logits).square().sum().backward()
        gradient = model.transformer.h[0].attn.c_attn.weight.grad.clone()
        model.zero_grad()
        with torch.no_grad():
            later = model(input_ids=TOKEN, past_key_values=cache, use_cache=True).logits
        return [*logits, gradient, later]

    both_ways(gpt2, run)


@torch.no_grad()
def test_who_holds_keys_and_the_cache_do_not_see_each_other_written(gpt2: Generation) -> None:
    """After a token, eager's cache is other memory than what was asked for before it."""

    def run(model: Any) -> list[Any]:
        cache = filled(model, IDS)
        held = cache.layers[0].keys
        model(input_ids=TOKEN, past_key_values=cache, use_cache=True)
        held.zero_()
        cache.layers[1].values.mul_(2)
        return [model(input_ids=TOKEN, past_key_values=cache, use_cache=True).logits]

    both_ways(gpt2, run)


@torch.no_grad()
def test_generating_moves_no_memory(gpt2: Generation) -> None:
    model: Any = gpt2.model
    cache: Any = DynamicCache(config=model.config)
    model.generate(IDS, past_key_values=cache, max_new_tokens=2, do_sample=False)
    first = [layer.key_store.data_ptr() for layer in cache.layers]
    longer = torch.cat([IDS, torch.tensor([[5, 6]])], 1)
    model.generate(longer, past_key_values=cache, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert [layer.key_store.data_ptr() for layer in cache.layers] == first


@pytest.mark.parametrize("edit", ["reorder", "crop"])
@torch.no_grad()
def test_a_cache_that_was_reset_takes_another_number_of_rows(gpt2: Generation, edit: str) -> None:
    def run(model: Any) -> list[Any]:
        cache = filled(model, IDS, TOKEN)
        cache.reset()
        model(input_ids=torch.cat([IDS, IDS.flip(1)]), past_key_values=cache, use_cache=True)
        if edit == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        else:
            cache.crop(-1)
        length = cache.get_seq_length()
        return [length, model(input_ids=TOKEN.expand(2, 1), past_key_values=cache, use_cache=True).logits]

    both_ways(gpt2, run)
