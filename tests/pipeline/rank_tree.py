"""Cases of ranks: models that no graph holds, cut between their modules."""

from __future__ import annotations

import copy

import hf_zoo
import pytest
import torch
import torch.distributed as dist
from pipeline_zoo import make
from rank_training import check_gradients, gradients
from rank_worker import loss_of
from test_compiled_stages import Decides
from test_tree import Deep, Moody
from torch import nn

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.split import split

SCHEDULES = {"1F1B": 2, "ZeroBubble": 2, "Interleaved1F1B": 4, "ZBV": 4}


def by_parts(model, x, target, count):
    """The loss, the outputs and the gradients of a model that decides by its data, part by part."""
    losses, outputs = [], []
    for part, aim in zip(x.split(-(-len(x) // count)), target.split(-(-len(x) // count)), strict=True):
        output = model(part)
        loss = loss_of(output, aim) * len(part) / len(x)
        loss.backward()
        losses.append(loss.detach())
        outputs.append(output)
    return torch.stack(losses).sum(), {k: torch.cat([o[k] for o in outputs]) for k in outputs[0]}


def decides(*only):
    """Each schedule (or those given), with and without recomputation, uneven batches, and inference."""
    torch.manual_seed(0)
    model, x, target = Deep(), torch.randn(8, 6), torch.arange(8)
    for schedule, stages in SCHEDULES.items():
        if only and schedule not in only:
            continue
        parts = split(model, (x,), stages=stages, by="memory", agree=True)
        assert parts.report.way == "modules"
        for checkpoint in (False, True):
            pipe = parts.distributed(schedule, 4, loss_fn=loss_of, checkpoint=checkpoint)
            for count in (8, 7, 8):
                plain = copy.deepcopy(model)
                plain.zero_grad()
                pipe.zero_grad()
                want, outputs = by_parts(plain, x[:count], target[:count], 4)
                result = pipe.step(x[:count], target=target[:count])
                if pipe.is_last:
                    torch.testing.assert_close(result.loss, want)
                    torch.testing.assert_close(result.output, outputs)
                check_gradients(pipe, gradients(plain), f"{schedule} {checkpoint} {count}")
            out = pipe.infer(x)
            assert (out is None) == (not pipe.is_last)
            if out is not None:
                torch.testing.assert_close(out, by_parts(plain, x, target, 4)[1])
        print(f"decides {schedule} ok", flush=True)


def opt():
    """OPT in training, with padding masks, a tied head and autocast, gives the plain model's gradients.

    By its graph, and by its modules where a number that is drawn decides (this one hardly ever).
    """
    for layerdrop, way in ((0.0, "graph"), (1e-30, "modules")):
        model, call, target = hf_zoo.make("opt")
        model.model.decoder.layerdrop = layerdrop
        parts = split(model, (), call, stages=2, by="memory")
        assert model.training and parts.report.way == way and parts.tied, parts.report
        check_opt(model, parts, call, target)
    print("opt ok", flush=True)


def check_opt(model, parts, call, target):
    pipe = parts.distributed(
        "1F1B", 4, loss_fn=hf_zoo.loss_of, loss_weight=hf_zoo.weight_of, check_loss=False
    )
    for autocast in (False, True):
        plain = copy.deepcopy(model)
        plain.zero_grad()
        pipe.zero_grad()
        want, logits = hf_zoo.plain_step(plain, call, target, 4, autocast)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = pipe.step(target=target, **call)
        bound = 2e-2 if autocast else 1e-4
        if pipe.is_last:
            assert float(result.loss) == pytest.approx(float(want), rel=bound)
            assert hf_zoo.error(result.output.logits, logits) <= bound
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        least = max(float(p.grad.abs().max()) for p in plain.parameters()) / 1000
        for name, parameter in pipe.named_parameters():
            assert hf_zoo.error(parameter.grad, wanted[name].grad, least) <= bound, name
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        torch.testing.assert_close(pipe.clip_grad_norm_(1e-3), norm, rtol=bound, atol=0.0)


class Normed(nn.Module):
    """Decides by its data, and keeps statistics; hands a structure and a number from part to part."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.c = Moody(4), nn.BatchNorm1d(4), Pair(), Last()

    def forward(self, x):
        return self.c(self.b(self.norm(self.a(x))))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Moody(4)

    def forward(self, x):
        return {"value": self.inner(x), "mask": x > 0, "scale": 2.0, "rows": x.shape[0], "none": None}


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Moody(4)

    def forward(self, given):
        assert given["none"] is None and given["rows"] == given["value"].shape[0]
        return self.inner(torch.where(given["mask"], given["value"], 0.0)) * given["scale"]


def structures():
    """Dictionaries, numbers and None cross too; statistics are updated once, also with recomputation."""
    torch.manual_seed(0)
    first, x, target = Normed(), torch.randn(8, 4), torch.arange(8)
    for checkpoint in (False, True):
        model, plain = copy.deepcopy(first), copy.deepcopy(first)
        parts = split(model, (x,), cuts=["c"], by="memory")
        pipe = parts.distributed("1F1B", 2, loss_fn=loss_of, checkpoint=checkpoint)
        for _ in range(2):
            for part, aim in zip(x.chunk(2), target.chunk(2), strict=True):
                (loss_of(plain(part), aim) / 2).backward()
            pipe.step(x, target=target)
        check_gradients(pipe, gradients(plain), f"structures {checkpoint}")
        want = plain.state_dict()
        for key, value in pipe.state_dict().items():
            torch.testing.assert_close(value, want[key])
        assert int(want["norm.num_batches_tracked"]) == 4
    with pytest.raises(InputError, match="updates its buffers, which copies"):
        pipe.step(x[:7], target=target[:7])
    print("structures ok", flush=True)


def compiled():
    """Stages given to the engines answer over processes too, for any batch."""
    model, (x,), _ = make("mlp")
    model.eval()
    fast = split(model, (x,), stages=2, by="memory").compile((x,), engines=["onnxruntime"])
    pipe = fast.distributed("1F1B", 2)
    for batch in (x, torch.randn(10, 8), torch.randn(7, 8)):
        out = pipe.infer(batch)
        if pipe.is_last:
            torch.testing.assert_close(out, model(batch), rtol=1e-4, atol=1e-5)
    refuses(fast, pipe, x)
    # The same of a model that no graph holds; its middle stays with PyTorch.
    tree, x = Decides().eval(), torch.randn(4, 6)
    fast = split(tree, (x,), cuts=["last"], by="memory").compile((x,), engines=["onnxruntime"])
    assert fast.report.way == "modules"
    pipe = fast.distributed("1F1B", 2)
    for batch in (x, -x, torch.randn(7, 6), torch.randn(3, 6)):
        out = pipe.infer(batch)
        if pipe.is_last:
            size = -(-len(batch) // 2)
            want = torch.cat([tree(part) for part in batch.split(size)])
            torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    refuses(fast, pipe, x)
    print("compiled ok", flush=True)


def refuses(fast, pipe, x):
    with pytest.raises(PartitionError, match="omit loss_fn and call infer"):
        fast.distributed("1F1B", 2, loss_fn=loss_of)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PartitionError, match="without autocast"):
        pipe.infer(x)


class Opaque:
    def __init__(self, value):
        self.value = value


class Wraps(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.inner, self.mode = Moody(4), mode

    def forward(self, x):
        value = self.inner(x)
        if self.mode == "opaque":
            return Opaque(value)
        if self.mode == "raises" and dist.get_rank() == 0 and float(x.sum()) > 1e6:
            raise ValueError("too much")
        return {"value": value, "number": float(x.sum())}


class Unwraps(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Moody(4)

    def forward(self, given):
        assert given  # which tracing cannot know, so that this module stays closed
        return self.inner(given.value if isinstance(given, Opaque) else given["value"])


def refusals():
    """What cannot travel, a number that changes, and an exception while the ranks find what crosses."""
    torch.manual_seed(0)
    x, target = torch.randn(8, 4), torch.arange(8)
    for mode, error, sentence in (
        ("opaque", (PartitionError, PipelineError), "a Opaque, crosses a border"),
        ("number", PipelineError, "only the values of tensors may differ"),
        ("raises", (ValueError, PipelineError), "too much"),
    ):
        model = nn.Sequential(Wraps(mode), Unwraps())
        pipe = split(model, (x,), cuts=["1"], by="memory").distributed("1F1B", 2, loss_fn=loss_of)
        given = x * 1e9 if mode == "raises" else x
        given = given.abs() if mode == "raises" else given
        with pytest.raises(error, match=sentence):
            pipe.step(given, target=target)
    print("tree refusals ok", flush=True)
