"""Random numbers by key: pipelines draw what a plain loop with the same keys draws, however layers draw."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from pipeline_compare import MODES, assert_same, one_thread  # noqa: F401  (a fixture)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from intarsia.pipeline import GPipe, keyed_random, split
from intarsia.pipeline.gpipe.keyed_random import RandomKey, using_key


class Block(nn.Module):
    """A layer with weights, and a way to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x):
        return self.outer(self.draw(self.inner(x)))


class Checkpointed(Block):
    reentrant = False

    def draw(self, x):
        return checkpoint(lambda z: self.dropout(F.dropout(z.sin(), 0.2)), x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Functional(Block):
    def draw(self, x):
        on = self.training
        return F.dropout(F.dropout(x, 0.2, on), 0.2, on) * F.dropout(x, 0.0) * F.dropout(x, 0.9, False)


class Shared(Block):
    def draw(self, x):
        return self.dropout(self.dropout(x).cos())


class Noise(Block):
    def draw(self, x):
        return (
            x
            + torch.randn_like(x) * torch.rand(8)
            + torch.empty_like(x).uniform_() * torch.randint(1, 3, (8,))
        )


class Recurrent(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 8, num_layers=3, dropout=0.4, batch_first=True)

    def draw(self, x):
        return self.dropout(self.rnn(x[:, None])[0][:, 0])


class Attention(Block):
    def draw(self, x):
        return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.4)[0] + F.alpha_dropout(
            x, 0.2, training=True
        )


class Samples(Attention):
    """Attention within a sample, which a batch may be cut through."""

    def draw(self, x):
        z = x.view(-1, 2, 4)
        return (F.scaled_dot_product_attention(z, z, z, dropout_p=0.4)).flatten(1) + self.dropout(x)


class Seeding(Block):
    def draw(self, x):
        torch.manual_seed(7)
        return F.dropout(x, 0.4)


class Forking(Block):
    def draw(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            x = F.dropout(x, 0.4)
        return F.dropout(x, 0.4)


class Decides(Block):
    def draw(self, x):
        return F.dropout(x, 0.4) if torch.rand(()) < 0.5 else x.sin()


KINDS = [Checkpointed, Reentrant, Functional, Shared, Noise, Recurrent, Attention, Seeding, Forking, Decides]


def model_of(*kinds):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *[kind() for kind in kinds], nn.Dropout(0.5), nn.Linear(8, 8))


def plain_loop(model, x, chunks, layers, **key):
    """The answer and the gradients of a plain loop over micro-batches, each with its key."""
    answers = []
    for i, part in enumerate(x.chunk(chunks)):
        with keyed_random(micro_batch=i, layers=layers, **key):
            answers.append(model(part))
            answers[-1].square().sum().backward()
    return torch.cat(answers)


@pytest.mark.parametrize("concurrent", [None, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_draw_in_their_own_way(kind, mode, concurrent):
    plain, x = model_of(kind, nn.Tanh, kind), torch.randn(12, 8)
    piped = GPipe(
        copy.deepcopy(plain),
        [2, 4],
        devices=["cpu"] * 2,
        chunks=4,
        checkpoint=mode,
        concurrent_backward=concurrent,
    )
    for step in range(2):
        expected = plain_loop(plain, x, 4, piped.layers(plain), seed=3, step=step)
        before = torch.get_rng_state()
        with keyed_random(3, step):
            actual = piped(x)
        actual.square().sum().backward()
        assert torch.equal(actual, expected)
        assert_same(plain, piped)
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind", [Functional, Shared, Noise, Recurrent, Samples, Checkpointed, Reentrant, Seeding, Decides]
)
def test_models_that_are_cut(kind, mode):
    model, x = model_of(kind, nn.Tanh, kind), torch.randn(12, 8)
    plain = copy.deepcopy(model)
    stages = split(model, (x,), stages=2, by="memory")
    assert stages.report.way == ("modules" if kind in (Seeding, Decides) else "graph")
    piped = stages.gpipe(chunks=4, checkpoint=mode)
    expected = plain_loop(plain, x, 4, stages.layers(plain), seed=3)
    with keyed_random(3):
        actual = piped(x)
    actual.square().sum().backward()
    assert torch.equal(actual, expected)
    assert_same(plain, model)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_computes_itself_again_draws_the_same(mode):
    class Dropouts(nn.Module):
        def forward(self, x):
            return checkpoint(lambda z: F.dropout(F.dropout(z, 0.3), 0.3), x, use_reentrant=False)

    x = torch.rand(24, 16, requires_grad=True)
    layers = nn.Sequential(Dropouts(), Dropouts())
    y = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=8, checkpoint=mode)(x)
    y.sum().backward()
    assert torch.equal(y.bool(), x.grad.bool())


