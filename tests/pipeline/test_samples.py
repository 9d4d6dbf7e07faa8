"""Models that mix the samples of a batch are refused in micro-batches; models that do not are not."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from intarsia.errors import DifferenceWarning, PartitionError
from intarsia.pipeline import mixed_samples, split


def permutation(x):
    return torch.arange(x.shape[0] - 1, -1, -1)


MIXED = {
    "mean": lambda z: z - z.mean(0),
    "mean of all": lambda z: z - z.mean(),
    "std": lambda z: z / (z.std(0) + 1),
    "var": lambda z: z * z.var(0, keepdim=True),
    "sum": lambda z: z + z.sum(0),
    "prod": lambda z: z + torch.sigmoid(z).prod(0),
    "amax": lambda z: z / (1 + z.amax(0).abs()),
    "min": lambda z: z - z.min(0)[0],
    "median": lambda z: z - z.median(0)[0],
    "norm": lambda z: z / z.norm(),
    "norm along": lambda z: F.normalize(z, dim=0),
    "logsumexp": lambda z: z - z.logsumexp(0),
    "softmax": lambda z: z.softmax(0),
    "log_softmax": lambda z: z.log_softmax(0),
    "softmax of the transposed": lambda z: z.T.softmax(-1).T,
    "cumsum": lambda z: z.cumsum(0),
    "cumprod": lambda z: torch.sigmoid(z).cumprod(0),
    "cummax": lambda z: z.cummax(0)[0],
    "sort": lambda z: z.sort(0)[0],
    "argsort": lambda z: z + z.argsort(0),
    "topk": lambda z: z - z.topk(1, 0)[0],
    "flip": lambda z: z.flip(0),
    "roll": lambda z: z.roll(1, 0),
    "roll of all": lambda z: z.roll(1),
    "diff": lambda z: z - torch.cat([z[:1], z[1:] - z[:-1]]),
    "first sample": lambda z: z - z[0],
    "last sample": lambda z: z + z[-1:],
    "neighbour": lambda z: torch.cat([z[1:], z[:1]]),
    "reversed by index": lambda z: z[permutation(z)],
    "index_select": lambda z: z.index_select(0, permutation(z)),
    "gather": lambda z: z.gather(0, torch.zeros_like(z, dtype=torch.int64)),
    "product with itself": lambda z: torch.tanh(z @ z.T) @ z,
    "attention over samples": lambda z: F.scaled_dot_product_attention(z[None], z[None], z[None])[0],
    "einsum": lambda z: torch.einsum("bi,ci->bc", z, z).tanh().sum(1, keepdim=True) + z,
    "distances": lambda z: torch.cdist(z, z).sum(1, keepdim=True) + z,
    "broadcast differences": lambda z: (z[:, None] - z[None]).square().sum(1),
    "length of the batch": lambda z: z / z.shape[0],
    "number of the sample": lambda z: z + torch.arange(z.shape[0])[:, None],
    "convolution": lambda z: F.avg_pool1d(z.T, 3, 1, 1).T,
    "batch as features": lambda z: F.layer_norm(z.T, (z.shape[0],)).T,
    "statistics by hand": lambda z: (z - z.mean(0)) * torch.rsqrt(z.var(0, correction=0) + 1e-5),
    "written into a buffer": lambda z: torch.zeros_like(z).copy_(z.sum(0)) + z,
}

APART = {
    "pointwise": lambda z: torch.tanh(z) * torch.sigmoid(z) + 1,
    "mean of features": lambda z: z - z.mean(1, keepdim=True),
    "std of features": lambda z: z / (z.std(-1, keepdim=True) + 1),
    "norm of features": lambda z: F.normalize(z, dim=-1),
    "softmax": lambda z: z.softmax(-1),
    "softmax of the transposed": lambda z: z.T.softmax(0).T,
    "logsumexp": lambda z: z - z.logsumexp(-1, keepdim=True),
    "cumsum": lambda z: z.cumsum(1),
    "sort": lambda z: z.sort(1)[0],
    "argsort": lambda z: z + z.argsort(1),
    "topk": lambda z: z - z.topk(1, 1)[0],
    "flip": lambda z: z.flip(1),
    "roll": lambda z: z.roll(1, 1),
    "a feature": lambda z: z - z[:, :1],
    "features reversed": lambda z: z[:, [2, 1, 0, 3, 5, 4, 7, 6]],
    "index_select": lambda z: z.index_select(1, torch.tensor([3, 2, 1, 0, 4, 5, 6, 7])),
    "gather": lambda z: z.gather(1, z.argsort(1)),
    "index_put": lambda z: z.clone().index_put((torch.arange(z.shape[0]), z.argmax(1)), torch.tensor(0.5)),
    "scatter": lambda z: torch.zeros_like(z).scatter(1, z.argmax(1, keepdim=True), 1.0) + z,
    "select_scatter": lambda z: z.select_scatter(torch.ones(z.shape[0]), 1, 0),
    "masked": lambda z: z.masked_fill(z > 0, 0.25),
    "where": lambda z: torch.where(z > 0, z, z.new_zeros(z.shape)),
    "in place": lambda z: z.clone().mul_(2).add_(1).relu_(),
    "a part in place": lambda z: put_first(z),
    "folded": lambda z: torch.tanh(z.reshape(-1, 2)).reshape(z.shape[0], 8),
    "heads": lambda z: heads(z),
    "folded under another axis": lambda z: (
        z.reshape(-1, 4, 2).transpose(0, 1).reshape(-1, 2).view(4, -1, 2)[0].repeat(1, 4)
    ),
    "attention of each": lambda z: F.scaled_dot_product_attention(*[z.view(-1, 4, 2)] * 3).flatten(1),
    "einsum": lambda z: torch.einsum("bij,bkj->bik", z.view(-1, 4, 2), z.view(-1, 4, 2)).flatten(1)[:, :8],
    "layer norm": lambda z: F.layer_norm(z, (8,)),
    "group norm": lambda z: F.group_norm(z, 2),
    "convolution": lambda z: F.avg_pool1d(z[:, None], 3, 1, 1)[:, 0],
    "own row by number": lambda z: z + z[torch.arange(z.shape[0]), z.argmax(1)][:, None],
    "a token in front": lambda z: torch.cat([torch.zeros(1, 1).expand(z.shape[0], 1), z], 1)[:, :8],
    "split and joined": lambda z: torch.cat(z.chunk(2, 1)[::-1], 1),
    "stack": lambda z: torch.stack([z, -z], 1).amax(1),
    "largest of all, for stability": lambda z: (z - z.max()).softmax(1),
    "one-hot": lambda z: F.one_hot(z.argmax(1), 8) + z,
    "products of samples": lambda z: torch.bmm(z.view(-1, 2, 4), z.view(-1, 4, 2)).flatten(1).repeat(1, 2),
    "autocast and no_grad": lambda z: quiet(z),
    "unfolded": lambda z: F.unfold(z.view(-1, 1, 2, 4), 2).flatten(1)[:, :8],
    "distances inside": lambda z: torch.cdist(z.view(-1, 4, 2), z.view(-1, 4, 2)).flatten(1)[:, :8],
}


def put_first(z):
    out = torch.zeros_like(z)
    out[:, 0] = z[:, 1]
    return out + z


def heads(z):
    folded = z.view(z.shape[0], 2, 4).reshape(z.shape[0] * 2, 4)
    return folded.softmax(-1).view(-1, 8)


def quiet(z):
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        scale = z.float().abs().amax(-1, keepdim=True)
    return z / scale


class Model(nn.Module):
    def __init__(self, function, dropout=0.0):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.dropout, self.function = nn.Dropout(dropout), function

    def forward(self, x):
        return self.second(self.function(self.dropout(self.first(x))))


def pipelined(model, x, chunks=2):
    return split(model, (x,), stages=2, by="memory").gpipe(chunks=chunks)


def test_there_are_forty_of_each():
    assert len(MIXED) >= 40 and len(APART) >= 40


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_samples_is_refused_by_node_and_line(name):
    torch.manual_seed(0)
    model, x = Model(MIXED[name]), torch.randn(6, 8)
    parts = split(model, (x,), stages=2, by="memory")
    torch.testing.assert_close(parts.gpipe(chunks=1)(x), model(x))
    with pytest.raises(PartitionError, match=r"cannot be divided into micro-batches: .*test_samples\.py:\d+"):
        parts.gpipe(chunks=2)


@pytest.mark.parametrize("name", APART)
def test_what_keeps_samples_apart_is_not_refused(name):
    torch.manual_seed(0)
    model, x = Model(APART[name]), torch.randn(6, 8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "samples may be mixed")
        torch.testing.assert_close(pipelined(model, x)(x), model(x))


@pytest.mark.parametrize("mode", [True, False])
def test_dropout_and_what_only_training_does_are_seen(mode):
    class OnlyInTraining(Model):
        def forward(self, x):
            z = self.dropout(self.first(x))
            return self.second(z - z.mean(0) if self.training else z)

    model, x = OnlyInTraining(torch.tanh, dropout=0.5).train(mode), torch.randn(6, 8)
    if not mode:
        pipelined(model, x)
        return
    with pytest.raises(PartitionError, match=r"mean at .* makes one value of all samples"):
        pipelined(model, x)
    pipelined(Model(torch.tanh, dropout=0.5), x)


def test_dropout_does_not_hide_what_an_operator_without_rule_mixes():
    model = Model(lambda z: z + z.scatter(0, z.argsort(1) * 0, 1.0), dropout=0.5).train()
    with pytest.raises(PartitionError, match=r"two batches together differs.*scatter at test_samples\.py"):
        pipelined(model, torch.randn(6, 8))


def test_a_recurrent_layer_in_training_keeps_samples_apart():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.last = nn.LSTM(8, 8, 2, batch_first=True, dropout=0.5), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(self.cells(x)[0])

    with warnings.catch_warnings():
        warnings.simplefilter("error", DifferenceWarning)
        assert mixed_samples(Recurrent(), (torch.randn(6, 3, 8),)) == ""


@pytest.mark.parametrize("example", [torch.zeros(4, 8), torch.ones(4, 8)])
def test_an_example_of_equal_samples_hides_nothing(example):
    """`scatter` has no rule, so the forward passes decide; on equal samples they would agree."""

    def lift(z):
        return z.scatter(1, torch.zeros(z.shape[0], 1, dtype=torch.int64), 1.0) - z.roll(1, 0)

    with pytest.raises(PartitionError, match="cannot be divided"):
        pipelined(Model(lift), example)


def test_a_batch_that_the_model_fixes_is_compared_with_twice_the_batch():
    class Fixed(Model):
        def forward(self, x):
            z = self.first(x)
            if x.shape[0] > 5:
                z = z * 1.0
            return self.second(self.function(z))

    x = torch.randn(6, 8)
    with pytest.raises(PartitionError, match="cannot be divided into micro-batches"):
        split(Fixed(MIXED["mean"]), (x,), stages=2, by="memory", dynamic_batch=False).gpipe(chunks=2)
    split(Fixed(torch.tanh), (x,), stages=2, by="memory", dynamic_batch=False).gpipe(chunks=2)


def test_stages_of_modules_are_compared_too():
    class Tree(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
            self.mix = Unexportable(function)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.mix(x)

    class Unexportable(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function, self.linear = function, nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(self.function(x) if float(x.sum()) > -1e9 else x)

    x = torch.randn(6, 8)
    for mixed, function in ((True, MIXED["flip"]), (False, torch.tanh)):
        parts = split(Tree(function), (x,), stages=2, by="memory")
        assert parts.report.way == "modules"
        if not mixed:
            parts.gpipe(chunks=2)
            continue
        with pytest.raises(PartitionError, match=r"cannot be divided .*two batches together"):
            parts.gpipe(chunks=2)


class Counted(nn.Module):
    """The number of different values of a batch, which is the same for most batches."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        z = self.a(x)
        return self.b(z * torch.unique(z.round()).numel())


