"""A compiled module is called like the model it was made from, and refuses what it was not made for."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import intarsia
from intarsia.errors import InputError

ENGINES = ["onnxruntime", "openvino", "pytorch"]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, flag: bool = True) -> torch.Tensor:
        y = self.second(torch.relu(self.first(x)))
        if scale is not None:
            y = y * scale
        return y if flag else -y


def compiled(model: nn.Module, *args: Any, engine: str = "onnxruntime", **kwargs: Any) -> Any:
    return intarsia.compile(model.eval(), args, kwargs, engines=[engine], min_block_size=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_same_answer(engine: str) -> None:
    model, x = Mlp(), torch.randn(3, 8)
    fast = compiled(model, x, engine=engine)
    torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-5)
    assert not fast(x).requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(torch.randn(2, 8)), r"input x has shape \(2, 8\); compiled for \(3, 8\)"),
        (
            lambda f: f(torch.randn(3, 8).double()),
            r"input x has dtype torch.float64; compiled for torch.float32",
        ),
        (lambda f: f(torch.randn(3, 8, device="meta")), r"input x is on meta; compiled for cpu"),
        (lambda f: f([1.0]), "input x must be a tensor, not a list"),
        (lambda f: f(1.0), "input x must be a tensor, not a float"),
        (lambda f: f(), "does not fit the model"),
        (
            lambda f: f(torch.randn(3, 8), torch.randn(3, 4)),
            "argument scale is a tensor; compiled for its default",
        ),
    ],
)
def test_refuses_other_inputs(call: Any, message: str) -> None:
    fast = compiled(Mlp(), torch.randn(3, 8))
    with pytest.raises(InputError, match=message):
        call(fast)


class OfDict(nn.Module):
    def forward(self, batch: dict[str, Any], **more: torch.Tensor) -> torch.Tensor:
        return batch["x"] * 2 - batch["y"][0] + more["added"]


def test_keys_of_a_dict_in_any_order() -> None:
    x = torch.randn(3, 8)
    fast = compiled(OfDict(), {"x": x, "y": (x + 1,)}, added=x)
    batch = {"y": (torch.randn(3, 8),), "x": torch.randn(3, 8)}
    want = OfDict()(batch, added=x)
    for answer in (fast(batch, added=x), fast(added=x, batch=batch), fast(OrderedDict(batch), added=x)):
        torch.testing.assert_close(answer, want)
    with pytest.raises(InputError, match=r"batch\['y'\] is a tensor; compiled for a tuple of 1"):
        fast({"x": x, "y": x}, added=x)


def test_arguments_by_name_or_position() -> None:
    model, x, scale = Mlp(), torch.randn(3, 8), torch.randn(3, 4)
    fast = compiled(model, x, scale=scale)
    expected = model(x, scale).detach()
    for answer in (fast(x, scale), fast(x, scale=scale), fast(scale=scale, x=x)):
        torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


def test_plain_values_are_part_of_the_program() -> None:
    model, x = Mlp(), torch.randn(3, 8)
    fast = compiled(model, x, None, False)
    torch.testing.assert_close(fast(x, None, False), model(x, None, False).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="input flag is True; compiled for False"):
        fast(x, None, True)


@dataclass
class Pair:
    total: torch.Tensor
    parts: list[torch.Tensor]


pytree.register_dataclass(Pair)


class Nested(nn.Module):
    def forward(self, items: dict[str, Any]) -> Any:
        a, (b, c) = items["a"], items["rest"]
        return {"pair": Pair(a + b + c, [a * 2, b.view(-1)]), "same": a, "number": 3, "none": None}


@pytest.mark.parametrize("engine", ENGINES)
def test_nested_inputs_and_outputs(engine: str) -> None:
    a, b, c = torch.randn(2, 2), torch.randn(2, 2), torch.randn(2, 2)
    items = {"a": a, "rest": (b, c)}
    fast = compiled(Nested(), items, engine=engine)
    answer, expected = fast(items), Nested()(items)
    assert isinstance(answer["pair"], Pair)
    assert answer["number"] == 3 and answer["none"] is None
    torch.testing.assert_close(pytree.tree_leaves(answer), pytree.tree_leaves(expected))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"rest": (1, 2)}, "items has the keys ['rest']; compiled for ['a', 'rest']"),
        ({"a": 1, "rest": [2, 3]}, "items['rest'] is a list of 2; compiled for a tuple of 2"),
        ({"a": 1, "rest": ()}, "items['rest'] is a tuple of 0; compiled for a tuple of 2"),
        (1.0, "items is 1.0; compiled for a dict of 2"),
    ],
)
def test_another_structure_is_refused_at_the_argument_that_differs(items: Any, message: str) -> None:
    a = torch.randn(2, 2)
    fast = compiled(Nested(), {"a": a, "rest": (a, a)})
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        fast(items)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.cache[1:] = self.cache[:-1].clone()
        self.cache[0] = x
        return self.cache * self.count + torch.relu(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_are_written_back(engine: str) -> None:
    model, twin = Counter(), Counter()
    fast = compiled(model, torch.randn(3), engine=engine)
    assert int(model.count) == 0, "compiling must not run the model's side effects"
    for _ in range(3):
        x = torch.randn(3)
        torch.testing.assert_close(fast(x), twin(x))
    torch.testing.assert_close(model.count, twin.count)
    torch.testing.assert_close(model.cache, twin.cache)


class Bump(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.clone()
        x.mul_(2).add_(y)
        return before.view(-1), x - y


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_are_changed_as_in_eager(engine: str) -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    fast = compiled(Bump(), x.clone(), y, engine=engine)
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(fast(mine, y), Bump()(theirs, y))
    torch.testing.assert_close(mine, theirs)


class Copies(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), torch.relu(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_returned_copy_is_a_copy(engine: str) -> None:
    x = torch.randn(4)
    kept = x.clone()
    copy, _ = compiled(Copies(), x, engine=engine)(x)
    copy.zero_()
    torch.testing.assert_close(x, kept)


@pytest.mark.parametrize("engine", ENGINES)
def test_strided_inputs(engine: str) -> None:
    model, x = Mlp(), torch.randn(8, 3).t()
    assert not x.is_contiguous()
    torch.testing.assert_close(compiled(model, x, engine=engine)(x), model(x).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_results_of_two_calls_do_not_share_memory(engine: str) -> None:
    fast, a, b = compiled(Mlp(), torch.randn(3, 8), engine=engine), torch.randn(3, 8), torch.randn(3, 8)
    first = fast(a)
    kept = first.clone()
    fast(b)
    torch.testing.assert_close(first, kept, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_many_threads(engine: str) -> None:
    model = Mlp()
    fast = compiled(model, torch.randn(3, 8), engine=engine)
    inputs = [torch.randn(3, 8) for _ in range(8)]
    expected = [model(x).detach() for x in inputs]
    wrong: list[str] = []

    def work(index: int) -> None:
        for _ in range(30):
            if not torch.allclose(fast(inputs[index]), expected[index], rtol=1e-5, atol=1e-5):
                wrong.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("engine", ENGINES)
def test_dynamic_sizes(engine: str) -> None:
    model = Mlp().eval()
    batch = torch.export.Dim("batch", min=2, max=16)
    fast = intarsia.compile(
        model,
        (torch.randn(3, 8),),
        dynamic_shapes={"x": {0: batch}},
        engines=[engine],
        min_block_size=1,
    )
    for size in (2, 5, 16):
        x = torch.randn(size, 8)
        torch.testing.assert_close(fast(x), model(x).detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match="size 17 in dimension 0; compiled for 2 to 16"):
        fast(torch.randn(17, 8))
    with pytest.raises(InputError, match="size 7 in dimension 1; compiled for 8"):
        fast(torch.randn(3, 7))


class ByStrides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x).t()
        return torch.as_strided(y, (2, 3), (1, 2), 1) * 2 + torch.as_strided(x, (2, 3), (3, 1), 2)


@pytest.mark.parametrize("kept", [(), ("aten::as_strided",), ("aten::relu", "aten::t")])
def test_reading_by_strides(kept: tuple[str, ...]) -> None:
    x = torch.randn(5, 4).t()
    fast = intarsia.compile(
        ByStrides(), (x,), engines=["onnxruntime"], min_block_size=1, torch_executed_ops=kept
    )
    torch.testing.assert_close(fast(x), ByStrides()(x))
    with pytest.raises(InputError, match="the model reads it by its strides"):
        fast(x.contiguous())


def test_hooks_are_called() -> None:
    fast, seen = compiled(Mlp(), torch.randn(3, 8)), []
    handle = fast.register_forward_hook(lambda module, args, result: seen.append(result.shape))
    fast(torch.randn(3, 8))
    handle.remove()
    fast(torch.randn(3, 8))
    assert seen == [(3, 4)]


def test_the_direct_call_says_and_does_what_the_long_way_does() -> None:
    """A model that is one program of ONNX Runtime is run before anything is checked."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    fast = intarsia.compile(model, (x,), engines=["onnxruntime"], min_block_size=1)
    assert fast._fit.direct is not None
    expected = model(x).detach()
    torch.testing.assert_close(fast(x), expected)
    torch.testing.assert_close(fast(x.clone().requires_grad_()), expected)
    torch.testing.assert_close(fast(nn.Parameter(x)), expected)
    torch.testing.assert_close(fast(x.t().contiguous().t()), expected)
    for wrong in (torch.randn(2, 4), x.double(), x.to("meta"), torch.randn(3, 4, 1), x.tolist(), 1.0):
        with pytest.raises(InputError):
            fast(wrong)
    for call in ((), (x, x)):
        with pytest.raises(InputError):
            fast(*call)
    seen = []
    handle = fast.register_forward_hook(lambda module, args, result: seen.append(result))
    fast(x)
    handle.remove()
    assert len(seen) == 1


def test_the_direct_call_of_two_inputs_keeps_them_apart() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.softmax(a - 2 * b, -1)

    a, b = torch.randn(2, 3), torch.randn(2, 3)
    fast = intarsia.compile(Two().eval(), (a, b), engines=["onnxruntime"], min_block_size=1)
    assert fast._fit.direct is not None
    torch.testing.assert_close(fast(a, b), Two()(a, b))
    torch.testing.assert_close(fast(b, a), Two()(b, a))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_input_named_like_a_builtin_is_checked(engine: str) -> None:
    class Named(nn.Module):
        def forward(self, input: torch.Tensor, type: torch.Tensor) -> torch.Tensor:
            return input * 2 + type.sum()

    fast = intarsia.compile(
        Named().eval(), (torch.ones(3), torch.ones(2)), engines=[engine], min_block_size=1
    )
    torch.testing.assert_close(fast(torch.ones(3), torch.ones(2)), torch.full((3,), 4.0))
    with pytest.raises(InputError, match="input"):
        fast(torch.ones(4), torch.ones(2))
    with pytest.raises(InputError, match="type"):
        fast(torch.ones(3), torch.ones(2).int())
