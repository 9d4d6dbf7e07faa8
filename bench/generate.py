"""Tokens per second of generation, prompt and tokens apart: eager, torch.compile, ours, others.

    python bench/generate.py [--size tiny|small|fifth|half|one ...] [--rows 1 ...]
                             [--choice greedy|sampling|repetition ...]
                             [--dtype float32|bfloat16] [--peer intarsia ...]
                             [--prompt 128] [--tokens 64] [--engines openvino] [--device cpu]
                             [--results FILE.json] [--limit 220] [--built FOLDER] [--builders FOLDER]
                             [--turns] [--bits 4|8 | --torchao int4|int8|float8|float8-dynamic]

A Llama-like decoder with random weights. "prompt" is generation of one token; "tokens" what each
further token adds, each the best of some rounds; "at its median" what a round in the middle gave. "CPU" is
the time of all threads of the process, which other programs on the machine disturb less. On a GPU "kernels"
are those of a further token. All peers have as many threads as torch (OMP_NUM_THREADS). Every peer runs in a
process of its own, which `--limit` ends, so its memory is its own: weights of the model included
where it needs the model. One peer comes after the other, or, with `--turns`, a round of each after the other:
on a machine whose speed varies only that compares them. On a GPU all of these compile at once. With
`--results` what was measured is kept, and a run that was stopped goes on with the peers that are missing.

With `--bits` all linear layers are quantized, in 4 bits by groups of 128 inputs or in 8 bits by output.
"intarsia" loads the packed weights; "eager", "torch.compile" and "intarsia-dense" compute with the float
weights that these stand for; the builders of the others quantize those anew, to as many bits. OpenVINO GenAI
and onnxruntime-genai round activations to 8 bits, except the peers that end in "-exact".

With `--torchao` its `quantize_` replaces the weights of all linear layers, in groups of 128 inputs (int4) or
by output, and every peer runs that model. `float8-dynamic` rounds activations to float8 by row, too. On a GPU
int4 asks for `--dtype bfloat16`. These products are PyTorch's own: where torchao's libraries do not load, set
TORCHAO_FORCE_SKIP_LOADING_SO_FILES=1.

    python bench/generate.py --device cuda --dtype bfloat16 --torchao int4 --size half one --rows 1 8 \
        --tokens 128 --turns --peer eager --peer torch.compile --peer intarsia

onnxruntime-genai and OpenVINO GenAI run models that builders made, in `--built`; a peer that is not
installed, or whose model cannot be built, is a line with the reason. Both may stand beside this package:

    pip install --no-deps onnxruntime-genai openvino-genai openvino-tokenizers

optimum-intel, which builds for OpenVINO, asks for an older transformers. Put both into a folder, `pip install
--target FOLDER --no-deps optimum optimum-intel "transformers<5.6" "huggingface-hub<1.22" "tokenizers<0.23"
"diffusers<0.39" httpx httpcore h11 anyio certifi`, and name it by `--builders`: it comes first on the path of
that builder alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Generate = Callable[[int], Sequence[int]]  # so many tokens after the prompt; gives them

# hidden, intermediate, layers, heads, heads of keys, vocabulary
SIZES = {
    "tiny": (64, 96, 2, 4, 2, 128),
    "small": (512, 1408, 6, 8, 2, 8192),
    "fifth": (1024, 2816, 12, 16, 4, 32000),  # 0.2 billion weights
    "half": (1024, 4096, 24, 16, 4, 32000),  # 0.47 billion weights
    "one": (2048, 8192, 16, 32, 8, 32000),  # 1.0 billion weights
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "repetition": {"do_sample": False, "repetition_penalty": 1.2},
}
TORCHAO = ("int4", "int8", "float8", "float8-dynamic")
USUAL = ("eager", "torch.compile", "openvino-genai", "onnxruntime-genai", "intarsia")


class Unavailable(Exception):
    """A peer that cannot be had here, with the reason."""


def decoder(told: argparse.Namespace) -> Any:
    """The model in float; the one that packed weights stand for, where there are such."""
    if not told.bits:
        return by_torchao(drawn(told), told)
    model = packed(told)
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "dequantized"):
            dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            dense.weight = torch.nn.Parameter(layer.dequantized())
            model.set_submodule(name, dense)
    del model.config.quantization_config
    model.hf_quantizer = None
    return model


def by_torchao(model: Any, told: argparse.Namespace) -> Any:
    """The model, with weights of torchao's classes where `--torchao` asks for them."""
    if told.torchao:
        from torchao import quantization as ao
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig as Int4OnCpu

        configs: dict[str, Callable[[], Any]] = {
            "int4": Int4OnCpu
            if told.device == "cpu"
            else partial(ao.Int4WeightOnlyConfig, int4_packing_format="tile_packed_to_4d"),
            "int8": ao.Int8WeightOnlyConfig,
            "float8": ao.Float8WeightOnlyConfig,
            "float8-dynamic": partial(ao.Float8DynamicActivationFloat8WeightConfig, granularity=ao.PerRow()),
        }
        ao.quantize_(model, configs[told.torchao]())
    return model


