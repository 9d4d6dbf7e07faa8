"""Tokens per second of generation at batch 1, prompt and tokens apart: eager, torch.compile, ours, others.

    python bench/generate.py [--peer intarsia] [--size tiny|small|fifth|half] [--dtype float32|bfloat16]
                             [--prompt 128] [--tokens 64] [--engines openvino] [--device cpu]
    python bench/generate.py --peer intarsia-int8 --peer intarsia-int4 [--tolerance 0.3] [--budget 60]
    python bench/generate.py --save FOLDER       # the model and a tokenizer, for builders of other formats
    python -m onnxruntime_genai.models.builder -i FOLDER -o BUILT -p fp32 -e cpu
    python bench/generate.py --peer onnxruntime-genai --built BUILT

A Llama-like decoder with random weights, greedy. "prompt" is generation of one token; "tokens" what each
further token adds. Without --peer, eager, torch.compile and intarsia run in turns in one process; memory is
what the process held at most until a peer had been made and had run, so it is its own with --peer alone.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import intarsia

Generate = Callable[[int], torch.Tensor]

# hidden, intermediate, layers, heads, heads of keys, vocabulary
SIZES = {
    "tiny": (64, 96, 2, 4, 2, 128),
    "small": (512, 1408, 6, 8, 2, 8192),
    "fifth": (1024, 2816, 12, 16, 4, 32000),  # 0.2 billion weights
    "half": (1024, 4096, 24, 16, 4, 32000),  # 0.47 billion weights
}


def decoder(size: str, dtype: torch.dtype, device: str, room: int) -> Any:
    hidden, inner, layers, heads, shared, vocabulary = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=max(room, 512),
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device=device, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def seconds(generate: Callable[[int], object], tokens: int, device: str) -> float:
    begin = time.perf_counter()
    generate(tokens)
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def memory(device: str) -> str:
    if device != "cpu":
        return f"{torch.cuda.max_memory_allocated() / 2**20:.0f}"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f}"


def eager(model: Any, ids: torch.Tensor, told: argparse.Namespace) -> Generate:
    return lambda tokens: model.generate(ids, max_new_tokens=tokens, do_sample=False)


def torch_compile(model: Any, ids: torch.Tensor, told: argparse.Namespace) -> Generate:
    # Of one length, lest the cache be made, and the model compiled, anew.
    static = {"cache_implementation": "static", "max_cache_len": room(told)}
    fast = torch.compile(model.forward, dynamic=None) if told.device == "cpu" else None

    def run(tokens: int) -> torch.Tensor:
        if fast is not None:  # on a GPU transformers compiles for such a cache itself, with CUDA graphs
            model.forward = fast
        try:
            made: torch.Tensor = model.generate(
                ids, max_new_tokens=tokens, do_sample=False, disable_compile=fast is not None, **static
            )
            return made
        finally:
            model.__dict__.pop("forward", None)

    for _ in range(2):
        run(told.tokens + 1), run(1)
    return run


def ours(model: Any, ids: torch.Tensor, told: argparse.Namespace, precision: str | None = None) -> Generate:
    options: dict[str, Any] = {"engines": told.engines} if told.engines else {}
    if precision is not None:
        options |= {"precision": precision, "tolerance": told.tolerance, "examples": [ids]}
        options["partition"] = intarsia.Measured(budget_s=told.budget)
    begin = time.perf_counter()
    made = intarsia.compile_generation(model, max_length=room(told), **options)
    print(f"compiled in {time.perf_counter() - begin:.0f} s\n{made}")
    made.forward.take_out()

    def run(tokens: int) -> torch.Tensor:
        made.forward.put()
        try:
            answer: torch.Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False)
            return answer
        finally:
            made.forward.take_out()

    return run


def onnxruntime_genai(model: Any, ids: torch.Tensor, told: argparse.Namespace) -> Generate:
    import onnxruntime_genai as genai

    built = genai.Model(told.built)

    def run(tokens: int) -> torch.Tensor:
        asked = genai.GeneratorParams(built)
        asked.set_search_options(max_length=room(told), do_sample=False)
        made = genai.Generator(built, asked)
        made.append_tokens(ids.to(torch.int32).numpy())
        for _ in range(tokens):
            made.generate_next_token()
        return torch.as_tensor(made.get_sequence(0))[None].long()

    return run


PEERS: dict[str, Callable[[Any, torch.Tensor, argparse.Namespace], Generate]] = {
    "eager": eager,
    "torch.compile": torch_compile,
    "intarsia": ours,
    "intarsia-int8": partial(ours, precision="int8-weights"),
    "intarsia-int4": partial(ours, precision="int4-weights"),
    "onnxruntime-genai": onnxruntime_genai,
}


def room(told: argparse.Namespace) -> int:
    return int(told.prompt + told.tokens + 1)


def save(model: Any, folder: str) -> None:
    """The model and a tokenizer of one word a token: builders of other formats ask for one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = 1, 2, 0
    model.save_pretrained(folder)
    words = {f"t{place}": place for place in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    names = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=list(PEERS), action="append")
    parser.add_argument("--size", choices=list(SIZES), default="half")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*")
    parser.add_argument("--tolerance", type=float, default=0.3, help="of peers with short weights")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to choose each of their programs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--built", help="the folder that a builder of another format made")
    parser.add_argument("--save", help="write the model to this folder, and end")
    told = parser.parse_args()
    model = decoder(told.size, getattr(torch, told.dtype), told.device, room(told))
    if told.save:
        save(model, told.save)
        return
    ids = torch.randint(3, model.config.vocab_size, (1, told.prompt), device=told.device)
    expected = eager(model, ids, told)(told.tokens + 1)
    peers: dict[str, Generate] = {}
    held: dict[str, str] = {}
    for name in told.peer or ("eager", "torch.compile", "intarsia"):
        peers[name] = PEERS[name](model, ids, told)
        peers[name](1)
        held[name] = memory(told.device)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for _ in range(told.rounds):
        for name, peer in peers.items():
            times[name].append(
                (seconds(peer, 1, told.device), seconds(peer, told.tokens + 1, told.device)),
            )
    table = Table(title=f"Llama-like, {told.size}, {told.dtype}, {told.device}, prompt {told.prompt}")
    for column in ("peer", "prompt, tokens/s", "further tokens/s", "peak memory, MiB", "equal tokens"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for name, peer in peers.items():
        first = min(one for one, _ in times[name])
        whole = min(all_ for _, all_ in times[name])
        same = torch.equal(peer(told.tokens + 1).cpu(), expected.cpu())
        further = told.tokens / max(whole - first, 1e-9)
        table.add_row(
            name, f"{told.prompt / first:.0f}", f"{further:.1f}", held[name], "yes" if same else "no"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
