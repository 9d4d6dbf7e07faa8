"""Whole architectures on a CUDA device, in half precision: every peer in one process, in interleaved rounds.

    python bench/gpu.py --serve [names...]
    python bench/gpu.py [names...] [--batch 1] [--peers eager graphed ...] [--json results.json]

Figures are medians of CUDA-event times of a call (several in a row, divided), the error against the model
in float32 on the same device, kernels a call launches, and seconds of compiling. Random weights, nothing is
downloaded. `static` is ours with results in the graph's own memory, as `reduce-overhead` hands them out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils import _pytree as pytree

import intarsia
from intarsia.compare import relative_error
from intarsia.engines import Inductor, OnnxRuntime

Call = Callable[[], Any]


def tokens(vocabulary: int, batch: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, vocabulary, (batch, 128)),)


def image(batch: int, side: int = 224) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, 3, side, side),)


def bert(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.BertModel(hf.BertConfig()), tokens(30522, batch)


def gpt2(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)), tokens(50257, batch)


def vit(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.ViTModel(hf.ViTConfig()), image(batch)


def resnet50(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.ResNetForImageClassification(hf.ResNetConfig()), image(batch)


def convnext(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.ConvNextModel(hf.ConvNextConfig(layer_scale_init_value=0.5)), image(batch)


def swin(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.SwinModel(hf.SwinConfig()), image(batch)


def inception_v3(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import torchvision

    return torchvision.models.inception_v3(init_weights=False, transform_input=True), image(batch, 299)


def llama_1b(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = hf.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    return hf.LlamaForCausalLM(config), tokens(128256, batch)


def padded(
    hf: Any, batch: int, model: nn.Module, vocabulary: int
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A batch with a mask in which every row but the first is shorter than the one before."""
    (ids,) = tokens(vocabulary, batch)
    lengths = 128 - torch.arange(batch) * 96 // max(batch, 2)
    return model, (ids, (torch.arange(128) < lengths[:, None]).long())