def packed(told: argparse.Namespace) -> Any:
    """The model with packed weights."""
    import intarsia

    model = intarsia.load_pretrained(folder_of_packed(told)).to(told.device)
    model.generation_config.eos_token_id = None
    return model


def folder_of_packed(told: argparse.Namespace) -> Path:
    return Path(told.built) / f"{told.size}-{told.dtype}-{told.bits}-bits" / "packed"


def write_packed(told: argparse.Namespace) -> None:
    """A folder in the layout `pack-quantized` of compressed-tensors."""
    from safetensors.torch import save_file

    if (folder := folder_of_packed(told)).is_dir():
        return
    model, half = drawn(told), 2 ** (told.bits - 1)
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            weight = tensors.pop(f"{name}.weight").float()
            groups = weight.unflatten(1, (-1, 128 if told.bits == 4 else weight.shape[1]))
            scale = groups.abs().amax(-1) / (half - 0.5)
            numbers = (groups / scale[..., None]).round().clamp(-half, half - 1).flatten(1).long() + half
            words = (numbers.unflatten(1, (-1, 32 // told.bits)) << torch.arange(0, 32, told.bits)).sum(-1)
            tensors[f"{name}.weight_packed"] = words.int()
            tensors[f"{name}.weight_scale"] = scale.to(layer.weight.dtype)
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    group = {"strategy": "group", "group_size": 128} if told.bits == 4 else {"strategy": "channel"}
    model.config.quantization_config = settings_of_packed(told.bits, group)
    began = folder.with_name("unfinished")
    began.mkdir(parents=True, exist_ok=True)
    save_file(tensors, began / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    (began / "config.json").write_text(json.dumps(model.config.to_dict()))
    began.rename(folder)


def llama_config(sizes: Sequence[int], length: int, **settings: Any) -> Any:
    """A decoder of the sizes of a row of `SIZES`, for as many tokens."""
    from transformers import LlamaConfig

    hidden, inner, layers, heads, shared, vocabulary = sizes
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=length,
        eos_token_id=None,
        **settings,
    )


def settings_of_packed(bits: int, grouping: dict[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of a folder in the layout `pack-quantized` of compressed-tensors."""
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **grouping}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights}},
    }


def drawn(told: argparse.Namespace) -> Any:
    from transformers import LlamaForCausalLM

    config = llama_config(SIZES[told.size], max(room(told), 512), pad_token_id=0)
    torch.manual_seed(0)
    with torch.device(told.device):
        model = LlamaForCausalLM(config).to(getattr(torch, told.dtype)).eval()
    model.generation_config.eos_token_id = None
    return model


def prompt(told: argparse.Namespace) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(3, SIZES[told.size][-1], (told.rows, told.prompt), generator=drawn).to(told.device)


def room(told: argparse.Namespace) -> int:
    return int(told.prompt + told.tokens + 1)


def generated(model: Any, ids: torch.Tensor, tokens: int, **how: Any) -> list[int]:
    made = model.generate(ids, max_new_tokens=tokens, **CHOICES[how.pop("choice", "greedy")], **how)
    return [int(token) for token in made[0, ids.shape[1] :]]


def eager(told: argparse.Namespace) -> Generate:
    return partial(generated, decoder(told), prompt(told), choice=told.choice)


def torch_compile(told: argparse.Namespace) -> Generate:
    model, ids = decoder(told), prompt(told)
    # Of one length, lest the cache be made, and the model compiled, anew.
    static = {"cache_implementation": "static", "max_cache_len": room(told)}
    if told.device == "cpu":  # on a GPU transformers compiles for such a cache itself, with CUDA graphs
        model.forward = torch.compile(model.forward, dynamic=None)
    run = partial(generated, model, ids, choice=told.choice, disable_compile=told.device == "cpu", **static)
    for _ in range(2):
        run(told.tokens + 1), run(1)
    return run


def ours(told: argparse.Namespace, precision: str | None = None, dense: bool = False) -> Generate:
    import intarsia

    model, ids = packed(told) if told.bits and not dense else decoder(told), prompt(told)
    options: dict[str, Any] = {"engines": told.engines} if told.engines else {}
    if precision is not None:
        options |= {"tolerance": told.tolerance, "examples": [ids]}
        if told.engines:
            options["engines"] = [f"{engine}-{precision}" for engine in told.engines]
        else:
            options |= {"precision": precision, "partition": intarsia.Measured(budget_s=told.budget)}
    begin = time.perf_counter()
    made = intarsia.compile_generation(
        model, max_length=room(told), batch=told.rows, padding=False, **options
    )
    print(f"compiled in {time.perf_counter() - begin:.0f} s\n{made}", flush=True)
    return partial(generated, model, ids, choice=told.choice)


def onnxruntime_genai(told: argparse.Namespace, exact: bool = False) -> Generate:
    genai = installed("onnxruntime-genai")
    kind = f"int{told.bits}" if told.bits else {"float32": "fp32", "bfloat16": "bf16"}[told.dtype]
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", kind, "-e", "cpu"]
    if told.bits == 4:  # by itself it rounds activations to 8 bits before products
        builder += ["--extra_options", "block_size=128", f"accuracy_level={1 if exact else 4}"]
    name = "onnxruntime-exact" if exact else "onnxruntime"
    folder = built(told, name, lambda saved, folder: [*builder, "-i", saved, "-o", folder])
    config, ids = genai.Config(folder), prompt(told).to(torch.int32).numpy()
    threads = {"intra_op_num_threads": torch.get_num_threads()}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = genai.Model(config)

    def run(tokens: int) -> list[int]:
        asked = genai.GeneratorParams(model)
        asked.set_search_options(max_length=room(told), do_sample=False, min_length=room(told))
        made = genai.Generator(model, asked)
        made.append_tokens(ids)
        for _ in range(tokens):
            made.generate_next_token()
        return [int(token) for token in made.get_sequence(0)[told.prompt :]]

    return run


def openvino_genai(told: argparse.Namespace, exact: bool = False) -> Generate:
    import openvino

    from intarsia.cache.machine import is_arm

    genai = installed("openvino-genai")
    builder = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    builder += ["--task", "text-generation-with-past", "--weight-format"]
    builder += [f"int{told.bits}" if told.bits else "fp32"]  # there is no bf16
    builder += ["--group-size", "128", "--ratio", "1", "--sym"] if told.bits == 4 else []
    folder = built(told, "openvino", lambda saved, folder: [*builder, "-m", saved, folder])
    # As exact as the model: by itself it computes in bf16 where a processor can, and caches 8 bits.
    short = {"float32": "f32", "bfloat16": "bf16"}[told.dtype]
    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": short, "KV_CACHE_PRECISION": short}
    settings |= {"INFERENCE_NUM_THREADS": torch.get_num_threads()}
    # By itself it rounds activations to 8 bits before products with weights in few bits.
    settings |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} if exact else {}
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # the same prompt is to be read again each time
    # On ARM it refuses a scheduler, and remembers no prompts without.
    settings |= {"ATTENTION_BACKEND": "SDPA"} if is_arm() else {"scheduler_config": scheduler}
    pipe, ids = genai.LLMPipeline(folder, "CPU", **settings), openvino.Tensor(prompt(told).numpy())

    def run(tokens: int) -> list[int]:
        asked = genai.GenerationConfig()
        asked.max_new_tokens, asked.do_sample, asked.ignore_eos = tokens, False, True
        return [int(token) for token in pipe.generate(ids, asked).tokens[0]]

    return run


PEERS: dict[str, Callable[[argparse.Namespace], Generate]] = {
    "eager": eager,
    "torch.compile": torch_compile,
    "openvino-genai": openvino_genai,
    "openvino-genai-exact": partial(openvino_genai, exact=True),
    "onnxruntime-genai": onnxruntime_genai,
    "onnxruntime-genai-exact": partial(onnxruntime_genai, exact=True),
    "intarsia": ours,
    "intarsia-dense": partial(ours, dense=True),
    "intarsia-int8": partial(ours, precision="int8-weights"),
    "intarsia-int4": partial(ours, precision="int4-weights"),
}


def installed(package: str) -> Any:
    name = package.replace("-", "_")
    if importlib.util.find_spec(name) is None:
        raise Unavailable(f"{package} is not installed")
    return importlib.import_module(name)


def built(told: argparse.Namespace, name: str, command: Callable[[str, str], list[str]]) -> str:
    """The folder of the model in another format, made by its builder where it is not there yet."""
    where = Path(told.built) / f"{told.size}-{told.dtype}{f'-{told.bits}-bits' if told.bits else ''}"
    folder, saved = where / name, where / "saved"
    if folder.is_dir():
        return str(folder)
    if not saved.is_dir():
        save(told, saved)
    path = [told.builders or "", os.environ.get("PYTHONPATH", "")]
    path = path if name == "openvino" else path[1:]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}
    began = where / f"{name}-unfinished"
    run = subprocess.run(command(str(saved), str(began)), env=environment, capture_output=True, text=True)
    if run.returncode:
        told_last = [line for line in (run.stderr or run.stdout).splitlines() if line.strip()][-1:]
        raise Unavailable(f"its builder fails: {' '.join(told_last)}")
    began.rename(folder)
    return str(folder)


def save(told: argparse.Namespace, folder: Path) -> None:
    """The model and a tokenizer of one word a token: builders of other formats ask for one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = decoder(told)
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    began = folder.with_name(f"{folder.name}-unfinished")
    model.save_pretrained(began)
    words = {f"t{place}": place for place in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    names = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(began)
    began.rename(folder)
    del model
    gc.collect()


def seconds(generate: Generate, tokens: int, device: str) -> float:
    begin = time.perf_counter()
    generate(tokens)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def kernels(run: Generate, told: argparse.Namespace, name: str) -> float:
    """How many kernels a further token runs on the device; with `--profile` a table of them is written."""
    from torch.profiler import ProfilerActivity, profile

    counts = []
    for tokens in (1, 17):
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run(tokens)
            torch.cuda.synchronize()
        events = [one for one in seen.events() if one.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(sum(not one.name.startswith(("Memcpy", "Memset")) for one in events))
    if told.profile:
        averages = seen.key_averages().table(
            sort_by="cuda_time_total", row_limit=40, max_name_column_width=60
        )
        case = f"{name}-{told.size}-{told.rows}-{told.choice}.txt"
        Path(told.profile, case).write_text(averages)
    return (counts[1] - counts[0]) / 16


def serve(name: str, told: argparse.Namespace) -> None:
    """A peer in this process: makes its model, then runs a round for each line it is given."""
    try:
        run = PEERS[name](told)
    except Unavailable as error:
        print(json.dumps({"reason": str(error)}), flush=True)
        return
    tokens = list(run(told.tokens + 1))
    run(1)
    answer: dict[str, Any] = {"tokens": tokens}
    if told.device != "cpu":
        answer["kernels"] = kernels(run, told, name)
    print(json.dumps(answer), flush=True)
    cpu_s: list[float] = []
    for _ in sys.stdin:
        begin = time.process_time()
        one = seconds(run, 1, told.device)
        middle = time.process_time()
        times = one, seconds(run, told.tokens + 1, told.device)
        cpu_s.append((time.process_time() - middle - (middle - begin)) / told.tokens)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        if told.device != "cpu":
            peak = torch.cuda.max_memory_allocated() / 2**20
        print(json.dumps({"round": times, "cpu_ms": min(cpu_s) * 1e3, "peak_mib": peak}), flush=True)


class Peer:
    """A peer in a process of its own; `row` is what is known of it, or why it cannot be measured."""

    def __init__(self, name: str, told: argparse.Namespace) -> None:
        self._limit = told.limit
        case = ["--size", told.size, "--rows", str(told.rows), "--choice", told.choice]
        command = [sys.executable, __file__, *sys.argv[1:], *case, "--here", name]
        environment = {**os.environ, "INTARSIA_CACHE_GB": os.environ.get("INTARSIA_CACHE_GB", "0")}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes)
        self.row: dict[str, Any] = {"rounds": [], "version": self._version(name)}

    def ready(self) -> None:
        self.row |= self._answer()

    def round(self) -> None:
        if "reason" not in self.row:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says how
                self._process.stdin.write("again\n")
            made = self._answer()
            self.row["rounds"] += [made.pop("round")] if "round" in made else []
            self.row |= made

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        """The next line that is an answer; others are shown."""
        timer = threading.Timer(self._limit, self._process.kill)
        timer.start()
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                timer.cancel()
                made: dict[str, Any] = json.loads(line)
                return made
            print(line, end="", flush=True)
        in_time = timer.is_alive()
        timer.cancel()
        if not in_time:
            return {"reason": f"it took longer than {self._limit:.0f} s", "again": True}
        self._errors.seek(0)
        said = [line for line in self._errors.read().splitlines() if line.strip()][-1:]
        return {"reason": f"it ended with {self._process.wait()}: {' '.join(said)}", "again": True}

    def _version(self, name: str) -> list[str]:
        packages = [name, "intarsia" if name.startswith("intarsia") else "torch"]
        return [f"{one} {importlib.metadata.version(one)}" for one in packages if _is_known(one)][:1]


def measured(cases: Sequence[tuple[str, argparse.Namespace]]) -> list[dict[str, Any]]:
    """What these peers do, in turns if there are several."""
    peers: list[Peer] = []
    try:
        for name, told in cases:
            peers.append(Peer(name, told))
            if told.device == "cpu":
                peers[-1].ready()
        for peer, (_, told) in zip(peers, cases, strict=True):
            if told.device != "cpu":
                peer.ready()
        for _ in range(cases[0][1].rounds):
            for peer in peers:
                time.sleep(0.5)  # pools of the one before spin for a while
                peer.round()
    finally:
        for peer in peers:
            peer.close()
    return [peer.row for peer in peers]


def _is_known(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def table(told: argparse.Namespace, found: dict[str, dict[str, Any]]) -> Table:
    asked = f"{told.rows} rows, prompt {told.prompt}, {told.choice}"
    bits = f", weights in {told.bits} bits" if told.bits else ""
    bits += f", {told.torchao} of torchao" if told.torchao else ""
    made = Table(title=f"Llama-like, {told.size}, {told.dtype}{bits}, {told.device}, {asked}")
    columns = ("peer", "prompt, tokens/s", "further tokens/s", "at its median", "ms a token")
    columns += ("CPU ms a token", "kernels", "peak MiB", "equal tokens")
    for column in columns:
        made.add_column(column, justify="left" if column == "peer" else "right")
    expected = found.get("eager", {}).get("tokens")
    for name, row in found.items():
        if "reason" in row:
            made.add_row(name, *"-" * (len(columns) - 1))
            continue
        first = min(one for one, _ in row["rounds"])
        further = [all_ - one for one, all_ in row["rounds"]]
        same = "?" if expected is None else _agreement(row["tokens"], expected)
        best, middle = (
            told.rows * told.tokens / max(one, 1e-9) for one in (min(further), statistics.median(further))
        )
        figures = (f"{told.rows * told.prompt / first:.0f}", f"{best:.1f}", f"{middle:.1f}")
        figures += (
            f"{min(further) / told.tokens * 1e3:.3f}",
            f"{row['cpu_ms']:.3f}" if "cpu_ms" in row else "-",
            f"{row['kernels']:.0f}" if "kernels" in row else "-",
        )
        made.add_row(name, *figures, f"{row['peak_mib']:.0f}", same)
    return made


def _agreement(tokens: Sequence[int], expected: Sequence[int]) -> str:
    if list(tokens) == list(expected):
        return "yes"
    first = next(
        (place for place, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), 0
    )
    return f"the first {first} of {len(expected)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=list(PEERS), action="append")
    parser.add_argument("--size", choices=list(SIZES), nargs="+", default=["half"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--bits", type=int, choices=[4, 8], help="of all linear layers, which are packed")
    parser.add_argument("--torchao", choices=TORCHAO, help="how its quantize_ replaces the weights")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1], help="sequences at once, all in the figures"
    )
    parser.add_argument("--choice", choices=list(CHOICES), nargs="+", default=["greedy"])
    parser.add_argument("--profile", help="a folder for tables of the kernels of 17 tokens")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*")
    parser.add_argument("--tolerance", type=float, default=0.3, help="of peers with short weights")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to choose each of their programs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for a peer to answer")
    parser.add_argument("--turns", action="store_true", help="a round of each, and again: all are held")
    parser.add_argument("--results", help="a JSON file that keeps what was measured, and is gone on with")
    parser.add_argument("--built", default="bench-results/generate", help="models in formats of others")
    parser.add_argument("--builders", help="a folder with optimum-intel and the transformers it asks for")
    parser.add_argument("--here", choices=list(PEERS), help=argparse.SUPPRESS)  # the process of a peer
    told = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cases = [
        argparse.Namespace(**{**vars(told), "size": size, "rows": rows, "choice": choice})
        for size, rows, choice in itertools.product(told.size, told.rows, told.choice)
    ]
    if told.here:
        serve(told.here, cases[0])
        return
    for case in cases:
        if case.bits:
            write_packed(case)
    file = Path(told.results) if told.results else None
    results: dict[str, dict[str, Any]] = (
        json.loads(file.read_text()) if file is not None and file.exists() else {}
    )
    missing = []
    for case in cases:
        rows = results.setdefault(key(case), {})
        names = told.peer or USUAL
        missing += [(name, case) for name in names if name not in rows or rows[name].get("again")]
    for group in [missing] if told.turns and missing else [[pair] for pair in missing]:
        for (name, case), row in zip(group, measured(group), strict=True):
            results[key(case)][name] = row
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(results))
    console = Console(width=120)
    for case in cases:
        console.print(table(case, results[key(case)]))
        for name, row in results[key(case)].items():
            if "reason" in row:
                console.print(f"{name}: {row['reason']}", highlight=False)


def key(told: argparse.Namespace) -> str:
    bits = f" {told.bits} bits" if told.bits else ""
    bits += f" {told.torchao}" if told.torchao else ""
    return (
        f"{told.size} {told.dtype}{bits} {told.device} {told.rows}x{told.prompt}+{told.tokens} {told.choice}"
    )


if __name__ == "__main__":
    main()