@pytest.mark.parametrize("kind", [Functional, Decides])
def test_the_number_of_stages_does_not_matter(kind):
    model, x = model_of(kind, kind, kind, kind), torch.randn(12, 8)
    answers = []
    for count in (1, 2, 3, 4):
        stages = split(model, (x,), stages=count, by="memory")
        with keyed_random(0):
            answers.append(stages.gpipe(chunks=3)(x))
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_autocast():
    plain, x = model_of(Functional, Shared), torch.randn(12, 8)
    stages = split(plain, (x,), stages=2, by="memory")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        expected = plain_loop(plain, x, 4, None, seed=1)
        with keyed_random(1):
            assert torch.equal(stages.gpipe(chunks=4)(x), expected)


def test_in_evaluation_mode_nothing_is_drawn():
    plain, x = model_of(Functional, Shared, Recurrent).eval(), torch.randn(12, 8)
    before = torch.get_rng_state()
    piped = GPipe(copy.deepcopy(plain), [2, 4], devices=["cpu"] * 2, chunks=1)
    stages = split(plain, (x,), stages=2, by="memory")
    for model in (piped, stages.gpipe(chunks=1)):
        assert torch.equal(model(x), plain(x))
    assert torch.equal(before, torch.get_rng_state())


def test_a_seed_of_torch_repeats_a_run_and_another_run_draws_anew():
    x = torch.randn(12, 8)
    piped = GPipe(model_of(Functional), [2, 2], devices=["cpu"] * 2, chunks=4)
    torch.manual_seed(1)
    first, second = piped(x), piped(x)
    torch.manual_seed(1)
    assert torch.equal(piped(x), first) and not torch.equal(first, second)


def test_a_pipeline_that_is_computed_again_as_a_whole():
    x = torch.randn(12, 8, requires_grad=True)
    layers = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    piped = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=4, checkpoint="never")
    answer = checkpoint(piped, x, use_reentrant=True)
    answer.sum().backward()
    assert torch.equal(answer.bool(), x.grad.bool())
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        checkpoint(piped, x, use_reentrant=False)


def test_a_pipeline_inside_a_layer_of_a_pipeline():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
            self.inner = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint="always")

        def forward(self, x):
            return self.inner(F.dropout(x, 0.2))

    x = torch.rand(16, 64, requires_grad=True)
    for mode in MODES:
        x.grad = None
        layers = nn.Sequential(Outer(), Outer())
        piped = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=4, checkpoint=mode)
        answer = piped(x)
        answer.sum().backward()
        assert torch.equal(answer.bool(), x.grad.bool())
        parts = [part.bool() for part in answer.chunk(8)]
        assert not any(torch.equal(parts[0], other) for other in parts[1:])


def test_two_pipelines_at_once():
    x = torch.randn(40, 8)
    models = [model_of(Checkpointed, Shared), model_of(Seeding, Functional)]
    wanted = []

    def run(model):
        piped = GPipe(copy.deepcopy(model), [2, 3], devices=["cpu"] * 2, chunks=10, checkpoint="always")
        for step in range(3):
            with using_key(RandomKey(5, step)):
                answer = piped(x)
            answer.square().sum().backward()
        return [answer, *(p.grad for p in piped.parameters())]

    wanted = [run(model) for model in models]
    found = [None, None]

    def work(i):
        found[i] = run(models[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for want, got in zip(wanted, found, strict=True):
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b)
