"""Managers: priority, fixpoint, ending, taking back, logging, fuel, explaining."""

from __future__ import annotations

import pytest
import torch

from intarsia.errors import RewriteError
from intarsia.network import Layer, Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite import PatternRewriter, RewritePatternManager, Rule, refuse, rule


def chain(*names: str, shape: tuple[int | str, ...] = (2, 3)) -> Network:
    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, shape)
        for name in names:
            x = getattr(F, name)(x)
        x.mark_output("y")
    return net


def kinds(net: Network) -> list[str]:
    return [layer.kind for layer in net.get_layers()]


def manager(*patterns: PatternRewriter, benefits: tuple[float, ...] = ()) -> RewritePatternManager:
    made = RewritePatternManager()
    for index, pattern in enumerate(patterns):
        made.add(pattern.name, pattern, benefits[index] if benefits else 0)
    return made


def swap(old: str, new: str) -> Rule:
    @rule(lambda op, x: getattr(op, old)(x), name=f"{old}_to_{new}")
    def changed(net: Network, x: Tensor) -> Tensor:
        return F.op(new, x)

    return changed


def test_the_highest_benefit_acts_wherever_its_root_stands() -> None:
    @rule(lambda op, x: op.Abs(op.Relu(op.Neg(x))))
    def large(net: Network, x: Tensor) -> Tensor:
        return F.exp(x)

    for benefits, expected in (((0, 1), ["Exp"]), ((1, 0), ["Sin", "Relu", "Abs"])):
        net = chain("neg", "relu", "abs")
        manager(swap("Neg", "Sin"), large, benefits=benefits).rewrite(net)
        assert kinds(net) == expected


def test_rewriting_goes_on_to_a_fixpoint() -> None:
    @rule(lambda op, x: op.Relu(op.Relu(x)))
    def once(net: Network, x: Tensor) -> Tensor:
        return F.relu(x)

    net = chain(*["relu"] * 40)
    assert len(manager(once).rewrite(net)) == 39
    assert kinds(net) == ["Relu"]


def test_a_guard_that_a_later_rewrite_lifts_is_noticed() -> None:
    """relu(neg(x)) cannot be folded while exp reads neg(x); dropping exp(...) * 0 lifts that."""

    @rule(lambda op, x: op.Abs(op.Neg(x)))
    def fold(net: Network, x: Tensor) -> Tensor:
        return F.sin(x)

    @rule(lambda op, x, y: op.Max(x, op.Min(x, y)))
    def absorb(net: Network, x: Tensor, y: Tensor) -> Tensor:
        return x

    net = Network()
    with net_guard(net):
        x = Tensor("x", torch.float32, (3,))
        n = F.neg(x)
        z = F.abs(n)
        F.maximum(z, F.minimum(z, F.exp(n))).mark_output("y")
    manager(fold, absorb).rewrite(net)
    assert kinds(net) == ["Sin"]


def test_patterns_that_feed_each_other_are_named() -> None:
    net = chain("relu")
    with pytest.raises(RewriteError, match="patterns 'Relu_to_Abs' and 'Abs_to_Relu' feed each other"):
        manager(swap("Relu", "Abs"), swap("Abs", "Relu")).rewrite(net)
    net.verify()


def test_a_pattern_that_refuses_its_own_work_is_no_loop() -> None:
    class Renewed(PatternRewriter):
        def __init__(self) -> None:
            super().__init__("renewed", root_layer={"Relu"})

        def match_and_rewrite(self, layer: Layer) -> bool:
            if "pattern" in layer.node.metadata_props:
                return False
            (x,) = layer.get_inputs()
            layer.get_outputs()[0].replace_all_uses_with(F.relu(x))  # type: ignore[arg-type]
            return True

    net = chain("neg", "relu", "abs")
    assert str(manager(Renewed()).rewrite(net)) == "renewed: relu -> relu_1"


def test_growth_without_end_meets_the_budget() -> None:
    @rule(lambda op, x: op.Relu(x))
    def grow(net: Network, x: Tensor) -> Tensor:
        return F.relu(F.abs(x))

    net = chain("relu")
    with pytest.raises(RewriteError, match=r"50 rewrites without an end; the last 200 came from 'grow'"):
        manager(grow).rewrite(net, budget=50)
    net.verify()


def test_two_layers_of_one_kind_are_no_loop() -> None:
    @rule(lambda op, x: op.Transpose(x, perm=lambda p: p != [0, 1]))
    def flat(net: Network, x: Tensor) -> Tensor:
        return F.transpose(x, (0, 1))

    net = chain(shape=(2, 2))
    with net_guard(net):
        F.transpose(net.get_inputs()[0], (1, 0)).mark_output("z")
    assert len(manager(flat).rewrite(net)) == 1


