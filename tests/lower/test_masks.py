"""Masks that hide nothing are gone, causal ones are a flag, and what a user gives stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import intarsia
from intarsia.capture import capture
from intarsia.convert import registry
from intarsia.lower import lower
from intarsia.lower.index_values import All, IndexValues, Never, Sum, of_tensor
from intarsia.lower.unlift import unlift

SDPA = torch.ops.aten.scaled_dot_product_attention.default


def attention_of(
    model: nn.Module, args: Any = (), kwargs: Any = None, shapes: Any = None
) -> list[tuple[Any, bool]]:
    """Of each attention of a lowered model: its mask, and whether it is causal."""
    lowered = lower(capture(model, args, kwargs, shapes), registry.__contains__)
    nodes = [node for node in lowered.module.graph.nodes if node.target is SDPA]
    return [
        (
            (*node.args, None)[3] or node.kwargs.get("attn_mask"),
            bool(node.args[5]) if len(node.args) > 5 else False,
        )
        for node in nodes
    ]


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    return transformers.GPT2Model(config).eval()


IDS = torch.arange(12).reshape(2, 6)
VARYING = {"input_ids": {0: Dim.AUTO, 1: Dim.AUTO}}


@pytest.mark.parametrize("shapes", [None, VARYING], ids=["fixed", "varying"])
def test_bert_without_a_mask_has_none(bert: nn.Module, shapes: Any) -> None:
    assert attention_of(bert, (), {"input_ids": IDS}, shapes) == [(None, False)] * 2


@pytest.mark.parametrize("shapes", [None, VARYING], ids=["fixed", "varying"])
def test_gpt2_without_a_mask_is_causal(gpt2: nn.Module, shapes: Any) -> None:
    assert attention_of(gpt2, (), {"input_ids": IDS}, shapes) == [(None, True)] * 2


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_users_padding_mask_stays(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    mask = torch.ones_like(IDS)
    found = attention_of(model, (), {"input_ids": IDS, "attention_mask": mask})
    assert all(mask is not None and not causal for mask, causal in found) and len(found) == 2
    fast = intarsia.compile(model, kwargs={"input_ids": IDS, "attention_mask": mask})
    mask[0, 4:] = 0
    answer = fast(input_ids=IDS, attention_mask=mask).last_hidden_state
    expected = model(input_ids=IDS, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "engine"), [("bert", "openvino"), ("gpt2", "onnxruntime")])
def test_the_answers_stay(name: str, engine: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)
    fast = intarsia.compile(model, kwargs={"input_ids": IDS}, dynamic_shapes=VARYING, engines=[engine])
    for ids in (IDS, IDS[:1, :3], IDS.repeat(2, 2)):
        answer, expected = fast(input_ids=ids).last_hidden_state, model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)


class Attends(nn.Module):
    def __init__(self, mask: Callable[[int, int], torch.Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = self.mask(q.shape[-2], k.shape[-2])
        return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)


LOW = torch.finfo(torch.float32).min
MASKS: dict[str, tuple[Callable[[int, int], torch.Tensor], tuple[bool, bool]]] = {
    "ones": (lambda n, m: torch.ones(n, m, dtype=torch.bool), (True, False)),
    "tril": (lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(), (True, True)),
    "zeros": (lambda n, m: torch.zeros(n, m), (True, False)),
    "additive": (lambda n, m: torch.full((n, m), -torch.inf).triu(1), (True, True)),
    "lowest": (lambda n, m: torch.full((n, m), LOW).triu(1), (True, True)),
    "wider": (lambda n, m: torch.ones(n, m, dtype=torch.bool).tril(1), (False, False)),
    "upper": (lambda n, m: torch.ones(n, m, dtype=torch.bool).triu(), (False, False)),
    "slope": (lambda n, m: -torch.arange(m).float().expand(n, m), (False, False)),
    "window": (
        lambda n, m: (
            (torch.arange(m) <= torch.arange(n)[:, None]) & (torch.arange(m) > torch.arange(n)[:, None] - 2)
        ),
        (False, False),
    ),
}


@pytest.mark.parametrize(("mask", "expected"), MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("keys", [5, 7])
def test_masks_of_fixed_sizes_are_looked_at(mask: Any, expected: tuple[bool, bool], keys: int) -> None:
    model, q, k = Attends(mask), torch.rand(2, 2, 5, 4), torch.rand(2, 2, keys, 4)
    ((left, causal),) = attention_of(model, (q, k))
    assert (left is None, causal) == expected
    torch.testing.assert_close(intarsia.compile(model, (q, k))(q, k), model(q, k), rtol=1e-4, atol=1e-5)


class Filled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ahead = torch.arange(x.shape[-1]) < 0
        return torch.where(~torch.zeros(3, dtype=torch.bool), x.masked_fill(ahead, -1.0), x * 2)


def test_fills_that_fill_nothing_are_gone() -> None:
    x = torch.rand(2, 3)
    lowered = lower(capture(Filled(), (x,)), registry.__contains__)
    assert not [node for node in lowered.module.graph.nodes if node.op == "call_function"]
    torch.testing.assert_close(lowered.module(x)[0], x)


@st.composite
def positions(draw: Any) -> Callable[[int], torch.Tensor]:
    """A program that makes a mask out of positions."""
    shift, start, take = draw(st.integers(-2, 2)), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    compare = draw(st.sampled_from([torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne]))
    joined = draw(st.booleans())

    def program(n: int) -> torch.Tensor:
        rows = (torch.arange(n) + shift).unsqueeze(1)
        columns = torch.arange(start, n + start).unsqueeze(0)
        if joined:
            columns = torch.cat([columns[:, :1] - 1, columns], -1)[:, take : n + take]
        wide = columns.expand(n, -1)
        return compare(columns, rows.expand(-1, wide.shape[1])) & (rows >= rows - 1)

    return program


class Runs(nn.Module):
    def __init__(self, program: Callable[[int], torch.Tensor]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(x.shape[0])


def meaning(known: Any, shape: torch.Size, sizes: dict[Any, int]) -> torch.Tensor:
    """What is said of a tensor, spelled out."""
    if isinstance(known, Sum):
        total = torch.full(shape, int(known.const.subs(sizes)))
        for axis, step in enumerate(known.steps):
            place = [1] * len(shape)
            place[axis] = -1
            total = total + int(step.subs(sizes)) * torch.arange(shape[axis]).reshape(place)
        return total
    if isinstance(known, Never):
        return torch.zeros(shape, dtype=torch.bool)
    made = torch.ones(shape, dtype=torch.bool)
    for item in known.sums:
        made &= meaning(item, shape, sizes) >= 0
    return made


@settings(max_examples=25, deadline=None)
@given(positions(), st.integers(3, 6))
def test_what_is_known_of_a_tensor_is_true_at_every_size(
    program: Callable[[int], torch.Tensor], size: int
) -> None:
    shapes = ({0: Dim.DYNAMIC(min=3)},)
    lowered = unlift(capture(Runs(program), (torch.rand(4, 1),), dynamic_shapes=shapes))
    values = IndexValues(lowered.module)
    run = torch.fx.Interpreter(lowered.module, garbage_collect_values=False)
    run.run(torch.rand(size, 1))
    sizes = dict.fromkeys(lowered.range_constraints, size)
    told = 0
    for node, value in run.env.items():
        known = values.of(node)
        if isinstance(value, torch.Tensor) and known is not None:
            told += 1
            assert torch.equal(meaning(known, value.shape, sizes), value), (node, known)
    assert told > 3


def test_constants_are_known_by_their_values() -> None:
    assert of_tensor(torch.arange(6).reshape(2, 3)) == Sum(0, (3, 1))
    assert of_tensor(torch.ones(2, dtype=torch.bool)) == All(frozenset(), 1)
    assert of_tensor(torch.tensor([0, 1, 3])) is None
