"""Tokens per second of `model.generate` at batch 1, prompt and tokens apart: eager, torch.compile, ours.

    python bench/generate.py [--size tiny|small|half] [--dtype float32|bfloat16] [--prompt 128] [--tokens 64]
                             [--engines openvino] [--without torch.compile] [--device cpu]

A Llama-like decoder with random weights, greedy. "prompt" is `generate` of one token; "tokens" what each
further token adds. Peers run in turns, in one process; memory is what the process held after each was made.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import intarsia

# hidden, intermediate, layers, heads, heads of keys, vocabulary
SIZES = {
    "tiny": (64, 96, 2, 4, 2, 128),
    "small": (512, 1408, 6, 8, 2, 8192),
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="half")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*")
    parser.add_argument("--without", nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    told = parser.parse_args()
    room = told.prompt + told.tokens + 1
    model = decoder(told.size, getattr(torch, told.dtype), told.device, room)
    ids = torch.randint(3, model.config.vocab_size, (1, told.prompt), device=told.device)
    held: dict[str, str] = {}

    def plain(tokens: int, **kinds: Any) -> torch.Tensor:
        made: torch.Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False, **kinds)
        return made

    expected = plain(told.tokens + 1)
    peers: dict[str, Callable[[int], torch.Tensor]] = {"eager": plain}
    held["eager"] = memory(told.device)
    if "torch.compile" not in told.without:
        own = model.forward
        fast = torch.compile(own, dynamic=None)

        def compiled(tokens: int) -> torch.Tensor:
            model.forward = fast
            try:
                # Of one length, lest the cache be made, and the model compiled, anew.
                return plain(tokens, cache_implementation="static", max_cache_len=room, disable_compile=True)
            finally:
                del model.forward

        for _ in range(2):
            compiled(told.tokens + 1), compiled(1)
        peers["torch.compile"] = compiled
        held["torch.compile"] = memory(told.device)
    made = intarsia.compile_generation(
        model, max_length=room, **({"engines": told.engines} if told.engines else {})
    )
    made.forward.take_out()

    def ours(tokens: int) -> torch.Tensor:
        made.forward.put()
        try:
            return plain(tokens)
        finally:
            made.forward.take_out()

    peers["intarsia"] = ours
    held["intarsia"] = memory(told.device)
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
        same = torch.equal(peer(told.tokens + 1), expected)
        further = told.tokens / max(whole - first, 1e-9)
        table.add_row(
            name, f"{told.prompt / first:.0f}", f"{further:.1f}", held[name], "yes" if same else "no"
        )
    console = Console(width=110)
    console.print(table)
    console.print(str(made))
    console.print(f"forwards of ours: {made.forward.runs}")


if __name__ == "__main__":
    main()
