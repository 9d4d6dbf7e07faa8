"""What is divided among micro-batches: every tensor with an entry a sample; nothing that mixes samples."""

from __future__ import annotations

import copy

import pytest
import torch
from pipeline_zoo import calm, make
from torch import nn
from torch.utils import _pytree as pytree

from intarsia.errors import InputError, PartitionError
from intarsia.pipeline import split
from intarsia.pipeline.distributed.batch import divide
from intarsia.pipeline.stages.trace import trace

IDS = torch.randint(0, 64, (4, 12))
MASK = torch.ones(4, 12, dtype=torch.int64)
MASK[1, 8:] = 0
MASK[3, 5:] = 0
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def scalar(output):
    return sum(t.float().square().mean() for t in pytree.tree_leaves(output) if t.is_floating_point())


def assert_pipelined_equals(model, args, kwargs, chunks=2, **options):
    whole = copy.deepcopy(model)
    want = whole(*args, **kwargs)
    scalar(want).backward()
    pipe = split(model, args, kwargs, stages=2, by="memory", **options).gpipe(chunks=chunks)
    got = pipe(*args, **kwargs)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    scalar(got).backward()
    for (n, p), (_, q) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), n
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")


CAUSAL = {"Llama", "Mistral", "Qwen2", "GPTNeoX"}
MASKED = ["Bert", "Electra", "Llama"]
MASKED_TOO = ["Albert", "Mistral", "MPNet", "Qwen2", "GPTNeoX", "Roberta"]


@pytest.mark.parametrize("kind", [*MASKED, *(pytest.param(k, marks=pytest.mark.full) for k in MASKED_TOO)])
def test_padding_masks_are_divided(kind):
    """The graph does not tie a mask that is only indexed by sample to the tokens."""
    import transformers

    torch.manual_seed(0)
    more = {"Albert": {"embedding_size": 16}, "Roberta": {"max_position_embeddings": 40}}
    more |= {"Mistral": {"num_key_value_heads": 1}, "Qwen2": {"num_key_value_heads": 1}}
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more.get(kind, {}))
    made = getattr(transformers, f"{kind}Model")(config)
    kwargs = {"attention_mask": MASK} | ({"use_cache": False} if kind in CAUSAL else {})
    assert_pipelined_equals(calm(made), (IDS,), kwargs)


