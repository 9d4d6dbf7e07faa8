"""The jobs of `intarsia pipeline run`, and one rank of their training: progress, checkpoints, resuming."""

from __future__ import annotations

import ast
import copy
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from intarsia.cli.model import load_factory
from intarsia.drawing import save_curve, text_curve
from intarsia.errors import InputError, PipelineError
from intarsia.pipeline.distributed.pipeline import DistributedPipeline
from intarsia.pipeline.distributed.start import start_process_group
from intarsia.pipeline.plan.simulate import simulate
from intarsia.pipeline.schedules import SCHEDULES, schedule
from intarsia.pipeline.split import split

TEXT = (
    b"to cut a model at its waist, and lay the pieces side by side, and lose no grain of what it knew. " * 40
)


@dataclass(frozen=True)
class Batch:
    """One call of the model, and its target."""

    args: tuple[Any, ...]
    target: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A model to train. `data(step)` returns the batch of a step, which is the same on every rank."""

    model: nn.Module
    data: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor]
    loss_weight: Any = None
    compare: bool = False  # whether to compare the first gradients with those of the model on one device


@dataclass(frozen=True)
class TextData:
    """Windows of a text with one token per byte, at random positions for every step."""

    text: bytes
    batch: int
    length: int

    def __call__(self, step: int) -> Batch:
        data = torch.frombuffer(bytearray(self.text), dtype=torch.uint8).long()
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(data) - self.length + 1, (self.batch,), generator=draw)
        ids = torch.stack([data[s : s + self.length] for s in starts.tolist()])
        return Batch((ids,), ids, {"use_cache": False})


def job_of(name: str, text: Path | None = None, batch: int = 16, length: int = 64) -> Job:
    """The job with this name: `file.py:factory`, `module:factory`, or a Hugging Face model type with sizes.

    A factory has no arguments and returns `(model, data, loss)`. `data(step)` returns `(args, target)` or
    `(args, kwargs, target)`, and `loss(output, target)` a scalar. If it returns only a module, the module is
    trained as a language model of bytes. `gpt2:n_layer=4,n_embd=128` is Hugging Face's configuration of this
    type with these changes, and random weights; nothing is downloaded.
    """
    job = find_factory(name)()
    if isinstance(job, nn.Module):
        return Job(job, _text(job, text, batch, length), next_token_loss, "equal")
    if not (isinstance(job, tuple) and len(job) == 3 and isinstance(job[0], nn.Module)):
        raise InputError(f"{name} must return (model, data, loss) or a model, not {type(job).__name__}")
    if text is not None:
        raise InputError(f"{name} has its own data; --text is for language models")
    model, data, loss = job
    return Job(model, lambda step: _batch(data(step), name), loss)


def find_factory(name: str) -> Callable[[], Any]:
    """The factory with this name, not yet called. Raises InputError for an unknown name."""
    place, _, rest = name.partition(":")
    return load_factory(place, rest) if rest and "=" not in rest else _hugging_face(place, rest)


def next_token_loss(output: Any, ids: Tensor) -> Tensor:
    """The mean cross entropy of each token, predicted from the tokens before it."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _text(model: nn.Module, text: Path | None, batch: int, length: int) -> TextData:
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and vocabulary < 256:
        raise InputError(
            f"the model has a vocabulary of {vocabulary}; a text of bytes needs vocab_size=256 or more"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise InputError(f"--length={length} is more than the {positions} positions of the model")
    try:
        data = TEXT if text is None else text.read_bytes()
    except OSError as error:
        raise InputError(f"the text {text} cannot be read: {error.strerror}") from error
    if len(data) < length:
        raise InputError(f"the text has {len(data)} bytes, less than --length={length}")
    return TextData(data, batch, length)


def _batch(value: Any, name: str) -> Batch:
    if not isinstance(value, tuple) or len(value) not in (2, 3):
        form = "(args, target) or (args, kwargs, target)"
        raise InputError(f"the data of {name} must return {form} for a step")
    args, kwargs = value[0], value[1] if len(value) == 3 else {}
    return Batch(args if isinstance(args, tuple) else (args,), value[-1], kwargs)


def _hugging_face(kind: str, sizes: str) -> Callable[[], nn.Module]:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise InputError(f"{kind} needs Hugging Face: pip install transformers") from error
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"{kind!r} is not a model type of Hugging Face (gpt2, llama, ...); for your own model, give"
            " file.py:factory or module:factory"
        )
    changes: dict[str, Any] = {}
    for item in filter(None, sizes.split(",")):
        key, _, value = item.partition("=")
        if not value:
            raise InputError(f"{item!r} is not of the form name=value")
        try:
            changes[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[key] = value
    config = AutoConfig.for_model(kind, **{"vocab_size": 256, **changes})
    unknown = [k for k in changes if not hasattr(type(config)(), k)]
    if unknown:
        raise InputError(f"the configuration of {kind} has no {unknown[0]!r}")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (getattr(config, key, None) or 0) >= config.vocab_size:
            setattr(config, key, 0)

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        return model.train()

    return build


class TinyGPT(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self, vocabulary: int = 256, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens: nn.Embedding = nn.Embedding(vocabulary, width)
        self.places: nn.Embedding = nn.Embedding(128, width)
        options: dict[str, Any] = {
            "dropout": 0.0,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
        }
        self.blocks: nn.ModuleList = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)]
        )
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.head: nn.Linear = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of the next token at every position."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def demo_job(microbatches: int) -> Job:
    """A small GPT and one batch of random tokens."""
    torch.manual_seed(0)
    model, ids = TinyGPT(), torch.randint(0, 256, (4 * microbatches, 32))
    return Job(model, lambda step: Batch((ids,), ids), next_token_loss, compare=True)


