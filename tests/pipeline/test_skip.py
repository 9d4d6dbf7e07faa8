"""Skip connections: declaring, pairing, and their way past the stages between."""

from __future__ import annotations

import copy
import threading
import weakref

import pytest
import torch
from torch import nn

from intarsia.pipeline import GPipe
from intarsia.pipeline.gpipe.skip import (
    Namespace,
    SkipTracker,
    current_skip_tracker,
    inspect_skip_layout,
    pop,
    skippable,
    stash,
    use_skip_tracker,
    verify_skippables,
)


def stasher(*names, value=lambda x: x):
    @skippable(stash=names)
    class Stash(nn.Module):
        def forward(self, x):
            for name in names:
                yield stash(name, value(x))
            return x * 2

    return Stash()


def popper(*names):
    @skippable(pop=names)
    class Pop(nn.Module):
        def forward(self, x):
            for name in names:
                skip = yield pop(name)
                x = x if skip is None else x + skip
            return x

    return Pop()


@pytest.fixture
def tracker():
    tracker = SkipTracker()
    with use_skip_tracker(tracker):
        yield tracker


def test_stash_and_pop(tracker):
    assert stasher("foo")(torch.tensor(42)).item() == 84
    assert list(tracker.tensors) == [(None, "foo")]
    assert popper("foo")(torch.tensor(1)).item() == 43
    assert not tracker.tensors


def test_misuse(tracker):
    @skippable(stash=["foo"])
    class Silent(nn.Module):
        def forward(self, x):
            return x

    @skippable(pop=["foo"])
    class Deaf(nn.Module):
        def forward(self, x):
            return x

    @skippable()
    class Undeclared(nn.Module):
        def __init__(self, step):
            super().__init__()
            self.step = step

        def forward(self, x):
            yield self.step
            return x

    x = torch.tensor(42)
    with pytest.raises(RuntimeError, match=r"foo.*not stashed"):
        Silent()(x)
    stasher("foo")(x)
    with pytest.raises(RuntimeError, match=r"foo.*not popped"):
        Deaf()(x)
    with pytest.raises(RuntimeError, match="without being declared"):
        Undeclared(stash("foo", x))(x)
    with pytest.raises(RuntimeError, match="without being declared"):
        Undeclared(pop("foo"))(x)
    with pytest.raises(TypeError, match="'hello'"):
        Undeclared("hello")(x)
    with pytest.raises(RuntimeError, match="no layer has stashed it"):
        popper("bar")(x)


def test_repr_and_parameters():
    @skippable(stash=["hello"])
    class Hello(nn.Module):
        """Says hello."""

        def __init__(self, size):
            super().__init__()
            self.fc = nn.Linear(size, 1)

        def forward(self, x):
            yield stash("hello", x)
            return self.fc(x)

    layer = Hello(2)
    assert repr(layer).startswith("@skippable(Hello(\n  (fc): Linear(")
    assert Hello.__name__ == "Hello" and Hello.__doc__ == "Says hello."
    assert list(layer.state_dict()) == ["module.fc.weight", "module.fc.bias"]


def test_namespaces():
    a, b = Namespace(), Namespace()
    assert a != b and copy.copy(a) == a and copy.deepcopy(a) == a and hash(copy.copy(a)) == hash(a)
    assert a != None  # noqa: E711
    layer = stasher("x", "y")
    assert layer.isolate(a, only=["x"]) is layer
    assert list(layer.stashable()) == [(a, "x"), (None, "y")]
    with pytest.raises(ValueError, match="'z'"):
        layer.isolate(a, only=["z"])


def test_verify():
    verify_skippables(nn.Sequential(stasher("a"), popper("a")))
    verify_skippables(nn.Sequential(stasher("a").isolate(ns := Namespace()), popper("a").isolate(ns)))
    one, two = Namespace(), Namespace()
    verify_skippables(
        nn.Sequential(
            stasher("a").isolate(one),
            popper("a").isolate(one),
            stasher("a").isolate(two),
            popper("a").isolate(two),
        )
    )
    for layers, match in [
        ([stasher("a")], "'0' stashes 'a', which no layer after it pops"),
        ([popper("a")], "'0' pops 'a', which no layer before it stashes"),
        ([popper("a"), stasher("a")], "'0' pops 'a'"),
        ([stasher("a"), stasher("a"), popper("a")], "'1' stashes 'a' again"),
        ([stasher("a"), popper("a"), popper("a")], "'2' pops 'a' again"),
        ([stasher("a"), popper("b")], r"'1' pops 'b'.*\n.*'0' stashes 'a'"),
        ([skippable(stash=["a"], pop=["a"])(nn.Identity)()], "both"),
    ]:
        with pytest.raises(TypeError, match=match):
            verify_skippables(nn.Sequential(*layers))
    with pytest.raises(TypeError, match="pair up"):
        GPipe(nn.Sequential(stasher("a")), [1], devices=["cpu"])