def bert_padded(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return padded(hf, batch, hf.BertModel(hf.BertConfig()), 30522)


def distilbert_padded(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return padded(hf, batch, hf.DistilBertModel(hf.DistilBertConfig()), 30522)


def electra_padded(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = hf.ElectraConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    return padded(hf, batch, hf.ElectraModel(config), 30522)


MODELS = {
    make.__name__: make
    for make in (
        *(bert, gpt2, vit, resnet50, convnext, swin, inception_v3, llama_1b),
        *(bert_padded, distilbert_padded, electra_padded),
    )
}


def eager(model: nn.Module, args: tuple[Any, ...]) -> Call:
    return lambda: model(*args)


def graphed(model: nn.Module, args: tuple[Any, ...]) -> Call:
    """Eager in one CUDA graph, recorded by hand; results stay in its memory."""
    static = [x.clone() for x in args]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(*static)

    def call() -> Any:
        for to, x in zip(static, args, strict=True):
            to.copy_(x)
        graph.replay()
        return result

    return call


def reduce_overhead(model: nn.Module, args: tuple[Any, ...]) -> Call:
    fast = torch.compile(model, mode="reduce-overhead", dynamic=False)
    return lambda: fast(*args)


def freezing(model: nn.Module, args: tuple[Any, ...]) -> Call:
    """Weights as constants, one CUDA graph: what `reduce-overhead` gives with Inductor's freezing on."""
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(freezing=True):
        fast = torch.compile(model, mode="reduce-overhead", dynamic=False)
        fast(*args)
    return lambda: fast(*args)


def ours(model: nn.Module, args: tuple[Any, ...], **options: Any) -> Call:
    fast = intarsia.compile(model, args, **options)
    for note in fast.notes:
        print(f"  note: {note}")
    print("  " + str(fast.plan).replace("\n", "\n  "))
    return lambda: fast(*args)


def static(model: nn.Module, args: tuple[Any, ...]) -> Call:
    return ours(model, args, cuda_graphs="static")


def without_rewrites(model: nn.Module, args: tuple[Any, ...]) -> Call:
    return ours(model, args, engines=[Inductor(rewrites=())], cuda_graphs="static")


def cudnn(model: nn.Module, args: tuple[Any, ...]) -> Call:
    return ours(model, args, engines=["cudnn"], cuda_graphs="static")


def onnxruntime(model: nn.Module, args: tuple[Any, ...]) -> Call:
    """Ours on ONNX Runtime's CUDA provider alone, inside our CUDA graph."""
    return ours(model, args, engines=[OnnxRuntime(device="cuda", guards=False)], cuda_graphs="static")


PEERS: dict[str, Callable[[nn.Module, tuple[Any, ...]], Call]] = {
    "eager": eager,
    "graphed": graphed,
    "reduce-overhead": reduce_overhead,
    "freezing": freezing,
    "ours": ours,
    "static": static,
    "static, no rewrites": without_rewrites,
    "static, cudnn": cudnn,
    "static, onnxruntime": onnxruntime,
}


def milliseconds(call: Call, repeats: int) -> float:
    """One timing: so many calls in a row between two CUDA events, divided."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def race(calls: dict[str, Call], rounds: int, repeats: int) -> dict[str, float]:
    for call in calls.values():
        for _ in range(5):
            call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            taken[name].append(milliseconds(call, repeats))
    return {name: statistics.median(times) for name, times in taken.items()}


def kernels(call: Call) -> int:
    """How many kernels one call runs on the device, those inside a CUDA graph included."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def one_model(name: str, batch: int, peers: list[str], rounds: int, repeats: int) -> dict[str, Any]:
    import transformers

    torch.manual_seed(0)
    model, inputs = MODELS[name](transformers, batch)
    model = model.eval().cuda()
    args = tuple(x.cuda() for x in inputs)
    with torch.no_grad():
        truth = [x.float() for x in tensors(model(*args))]
    model = model.half()
    args = tuple(x.half() if x.is_floating_point() else x for x in args)
    calls: dict[str, Call] = {}
    found: dict[str, Any] = {}
    for peer in peers:
        start = time.perf_counter()
        try:
            call = PEERS[peer](model, args)
            answer = [x.float() for x in tensors(call())]
            for _ in range(4):
                call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name}, {peer}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            found[peer] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        seconds = time.perf_counter() - start
        found[peer] = {"error": relative_error(answer, truth), "compile_s": seconds, "kernels": kernels(call)}
        calls[peer] = call
        print(f"{name}, {peer}: ready after {seconds:.1f} s", flush=True)
    for peer, took in race(calls, rounds, repeats).items():
        found[peer]["ms"] = took
    del calls
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    return found


# What varies, and between which bounds.
SERVED: dict[str, tuple[str, int, int]] = {
    "bert": ("length", 5, 500),
    "gpt2": ("length", 5, 500),
    "vit": ("batch", 1, 32),
}


def served(name: str, calls: int, peer: str) -> dict[str, Any]:
    """One model as a server sees it: calls of sizes drawn from up to a hundred, each waited for, in ms."""
    import transformers

    what, least, most = SERVED[name]
    torch.manual_seed(0)
    model, (example,) = MODELS[name](transformers, 2)
    model, axis = model.eval().cuda().half(), 1 if what == "length" else 0
    sizes = sorted({least + (most - least) * k // 99 for k in range(100)})

    def input_of(size: int) -> torch.Tensor:
        if what == "length":
            return torch.randint(0, 30000, (1, size), device="cuda")
        return torch.randn(size, *example.shape[1:], device="cuda", dtype=torch.half)

    start = time.perf_counter()
    if peer == "ours":
        shapes = {
            "input_ids" if what == "length" else "pixel_values": {
                axis: torch.export.Dim(what, min=least, max=512)
            }
        }
        call = intarsia.compile(model, (input_of(sizes[-2]),), dynamic_shapes=shapes, engines=["inductor"])
        print(call.plan, call.notes)
    else:
        call = torch.compile(model, dynamic=True)
        call(input_of(sizes[-2]))
    seconds = time.perf_counter() - start

    def timed(size: int) -> float:
        x = input_of(size)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(x)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    order = [sizes[k] for k in torch.randperm(len(sizes)).tolist()]
    first = [timed(size) for size in order]
    later = sorted(timed(sizes[k]) for k in torch.randint(0, len(sizes), (calls,)).tolist())
    found = {"median": later[calls // 2], "p99": later[calls * 99 // 100], "compile_s": seconds}
    return found | {"first_median": statistics.median(first), "first_most": max(first)}


def serve(names: list[str]) -> None:
    """The table of `--serve`."""
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float16, sizes vary, ms")
    for column in ("model", "peer", "median", "99 %", "first calls, median", "most", "compile s"):
        table.add_column(column, justify="right")
    for name in names or list(SERVED):
        for peer in ("ours", "torch.compile(dynamic=True)"):
            with torch.no_grad():
                try:
                    row = served(name, 300, peer)
                except Exception as error:
                    print(f"{name}, {peer}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
            torch._dynamo.reset()
            figures = [row[key] for key in ("median", "p99", "first_median", "first_most", "compile_s")]
            print(json.dumps({name: {peer: row}}), flush=True)
            table.add_row(name, peer, *(f"{figure:.2f}" for figure in figures))
    Console(width=110).print(table)


def tensors(answer: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(answer) if isinstance(x, torch.Tensor)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help="sizes that vary, each call waited for")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", help="write the figures to this file too")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    if asked.serve:
        serve(asked.names)
        return
    table = Table(
        title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float16, batch {asked.batch}"
    )
    for column in ("model", "peer", "ms", "of reduce-overhead", "kernels", "error", "compile s"):
        table.add_column(column, justify="right")
    everything: dict[str, Any] = {}
    for name in asked.names or list(MODELS):
        with torch.no_grad():
            everything[name] = one_model(name, asked.batch, asked.peers, asked.rounds, asked.repeats)
        base = everything[name].get("reduce-overhead", {}).get("ms")
        for peer, row in everything[name].items():
            if "ms" not in row:
                table.add_row(name, peer, "failed")
                continue
            ratio = f"{row['ms'] / base:.2f}" if base else ""
            table.add_row(
                name,
                peer,
                f"{row['ms']:.3f}",
                ratio,
                str(row["kernels"]),
                f"{row['error']:.1e}",
                f"{row['compile_s']:.0f}",
            )
        print(json.dumps({name: everything[name]}), flush=True)
        if asked.json:
            with open(asked.json, "w") as file:
                json.dump({"device": torch.cuda.get_device_name(), "batch": asked.batch, **everything}, file)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