Echo = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """The options of a training run."""

    schedule: str
    microbatches: int
    per_rank: int
    steps: int
    rate: float
    checkpoint: bool
    save: Path | None
    every: int
    resume: bool
    curve: Path | None
    timeout: float


def train_rank(job: Job, options: Training, echo: Echo) -> list[float] | None:
    """Train the job's model with the other ranks. The rank of the last stage reports and returns losses."""
    device = _start(options.timeout)
    first = job.data(0)
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = copy.deepcopy(job.model) if job.compare else None
    part = [_microbatch(values, options.microbatches) for values in (first.args, dict(first.kwargs))]
    parts = split(job.model, *part, stages=world * options.per_rank, agree=True)
    if rank == 0:
        echo(str(parts.report))
    weighed = {} if job.loss_weight is None else {"loss_weight": job.loss_weight, "check_loss": False}
    pipe = parts.distributed(
        options.schedule, options.microbatches, loss_fn=job.loss, checkpoint=options.checkpoint, **weighed
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.rate)
    losses = _resumed(pipe, optimizer, options) if options.resume or _restarted(options) else []
    if losses and pipe.is_last:
        echo(f"continues after step {len(losses)}")
    begin, before = time.perf_counter(), len(losses)
    for step in range(before, options.steps):
        # The user's factory may draw its data; dropout draws by the pipeline's own seed and steps.
        torch.manual_seed(step)
        batch = job.data(step)
        args, kwargs, target = pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(device), (batch.args, dict(batch.kwargs), batch.target)
        )
        optimizer.zero_grad()
        result = pipe.step(*args, target=target, **kwargs)
        if plain is not None and step == before:
            worst = _largest_difference(pipe, plain, job, batch)
            agreement = f"gradients equal the plain model's (difference {worst:.1e})"
            echo(f"rank {rank}: stages {sorted(pipe.parts)}, {agreement}")
        optimizer.step()
        losses.append(float("nan") if result.loss is None else float(result.loss))
        if pipe.is_last:
            each = (time.perf_counter() - begin) / (step + 1 - before)
            if step + 1 in (before + 1, options.steps) or (step + 1) % max(1, options.steps // 20) == 0:
                progress = f"step {step + 1:>5}/{options.steps}"
                echo(f"{progress}  loss {losses[-1]:.4f}  {each * 1e3:.0f} ms per step")
        if options.save is not None and ((step + 1) % options.every == 0 or step + 1 == options.steps):
            _save(pipe, optimizer, options.save, losses)
    if pipe.is_last:
        if options.schedule in SCHEDULES:
            plan = schedule(options.schedule, world, options.microbatches, options.per_rank)
            predicted = simulate(plan, parts.report.costs)
            echo(f"predicted {predicted.step_time * 1e3:.0f} ms per step, bubble {predicted.bubble:.0%}")
        echo(text_curve(losses))
        if options.curve is not None:
            save_curve(losses, options.curve)
            echo(f"wrote {options.curve}")
    dist.barrier()
    dist.destroy_process_group()
    return losses if pipe.is_last else None


def _largest_difference(pipe: DistributedPipeline, plain: nn.Module, job: Job, batch: Batch) -> float:
    """The largest difference between this rank's gradients and those of the model on one device."""
    torch.autograd.backward(job.loss(plain(*batch.args, **batch.kwargs), batch.target))
    expected = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    worst = 0.0
    for module in pipe:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            gradient, reference = parameter.grad, expected[name]
            assert gradient is not None and reference is not None
            worst = max(worst, float((gradient.cpu() - reference).abs().max()))
    if worst > 1e-4:
        raise PipelineError(f"a gradient differs from the plain model's by {worst:.2e}")
    return worst


def _start(timeout: float) -> torch.device:
    """Start the process group. Returns this rank's device: its GPU if there is one per rank, or the CPU."""
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    start_process_group("nccl" if on_gpu else "gloo", timedelta(seconds=timeout))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _microbatch(values: Any, microbatches: int) -> Any:
    """The first micro-batch of a batch; the whole batch if it has one sample, which export would fix."""
    sizes = {t.shape[0] for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and t.ndim}

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.shape[0] // microbatches
        return tensor[:size] if tensor.ndim and size >= 2 and len(sizes) == 1 else tensor

    return pytree.tree_map_only(torch.Tensor, cut, values)


def _save(
    pipe: DistributedPipeline, optimizer: torch.optim.Optimizer, folder: Path, losses: list[float]
) -> None:
    """Write a checkpoint beside the last one, make it the latest, and delete the last one."""
    name = f"step-{len(losses)}"
    pipe.save(folder / name, optimizer)
    if pipe.is_last:
        before = _latest(folder)
        new = folder / "latest.json.new"
        new.write_text(json.dumps({"checkpoint": name, "losses": losses, "run": _run_id()}), encoding="utf-8")
        new.replace(folder / "latest.json")
        if before is not None and before["checkpoint"] != name:
            shutil.rmtree(folder / before["checkpoint"], ignore_errors=True)
    dist.barrier()


def _resumed(pipe: DistributedPipeline, optimizer: torch.optim.Optimizer, options: Training) -> list[float]:
    """Load the last checkpoint, and return the losses until it."""
    assert options.save is not None
    latest = _latest(options.save)
    if latest is None:
        raise InputError(f"--resume: there is no checkpoint in {options.save}")
    pipe.load(options.save / latest["checkpoint"], optimizer)
    return [float(x) for x in latest["losses"]]


def _restarted(options: Training) -> bool:
    """Whether torchrun has restarted this run, and there is a checkpoint of it."""
    if options.save is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return False
    latest = _latest(options.save)
    # A checkpoint of another run is used only with --resume.
    return latest is not None and _run_id() is not None and latest.get("run") == _run_id()


def _run_id() -> str | None:
    """torchrun's name of this run, the same after restarts; None if there is none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if name == "none" else name


def _latest(folder: Path) -> dict[str, Any] | None:
    path = folder / "latest.json"
    if not path.is_file():
        return None
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record