def test_layout():
    a, b = Namespace(), Namespace()

    def taken(*stages):
        layout = inspect_skip_layout([nn.Sequential(*layers) for layers in stages])
        for j, stage in enumerate(layout):
            assert all(layout[k].takes[key] == j for key, k in stage.gives.items())
        return [stage.takes for stage in layout]

    rest, x, y = nn.Identity(), (None, "x"), (None, "y")
    assert taken([rest], [rest]) == [{}, {}]
    assert taken([stasher("x"), popper("x")], [rest]) == [{}, {}]
    assert taken([stasher("x")], [popper("x")]) == [{}, {x: 0}]
    assert taken([stasher("x")], [rest], [popper("x")]) == [{}, {}, {x: 0}]
    assert taken([stasher("x")], [stasher("y")], [popper("y"), popper("x")]) == [{}, {}, {x: 0, y: 1}]
    assert taken(
        [stasher("x").isolate(a)], [stasher("x").isolate(b)], [popper("x").isolate(b), popper("x").isolate(a)]
    ) == [{}, {}, {(a, "x"): 0, (b, "x"): 1}]


def test_trackers_are_per_thread():
    here, there = current_skip_tracker(), []
    thread = threading.Thread(target=lambda: there.append(current_skip_tracker()))
    thread.start()
    thread.join()
    assert type(here) is SkipTracker and here is current_skip_tracker() and there[0] is not here


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_skip_may_be_none(checkpoint):
    layers = nn.Sequential(stasher("none", value=lambda x: None), popper("none"))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=5, checkpoint=checkpoint)
    x = torch.rand(10, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.mean().item() == 2


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_one_to_three(balance, checkpoint):
    plain = nn.Sequential(stasher("x", "y"), nn.Linear(3, 3), popper("y", "x"))
    model = GPipe(
        copy.deepcopy(plain), balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=checkpoint
    )
    a = torch.rand(6, 3, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    expected, actual = plain(a), model(b)
    torch.testing.assert_close(expected, actual)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(plain[1].weight.grad, model[1].weight.grad)


MODES = ["always", "except_last", "never"]


@pytest.mark.parametrize("checkpoint", MODES)
def test_no_skip_stays_alive(checkpoint):
    alive = []

    def value(x):
        alive.append(weakref.ref(skip := x * 3))
        return skip

    model = GPipe(
        nn.Sequential(stasher("x", value=value), nn.Linear(2, 2), popper("x")),
        [1, 1, 1],
        devices=["cpu"] * 3,
        chunks=3,
        checkpoint=checkpoint,
    )
    output = model(torch.rand(6, 2))
    output.sum().backward()
    del output
    assert len(alive) >= 3 and not any(reference() is not None for reference in alive)


def test_a_skip_passes_a_stage_without_floats():
    class Numbers(nn.Module):
        def forward(self, x):
            return x.long()

    plain = nn.Sequential(stasher("x"), Numbers(), popper("x"))
    x = torch.rand(4, requires_grad=True)
    for checkpoint in MODES:
        x.grad = None
        model = GPipe(plain, [2, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        output = model(x)
        torch.testing.assert_close(output, plain(x))
        output.sum().backward()
        assert x.grad.tolist() == [1.0] * 4


@pytest.mark.parametrize("concurrent", [False, True])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_popped_skip_may_be_changed_in_place(checkpoint, concurrent):
    @skippable(pop=["x"])
    class Change(nn.Module):
        def forward(self, x):
            skip = yield pop("x")
            return x * skip.mul_(2)

    plain = nn.Sequential(stasher("x", value=lambda x: x * 1), nn.Linear(2, 2), Change())
    model = GPipe(
        copy.deepcopy(plain),
        [1, 1, 1],
        devices=["cpu"] * 3,
        chunks=3,
        checkpoint=checkpoint,
        concurrent_backward=concurrent,
    )
    for _ in range(2):
        a = torch.rand(6, 2, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        expected, actual = plain(a), model(b)
        torch.testing.assert_close(expected, actual)
        expected.sum().backward()
        actual.sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
        torch.testing.assert_close(plain[1].weight.grad, model[1].weight.grad)


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_skip_that_the_loss_does_not_use(checkpoint):
    @skippable(pop=["x"])
    class Leave(nn.Module):
        def forward(self, x):
            skip = yield pop("x")
            return x, skip

    plain = nn.Sequential(stasher("x"), nn.Linear(2, 2), Leave())
    model = GPipe(
        plain, [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint, concurrent_backward=True
    )
    for used in (0, 1):
        x = torch.rand(4, 2, requires_grad=True)
        (expected,) = torch.autograd.grad(plain(x)[used].sum(), x)
        model(x)[used].sum().backward()
        torch.testing.assert_close(x.grad, expected)
