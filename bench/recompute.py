"""What recomputation saves: the bytes that autograd keeps for the backward pass, stage by stage.

    python bench/recompute.py [--layers 8] [--width 256] [--length 128]

A GPT-2 of random weights, cut into two stages. Kept bytes are counted at the forward pass of one batch,
weights aside, so the figures are the same on every machine.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.autograd.graph import saved_tensors_hooks

os.environ["HF_HUB_OFFLINE"] = "1"

WAYS: dict[str, list[str]] = {
    "nothing": [],
    "the MLPs (h.*.mlp)": ["h.*.mlp"],
    "the attentions (h.*.attn)": ["h.*.attn"],
    "every layer (h.*)": ["h.*"],
}


def kept(stage: torch.nn.Module, values: tuple[torch.Tensor, ...]) -> tuple[int, tuple[torch.Tensor, ...]]:
    """The bytes that one stage keeps, each storage once, and what it gives."""
    own = {t.untyped_storage()._cdata for t in (*stage.parameters(), *stage.buffers())}
    found: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
            held.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda t: t):
        given = stage(*values)
    return sum(found.values()), given


def main() -> None:
    import transformers

    from intarsia.pipeline.split import split

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    config = transformers.GPT2Config(
        n_layer=given.layers, n_embd=given.width, n_head=given.width // 64, vocab_size=1000, use_cache=False
    )
    ids = torch.randint(0, 1000, (4, given.length), generator=torch.Generator().manual_seed(0))
    model = transformers.GPT2Model(config).train()
    print(f"GPT-2 of {given.layers} layers of width {given.width}, a batch of 4 x {given.length}, two stages")
    middle = f"h.{given.layers // 2}"
    most = 0
    for words, names in WAYS.items():
        stages = split(model, (ids,), cuts=[middle], by="memory", checkpoint=names)
        values: tuple[torch.Tensor, ...] = (ids,)
        sizes = []
        for stage in stages:
            size, values = kept(stage, values)
            sizes.append(size)
        most = most or sum(sizes)
        parts = ", ".join(f"{size / 2**20:6.1f} MB" for size in sizes)
        print(f"  computed again: {words:38} kept {parts}  ({sum(sizes) / most:.0%} of all)")


if __name__ == "__main__":
    main()
