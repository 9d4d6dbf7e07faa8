"""Train a small GPT-2 as a pipeline, in one process or over several.

    python examples/train_gpt2_pipeline.py                                      # workers in one process
    torchrun --nproc_per_node 2 examples/train_gpt2_pipeline.py                 # one process a stage
    torchrun --nproc_per_node 2 examples/train_gpt2_pipeline.py --schedule ZeroBubble

The model is Hugging Face's GPT-2 with random weights, its head tied to its embedding; nothing is downloaded.
It learns a short text. Both ways give the plain model's gradients.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch.nn import functional as F

from intarsia.pipeline import split
from intarsia.pipeline.distributed.start import start_process_group

TEXT = b"to cut a model at its waist, and lay the pieces side by side, and lose no grain of what it knew. "


def batches(steps: int, batch: int, length: int):
    """Windows of the text, the same on every rank."""
    data = torch.frombuffer(bytearray(TEXT * 40), dtype=torch.uint8).long()
    places = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - length, (batch,), generator=places)
        yield torch.stack([data[s : s + length] for s in starts.tolist()])


def make_model():
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise SystemExit("this example needs transformers: pip install transformers") from error
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=64,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def loss_of(output, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def one_process(options: argparse.Namespace) -> None:
    model = make_model()
    ids = next(batches(1, options.batch, options.length))
    stages = split(model, (ids,), {"use_cache": False}, stages=options.stages)
    print(stages.report)
    pipe = stages.gpipe(chunks=options.microbatches)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for i, ids in enumerate(batches(options.steps, options.batch, options.length)):
        loss = loss_of(pipe(ids, use_cache=False), ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0 or i == options.steps - 1:
            print(f"step {i:3d}  loss {loss.item():.3f}")
    model.load_state_dict(pipe.state_dict())  # the plain model's own keys


def many_processes(options: argparse.Namespace) -> None:
    cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    start_process_group("nccl" if cuda else "gloo", timedelta(seconds=60))
    per_rank = 2 if options.schedule in ("Interleaved1F1B", "LoopedBFS", "ZBV", "DualPipeV") else 1
    ids = next(batches(1, options.batch, options.length))
    stages = split(
        make_model(), (ids,), {"use_cache": False}, stages=dist.get_world_size() * per_rank, agree=True
    )
    if dist.get_rank() == 0:
        print(stages.report)
    pipe = stages.distributed(options.schedule, options.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for i, ids in enumerate(batches(options.steps, options.batch, options.length)):
        device = pipe.device
        optimizer.zero_grad()
        result = pipe.step(ids.to(device), target=ids.to(device), use_cache=False)
        optimizer.step()
        if result.loss is not None and (i % 10 == 0 or i == options.steps - 1):
            print(f"step {i:3d}  loss {result.loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=2, help="stages, in one process")
    parser.add_argument("--schedule", default="1F1B", help="schedule, under torchrun")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    many_processes(arguments) if "RANK" in os.environ else one_process(arguments)
