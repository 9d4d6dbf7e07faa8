"""Whole architectures on a CUDA device, in half precision: every peer in one process, in interleaved rounds.

    python bench/gpu.py [names...] [--batch 1 8 32] [--peers eager ours ...] [--json results.json] [--jobs 16]
    python bench/gpu.py --masked        models with a mask that has padding
    python bench/gpu.py --serve         sizes that vary, as a server sees them

Figures are medians of CUDA-event times of a call (several in a row, divided), the error against the model
in float32 on the same device, kernels a call launches, and seconds of compiling. Random weights, nothing is
downloaded. `static` is ours with results in the graph's own memory, as `reduce-overhead` hands them out.
With `--jobs` so many cases are compiled at once, in processes; then one after the other is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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


def with_statistics(model: nn.Module) -> nn.Module:
    """With statistics of noise in its batch norms: without, activations vanish in half precision."""
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(*image(8))
    return model


def mobilenet_v3(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import torchvision

    return with_statistics(torchvision.models.mobilenet_v3_large()), image(batch)


def densenet121(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    import torchvision

    return with_statistics(torchvision.models.densenet121()), image(batch)


def segformer(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.SegformerForSemanticSegmentation(hf.SegformerConfig()), image(batch, 512)


def wav2vec2(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.Wav2Vec2Model(hf.Wav2Vec2Config()), (torch.randn(batch, 16000),)


def whisper_encoder(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    sizes = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
    config = hf.WhisperConfig(**sizes, decoder_attention_heads=8)
    return hf.WhisperModel(config).get_encoder(), (torch.randn(batch, 80, 3000),)


def t5_encoder(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.T5EncoderModel(hf.T5Config()), tokens(32128, batch)


def distilbert(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return hf.DistilBertModel(hf.DistilBertConfig()), tokens(30522, batch)


def electra(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    config = hf.ElectraConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
    return hf.ElectraModel(config), tokens(30522, batch)


Maker = Callable[[Any, int], tuple[nn.Module, tuple[torch.Tensor, ...]]]


def mask_of(ids: torch.Tensor) -> torch.Tensor:
    """A mask in which each row is shorter than the one before; a row alone is padded for a quarter."""
    batch, length = ids.shape
    lengths = length - torch.arange(batch, device=ids.device) * (3 * length // 4) // max(batch, 2)
    lengths = lengths if batch > 1 else lengths - length // 4
    return (torch.arange(length, device=ids.device) < lengths[:, None]).long()


class Masked(nn.Module):
    """A model with its mask as the second input: where models take it differs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask)


def padded(make: Maker) -> Maker:
    def with_mask(hf: Any, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        model, (ids,) = make(hf, batch)
        return Masked(model), (ids, mask_of(ids))

    return with_mask


PLAIN: dict[str, Maker] = {
    make.__name__: make
    for make in (
        *(bert, gpt2, vit, resnet50, convnext, swin, inception_v3, llama_1b, mobilenet_v3, densenet121),
        *(segformer, wav2vec2, whisper_encoder, t5_encoder),
    )
}
MASKED: dict[str, Maker] = {
    f"{make.__name__}_padded": padded(make)
    for make in (bert, distilbert, electra, t5_encoder, gpt2, llama_1b)
}
MODELS = PLAIN | MASKED


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


def one_model(name: str, batch: int, asked: argparse.Namespace) -> dict[str, Any]:
    import transformers

    torch.manual_seed(0)
    with torch.device("cuda"):
        model, args = MODELS[name](transformers, batch)
    model = model.eval()
    truth = [x.float() for x in tensors(model(*args))]
    model = model.half()
    args = tuple(x.half() if x.is_floating_point() else x for x in args)
    calls: dict[str, Call] = {}
    rows: dict[str, Any] = {}
    for peer in asked.peers:
        start = time.perf_counter()
        try:
            call = PEERS[peer](model, args)
            answer = [x.float() for x in tensors(call())]
            for _ in range(4):
                call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name}, {peer}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            rows[peer] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        seconds = time.perf_counter() - start
        rows[peer] = {"error": relative_error(answer, truth), "compile_s": seconds, "kernels": kernels(call)}
        calls[peer] = call
        print(f"{name}, {peer}: ready after {seconds:.1f} s", flush=True)
    wait_for_turn(asked)
    for peer, took in race(calls, asked.rounds, asked.repeats).items():
        rows[peer]["ms"] = took
    return rows


# The model, what varies, between which bounds, and how many rows there are where lengths vary.
SERVED: dict[str, tuple[str, str, int, int, int]] = {
    "bert": ("bert", "length", 5, 500, 1),
    "bert_padded": ("bert_padded", "length", 5, 500, 4),
    "gpt2": ("gpt2", "length", 5, 500, 1),
    "gpt2_padded": ("gpt2_padded", "length", 5, 500, 4),
    "vit_to_8": ("vit", "batch", 1, 8, 0),
    "vit_to_32": ("vit", "batch", 1, 32, 0),
}
DYNAMIC = "torch.compile(dynamic=True)"


