"""The whole shipped pattern set over whole networks, beside onnxscript's and ONNX Runtime's optimizers.

    python bench/rewrite_speed.py [--networks bert swin llama synthetic] [--rounds 3] [--layers 10000]
                                  [--doublings 2] [--without-compile]

Each optimizer is given a fresh copy of the same network, in memory:

- Intarsia: `rewrite.apply(net, engine=OnnxRuntime(), patterns=True)`, all patterns, all checks on.
- onnxscript: `onnxscript.optimizer.optimize`, which folds constants and applies its own rewrite rules.
- ONNX Runtime: an `InferenceSession` with every offline optimization (`ORT_ENABLE_EXTENDED`) and
  `optimized_model_filepath`, weights beside the model; what it costs without optimizations is taken off.

Rounds are interleaved; figures are medians, ratios are medians of the ratios within a round, CPU time. The
networks: BERT-base, Swin-T, a Llama of 32 narrow layers, and a synthetic one of many layers, which is doubled
to show how our time grows. At the end, the share of rewriting in the time of `intarsia.compile` with ONNX
Runtime and its default patterns.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import onnx_ir as ir
import onnxruntime
import onnxscript.optimizer
import torch
import transformers

import intarsia
from intarsia.capture.export import capture
from intarsia.convert import registry
from intarsia.convert.interpreter import convert
from intarsia.engines import OnnxRuntime
from intarsia.lower.lowering import lower
from intarsia.network import Network, Tensor, net_guard
from intarsia.network import functional as F
from intarsia.rewrite import apply

REAL = ("bert", "swin", "llama")


def model_of(name: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A real architecture with random weights, and a call to it."""
    torch.manual_seed(0)
    if name == "swin":
        return transformers.SwinModel(transformers.SwinConfig()).eval(), (torch.randn(1, 3, 224, 224),)
    ids = torch.randint(0, 1000, (1, 64))
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig()).eval(), (ids, torch.ones_like(ids))
    narrow = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=32, vocab_size=1000, use_cache=False, **narrow)
    return transformers.LlamaForCausalLM(config).eval(), (ids,)


def network_of(name: str) -> Network:
    """The layers that the converters write for it."""
    model, args = model_of(name)
    return convert(lower(capture(model, args, {}), lambda target: target in registry).module)


def synthetic(layers: int) -> Network:
    """Blocks of what exporters write: norms and activations in fragments, projections, layers that cancel."""
    net, rng = Network("synthetic"), np.random.default_rng(0)
    width = 16

    def weight(*shape: int) -> Tensor:
        return F.constant(rng.standard_normal(shape, dtype=np.float32))

    with net_guard(net):
        x = Tensor("x", torch.float32, (8, width))
        while len(net) < layers:
            centered = x - F.reduce_mean(x, [-1])
            variance = F.reduce_mean(F.mul(centered, centered), [-1])
            y = centered / F.sqrt(variance + 1e-5) * weight(width) + weight(width)
            y = F.transpose(F.identity(F.transpose(y, (1, 0))), (1, 0))
            y = F.matmul(y, weight(width, width)) + weight(width)
            y = y * 0.5 * (1.0 + F.erf(y / 2.0**0.5))
            y = F.reshape(F.reshape(y, (4, 2, width)), (8, width))
            y = F.relu(F.matmul(y, weight(width, width)) + weight(width)) * F.exp(F.neg(x))
            x = x + F.sigmoid(y) * y
        x.mark_output("y")
    return net


def copy_of(net: Network) -> Network:
    return Network.of(net.graph.clone())


def with_intarsia(net: Network, folder: Path) -> float:
    fresh = copy_of(net)
    return seconds(lambda: apply(fresh, engine=OnnxRuntime(), patterns=True, strict=True))


def with_onnxscript(net: Network, folder: Path) -> float:
    model = ir.Model(net.graph.clone(), ir_version=11)
    return seconds(lambda: onnxscript.optimizer.optimize(model))


