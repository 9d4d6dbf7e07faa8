"""Weights are frozen when a model is compiled, as a whole; a later change is noticed at the next call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import intarsia
from intarsia.errors import InputError, StaleWeightsError


class Words(nn.Module):
    """An embedding, which engines read where it lies, and a product, whose weight they pack."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)) * self.scale


IDS = torch.tensor([1, 2, 3])


def compiled(engine: str) -> tuple[Words, Any]:
    model = Words().eval()
    return model, intarsia.compile(model, (IDS,), engines=[engine], min_block_size=1)


def _optimizer_step(model: Words) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(IDS).sum().backward()
    optimizer.step()
    model.eval()


def _load(model: Words) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def _in_place(model: Words) -> None:
    with torch.no_grad():
        model.head.weight.add_(1)


def _in_inference_mode(model: Words) -> None:
    with torch.inference_mode():
        model.embed.weight.mul_(2)


def _buffer(model: Words) -> None:
    model.scale.mul_(3)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_in_place, "head.weight"),
        (_load, "embed.weight"),
        (_optimizer_step, "embed.weight"),
        (_in_inference_mode, "embed.weight"),
        (_buffer, "scale"),
    ],
)
def test_a_weight_written_to_is_an_error_that_names_it(
    engine: str, change: Callable[[Words], None], name: str
) -> None:
    model, fast = compiled(engine)
    fast(IDS)
    change(model)
    for _ in range(2):
        with pytest.raises(
            StaleWeightsError, match=rf"{name}.* changed after compiling.*compile the model again"
        ):
            fast(IDS)


class Listed(nn.Module):
    """Layers in a plain list, and a tensor in a dictionary: no module has registered them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.tensors = [nn.Linear(4, 4)], {"scale": torch.ones(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * self.tensors["scale"]


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
@pytest.mark.parametrize("place", ["layer", "dictionary", "uncounted"])
def test_a_write_to_a_tensor_that_no_module_has_registered_is_an_error(engine: str, place: str) -> None:
    model = Listed().eval()
    fast = intarsia.compile(model, (torch.ones(2, 4),), engines=[engine], min_block_size=1)
    fast(torch.ones(2, 4))
    with torch.no_grad():
        if place == "layer":
            model.layers[0].weight.mul_(2)
        elif place == "uncounted":
            model.layers[0].weight.data.mul_(2)
        else:
            model.tensors["scale"].mul_(2)
    with pytest.raises(StaleWeightsError, match=r"an unregistered tensor of shape .* changed"):
        fast(torch.ones(2, 4))


def _assign(model: Words) -> None:
    model.head.weight = nn.Parameter(torch.zeros(4, 8))


def _data(model: Words) -> None:
    model.head.weight.data = torch.zeros(4, 8)


def _half(model: Words) -> None:
    model.half()


def _load_by_assignment(model: Words) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "pytorch"])
@pytest.mark.parametrize("change", [_assign, _data, _half, _load_by_assignment])
def test_a_weight_replaced_leaves_the_answer_and_is_told_once(
    engine: str, change: Callable[[Words], None]
) -> None:
    model, fast = compiled(engine)
    before = fast(IDS).clone()
    change(model)
    with pytest.warns(UserWarning, match="was replaced after compiling"):
        torch.testing.assert_close(fast(IDS), before, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(fast(IDS), before, rtol=0, atol=0)


@pytest.mark.parametrize("place", [0, 150, 199])
def test_one_of_many_weights_replaced_is_told_within_eight_calls(place: int) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(200)])
    fast = intarsia.compile(model, (torch.ones(1, 2),), engines=["pytorch"], verify=False)
    fast(torch.ones(1, 2))
    model[place].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.warns(UserWarning, match=rf"^{place}\.weight of the model was replaced"):
        _ = [fast(torch.ones(1, 2)) for _ in range(8)]


@pytest.mark.parametrize("write", [lambda p: p.data.add_(1), lambda p: p.detach().numpy().fill(1)])
def test_a_write_that_torch_does_not_count_shows_in_the_digest(write: Callable[[torch.Tensor], Any]) -> None:
    model, fast = compiled("onnxruntime")
    before = fast.weights_digest()
    fast(IDS)
    assert fast.weights_digest() == before
    write(model.head.weight)
    assert fast.weights_digest() != before


def test_buffers_the_model_changes_are_no_weights() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return x * self.count

    model = Counter()
    fast = intarsia.compile(model, (torch.ones(2),))
    assert fast(torch.ones(2)).tolist() == [1, 1]
    model.count.zero_()
    assert fast(torch.ones(2)).tolist() == [1, 1]
    model.count = torch.zeros(())
    with pytest.warns(UserWarning, match="count of the model was replaced after compiling"):
        assert fast(torch.ones(2)).tolist() == [2, 2]
    fast.refit(model)
    assert fast(torch.ones(2)).tolist() == [1, 1] and float(model.count) == 1


def test_state_dict_has_the_models_keys() -> None:
    model, fast = compiled("onnxruntime")
    assert list(fast.state_dict()) == list(model.state_dict())
    for name, tensor in fast.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name])
    outer = nn.Sequential(fast)
    assert list(outer.state_dict()) == [f"0.{name}" for name in model.state_dict()]
    outer.load_state_dict(outer.state_dict())
    other = {name: tensor + 1 for name, tensor in fast.state_dict().items()}
    with pytest.raises(RuntimeError, match="weights are frozen; load it into the model"):
        fast.load_state_dict(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("meta"),
        lambda m: nn.Sequential(m).half(),
    ],
)
def test_another_dtype_or_device_is_refused(change: Any) -> None:
    _, fast = compiled("onnxruntime")
    with pytest.raises(InputError, match=r"stays as it was compiled, torch.float32 on cpu; convert"):
        change(fast)


def test_what_changes_nothing_is_fine() -> None:
    model, fast = compiled("onnxruntime")
    assert (
        fast.to("cpu") is fast and fast.float() is fast and fast.eval() is fast and fast.train(False) is fast
    )
    assert not fast.training
    with pytest.raises(InputError, match="cannot be trained; train the model"):
        fast.train()
    torch.testing.assert_close(fast(IDS), model(IDS).detach(), rtol=1e-5, atol=1e-6)


def test_hooks_on_every_module_see_the_call() -> None:
    _, fast = compiled("onnxruntime")
    seen: list[Any] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, made: seen.append(m))
    try:
        fast(IDS)
    finally:
        handle.remove()
    assert fast in seen


def test_the_count_of_changes_is_where_we_look_for_it() -> None:
    """torch has no public name for it: this is the guard of the one place that reads it."""
    from intarsia.runtime.freshness import VERSION

    tensor = torch.zeros(2)
    before = VERSION(tensor)
    tensor.add_(1)
    assert VERSION(tensor) == before + 1 == VERSION(tensor.detach())