def test_what_the_graph_shows_holds_for_stages_of_modules():
    """`unique` has no size, so its graph cannot be measured; that it mixes samples was seen there."""
    torch.manual_seed(0)
    parts = split(Counted(), (torch.randn(8, 8),), stages=2, by="memory")
    assert parts.report.way == "modules"
    with pytest.raises(PartitionError, match="two batches together differs"):
        parts.gpipe(chunks=4)


def test_what_torch_logs_of_other_lengths_is_not_shown(capfd):
    """Pairs of samples: an odd length fails on fake tensors, and torch logs the whole trace of it."""
    pairs = Model(lambda z: z + z.unfold(0, 2, 2).mean(-1).repeat_interleave(2, 0))
    split(pairs, (torch.randn(8, 8),), stages=2, by="memory")
    assert capfd.readouterr().err == ""


def test_a_difference_that_is_not_seen_is_a_warning():
    """The largest value of all samples cancels out in a softmax."""
    x = torch.randn(6, 8)
    with pytest.warns(
        DifferenceWarning, match=r"samples may be mixed: max_1 at test_samples\.py:\d+ .* no difference"
    ):
        split(Model(APART["largest of all, for stability"]), (x,), stages=2, by="memory")


def test_a_loss_computed_inside_is_no_mixing():
    class WithLoss(Model):
        def forward(self, x):
            z = super().forward(x)
            return F.mse_loss(z, torch.ones_like(z)), z

    class Centred(WithLoss):
        def forward(self, x):
            _, z = super().forward(x)
            return (z - z.mean(0)).square().mean(), z

    x = torch.randn(6, 8)
    assert mixed_samples(WithLoss(torch.tanh), (x,)) == ""
    assert "test_samples.py" in mixed_samples(Centred(torch.tanh), (x,))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.b(torch.relu(self.norm(self.a(x))))