class Broken(PatternRewriter):
    def __init__(self, how: str) -> None:
        super().__init__(f"broken_{how}", {"Relu"})
        self.how = how

    def match_and_rewrite(self, layer: Layer) -> bool:
        x, y = layer.get_inputs(0)[0], layer.get_outputs(0)[0]
        assert x is not None
        if self.how == "nothing":
            return True
        if self.how == "raises":
            F.neg(x)
            raise ValueError("this does not work")
        if self.how == "dtype":
            y.replace_all_uses_with(F.cast(x, torch.float64))
        elif self.how == "shape":
            y.replace_all_uses_with(F.transpose(x, (1, 0)))
        elif self.how == "cycle":
            y.replace_all_uses_with(F.neg(y))
        elif self.how == "removed":
            layer.mark_as_removed()
        elif self.how == "arity":
            net = layer.network
            made = net.add_layer("Relu", [x, x], outputs=[(x.dtype, x.shape)])
            y.replace_all_uses_with(made.get_outputs()[0])
        elif self.how == "rule":
            made = layer.network.add_layer("Relu", [F.cast(x, torch.float64)], outputs=[(x.dtype, x.shape)])
            y.replace_all_uses_with(made.get_outputs()[0])
        elif self.how == "output":
            F.neg(x).mark_output("more")
        elif self.how == "elsewhere":
            other = Network()
            with net_guard(other):
                y.replace_all_uses_with(Tensor("q", torch.float32, (2, 3)))
        return True


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("nothing", "changed nothing"),
        ("raises", "this does not work"),
        ("dtype", "which has another dtype"),
        ("shape", r"which has another shape: \[2, 3\] against \[3, 2\]"),
        ("cycle", "would close a cycle"),
        ("removed", "cannot be removed: relu is read by abs"),
        ("arity", r"Relu of .* input size 2 not in range \[min=1, max=1\]"),
        ("rule", "makes DOUBLE"),
        ("output", "it made more an output of the network"),
        ("elsewhere", "does not belong to the network"),
    ],
)
def test_what_breaks_the_network_is_taken_back(how: str, reason: str) -> None:
    net = chain("relu", "abs")
    before = str(net)
    with pytest.raises(RewriteError, match=f"pattern 'broken_{how}' at layer relu .*undone: .*{reason}"):
        manager(Broken(how)).rewrite(net)
    assert str(net) == before
    net.verify()
    log = manager(Broken(how)).rewrite(net, strict=False)
    assert not log.fired and len(log.broken) == 1 and "undone" in str(log)
    assert str(net) == before


def test_symbols_that_differ_are_not_one_size() -> None:
    @rule(lambda op, x: op.Relu(x))
    def turn(net: Network, x: Tensor) -> Tensor:
        return F.transpose(x, (1, 0))

    with pytest.raises(RewriteError, match="n against m"):
        manager(turn).rewrite(chain("relu", shape=("n", "m")))


def test_a_pattern_that_says_no_leaves_nothing_behind() -> None:
    class Hesitant(PatternRewriter):
        def match_and_rewrite(self, layer: Layer) -> bool:
            x = layer.get_inputs(0)[0]
            assert x is not None
            layer.get_outputs(0)[0].replace_all_uses_with(F.neg(x) * 3.0)
            layer.mark_as_removed()
            return False

    net = chain("relu", "abs")
    before = str(net)
    assert len(manager(Hesitant("hesitant", {"Relu"})).rewrite(net)) == 0
    assert str(net) == before and not net.graph.initializers


def test_log_and_provenance() -> None:
    net = Network()
    net.origin = {"module": "body.act", "source": "model.py:12 in forward"}
    with net_guard(net):
        F.relu(F.neg(Tensor("x", torch.float32, (3,)))).mark_output("y")
    net.origin = None

    @rule(lambda op, x: op.Relu(op.Neg(x)))
    def fold(net: Network, x: Tensor) -> Tensor:
        return F.abs(x)

    log = manager(fold).rewrite(net)
    assert str(log) == "fold: relu, neg -> abs (model.py:12 in forward)"
    (layer,) = net.get_layers()
    assert layer.node.metadata_props == {
        "module": "body.act",
        "source": "model.py:12 in forward",
        "pattern": "fold",
        "replaced": "relu, neg",
    }


def test_fuel_finds_the_bad_rewrite() -> None:
    for limit in range(5):
        net = chain(*["relu"] * 4)
        log = manager(swap("Relu", "Abs")).rewrite(net, limit=limit)
        assert kinds(net) == ["Abs"] * limit + ["Relu"] * (4 - limit)
        assert log.exhausted == (limit < 4)


def test_matches_and_explain_change_nothing() -> None:
    @rule(lambda op, x: op.Relu(op.Neg(x)))
    def fold(net: Network, x: Tensor) -> object:
        return refuse("three rows") if x.shape[0] == 3 else F.abs(x)

    net = chain("neg", "relu", "abs", "relu")
    made = manager(fold, swap("Abs", "Sin"))
    before = str(net)
    assert [(m.label, m.layer.name) for m in made.matches(net)] == [("fold", "relu"), ("Abs_to_Sin", "abs")]
    layer = net.get_layer_by_name("relu_1")
    assert layer is not None
    assert [str(line) for line in made.explain(layer)] == [
        "fold: abs is made by Abs, not Neg",
        "Abs_to_Sin: it starts at Abs; relu_1 is Relu",
    ]
    assert str(net) == before
    net = chain("neg", "relu", shape=(3, 3))
    layer = net.get_layer_by_name("relu")
    assert layer is not None
    assert made.explain(layer)[0].reason == "three rows" and made.matches(net) == []


def test_labels_and_instances() -> None:
    made = manager(swap("Relu", "Abs"))
    with pytest.raises(RewriteError, match="with the label"):
        made.add("Relu_to_Abs", swap("Relu", "Abs"))
    with pytest.raises(RewriteError, match="there is no pattern with the label 'x'"):
        made.get("x")
    with pytest.raises(RewriteError, match="is not a PatternRewriter"):
        made.add("f", lambda: None)  # type: ignore[arg-type]
    with pytest.raises(RewriteError, match="a set of kinds"):
        PatternRewriter("x", "Add")
    assert RewritePatternManager.instance() is RewritePatternManager.instance()