def served(name: str, peer: str, asked: argparse.Namespace) -> dict[str, Any]:
    """One model as a server sees it: calls of sizes drawn from up to a hundred, each waited for, in ms."""
    import transformers

    architecture, what, least, most, rows = SERVED[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model, _ = MODELS[architecture](transformers, 2)
    model, axis = model.eval().half(), 1 if rows else 0
    sizes = sorted({least + (most - least) * k // 99 for k in range(100)})

    def inputs_of(size: int) -> tuple[torch.Tensor, ...]:
        if not rows:
            return (torch.randn(size, 3, 224, 224, device="cuda", dtype=torch.half),)
        ids = torch.randint(0, 30000, (rows, size), device="cuda")
        return (ids, mask_of(ids)) if isinstance(model, Masked) else (ids,)

    start = time.perf_counter()
    if peer == "ours":
        example = inputs_of(sizes[-2])
        shapes = tuple(
            {axis: torch.export.Dim(what, min=least, max=max(most, 512 if rows else most))} for _ in example
        )
        call: Callable[..., Any] = intarsia.compile(
            model, example, dynamic_shapes=shapes, engines=["inductor"]
        )
        print(call.plan, call.notes, flush=True)
    else:
        call = torch.compile(model, dynamic=True)
        call(*inputs_of(sizes[-2]))
    seconds = time.perf_counter() - start

    def timed(size: int) -> float:
        args = inputs_of(size)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(*args)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3

    wait_for_turn(asked)
    order = [sizes[k] for k in torch.randperm(len(sizes)).tolist()]
    first = [timed(size) for size in order]
    later = sorted(timed(sizes[k]) for k in torch.randint(0, len(sizes), (300,)).tolist())
    row = {"median": later[150], "p99": later[297], "compile_s": seconds}
    return row | {"first_median": statistics.median(first), "first_most": max(first)}


def wait_for_turn(asked: argparse.Namespace) -> None:
    """Among several processes, time when no other does."""
    if asked.here:
        print("ready", flush=True)
        sys.stdin.readline()


def in_turns(commands: Sequence[Sequence[str]], jobs: int) -> Iterator[dict[str, Any]]:
    """The answers of processes: so many prepare at once; once all are ready, one after the other times."""
    for start in range(0, len(commands), jobs):
        group = [
            subprocess.Popen(
                [sys.executable, __file__, *command, "--here"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for command in commands[start : start + jobs]
        ]  # fmt: skip
        for process in group:
            until(process, "ready")
        for process in group:
            if process.poll() is None:
                process.stdin.write("go\n")  # type: ignore[union-attr]
                yield json.loads(until(process, "{") or "{}")
            process.kill()
            process.wait()


def until(process: subprocess.Popen[str], start: str) -> str | None:
    """The next line of a process that starts so; the lines before are shown."""
    for line in process.stdout:  # type: ignore[union-attr]
        if line.startswith(start):
            return line
        print(line, end="", flush=True)
    return None


def tensors(answer: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(answer) if isinstance(x, torch.Tensor)]


def race_table(cases: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float16")
    for column in (
        "model and batch",
        "peer",
        "ms",
        "gain over reduce-overhead",
        "kernels",
        "error",
        "compile s",
    ):
        table.add_column(column, justify="right")
    gains = []
    for name, rows in cases.items():
        base = rows.get("reduce-overhead", {}).get("ms")
        for peer, row in rows.items():
            if "ms" not in row:
                table.add_row(name, peer, "failed")
                continue
            gain = base / row["ms"] if base else 0.0
            gains += [gain] if peer == "ours" and base else []
            figures = f"{row['ms']:.3f}", f"{gain:.2f}", str(row["kernels"]), f"{row['error']:.1e}"
            table.add_row(name, peer, *figures, f"{row['compile_s']:.0f}")
    if gains:
        mean, least = statistics.geometric_mean(gains), min(gains)
        table.caption = f"ours over reduce-overhead: {mean:.2f} in the geometric mean, {least:.2f} at least"
    return table


def serve_table(cases: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}, float16, sizes vary, ms")
    for column in ("model", "peer", "median", "99 %", "first calls, median", "most", "compile s"):
        table.add_column(column, justify="right")
    for name, rows in cases.items():
        for peer, row in rows.items():
            figures = [row[key] for key in ("median", "p99", "first_median", "first_most", "compile_s")]
            table.add_row(name, peer, *(f"{figure:.2f}" for figure in figures))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--masked", action="store_true", help="models with a mask that has padding")
    parser.add_argument("--serve", action="store_true", help="sizes that vary, each call waited for")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS, DYNAMIC])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="cases that are compiled at once")
    parser.add_argument("--json", help="write the figures to this file too")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # the process of a case
    asked = parser.parse_args()
    asked.peers = asked.peers or (["ours", DYNAMIC] if asked.serve else list(PEERS))
    warnings.filterwarnings("ignore")
    if asked.here:
        with torch.no_grad():
            (name,), (batch,) = asked.names, asked.batch
            if asked.serve:
                case = {name: {asked.peers[0]: served(name, asked.peers[0], asked)}}
            else:
                case = {f"{name} {batch}": one_model(name, batch, asked)}
        print(json.dumps(case), flush=True)
        return
    names = asked.names or list(SERVED if asked.serve else MASKED if asked.masked else PLAIN)
    if asked.serve:
        commands = [["--serve", name, "--peers", peer] for name in names for peer in asked.peers]
    else:
        timing = ["--rounds", str(asked.rounds), "--repeats", str(asked.repeats), "--peers", *asked.peers]
        commands = [[name, "--batch", str(batch), *timing] for batch in asked.batch for name in names]
    cases: dict[str, dict[str, Any]] = {}
    for case in in_turns(commands, asked.jobs):
        print(json.dumps(case), flush=True)
        for name, rows in case.items():
            cases.setdefault(name, {}).update(rows)
        if asked.json:
            with open(asked.json, "w") as file:
                json.dump({"device": torch.cuda.get_device_name(), **cases}, file)
    Console(width=120).print(serve_table(cases) if asked.serve else race_table(cases))


if __name__ == "__main__":
    main()