def with_onnxruntime(net: Network, folder: Path) -> float:
    path = folder / "model.onnx"
    if not path.exists():
        ir.save(ir.Model(net.graph.clone(), ir_version=11), path, external_data="weights")

    def session(level: Any) -> float:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(folder / "optimized.onnx")
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.log_severity_level = 4
        return seconds(
            lambda: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        )

    levels = onnxruntime.GraphOptimizationLevel
    return session(levels.ORT_ENABLE_EXTENDED) - session(levels.ORT_DISABLE_ALL)


Runner = Callable[[Network, Path], float]
RUNNERS: dict[str, Runner] = {
    "Intarsia": with_intarsia,
    "onnxscript": with_onnxscript,
    "ONNX Runtime": with_onnxruntime,
}


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(title: str, net: Network, rounds: int, runners: Mapping[str, Runner] = RUNNERS) -> None:
    """Print one line."""
    with tempfile.TemporaryDirectory() as folder:
        took = [{name: run(net, Path(folder)) for name, run in runners.items()} for _ in range(rounds)]
    fired = len(apply(copy_of(net), engine=OnnxRuntime(), patterns=True))
    own = median(each["Intarsia"] for each in took)
    cells = [f"{title:18}{len(net):6} layers {fired:5} rewrites   Intarsia {own:6.3f} s"]
    for name in list(runners)[1:]:
        ratio = median(each["Intarsia"] / each[name] for each in took)
        cells.append(f"{name} {median(each[name] for each in took):6.3f} s (ours is {ratio:.2f} of it)")
    print("   ".join(cells), flush=True)


def growth(layers: int, doublings: int, rounds: int) -> None:
    """Our own time on half the layers and on ever twice as many, the sizes in turn, round by round."""
    sizes = [layers * 2**power // 2 for power in range(doublings + 2)]
    nets = {size: synthetic(size) for size in sizes}
    took: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size, net in nets.items():
            gc.collect()
            took[size].append(with_intarsia(net, Path()))
    middle = [median(took[size]) for size in sizes]
    times = ", ".join(f"{size} layers {own:.2f} s" for size, own in zip(sizes, middle, strict=True))
    ratios = ", ".join(f"{later / before:.2f}" for before, later in itertools.pairwise(middle))
    print(f"{'growth':18}{times}; twice the layers take {ratios} times as long", flush=True)


def share_of_compile(name: str, rounds: int) -> None:
    """How much of `intarsia.compile` is rewriting, once benefits are measured."""
    model, args = model_of(name)
    rewriting: list[float] = []

    def timed(*given: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return apply(*given, **options)
        finally:
            rewriting[-1] += time.perf_counter() - start

    shares = []
    kept_nothing = mock.patch.dict("os.environ", {"INTARSIA_CACHE_GB": "0"})  # every compile is a first one
    with kept_nothing, mock.patch("intarsia.build.trial.apply", timed):
        for _ in range(rounds + 1):  # the first measures patterns and fills caches
            rewriting.append(0.0)
            start = time.perf_counter()
            intarsia.compile(model, args, engines=["onnxruntime"])
            shares.append((rewriting[-1] / (whole := time.perf_counter() - start), rewriting[-1], whole))
    share, rewrite, whole = (median(column) for column in zip(*shares[1:], strict=True))
    print(f"{name:18}rewriting {rewrite:6.3f} s of compile's {whole:6.2f} s: {share:.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=[*REAL, "synthetic"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=10_000)
    parser.add_argument("--doublings", type=int, default=2)
    parser.add_argument("--without-compile", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in options.networks:
        if name in REAL:
            compare(name, network_of(name), options.rounds)
            continue
        compare(name, synthetic(options.layers), options.rounds)
        growth(options.layers, options.doublings, options.rounds)
    for name in options.networks if not options.without_compile else ():
        if name in REAL:
            share_of_compile(name, min(options.rounds, 3))


if __name__ == "__main__":
    main()
