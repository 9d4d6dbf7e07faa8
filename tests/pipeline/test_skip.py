"""Skip connections: declaring, pairing, portals and their lives."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from intarsia.pipeline import GPipe, is_checkpointing, is_recomputing
from intarsia.pipeline.gpipe.checkpoint import enable_checkpointing, enable_recomputing
from intarsia.pipeline.gpipe.microbatch import Batch
from intarsia.pipeline.gpipe.portal import (
    Portal,
    PortalBlue,
    PortalCopy,
    PortalOrange,
    SkipTrackerThroughPortals,
    SkipTrackerThroughPotals,
)
from intarsia.pipeline.gpipe.skip import (
    Namespace,
    SkipLayout,
    SkipTracker,
    current_skip_tracker,
    inspect_skip_layout,
    pop,
    skippable,
    stash,
    use_skip_tracker,
    verify_skippables,
)
from intarsia.pipeline.gpipe.stream import fork, join


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

    def policy(*stages):
        partitions = [nn.Sequential(*layers) for layers in stages]
        layout = inspect_skip_layout(partitions)
        return [list(layout.copy_policy(j)) for j in range(len(partitions))]

    rest = nn.Identity()
    assert policy([rest], [rest]) == [[], []]
    assert policy([stasher("x"), popper("x")], [rest]) == [[], []]
    assert policy([stasher("x")], [popper("x")]) == [[], [(0, None, "x")]]
    assert policy([stasher("x")], [rest], [popper("x")]) == [[], [], [(0, None, "x")]]
    assert policy([stasher("x")], [stasher("y")], [popper("y"), popper("x")]) == [
        [],
        [],
        [(0, None, "x"), (1, None, "y")],
    ]
    assert policy(
        [stasher("x").isolate(a)], [stasher("x").isolate(b)], [popper("x").isolate(b), popper("x").isolate(a)]
    ) == [[], [], [(0, a, "x"), (1, b, "x")]]


def test_trackers_are_per_thread():
    here, there = current_skip_tracker(), []
    thread = threading.Thread(target=lambda: there.append(current_skip_tracker()))
    thread.start()
    thread.join()
    assert type(here) is SkipTracker and here is current_skip_tracker() and there[0] is not here


def through_portals(routes):
    return SkipTrackerThroughPortals(SkipLayout(2, {(None, name): route for name, route in routes.items()}))


def test_portals_only_where_a_skip_leaves_its_stage():
    assert SkipTrackerThroughPotals is SkipTrackerThroughPortals
    tracker = through_portals({"far": (0, 1), "near": (0, 0)})
    batch = Batch(torch.tensor([1.0]))
    tracker.save(batch, None, "far", torch.tensor([2.0]))
    tracker.save(batch, None, "near", torch.tensor([2.0]))
    assert list(tracker.portals) == [(None, "far")] and list(tracker.tensors) == [(None, "near")]
    portal = tracker.portals[(None, "far")]
    tracker.save(batch, None, "far", torch.tensor([3.0]))
    assert tracker.portals[(None, "far")] is portal


def test_lives_of_a_portal():
    tracker = through_portals({"x": (0, 1)})
    batch = Batch(torch.tensor([1.0]))

    def life():
        return tracker.portals[(None, "x")].tensor_life

    tracker.save(batch, None, "x", torch.tensor([2.0]))
    assert life() == 1
    tracker.load(batch, None, "x")
    assert life() == 0

    tracker = through_portals({"x": (0, 1)})
    with enable_checkpointing():
        tracker.save(batch, None, "x", torch.tensor([2.0]))
        assert life() == 2
        tracker.load(batch, None, "x")
        assert life() == 1
    with enable_recomputing():
        tracker.load(batch, None, "x")
        assert life() == 0
        tracker.save(batch, None, "x", torch.tensor([2.0]))
        assert life() == 0


def test_blue_and_orange_carry_gradients():
    one = torch.rand(1, requires_grad=True)
    two = torch.rand(1, requires_grad=True)
    portal = Portal(one, tensor_life=2)
    main = join(two, portal.blue())
    main, phony = fork(main)
    (main * 3 + portal.orange(phony) * 2).backward()
    assert one.grad.item() == 2 and two.grad.item() == 3


@pytest.mark.parametrize("life", [1, 2, 3, 4])
def test_a_portal_lets_go(life):
    tensor = torch.rand(1, requires_grad=True)
    portal = Portal(tensor, life)
    assert portal.tensor is tensor
    phony = portal.blue()
    for _ in range(life - 1):
        assert portal.orange(phony).data_ptr() == tensor.data_ptr()
    assert portal.tensor is None
    with pytest.raises(RuntimeError):
        portal.check_tensor_life()
    portal.put_tensor(tensor, 1)
    portal.blue()
    assert portal.tensor is None
    assert Portal(tensor, 0).tensor is None


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_no_tensor_stays_in_a_portal(train, checkpoint):
    checked = []

    def life_is(life, tracker=None):
        (portal,) = (tracker or current_skip_tracker()).portals.values()
        assert portal.tensor_life == life
        assert (portal.tensor is None) == (life == 0)
        checked.append(life)

    class Watch(nn.Module):
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.tracker = current_skip_tracker()
                return x.detach()

            @staticmethod
            def backward(ctx, grad):
                life_is(0, ctx.tracker)
                return grad

        def forward(self, x):
            return self.F.apply(x)

    source, destination = stasher("x"), popper("x")
    source.register_forward_hook(
        lambda *_: life_is(2 if is_checkpointing() else 0 if is_recomputing() else 1)
    )
    destination.register_forward_hook(lambda *_: life_is(1 if is_checkpointing() else 0))
    model = GPipe(
        nn.Sequential(Watch(), source, destination),
        [2, 1],
        devices=["cpu"] * 2,
        chunks=2,
        checkpoint=checkpoint,
    )
    x = torch.rand(10, requires_grad=True)
    if train:
        model(x).norm().backward()
        assert torch.is_tensor(x.grad)
    else:
        model.eval()
        with torch.no_grad():
            model(x)
    assert len(checked) >= 4


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_skip_may_be_none(checkpoint):
    layers = nn.Sequential(stasher("none", value=lambda x: None), popper("none"))
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=5, checkpoint=checkpoint)
    x = torch.rand(10, requires_grad=True)
    output = model(x)
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            assert not isinstance(
                node, tuple(f._backward_cls for f in (PortalBlue, PortalCopy, PortalOrange))
            )
            todo += [following for following, _ in node.next_functions]
    output.sum().backward()
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


def test_no_portals_without_a_pipeline(monkeypatch):
    monkeypatch.setattr(Portal, "__init__", None)
    x = torch.rand(4, requires_grad=True)
    nn.Sequential(stasher("x"), popper("x"))(x).norm().backward()
    assert x.grad is not None


def test_a_skip_without_a_carrier_is_refused():
    class Numbers(nn.Module):
        def forward(self, x):
            return x.long()

    layers = nn.Sequential(stasher("x"), Numbers(), popper("x"))
    with pytest.raises(TypeError, match="'x' cannot pass"):
        GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=2)(torch.rand(4, requires_grad=True))
