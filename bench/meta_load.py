"""Memory of a rank that loads its stages of a model built and cut on the meta device.

    python bench/meta_load.py --ranks 4 --layers 16 --width 1024

A Llama of random weights is written as safetensors shards, one layer a shard, and is never whole in memory.
Then each rank builds it on meta, cuts it, and loads its own stage. Printed, for each rank: the bytes of its
stage, and by how much its peak resident memory grew over what it had before the load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

os.environ["HF_HUB_OFFLINE"] = "1"


def build(layers: int, width: int):
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=8000,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train()


def write_shards(folder: Path, layers: int, width: int) -> int:
    """Random weights, one shard at a time; the bytes of all."""
    state = build(layers, width).state_dict()
    groups: dict[str, list[str]] = {}
    for name in state:
        groups.setdefault(".".join(name.split(".")[:3]), []).append(name)
    weight_map = {}
    for i, names in enumerate(groups.values()):
        file = f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
        save_file({n: torch.randn(state[n].shape) * 0.02 for n in names}, str(folder / file))
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(t.numel() * t.element_size() for t in state.values())


def peak() -> float:
    """The largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def rank(folder: str, layers: int, width: int, train: bool) -> None:
    from intarsia.pipeline.split import split

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ids = torch.randint(0, 8000, (2 * dist.get_world_size(), 64), generator=torch.Generator().manual_seed(0))
    stages = split(build(layers, width), (ids,), stages=dist.get_world_size(), by="memory", agree=True)
    before, start = peak(), time.perf_counter()

    def loss(output, labels):
        logits = output.logits[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    pipe = stages.distributed(
        "1F1B", dist.get_world_size(), loss_fn=loss, loss_weight="equal", weights=folder
    )
    took, after = time.perf_counter() - start, peak()
    share = sum(p.numel() * p.element_size() for p in pipe.parameters()) / 2**20
    words = (
        f"rank {dist.get_rank()}: its stage {share:7.1f} MB; before {before:7.1f} MB, peak {after:7.1f} MB,"
    )
    words += f" grown by {after - before:7.1f} MB in {took:.1f} s"
    if train:
        pipe.step(ids, target=ids)
        words += f"; after a training step {peak():7.1f} MB"
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, words)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--train", action="store_true", help="run one training step too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        rank(given.worker, given.layers, given.width, given.train)
        return
    with tempfile.TemporaryDirectory() as folder:
        size = write_shards(Path(folder), given.layers, given.width)
        print(f"{given.layers} layers of width {given.width}: {size / 2**20:.1f} MB, {given.ranks} ranks")
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += [f"--nproc-per-node={given.ranks}", *sys.argv, "--worker", folder]
        subprocess.run(launch, check=True)


if __name__ == "__main__":
    main()
