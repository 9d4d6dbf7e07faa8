"""One pattern over large networks: relu(a + b) into one layer, by Intarsia, OpenVINO and onnxscript.

    python bench/rewrite_speed.py [--sizes 1000 10000 50000] [--rounds 7] [--without-peers]

CPU time of the rewriting alone, medians of interleaved rounds; Intarsia's checks are on. How many times
slower a peer is, is the median over the rounds too: both ran within the same seconds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite import RewritePatternManager, rule


def network(layers: int, shape: str) -> Network:
    """Pairs of Add and Relu: a chain, or a DAG in which each pair reads the last one and one before it."""
    net = Network(shape)
    rng = np.random.default_rng(0)
    with net_guard(net):
        made = [Tensor("x", torch.float32, (4, 4)), Tensor("y", torch.float32, (4, 4))]
        for _ in range(layers // 2):
            other = (
                made[1] if shape == "chain" else made[int(rng.integers(max(0, len(made) - 50), len(made)))]
            )
            made.append(F.relu(made[-1] + other))
        made[-1].mark_output("out")
    return net


def seconds(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    work()
    return time.process_time() - start


def with_intarsia(layers: int, shape: str) -> float:
    @rule(lambda op, a, b: op.Relu(op.Add(a, b)))
    def relu_add(net: Network, a: Tensor, b: Tensor) -> Tensor:
        return F.maximum(a, b)

    manager = RewritePatternManager()
    manager.add("relu_add", relu_add)
    net = network(layers, shape)
    spent = seconds(lambda: manager.rewrite(net))
    assert len(net) == layers // 2, len(net)
    return spent


def with_onnxscript(layers: int, shape: str) -> float:
    from onnxscript.rewriter import pattern

    found = pattern.RewriteRule(lambda op, a, b: op.Relu(op.Add(a, b)), lambda op, a, b: op.Max(a, b))
    rules = pattern.RewriteRuleSet([found])
    model = ir.Model(network(layers, shape).graph, ir_version=10)
    spent = seconds(lambda: rules.apply_to_model(model))
    assert sum(node.op_type == "Max" for node in model.graph) == layers // 2
    return spent


def with_openvino(layers: int, shape: str) -> float:
    import openvino as ov
    from openvino import opset13 as ops
    from openvino.passes import Manager, Matcher, MatcherPass, WrapType

    class ReluAdd(MatcherPass):
        def __init__(self) -> None:
            super().__init__()
            add = WrapType("opset13.Add")
            relu = WrapType("opset13.Relu", [add.output(0)])

            def rewrite(matcher: Any) -> bool:
                root = matcher.get_match_root()
                inner = root.input_value(0).get_node()
                if len(inner.output(0).get_target_inputs()) != 1:
                    return False
                new = ops.maximum(inner.input_value(0), inner.input_value(1))
                ov.utils.replace_node(root, new)
                return True

            self.register_matcher(Matcher(relu, "ReluAdd"), rewrite)

    model = _openvino_model(ov, ops, layers, shape)
    manager = Manager()
    manager.register_pass(ReluAdd())
    spent = seconds(lambda: manager.run_passes(model))
    assert sum(op.get_type_name() == "Maximum" for op in model.get_ops()) == layers // 2
    return spent


def _openvino_model(ov: Any, ops: Any, layers: int, shape: str) -> Any:
    rng = np.random.default_rng(0)
    made = [ops.parameter([4, 4], np.float32, name) for name in "xy"]
    inputs = list(made)
    for _ in range(layers // 2):
        other = made[1] if shape == "chain" else made[int(rng.integers(max(0, len(made) - 50), len(made)))]
        made.append(ops.relu(ops.add(made[-1], other)))
    return ov.Model([made[-1]], inputs, shape)


PEERS = {"OpenVINO MatcherPass": with_openvino, "onnxscript": with_onnxscript}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 10000, 50000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-peers", action="store_true")
    options = parser.parse_args()
    runners = {"Intarsia": with_intarsia, **({} if options.without_peers else PEERS)}
    for shape in ("chain", "dag"):
        for layers in options.sizes:
            rounds = [
                {name: run(layers, shape) for name, run in runners.items()} for _ in range(options.rounds)
            ]
            own = median(each["Intarsia"] for each in rounds)
            print(f"{shape:6}{layers:7} layers   Intarsia {own:.3f} s", end="")
            for name in list(runners)[1:]:
                slower = median(each[name] / each["Intarsia"] for each in rounds)
                print(f"   {name} {median(each[name] for each in rounds):.3f} s ({slower:.2f}x)", end="")
            print(f"   ({own / layers * 2e6:.0f} us a rewrite)")


if __name__ == "__main__":
    main()