def test_the_report_lists_what_a_forward_changes():
    x = torch.randn(6, 8)
    report = split(Normed(), (x,), stages=2, by="memory").report
    assert report.changed == ("calls", "norm.num_batches_tracked", "norm.running_mean", "norm.running_var")
    assert "norm.running_mean" in str(report) and "statistics" in str(report)
    assert split(Normed().eval(), (x,), stages=2, by="memory").report.changed == ("calls",)
    assert split(Model(torch.tanh), (x,), stages=2, by="memory").report.changed == ()


def test_on_the_meta_device_the_graph_alone_decides():
    with torch.device("meta"):
        mixed, apart = Model(MIXED["roll"]), Model(APART["layer norm"])
    x = torch.empty(6, 8, device="meta")
    options = {"stages": 2, "by": "memory"}
    assert "roll" in split(mixed, (x,), **options).signature.mixes
    assert split(apart, (x,), **options).signature.mixes == ""


def test_deferred_statistics_are_those_of_the_whole_batch():
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(6, 8) * 3 + 1
    whole = copy.deepcopy(model)
    whole(x)
    parts = split(model, (x,), stages=2, by="memory")
    pipe = parts.gpipe(chunks=3, deferred_batch_norm=True, checkpoint="always")
    answer = pipe(x)
    answer.sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(model.norm, name), getattr(whole.norm, name))
    # Each micro-batch is normalised by its own statistics, deferred or not.
    plain = copy.deepcopy(model)
    torch.testing.assert_close(answer, torch.cat([plain(part) for part in x.chunk(3)]))
    assert list(pipe.state_dict()) == list(model.state_dict())
    pipe(x)
    assert int(model.norm.num_batches_tracked) == 2
    parts.gpipe(chunks=3)(x)  # without it every micro-batch counts again
    assert int(model.norm.num_batches_tracked) == 5


def test_what_cannot_defer_says_so():
    x = torch.randn(6, 8)
    parts = split(Normed(), (x,), stages=2, by="memory", checkpoint=["a"])
    with pytest.raises(PartitionError, match="cannot be combined with modules that are recomputed by name"):
        parts.gpipe(chunks=2, deferred_batch_norm=True)
