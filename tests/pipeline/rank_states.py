"""Cases of ranks: what training keeps, that is optimizers, scalers, norms, gradients that are None."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from intarsia.errors import InputError, PartitionError, PipelineError
from intarsia.pipeline.split import split


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        return self.d(torch.relu(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))


class TwoAnswers(nn.Module):
    """The second answer is made of `b` alone, which lies in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        return hidden, self.b(hidden) * 2


def layers():
    torch.manual_seed(0)
    return Layers()


def batch(seed):
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(4, 4, generator=drawn), torch.randn(4, 4, generator=drawn)


def piped(model, cuts=("c",), **options):
    options = {"loss_fn": F.mse_loss} | options
    return split(model, (batch(0)[0],), cuts=list(cuts)).distributed("1F1B", 2, **options)


def train(pipe, optimizer, *seeds):
    for seed in seeds:
        x, target = batch(seed)
        pipe.zero_grad()
        pipe.step(x, target=target)
        optimizer.step()


def train_plainly(model, optimizer, *seeds):
    for seed in seeds:
        x, target = batch(seed)
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()


def check_equal(pipe, model):
    want = dict(model.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, want[name], msg=lambda m, n=name: f"{n}: {m}")


def optimizers(folder):
    """A checkpoint from before the first step forgets what came after; options go with their parameters."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    pipe = piped(layers())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    pipe.save(f"{folder}/fresh", optimizer)
    train(pipe, optimizer, 1, 2, 3)
    pipe.load(f"{folder}/fresh", optimizer)
    train(pipe, optimizer, 4)
    plain = layers()
    train_plainly(plain, torch.optim.Adam(plain.parameters(), lr=0.1), 4)
    check_equal(pipe, plain)

    def by_layer(named, rates=(0.1, 0.2, 0.3, 0.4)):
        groups = {layer: [p for n, p in named.items() if n[0] == layer] for layer in "abcd"}
        rated = zip(groups.values(), rates, strict=True)
        return torch.optim.Adam([{"params": own, "lr": rate} for own, rate in rated if own])

    pipe = piped(layers(), cuts="b")
    optimizer = by_layer(dict(pipe.named_parameters()))
    train(pipe, optimizer, 1)
    pipe.save(f"{folder}/layers", optimizer)
    again = piped(layers(), cuts="d")
    other = by_layer(dict(again.named_parameters()), rates=(9.0, 9.0, 9.0, 9.0))
    again.load(f"{folder}/layers", other)
    train(again, other, 2)
    plain = layers()
    train_plainly(plain, by_layer(dict(plain.named_parameters())), 1, 2)
    check_equal(again, plain)
    one = torch.optim.Adam(again.parameters())
    words = "lr=0.1 and b.weight with 0.2" if dist.get_rank() == 0 else "rank 0 refuses the checkpoint"
    with pytest.raises(InputError, match=words):
        again.load(f"{folder}/layers", one)

    other = split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (batch(0)[0],), cuts=["1"])
    with pytest.raises(InputError, match=r"lacks [01].weight, [01].bias; it also has a.weight, a.bias,"):
        other.distributed("1F1B", 2).load(f"{folder}/layers")
    wide = Layers()
    wide.a = nn.Linear(6, 4)
    other = split(wide, (torch.ones(4, 6),), cuts=["c"]).distributed("1F1B", 2)
    words = r"a.weight is float32\[4, 6\], stored as float32\[4, 4\]" if other.is_first else "rank 0 refuses"
    with pytest.raises(InputError, match=words):
        other.load(f"{folder}/layers")

    pipe = piped(layers())
    optimizer = torch.optim.SGD(pipe.named_parameters(), lr=0.1)
    pipe.save(f"{folder}/named", optimizer)
    again = piped(layers(), cuts="d")
    other = torch.optim.SGD(again.named_parameters(), lr=0.2, foreach=False)
    again.load(f"{folder}/named", other)
    assert other.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["foreach"] is False  # how a step is computed is not a part of a checkpoint
    assert other.param_groups[0]["param_names"] == [name for name, _ in again.named_parameters()]

    pipe = piped(layers())
    optimizer = torch.optim.SGD(pipe.parameters(), lr=torch.tensor(0.25))
    pipe.save(f"{folder}/tensor", optimizer)
    optimizer.param_groups[0]["lr"].fill_(1.0)
    pipe.load(f"{folder}/tensor", optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)
    print("optimizers ok", flush=True)


def norms():
    """Ranks whose gradients have different dtypes or layouts, or none, clip by one norm."""
    model = layers().double()
    for parameter in (*model.a.parameters(), *model.b.parameters()):
        parameter.requires_grad_(False)
    plain = copy.deepcopy(model)
    x, target = (value.double() for value in batch(1))
    pipe = split(model, (x,), cuts=["c"]).distributed("1F1B", 2, loss_fn=F.mse_loss)
    pipe.step(x, target=target)
    F.mse_loss(plain(x), target).backward()
    torch.testing.assert_close(pipe.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(plain.parameters(), 0.01))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x.bfloat16()).float())

    torch.manual_seed(0)
    model = Mixed()
    plain = copy.deepcopy(model)
    x, target = batch(1)
    pipe = split(model, (x,), cuts=["b"]).distributed("GPipe", 1, loss_fn=F.mse_loss)
    pipe.step(x, target=target)
    F.mse_loss(plain(x), target).backward()
    norm = pipe.clip_grad_norm_(0.01)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01), rtol=1e-2, atol=0)

    sparse, plain = (
        nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.ReLU(), nn.Linear(4, 3))
        for sparse in (True, False)
    )
    plain.load_state_dict(sparse.state_dict())
    x, target = torch.tensor([[1, 2], [2, 5], [0, 1], [8, 8]]), torch.ones(4, 2, 3)
    pipe = split(sparse, (x,), cuts=["2"]).distributed("1F1B", 2, loss_fn=F.mse_loss)
    pipe.step(x, target=target)
    F.mse_loss(plain(x), target).backward()
    torch.testing.assert_close(pipe.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    gradients = dict(plain.named_parameters())
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad.to_dense(), gradients[name].grad)
    print("norms ok", flush=True)


def overflows():
    """An overflow is skipped by all ranks, whatever the layout; a rank that learns nothing has no scaler."""
    torch.manual_seed(0)
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3))
    images = images.to(memory_format=torch.channels_last)
    image = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    tokens = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.ReLU(), nn.Linear(4, 3))
    for model, x in ((images, image), (tokens, torch.tensor([[1, 2], [2, 5], [0, 1], [8, 8]]))):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        pipe = split(model, (x,), cuts=["2"]).distributed("1F1B", 2, loss_fn=F.mse_loss, scaler=scaler)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        scales = []
        for value in (0.0, float("inf")):
            pipe.zero_grad()
            pipe.step(x, target=torch.full_like(model(x), value))
            scaler.unscale_(optimizer), scaler.step(optimizer), scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [8.0, 4.0]

    for frozen in ("ab", "cd"):
        model = layers()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        plain = copy.deepcopy(model)
        x, target = batch(1)
        learns = (dist.get_rank() == 0) == (frozen == "cd")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        words = "rank . refused this batch" if learns else "give scaler=None on this rank"
        with pytest.raises((InputError, PartitionError), match=words):
            piped(model, scaler=scaler).step(x, target=target)
        pipe = piped(model, scaler=scaler if learns else None)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(x, target=target)
        if learns:
            scaler.step(optimizer), scaler.update()
        train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
        check_equal(pipe, plain)
    print("overflows ok", flush=True)


def unused():
    """A parameter that the loss does not use has no gradient, and does not decay."""
    for schedule, checkpoint in (("1F1B", False), ("ZeroBubble", False), ("GPipe", True)):
        torch.manual_seed(0)
        model = TwoAnswers()
        plain = copy.deepcopy(model)
        x, target = batch(1)
        pipe = split(model, (x,), cuts=["mul"]).distributed(
            schedule, 2, loss_fn=lambda answer, t: F.mse_loss(answer[0], t), checkpoint=checkpoint
        )
        for _ in range(2):
            pipe.zero_grad(), plain.zero_grad()
            pipe.step(x, target=target)
            F.mse_loss(plain(x)[0], target).backward()
            want = dict(plain.named_parameters())
            for name, parameter in pipe.named_parameters():
                assert (parameter.grad is None) == (want[name].grad is None), (schedule, name)
                if parameter.grad is not None:
                    torch.testing.assert_close(parameter.grad, want[name].grad)
    # A gradient of an embedding stays sparse, as in the plain model.
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    ids = torch.arange(4)
    pipe = split(model, (ids,), cuts=["1"]).distributed("1F1B", 2, loss_fn=F.mse_loss)
    pipe.step(ids, target=target)
    F.mse_loss(plain(ids), target).backward()
    if pipe.is_first:
        (table,) = pipe.parameters()
        assert table.grad.is_sparse
        torch.testing.assert_close(table.grad.to_dense(), plain[0].weight.grad.to_dense())
    print("unused ok", flush=True)


def agreements():
    """A loss without a target is compared too; ranks that would run differently are told so."""
    x, _ = batch(1)
    plain = layers()
    result = piped(layers(), loss_fn=lambda answer: answer.square().mean()).step(x)
    if result.loss is not None:
        torch.testing.assert_close(result.loss, plain(x).square().mean())
    stages = split(layers(), (x,), cuts=["c"])
    rank = dist.get_rank()
    pipe = stages.distributed("1F1B", 2, loss_fn=F.mse_loss)
    with pytest.raises(
        InputError, match="calls step, but rank 0 calls infer" if rank else "calls infer, but"
    ):
        pipe.step(x, target=x) if rank else pipe.infer(x)
    with pytest.raises(PartitionError, match=rf"n_microbatches={2 + 2 * rank}, and rank"):
        stages.distributed("1F1B", 2 + 2 * rank, loss_fn=F.mse_loss)
    with pytest.raises(PartitionError, match=r"has schedule=.*, and rank [01] schedule="):
        stages.distributed(["1F1B", "GPipe"][rank], 2, loss_fn=F.mse_loss)
    for loss_fn, words in (
        (
            lambda answer, target: {"loss": answer.mean()},
            "loss_fn returned {'loss'.*; a loss is a tensor with one",
        ),
        (lambda answer, target: answer, r"loss_fn returned a tensor of shape \(2, 4\); a loss is"),
        (lambda answer, target: answer.detach().mean(), "the loss has no gradient: it does not depend on"),
    ):
        with pytest.raises(PipelineError, match=words):
            stages.distributed("1F1B", 2, loss_fn=loss_fn).step(x, target=x)
    with pytest.raises(PartitionError, match=r"cannot be copied; .* copy nn.ParameterList\(pipe.parameters"):
        copy.deepcopy(pipe)
    for wrong in ("always", None, [1.5]):
        with pytest.raises(PartitionError, match="checkpoint"):
            stages.distributed("1F1B", 2, checkpoint=wrong)
    print("agreements ok", flush=True)


def as_module():
    """What a training loop does with a module, it does with a rank's part of a pipeline."""
    pipe = piped(layers())
    x, target = batch(1)
    pipe.step(x, target=target)
    mine = [("a", "b"), ("c", "d")][dist.get_rank()]
    names = [name for name, _ in pipe.named_parameters()]
    assert isinstance(pipe, nn.Module)
    assert names == list(pipe.state_dict()) == [f"{n}.{kind}" for n in mine for kind in ("weight", "bias")]
    assert next(pipe.named_parameters(prefix="x"))[0] == f"x.{mine[0]}.weight"
    assert len(nn.utils.parameters_to_vector(pipe.parameters())) == 40
    assert pipe.train() is pipe and pipe.training and not pipe.eval().training
    with pytest.raises((InputError, PipelineError), match="cut in training mode"):
        pipe.infer(x)
    pipe.train().zero_grad()
    assert all(p.grad is None for p in pipe.parameters())
    # Evaluation by the same cuts has the trained weights. By other cuts, rank 1 would have old ones.
    model, rank = layers(), dist.get_rank()
    pipe = piped(model)
    train(pipe, torch.optim.SGD(pipe.parameters(), lr=0.5), 1)
    plain = layers()
    train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.5), 1)
    output = split(model.eval(), (x,), cuts=["c"]).distributed("1F1B", 2).infer(x)
    if rank:
        torch.testing.assert_close(output, plain(x))
    other = split(model, (x,), cuts=["b"]).distributed("1F1B", 2)
    words = "rank 1 has an old copy of b.weight, which rank 0 trains"
    with pytest.raises(PartitionError if rank else InputError, match=words):
        other.infer(x)
    other.load_state_dict(plain.state_dict())
    output = other.infer(x)
    if rank:
        torch.testing.assert_close(output, plain(x))
    with pytest.raises(PartitionError, match=r"is not called: use step\(...\), or infer"):
        pipe(x)
    print("as_module ok", flush=True)
