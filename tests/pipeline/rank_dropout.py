"""Tiny models with dropout, trained plainly by keys and in every way a pipeline runs: the errors of each way.

Over processes, a way is `schedule:ZBV`, `recompute:1F1B`, `mesh:`, `shard:`, `save:FOLDER`, `resume:FOLDER`,
or the last two with stages that are sharded inside, `shardsave:FOLDER`.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from intarsia.pipeline import Stages, keyed_random, split
from intarsia.pipeline.distributed.placement import whole

STEPS, SEED, BATCH, VOCABULARY = 4, 5, 8, 40
# Modules that are computed again by name.
RECOMPUTED = {
    "gpt": ["transformer.h.*"],
    "t5": ["encoder.block.*", "decoder.block.*.layer.2"],
    "vit": ["vit.layers.*"],
}
A_RANK = {"Interleaved1F1B": 2, "ZBV": 2}  # stages; of others one


def make(name: str) -> tuple[nn.Module, dict[str, Any], Tensor]:
    """A model in training mode with dropout everywhere, a call of it, and its target."""
    import transformers as hf

    torch.manual_seed(0)
    if name == "gpt":
        config = hf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=16, n_layer=4, n_head=2, n_positions=16, bos_token_id=0,
            eos_token_id=0, attn_pdrop=0.2, embd_pdrop=0.2, resid_pdrop=0.2,
        )  # fmt: skip
        model, ids = hf.GPT2LMHeadModel(config), torch.randint(0, VOCABULARY, (BATCH, 6))
        return model.train(), {"input_ids": ids, "use_cache": False}, ids
    if name == "t5":
        config = hf.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.2
        )
        model = hf.T5ForConditionalGeneration(config)
        ids, target = (torch.randint(2, VOCABULARY, (BATCH, n)) for n in (6, 5))
        return model.train(), {"input_ids": ids, "decoder_input_ids": target, "use_cache": False}, target
    config = hf.ViTConfig(
        hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32, image_size=8,
        patch_size=4, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, num_labels=5,
    )  # fmt: skip
    model = hf.ViTForImageClassification(config)
    return model.train(), {"pixel_values": torch.randn(BATCH, 3, 8, 8)}, torch.randint(0, 5, (BATCH,))


def loss_of(answer: Any, target: Tensor) -> Tensor:
    logits = answer.logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.flatten())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def cut_call(call: dict[str, Any], count: int) -> list[dict[str, Any]]:
    pieces = {k: v.chunk(count) if isinstance(v, Tensor) else [v] * count for k, v in call.items()}
    return [{k: v[i] for k, v in pieces.items()} for i in range(count)]


@functools.cache
def plain_run(name: str, count: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of a plain loop over `count` micro-batches, and its weights before and after."""
    model, call, target = make(name)
    start, optimizer, losses = copy.deepcopy(model.state_dict()), optimizer_of(model.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for i, (part, aim) in enumerate(zip(cut_call(call, count), target.chunk(count), strict=True)):
            with keyed_random(SEED, step, i):
                loss = loss_of(model(**part), aim) / count
                loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
    return losses, start, model.state_dict()


def errors(losses, weights, plain, first: int = 0) -> dict[str, float]:
    """How far a run is off: its losses, and its weights as a part of how far they moved."""
    want, start, end = plain
    moved = max(float((end[k] - start[k]).abs().max()) for k in end if end[k].is_floating_point())
    off = [float((v - end[k]).abs().max()) for k, v in weights.items() if v.is_floating_point()]
    return {
        "loss": max((abs(a - b) for a, b in zip(losses, want[first:], strict=False)), default=0.0),
        "weight": max(off, default=0.0) / moved,
    }


def gpipe_run(name: str, chunks: int, checkpoint: str, names: bool = False) -> dict[str, float]:
    """The errors of a pipeline of workers."""
    model, call, target = make(name)
    parts = split(model, (), call, stages=2, by="memory", checkpoint=RECOMPUTED[name] if names else ())
    pipe, optimizer, losses = (
        parts.gpipe(chunks=chunks, checkpoint=checkpoint),
        optimizer_of(parts.parameters()),
        [],
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        with keyed_random(SEED, step):
            loss = loss_of(pipe(**call), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return errors(losses, model.state_dict(), plain_run(name, chunks))


@functools.cache
def cut(name: str, stages: int) -> tuple[Stages, dict[str, Any], Tensor]:
    """The stages of a model, a call of it, and its target."""
    model, call, target = make(name)
    return split(model, (), call, stages=stages, by="memory"), call, target


def stages_of(kind: str, argument: str) -> int:
    """How many stages a way has."""
    on_mesh = kind == "mesh" or kind.startswith("shard")
    return 2 if on_mesh else int(os.environ["WORLD_SIZE"]) * A_RANK.get(argument, 1)


def prepare(kind: str = "", argument: str = "", *names: str) -> None:
    """Before ranks are forked: models are cut, and run plainly."""
    for name in names:
        cut(name, stages_of(kind, argument))
        plain_run(name, 4)


def trained(kind: str, argument: str, *names: str) -> None:
    """A row of JSON for each model: the errors of a way on this rank."""
    for name in names:
        print(json.dumps({"model": name} | distributed_run(kind, argument, name)), flush=True)


def distributed_run(kind: str, argument: str, name: str) -> dict[str, float]:
    schedule = argument if kind in ("schedule", "recompute") else "1F1B"
    sharded = kind.startswith("shard")
    count = 2 if kind == "mesh" or sharded else 4
    options: dict[str, Any] = {"checkpoint": RECOMPUTED[name]} if kind == "recompute" else {}
    axes = ("data", "pipeline") if kind == "mesh" else ("pipeline", "shard")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes) if kind == "mesh" or sharded else None
    torch.manual_seed(dist.get_rank())  # each rank's own generator has no part in it
    parts, call, target = cut(name, stages_of(kind, argument))
    pipe = parts.distributed(
        schedule,
        count,
        loss_fn=loss_of,
        seed=SEED,
        mesh=mesh,
        loss_weight="equal",
        check_loss=False,
        **options,
    )
    optimizer = optimizer_of(pipe.parameters())
    steps = STEPS // 2 if kind.endswith("save") else STEPS
    if kind.endswith("resume"):
        pipe.seed = 0  # the checkpoint knows better
        pipe.load(argument + "/" + name, optimizer)
        assert (pipe.seed, pipe.steps) == (SEED, STEPS // 2)
    first, losses = pipe.steps, []
    while pipe.steps < steps:
        pipe.zero_grad()
        result = pipe.step(target=pipe.shard(target), **pipe.shard(call))
        optimizer.step()
        losses += [] if result.loss is None else [result.loss.item()]
    weights = {k: whole(v) for k, v in pipe.state_dict().items()}
    if kind.endswith("save"):
        pipe.save(argument + "/" + name, optimizer)
        weights = {}
    return errors(losses, weights, plain_run(name, 4), first)


def masks() -> None:
    """What two layers of dropout keep, one on each of two ranks that were seeded alike, as users do."""
    torch.manual_seed(0)
    x = torch.ones(64, 64)
    parts = split(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), (x,), cuts=[1])
    pipe = parts.distributed("1F1B", 2, loss_fn=lambda y, _: y.sum(), check_loss=False)
    kept = torch.zeros(()) if (y := pipe.infer(x)) is None else (y != 0).float().mean()
    dist.broadcast(kept, 1)
    print(json.dumps({"share": kept.item()}), flush=True)
