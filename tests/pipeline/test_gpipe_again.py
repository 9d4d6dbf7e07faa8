"""What checkpointing runs a second time draws the same random numbers and finds the same buffers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from pipeline_compare import MODES, assert_same, cuts, one_thread  # noqa: F401  (a fixture)
from torch import nn

from intarsia.pipeline import GPipe, keyed_random


def dropouts():
    return nn.Sequential(
        nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.3), nn.Linear(32, 8)
    )


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize(("chunks", "stages"), [(1, 3), (1, 1), (4, 1), (4, 3)])
def test_dropout_equals_the_plain_module_that_draws_by_the_same_keys(chunks, stages, checkpoint):
    plain = dropouts()
    piped = GPipe(
        copy.deepcopy(plain), cuts(5, stages), devices=["cpu"] * stages, chunks=chunks, checkpoint=checkpoint
    )
    x = torch.rand(8, 8)
    before = torch.get_rng_state()
    expected = []
    for i, part in enumerate(x.chunk(chunks)):
        with keyed_random(seed=1, step=2, micro_batch=i, layers=piped.layers(plain)):
            expected.append(plain(part))
            expected[-1].sum().backward()
    with keyed_random(seed=1, step=2):
        actual = piped(x)
    actual.sum().backward()
    assert torch.equal(torch.cat(expected), actual)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator is left alone"
    assert_same(plain, piped)


@pytest.mark.parametrize("chunks", [2, 5])
def test_dropout_is_the_same_however_it_is_checkpointed_and_run_after_run(chunks):
    plain = dropouts()
    x = torch.rand(10, 8)
    results = []
    for checkpoint in [*MODES, "always"]:
        piped = GPipe(copy.deepcopy(plain), [2, 3], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint)
        torch.manual_seed(2)
        outputs = [piped(x) for _ in range(3)]
        state = torch.get_rng_state()
        sum(output.sum() for output in outputs).backward()
        results.append((*outputs, state, *(p.grad for p in piped.parameters())))
    assert not torch.equal(results[0][0], results[0][1]), "the second run draws other numbers"
    for result in results[1:]:
        for first, other in zip(results[0], result, strict=True):
            torch.testing.assert_close(first, other, rtol=1e-6, atol=1e-7)


def test_masks_agree_with_gradients_when_stages_draw_at_the_same_time():
    class Dropouts(nn.Module):
        def forward(self, x):
            for _ in range(100):
                x = F.dropout(x, p=0.001)
            return x

    x = torch.rand(10, 10, requires_grad=True)
    piped = GPipe(
        nn.Sequential(Dropouts(), Dropouts()), [1, 1], devices=["cpu"] * 2, chunks=10, checkpoint="always"
    )
    y = piped(x)
    y.norm().backward()
    assert y.bool().tolist() == x.grad.bool().tolist()
    assert not y.bool().all()


def test_every_kind_of_random_operation_is_recomputed_alike():
    class Draw(nn.Module):
        def forward(self, x):
            x = x * torch.rand_like(x) + torch.randn(x.shape) * torch.bernoulli(torch.full_like(x, 0.5))
            x = F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]
            x = (
                x * torch.randint(1, 5, x.shape)
                + torch.empty_like(x).uniform_()
                + F.alpha_dropout(x, training=True)
            )
            return x * (1 + torch.multinomial(torch.ones(8), len(x) * 8, replacement=True).view(x.shape))

    grads = []
    for checkpoint in ("always", "never"):
        torch.manual_seed(3)
        x = torch.linspace(-1, 1, 80).view(10, 8).requires_grad_()
        piped = GPipe(
            nn.Sequential(Draw(), Draw()), [1, 1], devices=["cpu"] * 2, chunks=5, checkpoint=checkpoint
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            piped(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_without_random_operations_the_generator_stands_still():
    piped = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2, chunks=2)
    before = torch.get_rng_state()
    piped(torch.rand(4, 1, generator=torch.Generator())).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


def test_drawing_unwatched_is_noticed():
    class Late(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x + torch.rand(1) if self.calls > 1 else x

    piped = GPipe(
        nn.Sequential(Late(), nn.Identity()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always"
    )
    with pytest.warns(UserWarning, match="default generator"):
        piped(torch.rand(4))


def test_stateful_buffers_are_recomputed_from_what_they_were():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            self.calls += 1
            return x * self.scale * self.calls

    plain = nn.Sequential(Counting(), Counting())
    piped = GPipe(copy.deepcopy(plain), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint="always")
    x = torch.rand(6, 1)
    for _ in range(2):
        for piece in x.chunk(3):
            plain(piece).sum().backward()
        piped(x).sum().backward()
        assert_same(plain, piped)


def test_a_late_change_of_the_input_is_refused():
    class Late(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x.add_(1) if self.calls > 1 else x

    for checkpoint in ("except_last", "never"):
        layers = nn.Sequential(nn.Identity(), Late())
        piped = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        with pytest.raises(RuntimeError, match=r"in.place"):
            piped(torch.rand(4))
        x = torch.rand(4)
        assert torch.equal(piped(x), x + 1), "it is known now"


class Attention(nn.Module):
    def forward(self, x):
        return x + nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_without_dropout_draws_nothing():
    """It is an operation that may draw: only a generator that has moved makes a stage random."""
    plain = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8), Attention())
    piped = GPipe(copy.deepcopy(plain), [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    x = torch.rand(4, 2, 3, 8)
    before = torch.get_rng_state()
    piped(x).sum().backward()
    assert torch.equal(before, torch.get_rng_state())
    plain(x).sum().backward()
    assert_same(plain, piped)
