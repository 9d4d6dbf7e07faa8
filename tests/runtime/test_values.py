"""Values go in and out of a compiled model as they do of the model itself, aliasing included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

import intarsia
from intarsia.backend import intarsia_backend

Make = Callable[[nn.Module, tuple[Any, ...]], Callable[..., Any]]


def by_compile(model: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any]:
    return intarsia.compile(model, args, min_block_size=1)


def by_backend(model: nn.Module, args: tuple[Any, ...]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend=intarsia_backend, options={"min_block_size": 1}, dynamic=False)


doors = pytest.mark.parametrize("make", [by_compile, by_backend])


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def shared(held: list[torch.Tensor]) -> list[list[tuple[bool, bool]]]:
    """For each pair, whether they lie in one memory, and whether they are one tensor."""
    return [
        [(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(), a is b) for b in held]
        for a in held
    ]


@torch.no_grad()
def agree(make: Make, model: nn.Module, *args: Any) -> Any:
    """Values, types, what is written to, and who shares memory with whom are the model's own."""
    copies = [pytree.tree_map_only(torch.Tensor, torch.clone, args) for _ in range(3)]
    model.eval()
    fast = make(model, copies[0])
    state = [*model.parameters(), *model.buffers()]
    wanted = model(*copies[1])
    expected = shared([*tensors(wanted), *tensors(copies[1]), *state])
    got = fast(*copies[2])
    assert type(got) is type(wanted)
    assert pytree.tree_structure(got) == pytree.tree_structure(wanted)
    for one, other in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        else:
            assert type(one) is type(other) and one == other
    for one, other in zip(tensors(copies[2]), tensors(copies[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert shared([*tensors(got), *tensors(copies[2]), *state]) == expected
    return got


class Run(nn.Module):
    """A function as a model, with weights of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.line, self.function = nn.Linear(4, 4), function
        self.register_buffer("table", torch.ones(2, 4))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def twice(_: Any, x: torch.Tensor) -> Any:
    y = torch.relu(x)
    return y, y


def result_and_views(_: Any, x: torch.Tensor) -> Any:
    y = torch.relu(x)
    return y[0], y, y.view(-1), y.t()[1:]


def changed_result(_: Any, x: torch.Tensor) -> Any:
    y = torch.relu(x)
    y.add_(1)
    return y, y[1:]


def written(_: Any, x: torch.Tensor) -> Any:
    x.add_(1)
    return x * 2


def written_and_returned(_: Any, x: torch.Tensor) -> Any:
    x.add_(1)
    return x, x[0]


def written_through_a_view(_: Any, x: torch.Tensor) -> Any:
    x[0].mul_(3)
    return x.sum(), x.view(-1)


def read_before_it_is_written(_: Any, x: torch.Tensor) -> Any:
    before = x.t().reshape(-1)  # copies, so that what follows is not seen
    x.add_(1)
    return before, x * 2


def view_and_views(self: Any, x: torch.Tensor) -> Any:
    turned = self.line(x).transpose(0, 1)
    return turned, turned[0], turned[1:].unsqueeze(0)


VIEWS = {
    "a view": lambda _, x: (x.view(-1), torch.relu(x)),
    "only a view": lambda _, x: x[1:],
    "a chain of views": lambda _, x: x.t().unsqueeze(0)[:, 1:].transpose(1, 2),
    "one of several": lambda _, x: x.chunk(2, dim=1)[1],
    "the input itself": lambda _, x: (x, torch.relu(x)),
    "one result twice": twice,
    "a result and views of it": result_and_views,
    "a result changed in place": changed_result,
    "an input that is written": written,
    "an input that is written and returned": written_and_returned,
    "an input written through a view": written_through_a_view,
    "a copy made before": read_before_it_is_written,
    "a view of what nobody gets, and views of it": view_and_views,
    "weights and views of them": lambda self, x: (self.table, self.line.weight.t(), self.line(x)),
    "two products": lambda self, x: (self.line(x), self.line(x) + 1),
}


@doors
@pytest.mark.parametrize("name", VIEWS)
def test_memory_is_shared_as_in_the_model(name: str, make: Make) -> None:
    agree(make, Run(VIEWS[name]), torch.randn(2, 4))


@torch.no_grad()
def test_views_are_made_of_inputs_whose_sizes_vary() -> None:
    model = Run(lambda _, x: (x.view(x.shape[0] * 2, -1), x[1:], torch.relu(x)))
    shapes = {"args": ({0: torch.export.Dim.AUTO},)}
    fast = intarsia.compile(model, (torch.randn(3, 4),), dynamic_shapes=shapes, min_block_size=1)
    for size in (2, 5):
        x = torch.randn(size, 4)
        for got, wanted in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted)
        fast(x)[0].zero_()
        assert not x.any()


@torch.no_grad()
def test_who_writes_to_a_result_writes_to_the_input() -> None:
    fast = intarsia.compile(Run(VIEWS["only a view"]), (torch.randn(2, 4),))
    x = torch.randn(2, 4)
    fast(x).fill_(7)
    assert bool((x[1] == 7).all()) and not bool((x[0] == 7).any())


@doors
@torch.no_grad()
def test_tied_weights(make: Make) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: torch.Tensor) -> Any:
            return self.head(torch.relu(self.words(ids)))

    agree(make, Tied(), torch.tensor([[1, 2, 3]]))


@doors
def test_none_and_numbers(make: Make) -> None:
    def answer(_: Any, x: torch.Tensor, mask: Any, by: int, scale: float) -> Any:
        y = x * by * scale if mask is None else x * mask
        return {"y": y, "nothing": None, "by": by, "half": 0.5, "name": "n", "nested": (True, [y + 1])}

    got = agree(make, Run(answer), torch.randn(2, 4), None, 3, 0.25)
    assert got["nothing"] is None and got["nested"][0] is True


class Pair(NamedTuple):
    """A named tuple."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Boxes:
    """A dataclass that torch.export knows."""

    corners: torch.Tensor
    scores: torch.Tensor


torch.export.register_dataclass(Boxes, serialized_type_name="tests.runtime.Boxes")


@doors
@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: Pair(torch.relu(x), x + 1),
        lambda _, x: Boxes(torch.relu(x), x + 1),
        lambda _, x: BaseModelOutput(last_hidden_state=torch.relu(x), hidden_states=(x, x + 1)),
        lambda _, x: [torch.relu(x), {"a": (x + 1,)}],
    ],
    ids=["named tuple", "dataclass", "ModelOutput", "nested"],
)
def test_structures_out(function: Callable[..., Any], make: Make) -> None:
    agree(make, Run(function), torch.randn(2, 4))


@doors
def test_structures_in(make: Make) -> None:
    def answer(_: Any, pair: Pair, named: dict[str, torch.Tensor], more: list[torch.Tensor]) -> Any:
        return pair.first + pair.second, named["a"] * more[0] + more[1]

    def some() -> torch.Tensor:
        return torch.randn(2, 4)

    agree(make, Run(answer), Pair(some(), some()), {"a": some()}, [some(), some()])


@doors
@torch.no_grad()
def test_a_model_with_a_key_value_cache(make: Make) -> None:
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    wanted = model(ids, use_cache=True)
    if make is by_compile:
        fast: Any = intarsia.compile(model, (ids,), {"use_cache": True})
    else:
        fast = make(model, (ids,))
    got = fast(ids, use_cache=True)
    assert type(got) is type(wanted)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    mine, theirs = got.past_key_values, wanted.past_key_values
    assert type(mine) is type(theirs) and mine.get_seq_length() == theirs.get_seq_length() == 3
    torch.testing.assert_close(mine.layers[0].keys, theirs.layers[0].keys, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_hooks_run_as_they_do_on_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    fast, x = intarsia.compile(model, (torch.randn(2, 4),)), torch.randn(2, 4)
    seen: list[str] = []
    fast.register_forward_pre_hook(lambda *_: seen.append("before"))
    fast.register_forward_hook(lambda _, __, made: made * 2)
    torch.testing.assert_close(fast(x), model(x) * 2, rtol=1e-5, atol=1e-5)
    assert seen == ["before"]
    torch._dynamo.reset()
    model.register_forward_hook(lambda _, __, made: made + 1)
    quick = by_backend(model, (x,))
    torch.testing.assert_close(quick(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
@torch.no_grad()
def test_sparse_results(kind: str) -> None:
    model = Run(lambda self, x: (getattr(torch.relu(self.line(x)), kind)(), self.line(x)))
    x = torch.randn(3, 4)
    fast = intarsia.compile(model, (x,), min_block_size=1)
    (made, _), (truth, _) = fast(x), model(x)
    assert made.layout == truth.layout
    torch.testing.assert_close(made.to_dense(), truth.to_dense(), rtol=1e-5, atol=1e-5)