class Lookup(nn.Module):
    """`table` may have any number of rows: that it has as many as there are samples is chance."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, rows, table):
        return self.b(torch.tanh(self.a(x)) + table[rows])


def test_inputs_of_different_numbers_of_samples_are_refused():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, mask):
            return self.second(self.first(x).relu()) * mask

    stages = split(Masked(), (torch.randn(12, 3), torch.ones(12, 3)), stages=2, by="memory")
    x, mask = torch.randn(12, 3), torch.ones(11, 3)
    with pytest.raises(InputError, match="x has 12 samples, and mask 11"):
        stages.gpipe(chunks=4)(x, mask)
    with pytest.raises(InputError, match="x has 12 samples, and mask 11"):  # 3 a part, if one is a copy
        divide(stages.signature, (x, mask), 4, torch.device("cpu"))


def test_a_size_that_equals_the_batch_by_chance():
    args = (torch.randn(6, 4), torch.tensor([0, 5, 1, 4, 2, 3]), torch.randn(6, 4))
    parts = split(Lookup(), args, stages=2, by="memory")
    assert parts.signature.axes == {"x": 0, "rows": 0, "table": None}
    assert_pipelined_equals(Lookup(), args, {}, chunks=3)


def test_the_user_says_what_the_batch_is():
    args = (torch.randn(6, 4), torch.tensor([0, 5, 1, 4, 2, 3]), torch.randn(6, 4))
    for said in ({"table": None}, (0, 0, None), {"x": 0, "table": None}):
        assert_pipelined_equals(Lookup(), args, {}, chunks=3, batch_dims=said)
    with pytest.raises(InputError, match="batch_dims names 'tabel'"):
        split(Lookup(), args, stages=2, batch_dims={"tabel": None})
    with pytest.raises(InputError, match="axis 1 of a tensor of shape"):
        split(Lookup(), args, stages=2, batch_dims={"table": 1})
    with pytest.raises(InputError, match=r"batch_dims gives axis 5 of a tensor of shape \(6, 4\)"):
        split(Lookup(), args, stages=2, batch_dims=(5,))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, lengths):
        inside = (torch.arange(x.shape[0])[:, None] < lengths).unsqueeze(-1)
        return self.b(torch.cumsum(torch.tanh(self.a(x)) * inside, 0)), lengths * 2


def test_the_batch_on_another_axis():
    args = (torch.randn(5, 6, 4), torch.tensor([1, 2, 3, 4, 5, 5]))
    assert_pipelined_equals(SequenceFirst(), args, {}, chunks=3, batch_dims=(1, 0))
    assert_pipelined_equals(SequenceFirst(), args, {}, chunks=3, batch_dims=(-2, -1))


class Against(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.a, self.inside = nn.Linear(3, 3), inside

    def forward(self, x):
        z = self.a(x)
        scores = z @ z.T
        return torch.tanh(scores).sum(1, keepdim=True) + z if self.inside else scores


@pytest.mark.parametrize("inside", [False, True])
def test_samples_set_against_each_other_are_refused(inside):
    model, x = Against(inside), torch.randn(4, 3)
    parts = split(model, (x,), stages=2, by="memory")
    torch.testing.assert_close(parts(x), model(x))
    torch.testing.assert_close(parts.gpipe(chunks=1)(x), model(x))
    with pytest.raises(PartitionError, match=r"combines different rows \(matmul at test_batch\.py"):
        parts.gpipe(chunks=2)


def test_the_trial_leaves_no_trace():
    model = nn.BatchNorm1d(4)

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = model

        def forward(self, x, rows, table):
            return self.norm(x) + table[rows]

    args = (torch.randn(6, 4), torch.zeros(6, dtype=torch.int64), torch.randn(6, 4))
    state = torch.get_rng_state()
    trace(Norm(), args)
    assert int(model.num_batches_tracked) == 0 and torch.equal(state, torch.get_rng_state())


def test_the_length_of_a_sequence_may_vary():
    model, args, kwargs = make("llama")
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    shapes = {"input_ids": {0: batch, 1: length}, "use_cache": None}
    parts = split(model, args, kwargs, stages=2, by="memory", dynamic_shapes=shapes)
    for size in ((4, 12), (2, 7), (5, 3)):
        tokens = torch.randint(0, 64, size)
        assert torch.equal(parts(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    pipe = parts.gpipe(chunks=2)
    tokens = torch.randint(0, 64, (5, 9))
    torch.testing.assert_close(pipe(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


class Counting(nn.Module):
    def __init__(self, assign):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.register_buffer("n", torch.zeros(()))
        self.assign = assign

    def forward(self, x):
        if self.assign:
            self.n = self.n + 1
        else:
            self.n += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.n


@pytest.mark.parametrize("assign", [False, True])
def test_a_counter_does_not_forbid_every_cut(assign):
    model, x = Counting(assign), torch.randn(6, 4)
    whole = copy.deepcopy(model)
    parts = split(model, (x,), stages=3, by="memory")
    for expected in (1, 2):
        torch.testing.assert_close(parts(x), whole(x))
        assert int(model.n) == expected == int(whole.n)
    pipe = parts.gpipe(chunks=3)
    want = torch.cat([whole(part) for part in x.chunk(3)])
    torch.testing.assert_close(pipe(x), want)


def test_a_change_that_forbids_every_cut_is_named():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            z = torch.tanh(y)
            y.add_(z)
            return y

    with pytest.raises(PartitionError, match=r"allows \d: linear is changed in place by aten\.add_"):
        split(Long(), (torch.randn(4, 4),), stages=4, by="memory")
